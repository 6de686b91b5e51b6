"""What others take results in: a folder as Spark Arena's, and NVIDIA's ``performance.yaml``.

Forms: recipes of sparkrun, version 2, with ``runtime: vllm`` (its arena takes no other words), and
``performance.yaml`` of NVIDIA/local-ai-inference-recipes, schema 1. Nothing is sent anywhere.
"""

from __future__ import annotations

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

from spark_deploy.bench import vllm_bench
from spark_deploy.bench.benchy import GRID_NAME
from spark_deploy.bench.result import BenchResult

# Columns of llama-benchy's own CSV, and where its JSON has them.
_PARTS = (
    ("t_s", "{}_throughput"), ("t_s_req", "{}_req_throughput"), ("peak_ts", "peak_throughput"),
    ("peak_ts_req", "peak_req_throughput"), ("ttfr", "ttfr"), ("est_ppt", "est_ppt"),
    ("e2e_ttft", "e2e_ttft"),
)  # fmt: skip
# A row about prompts tells how soon, one about answers how fast.
_OF_PROMPTS, _OF_ANSWERS = {"ttfr", "est_ppt", "e2e_ttft"}, {"peak_ts", "peak_ts_req"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Which published weights are served."""

    repository: str
    commit: str
    built: bool  # into a tree of our own, from this and others


class _Text(str):
    """A text of several lines, written as such."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def write(
    folder: Path, result: BenchResult, release: Release, origin: Origin, raw: dict[str, Any] | None
) -> list[Path]:
    """Write the files that this result has figures for, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = _dump(recipe_of(release, origin))
    files = {"recipe.yaml": recipe}
    if raw is not None:
        files["metadata.json"] = json.dumps(metadata_of(result, release, origin, recipe), indent=2)
        with (folder / "benchmark.csv").open("w", newline="") as out:
            writer = csv.DictWriter(out, columns())
            writer.writeheader()
            writer.writerows(rows_of(raw))
    if result.loads:
        files["performance.yaml"] = _dump(performance_of(result, release, origin, recipe))
    for name, text in files.items():
        (folder / name).write_text(text)
    return sorted(folder.iterdir())


def _dump(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100)


def recipe_of(release: Release, origin: Origin) -> dict[str, Any]:
    """Return the release as a recipe of sparkrun; what recipes cannot say is in its description."""
    built = "; the weights are a tree built from this repository and others" * origin.built
    more = [shlex.quote(word) for word in release.engine.argv[1:]]
    return {
        "recipe_version": "2",
        "model": origin.repository,
        "model_revision": origin.commit,
        "runtime": "vllm",
        "min_nodes": len(release.cluster.members) if release.cluster else 1,
        "container": release.image.base,
        "metadata": {
            "description": f"{release.model} with {release.profile}, release {release.name} of "
            f"dgx-spark-deploy{built}"
        },
        "env": dict(release.engine.env),
        "command": _Text(" \\\n  ".join(["vllm serve {model}", *_pairs(more)]) + "\n"),
    }


def _pairs(words: list[str]) -> Iterator[str]:
    """Yield an option and its values together."""
    line: list[str] = []
    for word in words:
        if word.startswith("--") and line:
            yield " ".join(line)
            line = []
        line.append(word)
    if line:
        yield " ".join(line)


def metadata_of(
    result: BenchResult, release: Release, origin: Origin, recipe: str
) -> dict[str, Any]:
    """Return what Spark Arena wants to know beside recipe and figures."""
    grid = {cell.depth_tokens for cell in result.cells}, {one.concurrency for one in result.cells}
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
            "args": {"depth": sorted(grid[0]), "concurrency": sorted(grid[1])},
        },
        "model": {"revision": origin.commit},
        "runtime_info": dict(result.served.versions),
    }


def columns() -> list[str]:
    """Return the columns of ``benchmark.csv``."""
    return ["model", "test_name", *(f"{c}_{p}" for c, _ in _PARTS for p in ("mean", "std"))]


def rows_of(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what llama-benchy's ``--format csv`` has for its own JSON."""
    for case in raw["benchmarks"]:
        filling, depth = case["is_context_prefill_phase"], case["context_size"]
        at = f" @ d{depth}" if depth or filling else ""
        clients = f" (c{case['concurrency']})" if raw["max_concurrency"] > 1 else ""
        sizes = {"pp": case["prompt_size"], "tg": case["response_size"]}
        for kind, left_out in (("pp", _OF_ANSWERS), ("tg", _OF_PROMPTS)):
            if not case.get(f"{kind}_throughput") and (kind == "pp" or not case["peak_throughput"]):
                continue
            name = f"ctx_{kind}" if filling else f"{kind}{sizes[kind]}"
            row = {"model": raw["model"], "test_name": f"{name}{at}{clients}"}
            for column, path in _PARTS:
                found = None if column in left_out else case.get(path.format(kind))
                row |= {f"{column}_{p}": found[p] if found else None for p in ("mean", "std")}
            yield row


def performance_of(
    result: BenchResult, release: Release, origin: Origin, recipe: str
) -> dict[str, Any]:
    """Return the figures of `vllm-bench` in NVIDIA's form; its own harness is another."""
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
                "id": f"random-{one.prompt_tokens}-c{one.concurrency}",
                "workload": {
                    "input_tokens": one.prompt_tokens,
                    "context_tokens": release.check.max_model_len,
                    "dataset": "random",
                    "input_tokens_total": one.sent_tokens,
                    "output_tokens": one.answer_tokens,
                    "concurrency": one.concurrency,
                    "requests": one.requests,
                    "warmup_requests": vllm_bench.WARM_UPS,
                },
                "results": {
                    "prefill_tokens_per_second_mean": _round(one.prefill_tokens_per_s),
                    "decode_tokens_per_second_mean": _round(one.decode_tokens_per_s),
                    "e2e_latency_ms_mean": _round(one.request_ms),
                },
            }
            for one in result.loads
        ],
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
