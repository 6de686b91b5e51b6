"""Figures and devices that pages tell are those of the result files that stand beside them."""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from spark_deploy.catalog.load import read_catalog
from spark_deploy.checkout import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "docs"))
import results
from depths import with_depths
from results import BEGIN, END, NAMED, device_of, older

RESULTS = CHECKOUT / "benchmarks/results"
PAGE = (CHECKOUT / "docs/reference/engine-proofs.md").read_text("utf-8")
LINK = re.compile(r"\]\([^)]*results/[a-z]+/([\w.-]+\.json)\)")
FIGURE = re.compile(r"(?<![\w.#])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?!\w)(?: ?%)?")
SMALL = 20  # counts of layers, drafts and requests: they would be found in any file
# Figures of a row that no result holds as they are, by words of the row: what was asked, and sums.
ASKED = {
    "prompts of 60,000, 33,000 and 20,011": {"33,000", "20,011"},
    "sees a wrong scale and swapped layers": {"0.006"},
    "pictures through the full class": {"0.054"},
    "one layer of each kind": {"248,320", "512"},
    "two hosts of a `cluster:`": {"4,096", "12,288"},
    "| pictures are seen |": {"450"},
    "and drafts, each alone and both, eager": {"558,410", "544", "43,000"},
    "| utilisation 0.88 to 0.90 |": {"0.88", "0.90", "0.8", "0.82", "0.9"},  # settings
    "| 8192 batched tokens, 262,144 of context": {"8192", "262,144"},
    "35B, 400 steps of 256": {"400", "256", "2048", "10.5"},  # reported by others
    "`spark-check --compare` on the engine": {"1e-16"},
    "| preset | found, of 66": {"1e-6"},
    "| 16 bit | 66 | 16 (drafts and graphs)": {"16", "522,869"},  # of recall-recall.json
    "| `turboquant_k8v4` | 66": {"2.6"},  # times the tokens of 16 bit
    "| `turboquant_k3v4_nc` | 66": {"4.4"},
    "| `turboquant_3bit_nc` | 66": {"5.1"},
    "writes its logits to memory it never": {"1.06", "1.11"},  # times over floors
    "limited to 48 programs move": {"273"},  # GB/s of a Spark
    "peak memory while it is quantised": {"8,192"},  # rows of a block
}
# The same of paragraphs: settings, what others say, and what is computed and held elsewhere.
ASKED_OF_PROSE = {
    "Differences from a Spark's image": {"2.14"},  # what this engine pins
    "**One kernel is not the Spark's.**": {"128"},
    "Models: *wide*": {"256", "128"},
    "Trained model, eight questions": {"48"},
    "`VLLM_MARLIN_USE_ATOMIC_ADD=1` (": {"36"},  # layers of the 122B
    "The error of the formats themselves": {"24"},
    "The engine's own backend finds the same": {"140,000"},  # proofs/recall/training.py
    "Where prefixes are cached, FlashInfer's": {  # tests/unit/planning/test_memory.py
        "64", "2,112", "1,088", "2,096", "1,056", "320", "272",
    },
    "248320 rows, medians": {"1.6 %"},  # a scale of 16 bits for 128 values of 8
    "What only all bytes can tell": {"77"},
    "Recall by depth beyond": {"131,072", "140,000"},  # proofs/recall/training.py
}  # fmt: skip
SAMPLES = 30
"""A list as long as this holds raw samples: among so many any figure is found."""
VERSIONS = re.compile(
    r"\b(?:vLLM|torch|transformers|Triton|AutoRound|FlashInfer|up to) \d+\.\d+"
    r"(?: (?:to|and) 0\.\d+)*"
    r"|\b(?:9\.0|12\.1)\b"  # and compute capabilities
)


