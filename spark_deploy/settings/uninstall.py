"""Settings of leaving a host."""

from __future__ import annotations

from dataclasses import dataclass

from spark_deploy.documents.declare import setting


@dataclass(frozen=True, slots=True)
class UninstallSettings:
    """What `deploys/uninstall.py` takes along; usually given as --data uninstall.models=true."""

    models: bool = setting(False, "Remove downloaded and built models, too.")
    engine: bool = setting(
        False,
        "Remove Docker, the NVIDIA container toolkit and CUDA, too, where a deploy installed them "
        "and nobody else has containers.",
    )
