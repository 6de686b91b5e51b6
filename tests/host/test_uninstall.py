"""After an uninstall a host is what it was before the first deploy, by ordinary tools' word."""

from __future__ import annotations

import difflib
import json
import re
import threading
import time
from pathlib import Path

import pytest

from tests.labkit import SPARE, Guest, Site, guest_named, lab
from tests.runs import Run

UNINSTALL = "deploys/uninstall.py"
ALL = ("--data", "uninstall.models=true", "--data", "uninstall.engine=true")
# Logs, caches, what systemd and apt count, and Docker's and containerd's own stores: the lab mounts
# them, so their folders are there before Docker is, which gives them another mode.
_LEFT_OUT = (
    "^/var/(log|cache|tmp|lib/(systemd|sudo|docker|containerd|apt|dpkg|private))(/| |$)"
    "|/__pycache__|^/etc/ld.so.cache|^/etc/[a-z]+-( |$)"
)
_WHERE = "/etc /usr /opt /srv /root /home /boot /var"
SNAPSHOT = rf"""
find {_WHERE} -xdev -printf '%p %y %m %u %g %l\n' | grep -Ev '{_LEFT_OUT}' | sort
find {_WHERE} -xdev -type f -print0 | grep -zEv '{_LEFT_OUT}' | sort -z | xargs -0 sha256sum
dpkg-query -W -f '${{binary:Package}} ${{Version}} ${{db:Status-Abbrev}}\n'
apt-mark showmanual | sort
systemctl list-unit-files --no-legend --plain | grep -v '\.scope' | sort
systemctl list-units --type=service --state=active,failed --no-legend --plain | cut -d' ' -f1 |
  grep -v '^user' | sort
getent passwd; getent group; ss -Hltn | awk '{{print $4}}' | sort
if command -v docker >/dev/null; then
  docker images -a --no-trunc --format '{{{{.Repository}}}} {{{{.Tag}}}} {{{{.ID}}}}' | sort
  docker ps -aq --no-trunc | xargs -r docker inspect -f '{{{{.Id}}}} {{{{.State.StartedAt}}}}'
  docker volume ls -q; docker network ls --format '{{{{.Name}}}}'
fi
exit 0
"""
# In brackets, so that it does not find the shell that looks for it.
WORK = "[s]park_host.__main__.*uninstall [{]"
# A host whose owner has Docker, settings of his own in it, a container that runs, a package and a
# mask that a deploy would bring, and a file where ours will lie.
SOMEBODY = """
set -e; export DEBIAN_FRONTEND=noninteractive
apt-get -qq update; apt-get -qq -y --no-install-recommends install docker.io jq >/dev/null 2>&1
echo '{"log-opts": {"max-size": "7m"}}' > /etc/docker/daemon.json
systemctl restart docker; systemctl mask -q hibernate.target
d=$(mktemp -d); cd $d; cp $(command -v sleep) .; mkdir lib64 lib
ldd sleep | grep -o '/[^ ]*' | while read l; do mkdir -p .$(dirname $l); cp $l .$l; done
printf 'FROM scratch\\nCOPY . /\\nENTRYPOINT ["/sleep", "100000"]\\n' > Dockerfile
docker build -q -t somebody/else:1 . >/dev/null; cd /; rm -r $d
docker run -d --name somebody --restart always somebody/else:1 >/dev/null
mkdir -p /etc/spark/conf /srv/spark/models/mine
echo spark.master local > /etc/spark/conf/defaults; echo mine > /srv/spark/models/mine/file
"""


def snapshot(guest: Guest) -> list[str]:
    return guest.run(SNAPSHOT, timeout_s=120).splitlines()


