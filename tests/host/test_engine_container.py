"""The engine's container as docker made it, and what its account can do to the host from there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.host.exposure import Place

FOLDER = "/run/spark/engines/main"
AS_ENGINE = "setpriv --reuid spark-engine --regid spark-engine --clear-groups"


def inspected(place: Place) -> dict[str, Any]:
    name = place.guest.run("docker ps --filter label=spark.release --format '{{.Names}}'")
    (found,) = place.guest.json(f"docker inspect {name}")
    return found


def test_docker_says_that_the_engine_has_nothing_it_does_not_need(place: Place) -> None:
    found = inspected(place)
    host = found["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["ReadonlyRootfs"] is True
    assert host["NetworkMode"] == "none"
    assert host["IpcMode"] == "private"
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert 0 < host["PidsLimit"] <= 8192
    assert host["Privileged"] is False
    assert found["Config"]["User"].split(":")[0] not in ("", "0", "root")


def test_the_kernel_says_so_of_the_engine_s_process(place: Place) -> None:
    pid = inspected(place)["State"]["Pid"]
    status = place.guest.run(f"cat /proc/{pid}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[f"Cap{which}"] for which in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    mounts = {
        words[4]: words[5].split(",")
        for words in map(str.split, place.guest.run(f"cat /proc/{pid}/mountinfo").splitlines())
    }
    assert "ro" in mounts["/"]
    assert "ro" in mounts["/model"]
    assert {"nosuid", "nodev", "noexec"} <= set(mounts["/run/spark"])


def test_its_socket_lies_on_a_small_file_system_of_its_own(place: Place) -> None:
    found = place.guest.json(f"findmnt --json --bytes -o FSTYPE,SIZE,OPTIONS --mountpoint {FOLDER}")
    (mount,) = found["filesystems"]
    assert mount["fstype"] == "tmpfs"
    assert int(mount["size"]) <= 1 << 20
    assert "nosymfollow" in mount["options"]
    before = place.guest.run("df --output=avail /run | tail -1")
    place.guest.run(f"{AS_ENGINE} dd if=/dev/zero of={FOLDER}/filler bs=64k count=64", check=False)
    place.guest.run(f"rm {FOLDER}/filler")
    assert abs(int(place.guest.run("df --output=avail /run | tail -1")) - int(before)) < 1024


def test_links_that_the_engine_leaves_open_no_file_of_the_host(place: Place) -> None:
    before = place.guest.run("stat -c '%a %U:%G %Y' /etc/shadow; sha256sum /etc/shadow")
    refused = place.guest.run(
        f"{AS_ENGINE} sh -c 'ln -s /etc/shadow /run/spark/main/.open.1'; echo $?", check=False
    )
    assert refused.endswith("1")
    place.guest.run(f"{AS_ENGINE} ln -sf /etc/shadow {FOLDER}/engine.sock")
    unit = f"spark-serve@{place.guest.release()}.service"
    # Whoever opens traffic next meets the link: the check at the start of a watch would, too.
    said = place.guest.run(
        "PYTHONPATH=/usr/local/lib/spark/current python3 -P -c '"
        "from spark_host.system import host as system; from spark_host.gateway import traffic; "
        f'traffic.open_for(system.load_release("{place.guest.release()}", system.default_paths()), '
        "system.default_paths())' 2>&1 | tail -1",
        check=False,
    )
    assert "HostToolError" in said or "Error" in said
    assert place.guest.run("stat -c '%a %U:%G %Y' /etc/shadow; sha256sum /etc/shadow") == before
    # A start cleans up what the account left.
    place.guest.run(f"systemctl restart {unit}", timeout_s=300)
    place.guest.wait("spark-check --quick", seconds=60)
    assert place.guest.answers("What is the capital of France?", "Paris")


@pytest.mark.parametrize("unit", ["spark-serve@", "spark-watch@", "spark-gateway@"])
def test_every_unit_around_the_engine_has_a_limit_of_memory(place: Place, unit: str) -> None:
    name = place.guest.run(
        f"systemctl list-units --plain --no-legend '{unit}*' | cut -d' ' -f1 | head -1"
    )
    limit = place.guest.unit(name, "MemoryMax")["MemoryMax"]
    assert int(limit) <= 1 << 30
