"""Defaults of served names, added by vLLM's own way of installing middleware."""

import json

import pytest
from engine_process import run_engine

from spark_deploy.config.checkout import CHECKOUT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_every_api_uses_the_request_defaults_set_for_the_model_name(tmp_path):
    script = CHECKOUT / "tests/engine/engine_served_names.py"
    result = run_engine(tmp_path, str(script), PYTHONPATH=str(CHECKOUT / "files/image"))
    answers = json.loads(result.stdout.partition("answers:")[2])
    fast, deep = [0.7, 20, {"enable_thinking": False}], [None, None, None]
    assert answers == [[fast, deep]] * 3
