import json
import shlex

import pytest

from tests.host.prepared_host import CUDA_REPOSITORY, CUDA_TOOLKIT, GUEST, RUNNING, prepared
from tests.labkit import lab

__all__ = ["prepared"]

# How to cause a problem, how to repair it, and what the message names.
PROBLEMS = {
    "driver dead": (
        "break no-driver",
        "break no-driver --heal",
        "communicate with the NVIDIA driver",
    ),
    "driver module and library differ": (
        "break driver-mismatch",
        "break driver-mismatch --heal",
        "reboot",
    ),
    "disk full": ("break disk-full", "break disk-full --heal", "GiB"),
    "another engine runs": (
        "docker tag {image} ollama/ollama:1; "
        "docker run -d --name ollama --restart always --entrypoint sleep ollama/ollama:1 600",
        "docker rm -f ollama; docker rmi ollama/ollama:1",
        "container ollama: ",
    ),
    "another engine restarts at boot": (
        "docker tag {image} vllm/vllm-openai:1; docker run -d --name old --restart always "
        "--entrypoint sleep vllm/vllm-openai:1 600; docker stop -t 1 old",
        "docker rm -f old; docker rmi vllm/vllm-openai:1",
        "container old: ",
    ),
    # The owner could replace models after their verification.
    "parent folder of the models has another owner": (
        "chown nobody /srv/spark",
        "chown root /srv/spark",
        "nobody",
    ),
    "port in use": (
        "systemd-run -q --unit=stranger python3 -m http.server 8000 && sleep 1",
        "systemctl stop stranger",
        "port 8000: python3",
    ),
    "package half installed": (
        "sed -i '/^Package: runc$/,/^Status:/s/^Status:.*/Status: install ok half-configured/' "
        "/var/lib/dpkg/status",
        "dpkg --configure -a",
        "runc",
    ),
}


def execute(prepared, command):
    if command.startswith("break "):
        _, fault, *options = command.split()
        lab("break", fault, GUEST, *options)
    else:
        prepared.guest.run(command.replace("{image}", prepared.image()))


@pytest.mark.parametrize("name", PROBLEMS)
def test_prepare_rejects_unsuitable_host_before_any_change(prepared, name):
    cause, repair, message = PROBLEMS[name]
    execute(prepared, cause)
    prepared.guest.run("rmdir /var/lib/spark/switch")
    result = prepared.run()
    untouched = prepared.guest.run("test -e /var/lib/spark/switch || echo untouched")
    execute(prepared, repair)
    assert result.exit_code != 0
    assert message in result.stderr
    assert "fix:" in result.stderr
    assert untouched == "untouched"
    prepared.guest.run("mkdir -p /var/lib/spark/switch")


def test_prepare_reports_why_docker_does_not_start(prepared):
    guest = prepared.guest
    wrong = {**guest.json("cat /etc/docker/daemon.json"), "no-such-key": 1}
    guest.run(
        "cp /etc/docker/daemon.json /root/kept; systemctl stop docker docker.socket; "
        f"echo {shlex.quote(json.dumps(wrong))} > /etc/docker/daemon.json"
    )
    run = prepared.run()
    guest.run("systemctl stop docker docker.socket; cp /root/kept /etc/docker/daemon.json; "
              "systemctl reset-failed docker")  # fmt: skip
    assert run.exit_code != 0
    assert "no-such-key" in run.stderr
    assert prepared.run().changed == [RUNNING]


def test_prepare_rejects_apt_key_with_wrong_digest(prepared):
    guest = prepared.guest
    guest.run("rm -f /etc/apt/keyrings/spark-* /etc/apt/sources.list.d/spark-*")
    guest.run("apt-get remove -qy cuda-toolkit-13-0")
    inventory = prepared.site.root / "inventory/lab.py"
    text = inventory.read_text()
    # The lab's pin takes precedence over group_vars, so change it in the inventory.
    inventory.write_text(
        text.replace('_lab["apt"]', '({**_e, "key_sha256": "0" * 64} for _e in _lab["apt"])')
    )
    with prepared.site.chosen(repositories={"lab-vendor": {"key_sha256": "0" * 64}}):
        run = prepared.run()
    trusted = guest.run("ls /etc/apt/keyrings /etc/apt/sources.list.d")
    inventory.write_text(text)
    assert run.exit_code != 0
    assert "0" * 64 in run.stderr
    assert "spark-" not in trusted
    assert prepared.run().changed == [CUDA_REPOSITORY, CUDA_TOOLKIT]


def test_prepare_rejects_package_that_changes_the_driver(prepared):
    guest = prepared.guest
    guest.run(
        """set -e; mkdir -p /srv/repo/a/DEBIAN /srv/repo/b/DEBIAN; cd /srv/repo
        head='Version: 99\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x'
        printf "Package: earlyoom\nDepends: nvidia-driver-590\n$head\n" > a/DEBIAN/control
        printf "Package: nvidia-driver-590\n$head\n" > b/DEBIAN/control
        for d in a b; do dpkg-deb -b $d $d.deb >/dev/null
          { dpkg-deb -f $d.deb; echo "Filename: ./$d.deb"; echo "Size: $(stat -c %s $d.deb)"
            echo "SHA256: $(sha256sum $d.deb | cut -d' ' -f1)"; echo; } >> Packages; done
        echo 'deb [trusted=yes] file:/srv/repo ./' > /etc/apt/sources.list.d/earlyoom.list"""
    )
    with prepared.site.chosen(base={"earlyoom": True}):
        run = prepared.run()
    guest.run("rm -r /srv/repo /etc/apt/sources.list.d/earlyoom.list")
    assert run.exit_code != 0
    assert "nvidia-driver-590" in run.stderr
    assert guest.run("dpkg -l earlyoom nvidia-driver-590", check=False) == ""
    prepared.run().assert_unchanged()
