"""Settings of what is built and made anew before it is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spark_deploy.documents.declare import setting


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """How the tree that a profile asks for is kept on the host."""

    layout: Literal["overlay", "full"] | None = setting(
        None,
        "overlay: hard links to the base and one small file, for the plugin; takes seconds. full: "
        "every file written anew, readable by any tool. null keeps the profile's.",
    )
    prebuilt: bool = setting(
        False,
        "true starts from the model's ready hybrid repository (sources.hybrid) instead of the INT4 "
        "base: it passes the same gates and is held against the donor. Only with layout full.",
    )
    requantized: bool = setting(
        False,
        "true starts from an INT4 tree of our own, made of the model's 16-bit repository "
        "(sources.original) by `spark-deploy requantize`, with the settings of requantize.",
    )
    keep_base: bool = setting(
        True,
        "false removes the downloaded base once a full tree was proven byte by byte and serves: "
        "disk for one tree instead of two, and a rebuild downloads it again (`plan` says how "
        "much). An overlay needs its base.",
    )


@dataclass(frozen=True, slots=True)
class RequantizeSettings:
    """How `spark-deploy requantize` has AutoRound make an INT4 tree.

    What is packed and what stays in 16 bits is said by the model's exact sets of names.
    """

    iters: int = setting(
        200,
        "Steps of tuning for each block; 0 rounds to nearest and needs no text.",
        minimum=0,
        maximum=5000,
    )
    nsamples: int = setting(128, "Pieces of text that it tunes with.", minimum=1, maximum=4096)
    seqlen: int = setting(2048, "Tokens of a piece.", minimum=16, maximum=32768)
    batch: int = setting(8, "Pieces of one step.", minimum=1, maximum=64)
    calibration: str | None = setting(
        None,
        'File of this machine with the text: JSON lines, each {"text": ...}, best of what the '
        "model will be asked; together at least nsamples times seqlen tokens. Its content is part "
        "of what the tree is named by.",
        examples=["calibration.jsonl"],
    )
