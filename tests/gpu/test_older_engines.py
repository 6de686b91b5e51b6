"""The plugin in older engines: answers equal the 16-bit reference, with drafts and graphs too.

``SPARK_GPU_ENGINES=0.30.0=/a/folder,0.32.0=/another`` names folders with these versions of vLLM
(``pip install --no-deps --target``), which precede the installed packages.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
VERSIONS = ("0.30.0", "0.32.0")
NAMED = "SPARK_GPU_ENGINES"
ENGINES = (
    "tiny-reference",
    "tiny-eager",
    "tiny-head8",
    "tiny-head8-mtp2",
    "tiny-head8-full-mtp2",
    "tiny-triton",
    "tiny-native",
)


def _folder(version):
    named = dict(
        entry.split("=", 1) for entry in os.environ.get(NAMED, "").split(",") if "=" in entry
    )
    if version not in named:
        pytest.skip(f"needs a folder with vLLM {version}: {NAMED}={version}=/folder")
    return Path(named[version]).resolve()


@pytest.mark.parametrize("version", VERSIONS)
def test_older_engine_gives_the_same_answers_as_the_16_bit_reference(
    version, trees, tmp_path, results
):
    before = [
        str(_folder(version)),
        str(CHECKOUT / "files/image"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    arguments = ["--stage", "speculation", "--result", version, "--only", *ENGINES]
    places = {"--trees": trees, "--work": tmp_path / "work", "--out": results}
    arguments += [str(word) for pair in places.items() for word in pair]
    subprocess.run(
        [sys.executable, "-m", "proofs.stages", *arguments, "--at-once", str(len(ENGINES))],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(before)},
        check=True,
    )
    result = json.loads((results / f"engine-{version}.json").read_text())
    assert result["versions"]["vllm"] == version
    assert set(result["runs"]) == set(ENGINES)
    assert result["rows"]
    assert [row for row in result["rows"] if row["passed"] is False] == []
