import json
import os
import re
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("vllm")


from proofs import container, in_container, result_files
from proofs.releases import asking, judge, server

PLAN = Path(__file__).resolve().parents[2] / "build" / "plans" / "container.json"
START_S = 420
ROUNDING = 0.005
"""Relative error of a product rounded to BF16."""
pytestmark = [
    pytest.mark.skipif(not PLAN.exists(), reason="needs plans: `make gpu-plans`"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(
        prefix="spark-", dir="/tmp", ignore_cleanup_errors=True
    ) as new:
        Path(new).chmod(0o755)
        yield Path(new)


@pytest.fixture
def release():
    return server.read_release(PLAN)


def _record(results, claims, **numbers):
    for claim, passed in claims.items():
        result_files.record_row(results, "container", claim, passed, **numbers)
        numbers = {}
    return [claim for claim, passed in claims.items() if not passed]


def test_kernels_run_in_restricted_container(release, trees, root, results):
    engine, _ = container.from_release(release, trees / "tiny-overlay-head8", root)
    command = [sys.executable, "-m", "proofs.in_container", "--kernels"]
    process = container.start(engine, command, root, root / "log")
    assert process.wait(START_S) == 0, (root / "log").read_text()[-3000:]
    rights = json.loads((root / "log").read_text().splitlines()[-1])
    kernels = rights.pop("kernels")
    restrictions = {**asdict(engine), "environment": sorted(engine.environment)}
    failed = _record(
        results,
        in_container.judge_rights(rights, engine),
        docker_arguments=release.engine.docker_args,
        restrictions=restrictions,
        found=rights,
    )
    claims = {
        f"{name} computes on the GPU": kernels[f"{name}_error"] < ROUNDING
        for name in ("cublas", "triton", "inductor")
    }
    claims["compiled kernels are loaded from the cache"] = kernels["cached_libraries"]["/cache"] > 0
    assert failed + _record(results, claims, **kernels) == []


def test_release_in_a_container_passes_the_full_check(release, trees, root, results):
    engine, socket = container.from_release(release, trees / "tiny-overlay-head8", root)
    argv, changed = server.adapt_arguments(release, None, {})
    command = [sys.executable, "-m", "proofs.engine.served", "serve", *argv]
    log = root / "log"
    process = container.start(engine, command, root, log)
    running = server.Server(log, socket, argv, engine.environment, changed, process)
    try:
        healthy_s = running.healthy(START_S)
        findings = asking.run_check(running, release) if healthy_s else []
        rights = _rights_of(engine.user)
        drafts = asking.count_drafts(running) if healthy_s else {}
    finally:
        running.stop()
    text = log.read_text(errors="replace")
    results.mkdir(parents=True, exist_ok=True)
    (results / "container.log").write_text(text)
    required = {pattern: bool(re.search(pattern, text)) for pattern in release.check.log_required}
    forbidden = {pattern: bool(re.search(pattern, text)) for pattern in release.check.log_forbidden}
    claims = {
        "the engine answers on the socket": healthy_s is not None,
        "the release passes the full check": len(findings) > 5
        and not judge.failed_checks(findings),
        "no process of the engine has or can gain capabilities": (
            len(rights) > 1 and {tuple(right) for right in rights.values()} == {("0" * 16, "1")}
        ),
        "the log has every required line and no forbidden line": (
            all(required.values()) and not any(forbidden.values())
        ),
    }
    numbers = {"healthy_s": healthy_s, "argv": argv, "changed": changed, "drafts": drafts}
    failed = _record(
        results,
        claims,
        check=findings,
        rights=rights,
        log=running.kernel_lines(),
        log_required=required,
        **numbers,
    )
    assert failed == [], text[-3000:]


def _rights_of(user):
    rights = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        text = path.read_text()
        fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        if fields["Uid"].split() == [str(user)] * 4:
            rights[path.parent.name] = [fields["CapBnd"], fields["NoNewPrivs"]]
    return rights
