"""Files for submitting a result: Spark Arena's folder and NVIDIA's ``performance.yaml``.

The formats are a sparkrun recipe, version 2, with ``runtime: vllm``, and ``performance.yaml`` from
NVIDIA/local-ai-inference-recipes, schema 1. This module sends no data.
"""

import csv
import hashlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from spark_contract.release import Release

from spark_deploy.bench.host import WARM_UPS
from spark_deploy.bench.protocols import GRID_NAME
from spark_deploy.bench.result import BenchResult

# Columns in llama-benchy's CSV, and keys in its JSON.
_PARTS = (
    ("t_s", "{}_throughput"), ("t_s_req", "{}_req_throughput"), ("peak_ts", "peak_throughput"),
    ("peak_ts_req", "peak_req_throughput"), ("ttfr", "ttfr"), ("est_ppt", "est_ppt"),
    ("e2e_ttft", "e2e_ttft"),
)  # fmt: skip
COLUMNS = ["model", "test_name", *(f"{c}_{p}" for c, _ in _PARTS for p in ("mean", "std"))]
# Columns that are empty in rows for answers (tg) or in rows for prompts (pp).
_EMPTY = {"tg": {"ttfr", "est_ppt", "e2e_ttft"}, "pp": {"peak_ts", "peak_ts_req"}}


@dataclass(frozen=True, slots=True)
class Origin:
    """The published weights that a release uses."""

    repository: str
    commit: str
    is_built: bool  # whether the checkpoint was built from several repositories


class _Text(str):
    """A string that YAML writes as a block of lines."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def write_submission(
    folder: Path, result: BenchResult, release: Release, origin: Origin, raw: dict[str, Any] | None
) -> list[Path]:
    """Write the files and return the folder's files; ``raw`` is llama-benchy's JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = _dump(make_recipe(release, origin))
    files = {"recipe.yaml": recipe}
    if raw is not None:
        files["metadata.json"] = json.dumps(
            make_metadata(result, release, origin, recipe), indent=2
        )
        with (folder / "benchmark.csv").open("w", newline="") as out:
            writer = csv.DictWriter(out, COLUMNS)
            writer.writeheader()
            writer.writerows(_csv_rows(raw))
    if result.loads:
        files["performance.yaml"] = _dump(make_performance(result, release, origin, recipe))
    for name, text in files.items():
        (folder / name).write_text(text)
    return sorted(folder.iterdir())


def _dump(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100)


def make_recipe(release: Release, origin: Origin) -> dict[str, Any]:
    suffix = "; the checkpoint is built from several repositories" if origin.is_built else ""
    # Write each option and its values on a separate line.
    lines = list[list[str]]()
    for word in release.engine.argv[1:]:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return {
        "recipe_version": "2",
        "model": origin.repository,
        "model_revision": origin.commit,
        "runtime": "vllm",
        "min_nodes": len(release.cluster.members) if release.cluster else 1,
        "container": release.image.base,
        "metadata": {
            "description": f"{release.model} with {release.profile}, release {release.name}, "
            f"deployed by dgx-spark-deploy{suffix}"
        },
        "env": dict(release.engine.env),
        "command": _Text(" \\\n  ".join(["vllm serve {model}", *map(" ".join, lines)]) + "\n"),
    }


def make_metadata(
    result: BenchResult, release: Release, origin: Origin, recipe: str
) -> dict[str, Any]:
    depths = sorted({cell.depth_tokens for cell in result.cells})
    concurrencies = sorted({cell.concurrency for cell in result.cells})
    return {
        "recipe": {
            "name": f"{release.model}-{release.profile}",
            "type": "sparkrun",
            "model": origin.repository,
            "hf_model": origin.repository,
            "container": release.image.base,
            "container_pinned": "@sha256:" in release.image.base,
            "runtime": "vllm",
            "hash": hashlib.sha256(recipe.encode()).hexdigest(),
        },
        "timing": {
            "start": result.at,
            "duration": max((s.at_s for s in result.samples), default=0),
        },
        "benchmark": {
            "framework": f"llama-benchy {result.llama_benchy}",
            "profile": GRID_NAME,
            "args": {"depth": depths, "concurrency": concurrencies},
        },
        "model": {"revision": origin.commit},
        "runtime_info": dict(result.served.versions),
    }


def _csv_rows(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows that llama-benchy's ``--format csv`` writes."""
    for case in raw["benchmarks"]:
        is_prefill, depth = case["is_context_prefill_phase"], case["context_size"]
        suffix = f" @ d{depth}" if depth or is_prefill else ""
        suffix += f" (c{case['concurrency']})" if raw["max_concurrency"] > 1 else ""
        for kind, size in (("pp", case["prompt_size"]), ("tg", case["response_size"])):
            has_peak = kind == "tg" and case.get("peak_throughput")
            if not case.get(f"{kind}_throughput") and not has_peak:
                continue
            test = f"ctx_{kind}" if is_prefill else f"{kind}{size}"
            row = {"model": raw["model"], "test_name": f"{test}{suffix}"}
            for column, key in _PARTS:
                value = None if column in _EMPTY[kind] else case.get(key.format(kind))
                for part in ("mean", "std"):
                    row[f"{column}_{part}"] = value and value[part]
            yield row


def make_performance(
    result: BenchResult, release: Release, origin: Origin, recipe: str
) -> dict[str, Any]:
    """Return ``performance.yaml``, with figures that NVIDIA's own program did not measure."""
    versions = result.served.versions
    system = {
        "label": versions.get("product"),
        "accelerator": versions.get("gpu"),
        "accelerator_count": len(release.cluster.members) if release.cluster else 1,
        "operating_system": "linux",
        "os_version": versions.get("os"),
        "driver_version": versions.get("driver"),
        "cuda_version": versions.get("cuda"),
    }

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 2)

    return {
        "schema_version": 1,
        "recipe_sha256": hashlib.sha256(recipe.encode()).hexdigest(),
        "measured_at": result.at[:10],
        "harness": {"name": "vllm bench serve", "version": result.vllm},
        "system": {key: value for key, value in system.items() if value is not None},
        "software": {
            "backend_version": result.vllm,
            "model_revision": origin.commit,
            "runtime_revision": release.image.base.partition("@")[2] or release.image.base,
        },
        "profiles": [
            {
                "id": f"random-{load.prompt_tokens}-c{load.concurrency}",
                "workload": {
                    "input_tokens": load.prompt_tokens,
                    "context_tokens": release.check.max_model_len,
                    "dataset": "random",
                    "input_tokens_total": load.sent_tokens,
                    "output_tokens": load.answer_tokens,
                    "concurrency": load.concurrency,
                    "requests": load.requests,
                    "warmup_requests": WARM_UPS,
                },
                "results": {
                    "prefill_tokens_per_second_mean": rounded(load.prefill_tokens_per_s),
                    "decode_tokens_per_second_mean": rounded(load.decode_tokens_per_s),
                    "e2e_latency_ms_mean": rounded(load.request_ms),
                },
            }
            for load in result.loads
        ],
    }