def rows() -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of all tables with the files that they, the row above or the section name."""
    for section in re.split(r"^#{2,3} ", PAGE, flags=re.M):
        above: list[str] = []
        of_section = list(dict.fromkeys(LINK.findall(section)))
        for line in section.splitlines():
            if line.startswith("|") and not line.startswith("|--"):
                above = LINK.findall(line) or (above if re.search(r"\| same\b", line) else [])
                yield line, above or of_section


def prose() -> Iterator[tuple[str, list[str]]]:
    """Yield the paragraphs and items with the files that they, or else their section, name."""
    before, _, rest = PAGE.partition(BEGIN)
    for section in re.split(r"^#{2,3} ", before + rest.partition(END)[2], flags=re.M):
        of_section = list(dict.fromkeys(LINK.findall(section)))
        for part in re.split(r"\n\s*\n|\n(?=- )", section):
            if not part.startswith(("|", "    ", "<!--")):
                yield " ".join(part.split()), LINK.findall(part) or of_section


def leaves(found: Any) -> Iterator[Any]:
    if isinstance(found, dict):
        for key, value in found.items():
            yield key
            yield from leaves(value)
    elif isinstance(found, list):
        yield len(found)
        for value in found if len(found) < SAMPLES else ():
            yield from leaves(value)
    else:
        yield found


@cache
def numbers(name: str) -> frozenset[float]:
    """Return every number of a result file, those in its words as well."""
    [path] = RESULTS.rglob(name)
    found: set[float] = set()
    for leaf in leaves(json.loads(path.read_text("utf-8"))):
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            found.add(float(leaf))
        elif isinstance(leaf, str):
            found |= {
                float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*(?:\.\d+)?", leaf)
            }
    return frozenset(found)


def strange(line: str, files: list[str]) -> list[str]:
    """Return the figures of a row that stand in none of its files."""
    known = frozenset[float]().union(*map(numbers, files))
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\b\d+\.\d+\.\d+\b", "", line)  # versions are no figures
    return [one for one in FIGURE.findall(text) if not stands(one, known)]


def stands(figure: str, known: frozenset[float]) -> bool:
    plain = figure.rstrip(" %").replace(",", "")
    value, places = float(plain), len(plain.partition(".")[2]) if "e" not in plain else 0
    if value <= SMALL and "." not in plain and "e" not in plain:
        return True
    if "e" in plain:
        return any(f"{one:.0e}" == f"{value:.0e}" for one in known)
    half = 0.5 * 10**-places + 1e-9
    # Shares are told as percent, times in other units, what was refused as what was accepted.
    told = (1.0, 100.0, 1e3, 1e6, 1e-6)
    return any(
        abs(one * scale - value) <= half or abs((1 - one) * scale - value) <= half
        for one in known
        for scale in told
    )


PROSE = [pytest.param(*part, id=part[0][:40]) for part in prose()]
ROWS = [pytest.param(*row, id=f"{place}") for place, row in enumerate(rows()) if row[1]]


@pytest.mark.parametrize(("line", "files"), ROWS)
def test_every_figure_of_a_row_stands_in_a_result_it_names(line, files):
    asked = set[str]().union(*(said for words, said in ASKED.items() if words in line))
    assert [one for one in strange(line, files) if one not in asked] == []


@pytest.mark.parametrize(("text", "files"), PROSE)
def test_every_figure_of_a_paragraph_stands_in_a_result_that_it_or_its_section_names(text, files):
    asked = set[str]().union(*(said for words, said in ASKED_OF_PROSE.items() if words in text))
    found = [one.rstrip(",") for one in strange(VERSIONS.sub("", text), files)]
    assert [one for one in found if one not in asked] == []


@pytest.mark.parametrize(("text", "files"), PROSE)
def test_a_paragraph_names_the_device_of_its_results_and_no_other(text, files):
    own = LINK.findall(text)
    assert not own or devices(text) <= {device_of(name) for name in files}


def test_a_figure_in_a_paragraph_that_no_result_holds_is_noticed():
    text, files = next((text, files) for text, files in prose() if "recall-wide.json" in text)
    assert "193 s" not in text
    assert strange(f"{text} It took 193 s.", files)[-1:] == ["193"]


def test_what_is_asked_of_paragraphs_is_still_in_them():
    texts = [text for text, _ in prose()]
    for words, said in ASKED_OF_PROSE.items():
        [text] = [text for text in texts if words in text]
        assert all(one in text for one in said), words


def test_the_table_of_depths_is_that_of_the_results():
    page = with_depths(PAGE)
    assert page == PAGE
    [row] = [line for line in PAGE.splitlines() if line.startswith("| `damage-noise-100` |")]
    other = PAGE.replace(row, "| `damage-noise-100` | 67 of 67 |")
    assert with_depths(other) == PAGE


def test_a_figure_that_no_result_holds_is_noticed():
    line, files = next((line, files) for line, files in rows() if "every module equals" in line)
    assert strange(line, files) == []
    assert strange(line.replace("0.0017", "0.0019"), files) == ["0.0019"]


def test_what_is_asked_of_rows_is_still_in_them():
    lines = [line for line, _ in rows()]
    for words, said in ASKED.items():
        [line] = [line for line in lines if words in line]
        assert all(one in line for one in said), words


def devices(text: str) -> set[str]:
    return set(re.findall(r"\b(H100|H200)\b", text))


@pytest.mark.parametrize(("line", "files"), ROWS)
def test_a_row_names_the_device_of_its_results_and_no_other(line, files):
    assert devices(line) <= {device_of(name) for name in files}


CATALOG = read_catalog()
PROVEN = [
    (name, row.what, row.result)
    for name in CATALOG.profile_names
    for row in CATALOG.profile(name, "qwen3.5-122b").proven
]
RAILS = [(rail.rule, f"{rail.reason} {rail.source}", rail.source) for rail in CATALOG.rails]
# Of what others report the figures are theirs; the device is that of the result beside it.
MEASURED = {rail.rule for rail in CATALOG.rails if rail.evidence == "measured"}
SAID = [*(said for said in RAILS if said[0] in MEASURED), *PROVEN]


@pytest.mark.parametrize(("name", "text", "source"), [*RAILS, *PROVEN])
def test_a_rail_and_a_profile_name_the_device_of_their_results_and_no_other(name, text, source):
    files = [one for one in NAMED.findall(source) if (RESULTS / "gpu" / one).exists()]
    if files:
        assert devices(text) <= {device_of(one) for one in files}, name


@pytest.mark.parametrize(("name", "text", "source"), SAID)
def test_every_figure_of_a_rail_and_a_profile_stands_in_a_result_it_names(name, text, source):
    files = [one for one in NAMED.findall(source) if (RESULTS / "gpu" / one).exists()]
    versions = re.sub(r"vLLM 0\.\d+|0\.3\d\.0", "", text)
    assert not files or strange(versions, files) == [], name


def test_a_result_that_is_older_than_its_code_is_called_so_where_it_is_named(monkeypatch):
    monkeypatch.setattr(results, "older", lambda: {"engine-eager.json": "H100"})
    said = "benchmarks/results/gpu/engine-eager.json; experts.json on an H100"
    assert results.marked(said) == said.replace("eager.json", f"eager.json{results.OLDER}")


def test_a_page_that_quotes_older_results_leads_to_what_says_so():
    pages = [*CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("*.md")]
    quoting = [page for page in pages if set(LINK.findall(page.read_text("utf-8"))) & {*older()}]
    assert [page for page in quoting if "results.md" not in page.read_text("utf-8")] == [
        CHECKOUT / "docs/reference/results.md"
    ] * bool(older())


def test_a_figure_that_only_a_list_of_samples_holds_is_noticed():
    line = "| the tokens stand still for 1.1 s, the share takes 28 values |"
    assert strange(line, ["serve-v2-long.json"]) == ["1.1"]
