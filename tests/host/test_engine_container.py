import pytest

FOLDER = "/run/spark/engines/main"
AS_ENGINE = "setpriv --reuid spark-engine --regid spark-engine --clear-groups"


def test_container_has_no_unneeded_privileges(gateway):
    container = gateway.guest.container()
    host = container["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["ReadonlyRootfs"] is True
    assert host["NetworkMode"] == "none"
    assert host["IpcMode"] == "private"
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert 0 < host["PidsLimit"] <= 8192
    assert host["Privileged"] is False
    # systemd restarts it, with the arguments that the GPU check of the host used.
    assert host["RestartPolicy"]["Name"] in ("", "no")
    receipt = gateway.guest.json("cat /var/lib/spark/receipts/gpu-container.json")
    assert receipt["docker_arguments"] == [f"--runtime={host['Runtime']}"] == ["--runtime=nvidia"]
    models = [mount for mount in container["Mounts"] if mount["Destination"].startswith("/model")]
    assert not any(mount["RW"] for mount in models)


def test_engine_does_not_run_as_root(gateway):
    guest, container = gateway.guest, gateway.guest.container()
    uid, gid = guest.run("id -u spark-engine; id -g spark-engine").split()
    assert container["Config"]["User"] == f"{uid}:{gid}"
    running = guest.run(f"docker top {container['Id']} -eo pid,uid | awk 'NR > 1 {{print $2}}'")
    assert set(running.split()) == {uid} != {"0"}


def test_kernel_confirms_that_the_container_dropped_its_privileges(gateway):
    pid = gateway.guest.container()["State"]["Pid"]
    status = gateway.guest.run(f"cat /proc/{pid}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[f"Cap{which}"] for which in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    mounts = {
        words[4]: words[5].split(",")
        for words in map(str.split, gateway.guest.run(f"cat /proc/{pid}/mountinfo").splitlines())
    }
    assert "ro" in mounts["/"]
    assert "ro" in mounts["/model"]
    assert {"nosuid", "nodev", "noexec"} <= set(mounts["/run/spark"])


def test_engine_socket_is_on_a_separate_small_filesystem(gateway):
    command = f"findmnt --json --bytes -o FSTYPE,SIZE,OPTIONS --mountpoint {FOLDER}"
    [mount] = gateway.guest.json(command)["filesystems"]
    assert mount["fstype"] == "tmpfs"
    assert int(mount["size"]) <= 1 << 20
    assert "nosymfollow" in mount["options"]
    before = gateway.guest.run("df --output=avail /run | tail -1")
    gateway.guest.run(
        f"{AS_ENGINE} dd if=/dev/zero of={FOLDER}/filler bs=64k count=64", check=False
    )
    gateway.guest.run(f"rm {FOLDER}/filler")
    assert abs(int(gateway.guest.run("df --output=avail /run | tail -1")) - int(before)) < 1024


def test_symlinks_created_by_the_engine_account_cannot_reach_host_files(gateway):
    before = gateway.guest.run("stat -c '%a %U:%G %Y' /etc/shadow; sha256sum /etc/shadow")
    refused = gateway.guest.run(
        f"{AS_ENGINE} sh -c 'ln -s /etc/shadow /run/spark/main/.open.1'; echo $?", check=False
    )
    assert refused.endswith("1")
    gateway.guest.run(f"{AS_ENGINE} ln -sf /etc/shadow {FOLDER}/engine.sock")
    unit = f"spark-serve@{gateway.guest.release()}.service"
    output = gateway.guest.run(
        "PYTHONPATH=/usr/local/lib/spark/current python3 -P -c '"
        "from spark_host.system import host; "
        "from spark_host.gateway.gateway import open_traffic; "
        f'open_traffic(host.load_release("{gateway.guest.release()}", host.default_paths()), '
        "host.default_paths())' 2>&1 | tail -1",
        check=False,
    )
    assert "Error" in output
    assert gateway.guest.run("stat -c '%a %U:%G %Y' /etc/shadow; sha256sum /etc/shadow") == before
    gateway.guest.run(f"systemctl restart {unit}", timeout_s=300)
    gateway.guest.wait("spark-check --quick", seconds=60)
    assert gateway.guest.answers()


@pytest.mark.parametrize("unit", ["spark-serve@", "spark-watch@", "spark-gateway@"])
def test_every_unit_has_memory_limit(gateway, unit):
    name = gateway.guest.run(
        f"systemctl list-units --plain --no-legend '{unit}*' | cut -d' ' -f1 | head -1"
    )
    limit = gateway.guest.unit(name, "MemoryMax")["MemoryMax"]
    assert int(limit) <= 1 << 30
