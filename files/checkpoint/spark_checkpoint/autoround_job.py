"""Quantize ``/model`` with AutoRound into ``/work/made``, in a container of the engine's image."""

import json
import os
import shutil
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("SPARK_ROOT", "/"))  # set by benchmarks
MODEL, WORK, CALIBRATION, PACKAGES = (
    ROOT / name for name in ("model", "work", "calibration.jsonl", "packages")
)
OUTPUT, SCRATCH = WORK / "made", WORK / "scratch"
_SIXTEEN_BITS = {"bits": 16, "data_type": "float"}


def main() -> None:
    # As PID 1 of a container, this process ignores signals for which it has no handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    job = json.loads((WORK / "order.json").read_text())
    set_environment()
    sys.path.append(str(PACKAGES))  # last, so that packages of the image take precedence
    result = quantize(job)
    versions = {name: version(name) for name in ("auto-round", "torch", "transformers")}
    seconds = round(time.monotonic() - started)
    summary = {"tree": result.name, "versions": versions, "seconds_of_last_run": seconds}
    write_json(WORK / "done.json", summary)


def set_environment() -> None:
    os.environ |= {
        "AR_RESUME_DIR": str(WORK / "resume"),
        "AR_DISK_STREAM_MODEL": "1",  # load one block at a time
        "AR_DISABLE_COPY_MTP_WEIGHTS": "1",
        "AR_WORK_SPACE": str(SCRATCH),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(SCRATCH / "hf"),
    }


def quantize(job: dict[str, Any]) -> Path:
    import torch
    from auto_round import AutoRound
    from auto_round.utils.missing_tensors import copy_missing_tensors_from_source

    torch.set_num_threads(os.cpu_count() or 1)
    unpacked = list_unpacked_modules(set(job["int4"]))
    on_gpu = torch.cuda.is_available()
    rounding = AutoRound(
        str(MODEL),
        scheme="W4A16",
        iters=job["iters"],
        nsamples=job["nsamples"],
        seqlen=job["seqlen"],
        batch_size=job["batch"],
        dataset=read_calibration(job) if job["iters"] else None,
        layer_config={name: dict(_SIXTEEN_BITS) for name in unpacked},
        device_map=0 if on_gpu else "cpu",
        enable_torch_compile=on_gpu,
        disable_opt_rtn=not job["iters"],  # optimized RTN needs calibration text
        disable_model_free=True,
        seed=42,
    )
    rounding.quantize_and_save(output_dir=str(OUTPUT), format="auto_round")
    [config] = OUTPUT.glob("*/config.json")
    result = config.parent
    configure_drafter(config, job["drafter_kept"])
    copy_missing_tensors_from_source(str(MODEL), str(result))
    for path in sorted(MODEL.iterdir()):
        # AutoRound changes tokenizer, templates and processors: copy the published files.
        is_weights = path.suffix == ".safetensors" or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name not in ("config.json", "receipt.json"):
            shutil.copyfile(path, result / path.name)
    return result


def read_calibration(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return batches of token sequences of equal length from the calibration text.

    AutoRound's reader needs a network, which the container lacks.
    """
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [json.loads(line)["text"] for line in CALIBRATION.read_text().splitlines()]
    tokens = [token for text in texts for token in tokenizer(text)["input_ids"]]
    count, length = job["nsamples"], job["seqlen"]
    needed = count * length
    if len(tokens) < needed:
        sys.exit(f"the calibration text has {len(tokens)} tokens, but {needed} are required")
    # Sample evenly from the whole text, because adjacent texts are often similar.
    starts = [index * (len(tokens) - length) // count for index in range(count)]
    rows = torch.tensor([tokens[start : start + length] for start in starts])
    return [{"input_ids": batch, "use_cache": False} for batch in rows.split(job["batch"])]


def list_unpacked_modules(packed: set[str]) -> list[str]:
    """Return the linear modules of the language model that stay in 16 bits."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(MODEL))
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [name for name in linear if ".layers." in name and name not in packed]


def configure_drafter(config: Path, unpacked: list[str]) -> None:
    """Add the drafter's 16-bit modules to config.json, because AutoRound omits the drafter."""
    content = json.loads(config.read_text())
    per_module = content["quantization_config"].setdefault("extra_config", {})
    per_module.update({name: dict(_SIXTEEN_BITS) for name in unpacked})
    write_json(config, content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)


if __name__ == "__main__":
    main()
