import re
import subprocess
import sys

import pytest

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import CatalogError
from tools.docs import generate


@pytest.mark.slow
def test_generated_docs_are_current():
    command = [sys.executable, str(CHECKOUT / "tools/docs/generate.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_docs_are_not_generated_from_a_catalog_with_an_invalid_file(tmp_path, monkeypatch):
    (tmp_path / "catalog/models").mkdir(parents=True)
    (tmp_path / "catalog/models/mine.yml").write_text("sumary: x\n")
    monkeypatch.setattr(generate, "read_catalog", lambda: read_catalog(user_dir=tmp_path))
    with pytest.raises(CatalogError, match=r"catalog/models/mine.yml: sumary: unknown key"):
        generate.catalog.__wrapped__()


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
