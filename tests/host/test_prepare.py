"""A host is prepared once, and later repaired exactly where it changed."""

from __future__ import annotations

import pytest

from tests.host.prepared_host import (
    CUDA_REPOSITORY,
    CUDA_TOOLKIT,
    DAEMON_JSON,
    DIRECTORIES,
    ENGINE,
    HOLD,
    LOGIN,
    PACKAGES,
    PROOF,
    RUNNING,
    SLEEP,
    Prepared,
    prepared,
)

__all__ = ["prepared"]


def test_containers_of_prepared_host_see_gpu(prepared: Prepared) -> None:
    guest = prepared.guest
    assert "nvidia" in guest.json("docker info --format '{{json .Runtimes}}'")
    listed = guest.run(f"docker run --rm --runtime=nvidia {prepared.image()} nvidia-smi -L")
    assert listed.startswith("GPU 0: NVIDIA GB10")
    assert "release 13.0" in guest.run("/usr/local/cuda/bin/nvcc --version || nvcc --version")
    assert guest.run("systemctl is-enabled suspend.target", check=False) == "masked"
    # nginx is installed, but the default site is off.
    assert guest.run("systemctl is-enabled nginx", check=False) == "disabled"
    assert guest.run("ss -Hltn 'sport = :80'") == ""


def test_second_run_changes_nothing(prepared: Prepared) -> None:
    prepared.run().assert_unchanged()


def test_changes_no_driver_package(prepared: Prepared) -> None:
    now = prepared.guest.run("dpkg-query -W -f '${Package} ${Version}\\n'").splitlines()
    before = prepared.installed.splitlines()
    assert set(before) <= set(now)  # nothing upgraded, nothing removed
    new = {line.split()[0] for line in now} - {line.split()[0] for line in before}
    assert "nvidia-container-toolkit" in new
    assert not [name for name in new if name.startswith(("nvidia-driver", "linux-"))]


DRIFT = {
    "a package removed": ("apt-get remove -qy jq", [PACKAGES]),
    "a directory removed": ("rm -rf /var/lib/spark/jobs", [DIRECTORIES]),
    "a directory closed": ("chmod 700 /srv/spark/models", [DIRECTORIES]),
    "a directory given away": ("chown nobody /etc/spark", [DIRECTORIES]),
    "the hold edited": ("echo x >> /etc/apt/apt.conf.d/52spark-hold-driver", [HOLD]),
    "the hold made private": ("chmod 600 /etc/apt/apt.conf.d/52spark-hold-driver", [HOLD]),
    "the hold removed": ("rm /etc/apt/apt.conf.d/52spark-hold-driver", [HOLD]),
    "sleep allowed": ("systemctl unmask hibernate.target", [SLEEP]),
    "the login's memory taken": (
        "rm /etc/systemd/system/user.slice.d/50-spark.conf",
        [LOGIN],
    ),
    "the login's memory given but not read": (
        "f=/etc/systemd/system/user.slice.d/50-spark.conf; sed -i s/2G/1G/ $f; "
        "systemctl daemon-reload; sed -i s/1G/2G/ $f",
        [LOGIN],
    ),
    "our key replaced": ("echo x > /etc/apt/keyrings/spark-lab-vendor.asc", [CUDA_REPOSITORY]),
    "our source edited": (
        "sed -i s/vendor/x/ /etc/apt/sources.list.d/spark-lab-vendor.sources",
        [CUDA_REPOSITORY],
    ),
    "CUDA removed": ("apt-get remove -qy cuda-toolkit-13-0", [CUDA_TOOLKIT]),
    "the toolkit removed": ("apt-get remove -qy nvidia-container-toolkit", [ENGINE]),
    "daemon.json removed": ("rm /etc/docker/daemon.json", [DAEMON_JSON]),
    "daemon.json removed, docker restarted": (
        "rm /etc/docker/daemon.json; systemctl restart docker",
        [DAEMON_JSON, RUNNING],
    ),
    "docker restarted without our keys": (
        "cp /etc/docker/daemon.json /root/kept; echo '{}' > /etc/docker/daemon.json; "
        "systemctl restart docker; cp /root/kept /etc/docker/daemon.json",
        [RUNNING],
    ),
    "docker stopped": ("systemctl stop docker docker.socket", [RUNNING]),
    "docker disabled and stopped": (
        "systemctl disable -q --now docker docker.socket",
        [RUNNING],
    ),
    "the proof lost": ("rm /var/lib/spark/receipts/gpu-container.json", [PROOF]),
    "the proof damaged": ("echo '{' > /var/lib/spark/receipts/gpu-container.json", [PROOF]),
    "the proof of another driver": (
        "sed -i 's/580.159/580.142/' /var/lib/spark/receipts/gpu-container.json",
        [PROOF],
    ),
}


@pytest.mark.parametrize("name", DRIFT)
def test_repairs_only_the_change(prepared: Prepared, name: str) -> None:
    command, repaired_by = DRIFT[name]
    prepared.guest.run(command)
    # Exactly these: name the case before left undone would show here.
    assert prepared.run().changed == repaired_by


def test_dry_run_predicts_repairs(prepared: Prepared) -> None:
    for name in ("our source edited", "a directory removed", "docker stopped", "sleep allowed"):
        prepared.guest.run(DRIFT[name][0])
    predicted, repair, again = prepared.run(dry=True), prepared.run(), prepared.run()
    assert predicted.predicted == repair.changed == [DIRECTORIES, SLEEP, CUDA_REPOSITORY, RUNNING]
    again.assert_unchanged()


