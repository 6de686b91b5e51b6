"""Flavours are data: each on disk can be read and made, and what no flavour may say is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from lab import archive, flavour, packages
from lab.errors import LabError
from lab.flavour import Flavour, Release
from spark_deploy.config.checkout import CHECKOUT


@pytest.mark.parametrize("name", flavour.names())
def test_a_flavour_on_disk_has_everything_it_names(name):
    one = flavour.read(name)
    assert one.summary
    for package in (*one.stand_ins, *one.unpacked):
        control = packages.stub_control(package)
        assert control["Package"] == package
        assert control["Version"].endswith("+labstub")
    files = one.directory / "files"
    assert [unit for unit in one.units if not (files / "etc/systemd/system" / unit).exists()] == []
    # What a hand types has to be what a shell reads.
    subprocess.run(["sh", "-n", one.directory / "owner.sh"], check=True)


def test_no_line_of_code_names_a_flavour():
    words = "|".join(map(re.escape, flavour.names()))
    for path in Path(flavour.__file__).parent.rglob("*.py"):
        assert not re.search(rf"\b({words})\b", path.read_text()), path


def test_the_deploy_of_a_guest_on_another_release_is_told_so():
    for name in flavour.names():
        one = flavour.read(name)
        told = one.settings.get("expect", {}).get("os_version")
        assert told == (one.release.version if one.release else None)


def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **said: object) -> Flavour:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/flavour.yml").write_text(yaml.safe_dump(said))
    monkeypatch.setattr(flavour, "DIRECTORY", tmp_path)
    return flavour.read("new")


def test_a_new_folder_is_a_new_flavour(tmp_path, monkeypatch):
    release = {"codename": "trixie", "version": "13"}
    one = make(tmp_path, monkeypatch, summary="new", release=release, packages=["jq"], units=["a"])
    assert flavour.names() == ["new"]
    assert (one.release, one.packages) == (Release("trixie", "13"), ("jq",))
    assert one.units == ("a",)


def test_a_word_that_means_nothing_is_refused(tmp_path, monkeypatch):
    with pytest.raises(LabError, match="unknown: package"):
        make(tmp_path, monkeypatch, summary="new", package=["jq"])


def test_a_flavour_that_is_not_there_is_refused_by_name():
    with pytest.raises(LabError, match=r"mintcondition[\s\S]*choose one of"):
        flavour.read("mintcondition")


def test_guests_of_a_flavour_know_its_own_archive_under_the_usual_name():
    known = archive.of_flavour("x")
    assert known.name == archive.OS_ARCHIVE.name
    assert known.directory != archive.OS_ARCHIVE.directory
    assert known.preconfigured


def test_a_package_of_a_later_suite_takes_the_place_of_the_release_s_own(tmp_path, monkeypatch):
    ran: list[list[str]] = []
    monkeypatch.setattr(packages, "run", lambda words: ran.append([str(word) for word in words]))
    monkeypatch.setattr(packages.shutil, "rmtree", lambda path: None)
    from lab.distribution import Distribution
    from lab.paths import LabPaths

    machine = Distribution("debian", "13", "trixie", "http://mirror/debian", "main", "amd64", "x")
    more = packages.More(("docker.io/sid", "locales"), ("trixie", "sid"))
    packages.download(LabPaths(tmp_path), machine, tmp_path / "tree", more=more)
    update, install = ran
    assert update[-1] == "update"
    assert {"docker.io/sid", "locales", "docker-cli"} <= set(install)
    assert "docker.io" not in install
    assert "APT::Default-Release=trixie" in install
    sources = (tmp_path / "cache/apt-trixie-sid/sources.list").read_text()
    assert [line.split()[-2] for line in sources.splitlines()] == ["trixie", "sid"]


def test_every_flavour_was_taken_whole_and_its_owner_s_things_are_as_they_were():
    rows = json.loads((CHECKOUT / "proofs/results/lab/flavours.json").read_text())["rows"]
    assert [row["flavour"] for row in rows] == flavour.names()
    for row in rows:
        assert row["doctor"]["exit_code"] == 0
        assert row["first"]["served"]
        assert row["second"]["changed"] == row["owners"]["changed"] == 0
        assert row["owners"]["files"] > 100
        assert row["rebooted"] == {"served": True, "owners_changed": 0, "changed": 0}
