import dataclasses
import re

import pytest
from engine_checks import check, failed
from spark_contract import documents
from spark_contract.release import Release
from spark_host.engine import serve
from spark_host.engine.client import DIALECTS, Engine
from stub_host import REPOSITORY, release_data

from spark_deploy.config.settings.engine import PROFILE_KEYS

OTHER = dataclasses.replace(
    DIALECTS["vllm"],
    **{
        field: metric.replace("vllm:", "other_")
        for field, metric in dataclasses.asdict(DIALECTS["vllm"]).items()
    },
)


@pytest.fixture
def other(monkeypatch):
    monkeypatch.setitem(DIALECTS, "other", OTHER)
    return "other"


def test_engine_with_other_metric_names_passes(host, other):
    release = host.release(engine__kind=other, check__metrics_required={})
    host.started(release, STUB_METRICS="other_")
    metrics = Engine.for_release(release, host.paths).metrics()
    assert (metrics.total(OTHER.running), metrics.unfinished) == (0.0, 0.0)
    result = check(host, release)
    assert failed(result) == {}
    names = {finding.name for finding in result.checks}
    assert {"acceptance", "prefix reuse", "counters"} <= names


def test_unknown_engine_is_rejected_before_a_start(host):
    problem = serve.find_artifact_problem(host.release(engine__kind="unknown"))
    assert "engine 'unknown'" in problem.where
    assert "vllm" in problem.what


def test_default_engine_is_omitted_from_the_release():
    release = documents.read(Release, release_data())
    assert "kind" not in documents.to_plain(release)["engine"]


def test_only_the_engine_package_has_engine_specific_names():
    package = REPOSITORY / "files/host/spark_host/engine"
    names = re.compile(r"vllm:|KV cache size:|VLLM_")
    modules = [
        path
        for folder in ("files/host", "files/contract")
        for path in (REPOSITORY / folder).rglob("*.py")
        if package not in path.parents
    ]
    assert [path for path in modules if names.search(path.read_text())] == []


def test_only_engine_plan_modules_have_engine_options():
    folder = REPOSITORY / "spark_deploy/plan"
    names = ("cluster", "engine_arguments", "guard_rails", "kv_cache")
    allowed = {folder / f"{name}.py" for name in names}
    option = re.compile(r"[\"'](?:--)?([a-z]+(?:-[a-z]+)+)[\"']")
    options = {name for path in allowed for name in option.findall(path.read_text())}
    options |= set(PROFILE_KEYS)
    assert {"max-num-seqs", "block-size", "tensor-parallel-size", "served-model-name"} <= options
    violations = set()
    for path in set(folder.rglob("*.py")) - allowed:
        text = path.read_text()
        found = options.intersection(option.findall(text))
        # The engine's name, too, except in the names of our image and plugin.
        found.update(re.findall(r"(?i)(?<!spark[-_])vllm\w*", text))
        violations |= {(str(path.relative_to(folder)), name) for name in found}
    assert violations == set()
