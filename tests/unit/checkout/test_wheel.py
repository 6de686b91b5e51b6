import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.hosts.payload import read_payload

pytestmark = pytest.mark.slow
DIGESTS = (
    "from spark_deploy.hosts.payload import read_payload as r; import spark_deploy; "
    "print(r().tools_digest, r().image_context_digest, spark_deploy.__file__)"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, names):
        if (CHECKOUT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root), "."],
        cwd=source, check=True,
    )  # fmt: skip
    shutil.rmtree(source)
    [wheel] = root.glob("*.whl")
    venv.create(root / "venv", with_pip=False)
    python = root / "venv/bin/python"
    install = [*pip, "--python", str(python), "install", "--no-deps", str(wheel)]
    # A PYTHONPATH would make pip find this project.
    subprocess.run(install, check=True, cwd=root, env={"PATH": os.environ["PATH"]})
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    # A path in a .pth file does not load the editable install of this checkout.
    Path(site, "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pyinfra = (Path(sys.executable).with_name("pyinfra")).read_text().splitlines()
    (root / "venv/bin/pyinfra").write_text("\n".join([f"#!{python}", *pyinfra[1:]]) + "\n")
    (root / "venv/bin/pyinfra").chmod(0o755)
    return root / "venv/bin"


def run(installed, *arguments, cwd):
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    return subprocess.run(
        [str(installed / arguments[0]), *arguments[1:]],
        cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def test_wheel_and_checkout_send_the_same_files_to_hosts(installed, tmp_path):
    tools, image, where = run(installed, "python", "-c", DIGESTS, cwd=tmp_path).stdout.split()
    payload = read_payload()
    assert (tools, image) == (payload.tools_digest, payload.image_context_digest)
    assert str(installed.parent) in where


METADATA = (
    "import json; from importlib.metadata import metadata as m; d = m('dgx-spark-deploy'); "
    "print(json.dumps(d.json | {'description': d.json.get('description') or d.get_payload()}))"
)


def test_wheel_description_contains_only_absolute_links(installed, tmp_path):
    about = json.loads(run(installed, "python", "-c", METADATA, cwd=tmp_path).stdout)
    text = about["description"]
    assert about["description_content_type"] == "text/markdown"
    assert text.startswith("# dgx-spark-deploy\n")
    assert "spark-deploy init ~/sparks" in text
    assert all(target.startswith("https:") for target in re.findall(r"\]\((.*?)\)", text))


def test_wheel_creates_and_plans_a_configuration(installed, tmp_path):
    created = run(installed, "spark-deploy", "init", "own", "--host", "spark-1", cwd=tmp_path)
    assert created.returncode == 0, created.stderr
    own = tmp_path / "own"
    planned = run(installed, "spark-deploy", "plan", "--estimate", "--json", cwd=own)
    assert planned.returncode == 0, planned.stderr
    assert [plan["host"] for plan in json.loads(planned.stdout)] == ["spark-1"]
    assert run(installed, "spark-deploy", "settings", cwd=own).stdout.count("\n") > 100
    assert run(installed, "spark-deploy", "--version", cwd=own).stdout.startswith("spark-deploy 0")

    (own / "group_vars/all.yml").write_text("modle: x\n")
    wrong = run(installed, "spark-deploy", "plan", "--estimate", cwd=own)
    assert wrong.returncode == 1
    assert "did you mean model?" in wrong.stderr


def test_installed_wheel_runs_deploys_with_pyinfra(installed, tmp_path):
    assert run(installed, "spark-deploy", "init", "own", "--local", cwd=tmp_path).returncode == 0
    own = tmp_path / "own"
    line = run(installed, "spark-deploy", "rotate-key", "--dry", "-v", cwd=own)
    assert line.stderr.splitlines()[0].startswith(str(installed / "pyinfra"))
    assert "Ready: " in line.stdout + line.stderr, line.stdout + line.stderr


def test_plan_without_configuration_suggests_init(installed, tmp_path):
    plan = run(installed, "spark-deploy", "plan", "--estimate", cwd=tmp_path)
    assert plan.returncode == 1
    assert not plan.stdout
    assert "spark-deploy init" in plan.stderr
