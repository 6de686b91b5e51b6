import difflib
import json
import re
import threading
import time

import pytest

from tests.labkit import SPARE, Site, guest_named, lab

UNINSTALL = "deploys/uninstall.py"
ALL = ("--data", "uninstall.models=true", "--data", "uninstall.engine=true")
# Logs, caches, data of systemd and apt, and the stores of Docker and containerd, whose folders the
# lab mounts before Docker changes their mode.
_IGNORED = (
    "^/var/(log|cache|tmp|lib/(systemd|sudo|docker|containerd|apt|dpkg|private))(/| |$)"
    "|/__pycache__|^/etc/ld.so.cache|^/etc/[a-z]+-( |$)"
)
_FOLDERS = "/etc /usr /opt /srv /root /home /boot /var"
SNAPSHOT = rf"""
find {_FOLDERS} -xdev -printf '%p %y %m %u %g %l\n' | grep -Ev '{_IGNORED}' | sort
find {_FOLDERS} -xdev -type f -print0 | grep -zEv '{_IGNORED}' | sort -z | xargs -0 sha256sum
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
# In brackets, so that pgrep does not match the shell.
WORK = "[s]park_host.__main__.*uninstall [{]"
# The owner has Docker with settings and a running container, a package and a mask that a deploy
# would install, and files in our folders.
OWNER = """
set -e; export DEBIAN_FRONTEND=noninteractive
apt-get -qq update; apt-get -qq -y --no-install-recommends install docker.io jq >/dev/null 2>&1
echo '{"log-opts": {"max-size": "7m"}}' > /etc/docker/daemon.json
systemctl restart docker; systemctl mask -q hibernate.target
d=$(mktemp -d); cd $d; cp $(command -v sleep) .; mkdir lib64 lib
ldd sleep | grep -o '/[^ ]*' | while read l; do mkdir -p .$(dirname $l); cp $l .$l; done
printf 'FROM scratch\\nCOPY . /\\nENTRYPOINT ["/sleep", "100000"]\\n' > Dockerfile
docker build -q -t foreign/image:1 . >/dev/null; cd /; rm -r $d
docker run -d --name foreign --restart always foreign/image:1 >/dev/null
mkdir -p /etc/spark/conf /srv/spark/models/mine
echo spark.master local > /etc/spark/conf/defaults; echo mine > /srv/spark/models/mine/file
"""


def snapshot(guest):
    return guest.run(SNAPSHOT, timeout_s=120).splitlines()


def difference(before, after):
    diff = difflib.unified_diff(before, after, lineterm="", n=0)
    return [line for line in diff if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def fresh(name, root):
    lab("up", name, "--fresh", "--engine", "stub")
    site = Site(root, hosts=[name])
    site.choose(model="lab-stub", profile="v2")
    return guest_named(name), site


def uninstall(site, *arguments, dry=False):
    return site.deploy(*arguments, dry=dry, deploy=UNINSTALL)


def serve(site, guest):
    site.deploy().assert_succeeded()
    assert guest.answers()


def kill_during_uninstall(site, guest, seconds):
    def kill():
        guest.wait(f"pgrep -f '{WORK}'", seconds=30)
        time.sleep(seconds)
        guest.run(f"pkill -9 -f '{WORK}'")

    killer = threading.Thread(target=kill)
    killer.start()
    run = uninstall(site, *ALL)
    killer.join()
    assert run.exit_code != 0, "it finished before it could be killed"


def test_uninstall_lists_kept_files_first_and_restores_the_bare_host(tmp_path):
    guest, site = fresh(SPARE[0], tmp_path)
    before = snapshot(guest)
    before_deploy = uninstall(site)
    assert (before_deploy.exit_code, before_deploy.changed) == (0, [])
    serve(site, guest)
    deployed = snapshot(guest)

    dry = uninstall(site, dry=True)

    assert dry.predicted == ["Uninstall | Remove managed resources"]
    assert difference(deployed, snapshot(guest)) == []
    trees = guest.run("ls -d /srv/spark/models/* /srv/spark/sources/*").split()
    assert all(f"{path}: models are kept" in dry.stderr for path in trees)
    assert "docker.io, nvidia-container-toolkit, cuda-toolkit-13-0: " in dry.stderr

    uninstall(site).assert_succeeded()
    lines = [
        line
        for line in dry.stderr.splitlines()
        if line.lstrip().startswith("keep ") or "keep   " in line
    ]
    left = [line for line in difference(before, snapshot(guest)) if "spark" in line]
    paths = [re.findall(r"/[^ ]*", line)[0] for line in left if " d " not in line]
    assert [
        p for p in paths if not any(named in p for line in lines for named in _paths(line))
    ] == []
    assert guest.run("ls -d /srv/spark/models/* /srv/spark/sources/*").split() == trees
    assert guest.run("docker ps -aq") == ""
    again = uninstall(site)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]

    serve(site, guest)
    uninstall(site, *ALL).assert_succeeded()
    assert difference(before, snapshot(guest)) == []
    last = uninstall(site, *ALL)
    assert (last.exit_code, last.changed) == (0, []), last.stderr[-3000:]


def _paths(line):
    return re.findall(r"/[^ ,:]*", line)


@pytest.mark.parametrize("seconds", [0.3, 2.0])
def test_next_run_finishes_killed_uninstall_and_keeps_unmanaged_files(tmp_path, seconds):
    guest, site = fresh(SPARE[1], tmp_path)
    guest.run(OWNER, timeout_s=300)
    before = snapshot(guest)
    serve(site, guest)
    code, output = site.cli_output("status", "--files", "--json")
    assert code == 0, output
    [status] = json.loads(output)
    assert {"tree", "image", "unit", "tools", "record", "service"} <= {
        thing["kind"] for thing in status["items"]
    }

    kill_during_uninstall(site, guest, seconds)
    uninstall(site, *ALL).assert_succeeded()
    assert difference(before, snapshot(guest)) == []
    again = uninstall(site, *ALL)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
    assert "/etc/spark/conf" in again.stderr
