import subprocess

import pytest

from tests.host import prepared_host as steps
from tests.host.prepared_host import prepared
from tests.labkit import info

__all__ = ["prepared"]


def test_containers_on_a_prepared_host_can_use_the_gpu(prepared):
    guest = prepared.guest
    assert "nvidia" in guest.json("docker info --format '{{json .Runtimes}}'")
    listed = guest.run(f"docker run --rm --runtime=nvidia {prepared.image()} nvidia-smi -L")
    assert listed.startswith("GPU 0: NVIDIA GB10")
    assert "release 13.0" in guest.run("/usr/local/cuda/bin/nvcc --version || nvcc --version")
    assert guest.run("systemctl is-enabled suspend.target", check=False) == "masked"
    assert guest.run("systemctl is-enabled nginx", check=False) == "disabled"
    assert guest.run("ss -Hltn 'sport = :80'") == ""


def test_second_prepare_changes_nothing(prepared):
    prepared.run().assert_unchanged()


def test_prepare_does_not_change_driver_packages(prepared):
    now = prepared.guest.run("dpkg-query -W -f '${Package} ${Version}\\n'").splitlines()
    before = prepared.installed.splitlines()
    assert set(before) <= set(now)
    new = {line.split()[0] for line in now} - {line.split()[0] for line in before}
    assert "nvidia-container-toolkit" in new
    assert not [name for name in new if name.startswith(("nvidia-driver", "linux-"))]


GPU_RECEIPT = "/var/lib/spark/receipts/gpu-container.json"
DRIFT = {
    "memory limit of the login not loaded": (
        "f=/etc/systemd/system/user.slice.d/50-spark.conf; sed -i s/2G/1G/ $f; "
        "systemctl daemon-reload; sed -i s/1G/2G/ $f",
        [steps.LOGIN],
    ),
    "repository key replaced": (
        "echo x > /etc/apt/keyrings/spark-lab-vendor.asc",
        [steps.CUDA_REPOSITORY],
    ),
    "package source edited": (
        "sed -i s/vendor/x/ /etc/apt/sources.list.d/spark-lab-vendor.sources",
        [steps.CUDA_REPOSITORY],
    ),
    "CUDA removed": ("apt-get remove -qy cuda-toolkit-13-0", [steps.CUDA_TOOLKIT]),
    "container toolkit removed": ("apt-get remove -qy nvidia-container-toolkit", [steps.ENGINE]),
    "daemon.json removed": ("rm /etc/docker/daemon.json", [steps.DAEMON_JSON]),
    "daemon.json removed, docker restarted": (
        "rm /etc/docker/daemon.json; systemctl restart docker",
        [steps.DAEMON_JSON, steps.RUNNING],
    ),
    "docker restarted without our keys": (
        "cp /etc/docker/daemon.json /root/kept; echo '{}' > /etc/docker/daemon.json; "
        "systemctl restart docker; cp /root/kept /etc/docker/daemon.json",
        [steps.RUNNING],
    ),
    "docker disabled and stopped": (
        "systemctl disable -q --now docker docker.socket",
        [steps.RUNNING],
    ),
    "GPU receipt lost": (f"rm {GPU_RECEIPT}", [steps.PROOF]),
    "GPU receipt damaged": (f"echo '{{' > {GPU_RECEIPT}", [steps.PROOF]),
    "GPU receipt of another driver": (f"sed -i 's/580.159/580.142/' {GPU_RECEIPT}", [steps.PROOF]),
}


@pytest.mark.parametrize("name", DRIFT)
def test_prepare_repairs_only_what_changed(prepared, name):
    command, expected = DRIFT[name]
    prepared.guest.run(command)
    assert prepared.run().changed == expected


def test_dry_run_of_prepare_predicts_repairs(prepared):
    prepared.guest.run(
        f"{DRIFT['package source edited'][0]}; rm -rf /var/lib/spark/jobs; "
        "systemctl stop docker docker.socket; systemctl unmask hibernate.target"
    )
    predicted, repair, again = prepared.run(dry=True), prepared.run(), prepared.run()
    expected = [steps.DIRECTORIES, steps.SLEEP, steps.CUDA_REPOSITORY, steps.RUNNING]
    assert predicted.predicted == repair.changed == expected
    again.assert_unchanged()


def test_prepare_stops_only_the_containers_named_in_settings(prepared):
    guest = prepared.guest
    guest.run(
        f"docker tag {prepared.image()} ollama/ollama:1; docker run -d --name ollama "
        "--restart unless-stopped --stop-signal KILL --entrypoint sleep ollama/ollama:1 600"
    )
    with prepared.site.chosen(takeover=["ollama"]):
        taken, again = prepared.run(), prepared.run()
    left = guest.json("docker inspect ollama")[0]
    guest.run("docker rm -f ollama; docker rmi ollama/ollama:1")
    assert taken.changed == ["Preflight | Take over containers"]
    again.assert_unchanged()
    assert left["State"]["Status"] == "exited"
    assert left["HostConfig"]["RestartPolicy"]["Name"] == "no"


