"""Hosts and a catalog that plans for the proofs are made with; no such host is ever reached."""

import pathlib as _pathlib
import sys as _sys

_sys.path.insert(0, str(_pathlib.Path(__file__).resolve().parents[3]))

from spark_deploy.inventory import group_from as _group_from

two = _group_from("two", hosts=["spark-1", "spark-2"], file=__file__)