def difference(before: list[str], after: list[str]) -> list[str]:
    told = difflib.unified_diff(before, after, lineterm="", n=0)
    return [line for line in told if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def fresh(name: str, root: Path) -> tuple[Guest, Site]:
    lab("up", name, "--fresh", "--engine", "stub")
    site = Site(root, hosts=[name])
    site.choose(model="lab-stub", profile="v2")
    return guest_named(name), site


def uninstall(site: Site, *words: str, dry: bool = False) -> Run:
    return site.deploy(*words, dry=dry, deploy=UNINSTALL)


def serve(site: Site, guest: Guest) -> None:
    run = site.deploy()
    assert run.exit_code == 0, f"{run.failed}\n{run.stderr[-4000:]}"
    assert guest.answers("What is the capital of France?", "Paris")


def kill_while_it_goes(site: Site, guest: Guest, seconds: float) -> None:
    """End the work on the host without a word, so long after it began."""

    def kill() -> None:
        guest.wait(f"pgrep -f '{WORK}'", seconds=30)
        time.sleep(seconds)
        guest.run(f"pkill -9 -f '{WORK}'")

    killer = threading.Thread(target=kill)
    killer.start()
    run = uninstall(site, *ALL)
    killer.join()
    assert run.exit_code != 0, "it was over before it could be killed"


def test_a_bare_host_is_bare_again_and_what_stays_is_said_first(tmp_path: Path) -> None:
    guest, site = fresh(SPARE[0], tmp_path)
    before = snapshot(guest)
    nothing = uninstall(site)
    assert (nothing.exit_code, nothing.changed) == (0, []), nothing.stderr[-3000:]
    serve(site, guest)
    deployed = snapshot(guest)

    dry = uninstall(site, dry=True)

    assert dry.predicted == ["Uninstall | Remove managed resources"]
    assert difference(deployed, snapshot(guest)) == []
    trees = guest.run("ls -d /srv/spark/models/* /srv/spark/sources/*").split()
    assert all(f"{path}: models are kept" in dry.stderr for path in trees)
    assert "docker.io, nvidia-container-toolkit, cuda-toolkit-13-0: others may" in dry.stderr

    run = uninstall(site)

    assert run.exit_code == 0, run.stderr[-3000:]
    said = [
        line
        for line in dry.stderr.splitlines()
        if line.lstrip().startswith("keep ") or "keep   " in line
    ]
    left = [line for line in difference(before, snapshot(guest)) if "spark" in line]
    # A tree stands for all files in it; folders lead to what stays.
    paths = [re.findall(r"/[^ ]*", line)[0] for line in left if " d " not in line]
    assert [
        p for p in paths if not any(named in p for line in said for named in _paths(line))
    ] == []
    assert guest.run("ls -d /srv/spark/models/* /srv/spark/sources/*").split() == trees
    assert guest.run("docker ps -aq") == ""
    again = uninstall(site)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]

    # What stayed is used again, and what was noted first still holds.
    serve(site, guest)
    assert uninstall(site, *ALL).exit_code == 0
    assert difference(before, snapshot(guest)) == []
    last = uninstall(site, *ALL)
    assert (last.exit_code, last.changed) == (0, []), last.stderr[-3000:]


def _paths(line: str) -> list[str]:
    return re.findall(r"/[^ ,:]*", line)


@pytest.mark.parametrize("seconds", [0.3, 2.0])
def test_what_others_have_is_untouched_and_a_killed_uninstall_is_finished_by_the_next(
    tmp_path: Path, seconds: float
) -> None:
    guest, site = fresh(SPARE[1], tmp_path)
    guest.run(SOMEBODY, timeout_s=300)
    before = snapshot(guest)
    serve(site, guest)
    code, told = site.tool("status", "--files", "--json")
    assert code == 0, told
    [said] = json.loads(told)
    assert {"tree", "image", "unit", "tools", "record", "service"} <= {
        thing["kind"] for thing in said["things"]
    }

    kill_while_it_goes(site, guest, seconds)
    run = uninstall(site, *ALL)

    assert run.exit_code == 0, run.stderr[-3000:]
    assert difference(before, snapshot(guest)) == []
    again = uninstall(site, *ALL)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
    assert "/etc/spark/conf: not made by us" in again.stderr
