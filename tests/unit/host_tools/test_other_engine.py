"""Another engine is a row of metric names."""

from __future__ import annotations

import dataclasses
import re

import pytest
from spark_contract import documents
from spark_contract.records import Proof
from spark_contract.release import Release
from spark_host.check import runner
from spark_host.engine import serve
from spark_host.engine.client import ENGINES, Engine
from stub_host import REPOSITORY, Host, release_data

from spark_deploy.config.settings.engine_options import DECIDING

OTHER = dataclasses.replace(
    ENGINES["vllm"],
    **{
        name: said.replace("vllm:", "other_")
        for name, said in dataclasses.asdict(ENGINES["vllm"]).items()
    },
)
# Only a single package contains engine-specific names.
ROOM = REPOSITORY / "files/host/spark_host/engine"
NAMES = re.compile(r"vllm:|KV cache size:|VLLM_")


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ENGINES, "other", OTHER)
    return "other"


def check(host: Host, release: Release) -> Proof:
    return runner.check(release, host.here, "deep", print, invocation_id="run-1")


def test_engine_with_other_metric_names_passes(host: Host, other: str) -> None:
    release = host.release(engine__kind=other, check__metrics_required={})
    host.started(release, STUB_METRICS="other_")
    result = check(host, release)
    assert {one.name: one.detail for one in result.failed} == {}
    assert {"acceptance", "prefix reuse", "counters"} <= {one.name for one in result.checks}


def test_unknown_metric_names_fail_the_counters(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_host.check.checks._COUNTER_WAIT_S", 0.3)
    release = host.release(check__metrics_required={})
    host.started(release, STUB_METRICS="other_")
    failed = {one.name for one in check(host, release).failed}
    assert {"acceptance", "counters"} <= failed


def test_requests_are_counted_under_other_metric_names(host: Host, other: str) -> None:
    release = host.release(engine__kind=other)
    engine = host.started(release, STUB_METRICS="other_")
    assert engine.metrics().dialect is ENGINES["vllm"], "the stub's own client knows no release"
    metrics = Engine.of(release, host.paths).metrics()
    assert metrics.total(OTHER.running) == 0.0
    assert metrics.unfinished == 0.0


def test_unknown_engine_is_refused_before_a_start(host: Host) -> None:
    refused = serve.part_problem(host.release(engine__kind="nobodys"))
    assert refused is not None
    assert "engine 'nobodys'" in str(refused)
    assert "vllm" in refused.what


def test_default_engine_is_omitted_from_the_release() -> None:
    release = documents.read(Release, release_data())
    assert "kind" not in documents.plain(release)["engine"]


def test_only_the_engine_package_has_engine_specific_names() -> None:
    found = [
        str(path.relative_to(REPOSITORY))
        for folder in ("files/host", "files/contract")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if NAMES.search(path.read_text()) and ROOM not in path.parents
    ]
    assert found == []


def test_only_engine_plan_modules_have_engine_options() -> None:
    folder = REPOSITORY / "spark_deploy/plan"
    room = {folder / f"{name}.py" for name in ("engine_arguments", "guard_rails", "kv_cache")}
    written = re.compile(r"[\"'](?:--)?([a-z]+(?:-[a-z]+)+)[\"']")
    options = {name for path in room for name in written.findall(path.read_text())}
    options |= set(DECIDING)
    assert {"max-num-seqs", "block-size", "tensor-parallel-size", "served-model-name"} <= options
    found = {
        (str(path.relative_to(folder)), said)
        for path in folder.rglob("*.py")
        if path not in room
        # The name, too, except in the name of our image.
        for said in (
            *options.intersection(written.findall(path.read_text())),
            *re.findall(r"(?i)(?<!spark-)vllm\w*", path.read_text()),
        )
    }
    assert found == set()
