import io
import re
import subprocess
import zipfile

import pytest
import yaml

from spark_deploy.config.checkout import CHECKOUT

IMAGE = CHECKOUT / "files/image"


def test_dockerfile_installs_only_the_plugin():
    joined = re.sub(r"\\\n", " ", (IMAGE / "Dockerfile").read_text())
    lines = [line.strip() for line in joined.splitlines() if not line.strip().startswith("#")]
    instructions = {line.split()[0] for line in lines if line}
    assert instructions == {"ARG", "FROM", "LABEL", "COPY", "RUN", "ENV"}
    assert [line for line in lines if line.startswith("FROM")] == ["FROM ${BASE}"]
    assert not re.search(r"\b(apt|apk|curl|wget|git|npm|conda)\b", joined)
    installs = re.findall(r"pip (?:--\S+ )*install ([^;]*)", joined)
    assert len(installs) == 2
    for options in installs:
        assert "--no-deps" in options
        assert "--no-index" in options or "--offline" in options


@pytest.mark.parametrize("name", ["check", "release"])
def test_ci_workflow_pins_actions_and_calls_existing_make_targets(name):
    workflow = yaml.safe_load((CHECKOUT / f".github/workflows/{name}.yml").read_text())
    targets = re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for step in steps:
        assert "uses" not in step or re.search(r"@[0-9a-f]{40}$", step["uses"])
        assert set(re.findall(r"make ([a-z-]+)", step.get("run", ""))) <= set(targets)


@pytest.mark.slow
def test_plugin_wheel_builds_reproducibly(tmp_path):
    wheels = [
        build_plugin(tmp_path / name, time_s)
        for name, time_s in (("a", 1), ("deep/b", 1_700_000_000))
    ]
    assert wheels[0] == wheels[1]
    inside = zipfile.ZipFile(io.BytesIO(wheels[0])).namelist()
    assert {name for name in inside if ".dist-info/" not in name} == {
        str(path.relative_to(IMAGE))
        for path in (IMAGE / "spark_vllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def build_plugin(folder, time_s):
    [epoch] = re.findall(r"SOURCE_DATE_EPOCH=(\d+)", (IMAGE / "Dockerfile").read_text())
    environment = {"PYTHONHASHSEED": str(time_s % 9), "SOURCE_DATE_EPOCH": epoch}
    source, out = folder / "source", folder / "out"
    source.parent.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(IMAGE), str(source)], check=True)
    subprocess.run(["rm", "-rf", str(source / "build"), *map(str, source.glob("*.egg-info"))])
    for path in source.rglob("*"):
        subprocess.run(["touch", "--date", f"@{time_s}", str(path)], check=True)
    subprocess.run(
        [CHECKOUT / ".venv/bin/python", "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps",
         "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", str(out), "."],
        cwd=source, check=True,
        env={"PATH": "/usr/bin:/bin", **environment},
    )  # fmt: skip
    [wheel] = out.glob("*.whl")
    return wheel.read_bytes()
