import re

from spark_deploy.config.checkout import CHECKOUT
from tests.faults.bad_releases import BAD_RELEASES, DEPLOYED
from tests.faults.stub_faults import stub_faults

PAGE = (CHECKOUT / "proofs/faults.md").read_text("utf-8")
SECTION = PAGE.partition("## Injected faults")[2].partition("\n## ")[0]
# Full deploys must survive each of these.
REQUIRED = {
    "bad flag", "out of memory at load", "garbage answers", "low acceptance", "hang after start",
    "wrong served name", "plugin missing",
}  # fmt: skip


def test_faults_page_lists_every_faulty_release_with_its_phase():
    rows = re.findall(r"^\| ([a-z ]+) \| `([a-z]+)` \| (yes)? ?\|$", SECTION, re.MULTILINE)
    documented = {name: (phase, bool(deployed)) for name, phase, deployed in rows}
    assert documented == {
        name: (bad.phase, bad.choices is not None) for name, bad in BAD_RELEASES.items()
    }
    assert len(documented) == len(rows)
    assert set(DEPLOYED) >= REQUIRED


def test_faults_page_lists_every_stub_engine_fault():
    listed = SECTION.partition("test_stub_faults.py")[2]
    assert sorted(re.findall(r"`([a-z0-9-]+)`", listed)) == stub_faults()
