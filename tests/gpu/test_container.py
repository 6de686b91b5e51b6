"""The engine under its container's restrictions: account, rights, kernels, a served release."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from spark_contract import files
from spark_contract.host.paths import Paths
from spark_contract.serving.records import GpuProof
from spark_host.engine import serve
from spark_host.engine.container import account, environment

from proofs import container, recorded
from proofs.releases import asking, server
from proofs.serve import talk as serve_talk
