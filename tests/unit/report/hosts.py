"""Data for reports: a captured Spark, and the status of a serving engine."""

from pathlib import Path
from typing import Any

import yaml
from spark_contract.documents import read
from spark_contract.status import Evidence

from spark_deploy.cli.report import HostReport
from spark_deploy.cli.report_contents import HostData, host_report
from spark_deploy.hosts.survey import HostSurvey, Survey
from tests.unit.facts.test_facts import output_of
from tests.unit.planning.plans import plan_of
from tests.unit.statuses import host_status

SURVEYS = Path(__file__).parents[1] / "facts" / "HostSurvey"
PLAN = plan_of()
PLANNED_TOKENS = int((PLAN.memory.full_context_users or 0) * PLAN.release.check.max_model_len)
RELEASE = "main-0123456789ab"
CHECKS = [
    {"name": "ready", "detail": "the engine responds", "seconds": 612.0},
    {"name": "log lines", "detail": "3 expected log lines found"},
    {"name": "answers", "detail": "2 answered correctly, such as 'PROMPT' with 'ANSWER'"},
    {"name": "acceptance", "detail": "81% of 70 drafted tokens were accepted (floor 50%)"},
]
PROOF: dict[str, Any] = {
    "release": RELEASE, "invocation_id": "run-2", "checks": CHECKS,
    "versions": {"image": "registry.home.example:5000/vllm/vllm@sha256:" + "a1" * 32,
                 "plugin": "0123456789ab"},
    "engine": {"version": "0.33.0"},
    "last_full": {"invocation_id": "run-2", "checked_at": "then", "versions": {}},
    "bench": {"at": "then", "one_stream_tokens_per_s": {"median": 51.5, "min": 50.0, "max": 52.0}},
    "start_memory": {"lowest_bytes": 17 << 30, "after_s": 99.0, "floor_bytes": 4 << 30},
}  # fmt: skip
EVIDENCE: dict[str, Any] = {
    "schema_version": 2,
    "firmware": {"product_name": "NVIDIA DGX Spark", "bios_version": "5.36_0ACUM018"},
    "gpu": {"celsius": 61.0, "power_w": 31.5},
    "gpu_container": ["--runtime=nvidia", "--gpus=all"],
    "kernel_log": {"xid": 0, "no_memory": 3, "oom_kills": 0},
    "engines": [{
        "release": RELEASE,
        "lines": ["Using Triton/FLA GDN prefill kernel (requested=triton, head_k_dim=128)."],
        "times_s": {"weights": 401.5, "graphs": 22.0},
        "sizes_bytes": {"kv_cache": 20 << 30},
        "kv_cache_tokens": PLANNED_TOKENS + 1000,
        "libraries": {"nccl": "2.29.3", "flashinfer": "0.7.2.post1"},
        "drafted_tokens": 4000, "accepted_tokens": 3000, "generated_tokens": 250_000,
        "rollout_state": "switched", "rollout_times_s": {"check": 700.0, "total": 800.0},
    }],
}  # fmt: skip


EVIDENCE["engines"].append(
    {**EVIDENCE["engines"][0], "release": "embed-0123456789ab", "kv_cache_tokens": 7}
)


def survey_of(case: str = "factory_spark", **sections: Any) -> Survey:
    data = yaml.safe_load((SURVEYS / f"{case}.yml").read_text())["sections"]
    result: Survey = HostSurvey().process(output_of({**data, **sections}))
    return result


def status_of(**changes: Any) -> dict[str, Any]:
    release = {"name": RELEASE, "model": PLAN.model, "profile": PLAN.profile, "proof": PROOF}
    return {
        "releases": [release],
        "services": {"main": {"active": RELEASE, "known_good": RELEASE}},
        "versions": {"kernel": "6.17.0-1014-nvidia", "driver": "580.142", "docker": "29.2.1"},
        "jobs": [{"kind": "fetch", "elapsed_s": 4000}, {"kind": "checkpoint", "elapsed_s": 600}],
        **changes,
    }


def data_of(
    status: dict[str, Any] | None = None, evidence: dict[str, Any] | None = None, **survey: Any
) -> HostData:
    shown = read(Evidence, EVIDENCE if evidence is None else evidence)
    return HostData(
        survey_of(**survey), host_status(status_of() if status is None else status), shown
    )


def report_of(text: HostData | None = None) -> HostReport:
    return host_report(1, text or data_of(), PLAN, "main")