def test_stops_only_named_containers(prepared: Prepared) -> None:
    guest = prepared.guest
    guest.run(
        f"docker tag {prepared.image()} ollama/ollama:1; docker run -d --name ollama "
        "--restart unless-stopped --stop-signal KILL --entrypoint sleep ollama/ollama:1 600"
    )
    try:
        prepared.site.choose(takeover=["ollama"])
        taken, again = prepared.run(), prepared.run()
        left = guest.json("docker inspect ollama")[0]
    finally:
        prepared.site.choose(takeover=[])
        guest.run("docker rm -f ollama; docker rmi ollama/ollama:1")
    assert taken.changed == ["Preflight | Take over containers"]
    again.assert_unchanged()
    assert left["State"]["Status"] == "exited"
    assert left["HostConfig"]["RestartPolicy"]["Name"] == "no"


def test_keeps_foreign_daemon_json_keys_and_running_containers(prepared: Prepared) -> None:
    guest = prepared.guest
    guest.run(
        'echo \'{"log-opts": {"max-size": "10m"}, "labels": ["a=b"]}\' '
        "> /etc/docker/daemon.json; systemctl restart docker"
    )
    image = prepared.image()
    guest.run(f"docker run -d --name neighbour --entrypoint sleep {image} 600")
    started = guest.run("docker inspect -f '{{.State.StartedAt}}' neighbour")
    try:
        run = prepared.run()
        after = guest.run("docker inspect -f '{{.State.StartedAt}} {{.State.Running}}' neighbour")
    finally:
        guest.run("docker rm -f neighbour")
    merged = guest.json("cat /etc/docker/daemon.json")
    assert run.changed == [DAEMON_JSON, RUNNING]
    assert after == f"{started} true"
    assert merged["log-opts"] == {"max-size": "10m"}
    assert merged["labels"] == ["a=b"]
    assert "nvidia" in merged["runtimes"]


def test_waits_for_package_lock_and_names_its_holder(prepared: Prepared) -> None:
    guest = prepared.guest
    guest.run(
        "apt-get remove -qy jq; systemd-run -q --unit=holder python3 -c 'import fcntl, time; "
        'f = open("/var/lib/dpkg/lock-frontend", "w"); fcntl.lockf(f, fcntl.LOCK_EX); '
        'open("/run/held", "w"); time.sleep(600)\''
    )
    guest.wait("test -e /run/held")
    run = prepared.site.start(deploy="deploys/prepare.py")
    lines: list[str] = []
    try:
        for line in run.stdout or ():
            lines.append(line)
            if "waiting for the package lock, held by" in line:
                break
        waiting = run.poll() is None and guest.run("command -v jq", check=False) == ""
    finally:
        guest.run("systemctl stop holder; rm -f /run/held")
    rest, _ = run.communicate(timeout=300)
    assert "python3" in lines[-1]
    assert waiting
    assert run.returncode == 0, rest
    assert guest.run("command -v jq") == "/usr/bin/jq"
    prepared.run().assert_unchanged()


def test_ignores_broken_foreign_apt_source(prepared: Prepared) -> None:
    guest = prepared.guest
    guest.run(
        "apt-get remove -qy jq; "
        "echo 'deb http://127.0.0.1:9/none x main' > /etc/apt/sources.list.d/broken.list"
    )
    try:
        run = prepared.run()
    finally:
        guest.run("rm /etc/apt/sources.list.d/broken.list")
    assert run.changed == [PACKAGES]


def test_host_protection_is_optional(prepared: Prepared) -> None:
    guest = prepared.guest
    target = guest.run("systemctl get-default")
    assert guest.run("systemctl is-active earlyoom", check=False) == "inactive"
    prepared.site.choose(base={"earlyoom": True, "headless": True, "skip": ["protect-login"]})
    try:
        enabled, again = prepared.run(), prepared.run()
        running = guest.run("tr '\\0' ' ' < /proc/$(pidof earlyoom)/cmdline")
        guaranteed = guest.run("systemctl show -p MemoryMin --value user.slice")
        headless = guest.run("systemctl get-default")
    finally:
        prepared.site.choices.pop("base")
        prepared.site.choose()
        guest.run(f"systemctl disable -q --now earlyoom; systemctl set-default -q {target}")
    again.assert_unchanged()
    assert set(enabled.changed) >= {LOGIN, "Base | Run earlyoom"}
    assert "--prefer ^(VLLM|vllm)" in running
    assert guaranteed == "0"
    assert headless == "multi-user.target"
    assert prepared.run().changed == [LOGIN]


def test_sets_and_restores_compaction(prepared: Prepared) -> None:
    guest, step = prepared.guest, "Base | Set the kernel's compaction"
    read = "cat /proc/sys/vm/compaction_proactiveness"
    prepared.site.choose(base={"compaction_proactiveness": 0})
    try:
        enabled, again, value = prepared.run(), prepared.run(), guest.run(read)
        guest.run("echo 7 > /proc/sys/vm/compaction_proactiveness")
        repaired, value_again = prepared.run(), guest.run(read)
    finally:
        prepared.site.choices.pop("base")
        prepared.site.choose()
    assert (enabled.changed, value) == ([step], "0")
    again.assert_unchanged()
    assert (repaired.changed, value_again) == ([step], "0")
    assert (prepared.run().changed, guest.run(read)) == ([step], "20")
    prepared.run().assert_unchanged()


def test_reboot_changes_nothing(prepared: Prepared) -> None:
    prepared.guest.reboot()
    prepared.guest.wait("systemctl is-active docker", seconds=60)
    prepared.run().assert_unchanged()
