"""The list of what we add to an image names every file of it; nothing comes in unlisted."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from spark_deploy.config.checkout import CHECKOUT
from tools import sbom

IMAGE = CHECKOUT / "files/image"
REQUIREMENTS = CHECKOUT / "files/checkpoint/requirements.txt"


def test_it_is_cyclonedx_and_the_same_tree_gives_the_same_bytes() -> None:
    found = json.loads(sbom.text())
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(
        r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found["serialNumber"]
    )
    assert sbom.text() == sbom.text()
    names = [one["bom-ref"] for one in components(found)]
    assert len(names) == len(set(names))
    known = {*names, found["metadata"]["component"]["bom-ref"]}
    for one in found["dependencies"]:
        assert {one["ref"], *one["dependsOn"]} <= known


def components(found: dict) -> list[dict]:
    return [each for one in found["components"] for each in (one, *one.get("components", ()))]


def test_it_lists_every_file_that_goes_into_the_image_with_the_hash_that_others_find() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=IMAGE, capture_output=True, text=True, check=True
    ).stdout.split()
    found = {
        one["name"]: one["hashes"][0]["content"]
        for one in components(sbom.document())
        if one["type"] == "file"
    }
    assert set(tracked) == set(found)
    said = subprocess.run(
        ["sha256sum", *tracked], cwd=IMAGE, capture_output=True, text=True, check=True
    ).stdout
    assert found == {line.split()[1]: line.split()[0] for line in said.splitlines()}


def test_it_lists_every_package_that_hosts_get() -> None:
    text = REQUIREMENTS.read_text()
    wanted = set(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    found = {
        (one["name"], one["version"]): one
        for one in components(sbom.document())
        if one.get("purl", "").startswith("pkg:pypi/")
    }
    assert wanted
    assert set(found) == wanted
    hashes = [one["content"] for package in found.values() for one in package["hashes"]]
    assert sorted(hashes) == sorted(re.findall(r"sha256:([0-9a-f]{64})", text))


def test_the_dockerfile_brings_in_nothing_that_the_list_does_not_know() -> None:
    joined = re.sub(r"\\\n", " ", (IMAGE / "Dockerfile").read_text())
    lines = [line.strip() for line in joined.splitlines() if not line.strip().startswith("#")]
    words = {line.split()[0] for line in lines if line}
    assert words == {"ARG", "FROM", "LABEL", "COPY", "RUN", "ENV"}
    assert [line for line in lines if line.startswith("FROM")] == ["FROM ${BASE}"]
    assert not re.search(r"\b(apt|apk|curl|wget|git|npm|conda)\b", joined)
    installs = re.findall(r"pip (?:--\S+ )*install ([^;]*)", joined)
    assert len(installs) == 2
    for words_of in installs:
        assert "--no-deps" in words_of
        assert "--no-index" in words_of or "--offline" in words_of


@pytest.mark.slow
def test_the_plugin_s_wheel_has_the_same_bytes_from_another_place_and_time(tmp_path: Path) -> None:
    wheels = [built(tmp_path / name, when) for name, when in (("a", 1), ("deep/b", 1_700_000_000))]
    assert wheels[0] == wheels[1]
    assert len(wheels[0]) > 10_000


def built(folder: Path, when: int) -> bytes:
    """Build the plugin as the Dockerfile does, from files of that age."""
    [said] = re.findall(r"SOURCE_DATE_EPOCH=(\d+)", (IMAGE / "Dockerfile").read_text())
    source, out = folder / "source", folder / "out"
    source.parent.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(IMAGE), str(source)], check=True)
    subprocess.run(["rm", "-rf", str(source / "build"), *map(str, source.glob("*.egg-info"))])
    for path in source.rglob("*"):
        subprocess.run(["touch", "--date", f"@{when}", str(path)], check=True)
    subprocess.run(
        [CHECKOUT / ".venv/bin/python", "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps",
         "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", str(out), "."],
        cwd=source, check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": str(when % 9), "SOURCE_DATE_EPOCH": said},
    )  # fmt: skip
    [wheel] = out.glob("*.whl")
    return wheel.read_bytes()
