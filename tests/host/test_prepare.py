"""A host is prepared once, repaired exactly where it drifted, and refused before any change."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labkit import SPARE, Guest, Site, info, lab
from tests.runs import Run

GUEST = SPARE[0]  # its own, so that breaking it disturbs no other test

HOLD = "Base | Hold driver packages in unattended upgrades"
PACKAGES = "Base | Install packages"
DIRECTORIES = "Base | Create directories"
SLEEP = "Base | Disable sleep"
LOGIN = "Base | Guarantee memory to the login"
CUDA_REPOSITORY = "CUDA | Add package repositories"
CUDA_TOOLKIT = "CUDA | Install the toolkit"
ENGINE = "Docker | Install engine and NVIDIA toolkit"
DAEMON_JSON = "Docker | Merge daemon.json"
RUNNING = "Docker | Run the engine with our keys"
PROOF = "Docker | Prove the GPU in a container"


class Prepared:
    """One prepared guest and the runs that prepare it."""

    def __init__(self, root: Path):
        lab("up", GUEST, "--fresh")
        self.site = Site(root, hosts=[GUEST])
        self.site.choose(model="lab-stub", profile="v2", takeover=[])
        address = next(guest["ip"] for guest in info()["guests"] if guest["name"] == GUEST)
        self.guest = Guest(GUEST, address)
        self.installed = self.guest.run("dpkg-query -W -f '${Package} ${Version}\\n'")
        self.first = self.run()

    def run(self, *, dry: bool = False) -> Run:
        return self.site.deploy(deploy="deploys/prepare.py", dry=dry)

    def image(self) -> str:
        """Return an image the guest has, for containers of strangers."""
        return self.guest.run("docker images -q | head -n 1")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    host = Prepared(tmp_path_factory.mktemp("site"))
    assert host.first.exit_code == 0, host.first.stderr[-4000:]
    yield host
    lab("down", GUEST)


def test_a_bare_host_gets_containers_that_see_the_gpu(prepared: Prepared) -> None:
    guest = prepared.guest
    assert "nvidia" in guest.json("docker info --format '{{json .Runtimes}}'")
    listed = guest.run(f"docker run --rm --runtime=nvidia {prepared.image()} nvidia-smi -L")
    assert listed.startswith("GPU 0: NVIDIA GB10")
    assert "release 13.0" in guest.run("/usr/local/cuda/bin/nvcc --version || nvcc --version")
    assert guest.run("systemctl is-enabled suspend.target", check=False) == "masked"
    # The gateway's program is there, its own site is not.
    assert guest.run("systemctl is-enabled nginx", check=False) == "disabled"
    assert guest.run("ss -Hltn 'sport = :80'") == ""


def test_a_prepared_host_is_left_alone(prepared: Prepared) -> None:
    again = prepared.run()
    assert (again.exit_code, again.changed, again.failed) == (0, [], [])


def test_no_package_of_the_driver_was_touched(prepared: Prepared) -> None:
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


@pytest.mark.parametrize("what", DRIFT)
def test_what_drifted_is_repaired_and_nothing_else(prepared: Prepared, what: str) -> None:
    command, repaired_by = DRIFT[what]
    prepared.guest.run(command)
    # Exactly these: what the case before left undone would show here.
    assert prepared.run().changed == repaired_by


def test_a_dry_run_predicts_what_the_run_repairs(prepared: Prepared) -> None:
    for what in ("our source edited", "a directory removed", "docker stopped", "sleep allowed"):
        prepared.guest.run(DRIFT[what][0])
    predicted, repair, again = prepared.run(dry=True), prepared.run(), prepared.run()
    assert predicted.predicted == repair.changed == [DIRECTORIES, SLEEP, CUDA_REPOSITORY, RUNNING]
    again.must_have_changed_nothing()


REFUSED = {
    "the driver is dead": ("break no-driver", "couldn't communicate with the NVIDIA driver"),
    "module and library differ": ("break driver-mismatch", "reboot"),
    "the disk is full": ("break disk-full", "GiB to be written"),
    "another engine runs": (
        "docker tag {image} ollama/ollama:1; "
        "docker run -d --name ollama --restart always --entrypoint sleep ollama/ollama:1 600",
        "container ollama: another engine",
    ),
    "another engine comes back": (
        "docker tag {image} vllm/vllm-openai:1; docker run -d --name old --restart always "
        "--entrypoint sleep vllm/vllm-openai:1 600; docker stop -t 1 old",
        "container old: another engine",
    ),
    # Whoever owns it could have replaced models after they were verified.
    "a folder above the models is somebody's": ("chown nobody /srv/spark", "belongs to nobody"),
    "the port is taken": (
        "systemd-run -q --unit=stranger python3 -m http.server 8000 && sleep 1",
        "port 8000: python3",
    ),
    "a package is half installed": (
        "sed -i '/^Package: runc$/,/^Status:/s/^Status:.*/Status: install ok half-configured/' "
        "/var/lib/dpkg/status",
        "half installed: runc",
    ),
}
HEALED = {
    "the driver is dead": "break no-driver --heal",
    "module and library differ": "break driver-mismatch --heal",
    "the disk is full": "break disk-full --heal",
    "another engine runs": "docker rm -f ollama; docker rmi ollama/ollama:1",
    "another engine comes back": "docker rm -f old; docker rmi vllm/vllm-openai:1",
    "a folder above the models is somebody's": "chown root /srv/spark",
    "the port is taken": "systemctl stop stranger",
    "a package is half installed": "dpkg --configure -a",
}


def do(prepared: Prepared, command: str) -> None:
    if command.startswith("break "):
        _, what, *options = command.split()
        lab("break", what, GUEST, *options)
    else:
        prepared.guest.run(command.replace("{image}", prepared.image()))


@pytest.mark.parametrize("what", REFUSED)
def test_a_host_that_does_not_fit_is_refused_before_any_change(
    prepared: Prepared, what: str
) -> None:
    command, words = REFUSED[what]
    do(prepared, command)
    # Something a run would repair, had it got that far.
    prepared.guest.run("rmdir /var/lib/spark/switch")
    try:
        refused = prepared.run()
        untouched = prepared.guest.run("test -e /var/lib/spark/switch || echo untouched")
    finally:
        do(prepared, HEALED[what])
    assert refused.exit_code != 0
    assert words in refused.stderr
    assert "fix:" in refused.stderr
    assert untouched == "untouched"
    prepared.guest.run("mkdir -p /var/lib/spark/switch")


def test_a_container_is_stopped_only_when_it_is_named(prepared: Prepared) -> None:
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
    again.must_have_changed_nothing()
    assert left["State"]["Status"] == "exited"
    assert left["HostConfig"]["RestartPolicy"]["Name"] == "no"


def test_keys_of_others_in_daemon_json_stay_and_their_containers_go_on(prepared: Prepared) -> None:
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


def test_a_malformed_daemon_json_is_refused_and_kept(prepared: Prepared) -> None:
    guest = prepared.guest
    guest.run("cp /etc/docker/daemon.json /root/kept; echo '{,}' > /etc/docker/daemon.json")
    try:
        run = prepared.run()
        text = guest.run("cat /etc/docker/daemon.json")
    finally:
        guest.run("cp /root/kept /etc/docker/daemon.json")
    assert run.exit_code != 0
    assert "/etc/docker/daemon.json: not a JSON object" in run.stderr
    assert text == "{,}"


def test_a_daemon_that_cannot_start_is_quoted(prepared: Prepared) -> None:
    guest = prepared.guest
    wrong = {**guest.json("cat /etc/docker/daemon.json"), "no-such-key": 1}
    guest.run(
        "cp /etc/docker/daemon.json /root/kept; systemctl stop docker docker.socket; "
        f"echo {shlex.quote(json.dumps(wrong))} > /etc/docker/daemon.json"
    )
    try:
        run = prepared.run()
    finally:
        # Stopped: on a quick machine systemd would start it once more by itself, now with success.
        guest.run("systemctl stop docker docker.socket; cp /root/kept /etc/docker/daemon.json; "
                  "systemctl reset-failed docker")  # fmt: skip
    assert run.exit_code != 0
    assert "directives don't match any configuration option: no-such-key" in run.stderr
    assert prepared.run().changed == [RUNNING]


def test_the_package_lock_is_waited_for_and_its_holder_named(prepared: Prepared) -> None:
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
        # Held until the run says that it waits, however long it took to get there.
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
    prepared.run().must_have_changed_nothing()


def test_a_broken_source_of_others_stops_nothing(prepared: Prepared) -> None:
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


def test_a_repository_key_that_is_not_the_pinned_one_is_not_trusted(prepared: Prepared) -> None:
    guest = prepared.guest
    guest.run("rm -f /etc/apt/keyrings/spark-* /etc/apt/sources.list.d/spark-*")
    guest.run("apt-get remove -qy cuda-toolkit-13-0")
    prepared.site.choose(repositories={"lab-vendor": {"key_sha256": "0" * 64}})
    inventory = prepared.site.root / "inventory/lab.py"
    text = inventory.read_text()
    # The lab's own pin outranks group_vars, so it is spoilt where it comes from.
    inventory.write_text(
        text.replace('_lab["apt"]', '({**_e, "key_sha256": "0" * 64} for _e in _lab["apt"])')
    )
    try:
        run = prepared.run()
        trusted = guest.run("ls /etc/apt/keyrings /etc/apt/sources.list.d")
    finally:
        inventory.write_text(text)
        prepared.site.choices.pop("repositories")
        prepared.site.choose()
    assert run.exit_code != 0
    assert f"not the pinned {'0' * 64}; nothing was added" in run.stderr
    assert "spark-" not in trusted
    assert prepared.run().changed == [CUDA_REPOSITORY, CUDA_TOOLKIT]


def test_a_package_that_would_bring_another_driver_is_refused(prepared: Prepared) -> None:
    guest = prepared.guest
    guest.run(
        """set -e; mkdir -p /srv/repo/a/DEBIAN /srv/repo/b/DEBIAN; cd /srv/repo
        head='Version: 1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x'
        printf "Package: tempting\nDepends: nvidia-driver-590\n$head\n" > a/DEBIAN/control
        printf "Package: nvidia-driver-590\n$head\n" > b/DEBIAN/control
        for d in a b; do dpkg-deb -b $d $d.deb >/dev/null
          { dpkg-deb -f $d.deb; echo "Filename: ./$d.deb"; echo "Size: $(stat -c %s $d.deb)"
            echo "SHA256: $(sha256sum $d.deb | cut -d' ' -f1)"; echo; } >> Packages; done
        echo 'deb [trusted=yes] file:/srv/repo ./' > /etc/apt/sources.list.d/tempting.list"""
    )
    usual = prepared.site.choices.get("base")
    prepared.site.choose(base={"packages": ["curl", "tempting"]})
    try:
        run = prepared.run()
    finally:
        prepared.site.choices.pop("base")
        prepared.site.choose(**({"base": usual} if usual else {}))
        guest.run("rm -r /srv/repo /etc/apt/sources.list.d/tempting.list")
    assert run.exit_code != 0
    assert "installing tempting would change nvidia-driver-590" in run.stderr
    assert guest.run("dpkg -l tempting nvidia-driver-590", check=False) == ""
    prepared.run().must_have_changed_nothing()


def test_host_protection_is_done_only_when_asked_for(prepared: Prepared) -> None:
    guest = prepared.guest
    target = guest.run("systemctl get-default")
    assert guest.run("systemctl is-active earlyoom", check=False) == "inactive"
    prepared.site.choose(base={"earlyoom": True, "headless": True, "protect_login": False})
    try:
        asked, again = prepared.run(), prepared.run()
        running = guest.run("tr '\\0' ' ' < /proc/$(pidof earlyoom)/cmdline")
        guaranteed = guest.run("systemctl show -p MemoryMin --value user.slice")
        headless = guest.run("systemctl get-default")
    finally:
        prepared.site.choices.pop("base")
        prepared.site.choose()
        guest.run(f"systemctl disable -q --now earlyoom; systemctl set-default -q {target}")
    again.must_have_changed_nothing()
    assert set(asked.changed) >= {LOGIN, "Base | Run earlyoom"}
    assert "--prefer ^(VLLM|vllm)" in running
    assert guaranteed == "0"
    assert headless == "multi-user.target"
    assert prepared.run().changed == [LOGIN]


def test_a_reboot_changes_nothing(prepared: Prepared) -> None:
    prepared.guest.reboot()
    prepared.guest.wait("systemctl is-active docker", seconds=60)
    prepared.run().must_have_changed_nothing()
