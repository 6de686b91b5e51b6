import json
import re

import pytest

from spark_deploy.cli import main
from spark_deploy.config.catalog.model import HybridModel
from tests import forked
from tests.unit.lockfile.hub_trees import (
    BASE,
    CATALOG,
    DONOR,
    TENSORS,
    base_entries,
    donor_entries,
    header_bytes,
    requested_ranges,
    write_inventory,
    write_repository,
)

HYBRIDS = {n: model for n, model in CATALOG.models.items() if isinstance(model, HybridModel)}
TINY = {name for name, model in HYBRIDS.items() if model.tensors == TENSORS}


@pytest.fixture
def here(hub, tmp_path, monkeypatch):
    write_inventory(tmp_path / "here", f"hub: {{endpoint: '{hub.url}'}}\n")
    forked.fork_builder(monkeypatch)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def compare(capsys, place):
    assert main(["add", "--dry", place, "inventory.py", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["against"]
    return {(row["plan"], row["part"]): None if row["fits"] else row["why"] for row in rows}


def matches(result):
    return {key for key, reason in result.items() if reason is None}


@pytest.mark.slow
def test_compares_repository_with_every_model(here, capsys):
    parts = {
        (name, part)
        for name, model in HYBRIDS.items()
        for part in ("base", "donor", "hybrid")
        if getattr(model.sources, part) is not None
    }
    as_base, as_donor = compare(capsys, BASE), compare(capsys, DONOR)
    assert set(as_base) == set(as_donor) == parts
    assert matches(as_base) == {(name, "base") for name in TINY}
    assert matches(as_donor) == {(name, "donor") for name in TINY}
    assert "number of experts or layers" in as_base["qwen3.5-122b", "base"]


@pytest.mark.slow
def test_recognizes_hybrid_repository(hub, here, capsys):
    fp8 = {name: item for name, item in donor_entries().items() if ".shared_expert." in name}
    swapped = {name: item for name, item in fp8.items() if name.startswith("model.")}
    write_repository(hub.root, "lab/hybrid", {**base_entries(), **swapped}, commit="4" * 40)
    result = compare(capsys, "lab/hybrid@main")
    assert matches(result) == {(name, "hybrid") for name in TINY}


@pytest.mark.slow
def test_prints_files_sizes_and_matching_models(hub, here, capsys):
    assert main(["add", "--dry", BASE, "inventory.py"]) == 0
    text = capsys.readouterr().out
    tree = next((hub.root / BASE).rglob("config.json")).parent
    for path in tree.iterdir():
        size = path.stat().st_size
        assert re.search(rf"^  {re.escape(path.name)} +(\d+|-) +{size}$", text, re.MULTILINE)
    assert re.search(r"^  routed experts +I32 +\d+ +\d+$", text, re.MULTILINE)
    assert "  quantized  quant_method auto-round, bits 4\n" in text
    assert re.search(r"^  lab-tiny +base +matches: the plan's base$", text, re.MULTILINE)
    assert re.search(
        r"^  lab-tiny +donor +differs: weights and scales of the FP8 source: ", text, re.MULTILINE
    )
    assert all(last < header_bytes(path) for path, last in requested_ranges(hub, BASE))


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("lab/none", "the server returned 404"),
        (f"{BASE}@v9", "the server returned 404"),
        ("no repository", "is neither a directory nor ORG/NAME"),
    ],
)
def test_reports_uninspectable_repository_as_a_single_problem(here, capsys, place, what):
    assert main(["add", "--dry", place, "inventory.py"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert what in output.err
    assert output.err.count("\n  fix: ") == 1
    assert "Traceback" not in output.err


@pytest.mark.slow
def test_prints_repository_names_without_control_characters(hub, here, capsys):
    entries = {**base_entries(), "\x1b[2Jmodel.\x07weight": ("BF16", (1,))}
    tree = write_repository(hub.root, "lab/odd", entries, commit="5" * 40)
    (tree / "a\x1b[31mb.txt").write_text("x")
    for listing in (hub.root / "api/models/lab/odd/revision").iterdir():
        result = json.loads(listing.read_text())
        result["siblings"].append({"rfilename": "a\x1b[31mb.txt", "size": -7})
        listing.write_text(json.dumps(result))
    assert main(["add", "--dry", "lab/odd", "inventory.py"]) == 0
    text = capsys.readouterr().out
    assert all(line.isprintable() for line in text.splitlines())
    assert "a?[31mb.txt" in text