def test_prepare_keeps_unmanaged_daemon_json_keys_and_running_containers(prepared):
    guest = prepared.guest
    guest.run(
        'echo \'{"log-opts": {"max-size": "10m"}, "labels": ["a=b"]}\' '
        "> /etc/docker/daemon.json; systemctl restart docker"
    )
    image = prepared.image()
    guest.run(f"docker run -d --name neighbour --entrypoint sleep {image} 600")
    started = guest.run("docker inspect -f '{{.State.StartedAt}}' neighbour")
    run = prepared.run()
    after = guest.run("docker inspect -f '{{.State.StartedAt}} {{.State.Running}}' neighbour")
    guest.run("docker rm -f neighbour")
    merged = guest.json("cat /etc/docker/daemon.json")
    assert run.changed == [steps.DAEMON_JSON, steps.RUNNING]
    assert after == f"{started} true"
    assert merged["log-opts"] == {"max-size": "10m"}
    assert merged["labels"] == ["a=b"]
    assert "nvidia" in merged["runtimes"]


def test_prepare_waits_for_the_dpkg_lock_and_reports_its_holder(prepared):
    guest = prepared.guest
    guest.run(
        "apt-get remove -qy jq; systemd-run -q --unit=holder python3 -c 'import fcntl, time; "
        'f = open("/var/lib/dpkg/lock-frontend", "w"); fcntl.lockf(f, fcntl.LOCK_EX); '
        'open("/run/held", "w"); time.sleep(600)\''
    )
    guest.wait("test -e /run/held")
    run = prepared.site.start(deploy="deploys/prepare.py")
    try:
        message = next(line for line in run.stdout or () if "the package lock, held by" in line)
        waiting = run.poll() is None and guest.run("command -v jq", check=False) == ""
    finally:
        guest.run("systemctl stop holder; rm -f /run/held")
    rest, _ = run.communicate(timeout=300)
    assert "python3" in message
    assert waiting
    assert run.returncode == 0, rest
    assert guest.run("command -v jq") == "/usr/bin/jq"
    prepared.run().assert_unchanged()


def test_prepare_ignores_a_broken_third_party_apt_source(prepared):
    guest = prepared.guest
    guest.run(
        "apt-get remove -qy jq; "
        "echo 'deb http://127.0.0.1:9/none x main' > /etc/apt/sources.list.d/broken.list"
    )
    run = prepared.run()
    guest.run("rm /etc/apt/sources.list.d/broken.list")
    assert run.changed == [steps.PACKAGES]


def test_settings_can_turn_off_host_protection(prepared):
    guest = prepared.guest
    target = guest.run("systemctl get-default")
    assert guest.run("systemctl is-active earlyoom", check=False) == "inactive"
    base = {"earlyoom": True, "headless": True, "skip": ["protect-login"]}
    with prepared.site.chosen(base=base):
        enabled, again = prepared.run(), prepared.run()
    running = guest.run("tr '\\0' ' ' < /proc/$(pidof earlyoom)/cmdline")
    guaranteed = guest.run("systemctl show -p MemoryMin --value user.slice")
    headless = guest.run("systemctl get-default")
    guest.run(f"systemctl disable -q --now earlyoom; systemctl set-default -q {target}")
    again.assert_unchanged()
    assert set(enabled.changed) >= {steps.LOGIN, "Base | Run earlyoom"}
    assert "--prefer ^(VLLM|vllm)" in running
    assert guaranteed == "0"
    assert headless == "multi-user.target"
    assert prepared.run().changed == [steps.LOGIN]


def test_prepare_sets_memory_compaction_and_restores_the_default(prepared):
    guest, step = prepared.guest, "Base | Set the kernel's compaction"
    read = "cat /proc/sys/vm/compaction_proactiveness"
    with prepared.site.chosen(base={"compaction_proactiveness": 0}):
        enabled, again, value = prepared.run(), prepared.run(), guest.run(read)
        guest.run("echo 7 > /proc/sys/vm/compaction_proactiveness")
        repaired, value_again = prepared.run(), guest.run(read)
    assert (enabled.changed, value) == ([step], "0")
    again.assert_unchanged()
    assert (repaired.changed, value_again) == ([step], "0")
    assert (prepared.run().changed, guest.run(read)) == ([step], "20")
    prepared.run().assert_unchanged()


def can_use_docker(guest):
    result = subprocess.run([*guest.login(), "docker ps"], capture_output=True, check=False)
    return result.returncode == 0


def test_listed_user_can_use_docker_from_next_login(prepared):
    guest = prepared.guest
    assert guest.run("getent group docker").endswith(":")
    assert not can_use_docker(guest)
    prepared.site.choose(docker={"users": [info()["ssh"]["user"]]})
    assert prepared.run().changed == ["Docker | Add users to the docker group"]
    assert can_use_docker(guest)
    prepared.run().assert_unchanged()


def test_prepare_after_reboot_changes_nothing(prepared):
    prepared.guest.reboot()
    prepared.guest.wait("systemctl is-active docker", seconds=60)
    prepared.run().assert_unchanged()
