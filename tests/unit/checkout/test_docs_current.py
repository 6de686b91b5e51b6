import re
import subprocess
import sys

import pytest

from spark_deploy.config.checkout import CHECKOUT


@pytest.mark.slow
def test_generated_docs_are_current():
    command = [sys.executable, str(CHECKOUT / "tools/docs/generate.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_readme_and_speed_page_give_the_same_speed():
    readme = (CHECKOUT / "README.md").read_text("utf-8")
    speeds = re.search(
        r"(\d+)\s+tokens/s for one request \(computed; (\d+)\s+is the published", readme
    )
    page = (CHECKOUT / "docs/reference/speed.md").read_text("utf-8")
    row = re.search(r"^\| v2 \| qwen3.5-122b \| 1 \| (\d+) \|.*\| (\d+)\.\d \|", page, re.M)
    assert speeds is not None
    assert row is not None
    assert speeds.groups() == row.groups()[::-1]


def test_project_files_named_in_docs_exist():
    pages = [CHECKOUT / "CONTRIBUTING.md", CHECKOUT / "README.md", *CHECKOUT.glob("docs/**/*.md")]
    texts = {page: page.read_text("utf-8") for page in pages}
    tops = "catalog|deploys|docs|files|group_vars|lab|proofs|roles|spark_deploy|tests|tools"
    architecture = texts[CHECKOUT / "docs/architecture.md"] + texts[pages[0]]
    named = re.findall(rf"`((?:{tops})/[\w./@-]+)`", architecture)
    named += re.findall(r"\bdeploys/[a-z_]+\.py", "".join(texts.values()))
    assert len(named) > 30
    assert [name for name in named if not (CHECKOUT / name).exists()] == []


def test_every_result_file_is_referenced():
    pages = [*CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("proofs/**/*.md")]
    read = "\n".join(
        path.read_text("utf-8") for path in [*pages, *CHECKOUT.glob("catalog/**/*.yml")]
    )
    results = [path.name for path in (CHECKOUT / "proofs/results").rglob("*.json")]
    assert [name for name in results if not re.search(rf"\b{re.escape(name)}", read)] == []
    assert len(set(results)) == len(results), "pages name them without their folder"
