"""The compile cache of an engine over changes of its image, failed candidates and drivers."""

from __future__ import annotations

import json

from tests.host.exposure import QUESTION, Place
from tests.host.test_upgrades import NEW, OLD, upgraded

USUAL = {"model": "lab-stub", "profile": "v2"}


def cache_of(place: Place) -> str:
    """Return the directory that the running engine has at /cache."""
    [container] = json.loads(
        place.guest.run("docker inspect $(docker ps -q --filter label=spark.service=main)")
    )
    return next(one["Source"] for one in container["Mounts"] if one["Destination"] == "/cache")


def compile_kernel(place: Place, text: str) -> None:
    """Leave what an engine leaves: the stand-in compiles nothing."""
    nv = f"{cache_of(place)}/nv"
    place.guest.run(
        f"install -d -o spark-engine {nv}; echo {text} > {nv}/kernel; "
        f"chown spark-engine {nv}/kernel"
    )


def seen(place: Place, folder: str) -> str:
    """Return every file of a directory with owner, inode, times and content."""
    return place.guest.run(
        f"cd {folder} && find . -printf '%p %u %i %T@ %C@\\n' | sort && find . -type f "
        "-exec sha256sum {} +"
    )


def test_a_cache_outlives_a_change_of_release_but_neither_a_failed_candidate_nor_a_driver(
    place: Place,
) -> None:
    guest, site = place.guest, place.site
    site.choose(**USUAL)
    assert place.deploy().exit_code == 0
    old, unit = cache_of(place), guest.serving()[0]
    compile_kernel(place, "proven")
    before = seen(place, old)

    # A candidate that fails changes nothing of the proven release's cache.
    site.choose(engine={"environment": {"STUB_FAULT": "low-acceptance"}})
    failed = site.deploy()
    assert failed.exit_code != 0
    assert guest.serving() == [unit]
    assert cache_of(place) == old
    assert seen(place, old) == before
    copies = guest.run(f"cat {old.rpartition('/')[0]}/*/nv/kernel").split()
    assert copies == ["proven", "proven"]

    # Another release on the same base image (the stand-in engine takes no plugin).
    site.choose(profile="v2-native", engine={})
    done = site.deploy()
    assert done.exit_code == 0, done.stderr[-3000:]
    new = cache_of(place)
    assert new != old
    assert guest.run(f"cat {new}/nv/kernel") == "proven"
    compile_kernel(place, "new")
    assert guest.run(f"cat {old}/nv/kernel") == "proven"
    again = site.deploy()
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]

    # Cleanup leaves the caches of releases that it keeps.
    pruned = site.deploy(deploy="deploys/prune.py")
    assert pruned.exit_code == 0, pruned.stderr[-3000:]
    left = guest.run(f"ls -A {new.rpartition('/')[0]}").split()
    assert sorted(left) == sorted(one.rpartition("/")[2] for one in (old, new))

    upgraded(guest, OLD, NEW)
    try:
        guest.run(f"systemctl restart {guest.serving()[0]}")
        assert guest.ask(QUESTION)[0] == 200
        assert cache_of(place) == new
        assert guest.run(f"ls -A {new}") == ""
    finally:
        upgraded(guest, NEW, OLD)
