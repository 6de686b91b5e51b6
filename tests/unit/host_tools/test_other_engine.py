"""Another engine is a row of data: the stub counts under other names, and is proven as ever."""

from __future__ import annotations

import dataclasses
import re

import pytest
from spark_contract import documents
from spark_contract.records import Proof
from spark_contract.release import Release
from spark_host.check import runner
from spark_host.engine import serve
from spark_host.engine.client import Engine
from spark_host.engine.metrics import ENGINES
from stub_host import REPOSITORY, Host, release_data

from spark_deploy.config.settings.engine.arguments import DECIDING

OTHER = dataclasses.replace(
    ENGINES["vllm"],
    **{
        name: said.replace("vllm:", "other_")
        for name, said in dataclasses.asdict(ENGINES["vllm"]).items()
    },
)
# One room knows an engine by its names; `image.plugin` and paths of ours are no such names.
ROOM = REPOSITORY / "files/host/spark_host/engine"
NAMES = re.compile(r"vllm:|KV cache size:|VLLM_")


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ENGINES, "other", OTHER)
    return "other"


def check(host: Host, release: Release) -> Proof:
    return runner.check(release, host.here, "deep", print, invocation_id="run-1")


def test_an_engine_of_another_dialect_passes_every_check(host: Host, other: str) -> None:
    release = host.release(engine__kind=other, check__metrics_required={})
    host.started(release, STUB_METRICS="other_")
    result = check(host, release)
    assert {one.name: one.detail for one in result.failed} == {}
    assert {"acceptance", "prefix reuse", "counters"} <= {one.name for one in result.checks}


def test_without_its_row_the_same_engine_counts_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_host.check.checks._COUNTER_WAIT_S", 0.3)
    release = host.release(check__metrics_required={})
    host.started(release, STUB_METRICS="other_")
    failed = {one.name for one in check(host, release).failed}
    assert {"acceptance", "counters"} <= failed


def test_the_watch_and_the_rollout_count_requests_of_another_dialect(
    host: Host, other: str
) -> None:
    release = host.release(engine__kind=other)
    engine = host.started(release, STUB_METRICS="other_")
    assert engine.metrics().dialect is ENGINES["vllm"], "the stub's own client knows no release"
    metrics = Engine.of(release, host.paths).metrics()
    assert metrics.total(OTHER.running) == 0.0
    assert metrics.unfinished == 0.0


def test_an_engine_that_is_not_known_is_refused_before_anything_starts(host: Host) -> None:
    refused = serve.part_problem(host.release(engine__kind="nobodys"))
    assert refused is not None
    assert "engine 'nobodys'" in str(refused)
    assert "vllm" in refused.what


def test_a_release_of_the_usual_engine_is_the_document_it_was() -> None:
    release = documents.read(Release, release_data())
    assert "kind" not in documents.plain(release)["engine"]


def test_nothing_on_hosts_outside_one_room_knows_an_engine_by_its_names() -> None:
    found = [
        str(path.relative_to(REPOSITORY))
        for folder in ("files/host", "files/contract")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if NAMES.search(path.read_text()) and ROOM not in path.parents
    ]
    assert found == []


def test_nothing_in_plans_outside_one_room_knows_an_engine_by_its_options() -> None:
    folder = REPOSITORY / "spark_deploy/plan"
    room = {folder / f"engine_{part}.py" for part in ("arguments", "facts", "options")}
    written = re.compile(r"[\"'](?:--)?([a-z]+(?:-[a-z]+)+)[\"']")
    options = {name for path in room for name in written.findall(path.read_text())}
    options |= set(DECIDING)
    assert {"max-num-seqs", "block-size", "tensor-parallel-size", "served-model-name"} <= options
    found = {
        (str(path.relative_to(folder)), said)
        for path in folder.rglob("*.py")
        if path not in room
        # The name itself as well, but for what our own image is called.
        for said in (
            *options.intersection(written.findall(path.read_text())),
            *re.findall(r"(?i)(?<!spark-)vllm\w*", path.read_text()),
        )
    }
    assert found == set()
