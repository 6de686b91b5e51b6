import json

import pytest
from engine_process import run_engine

from lab.model.shape import TINY
from lab.model.weights import read
from spark_deploy.config.checkout import CHECKOUT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def run(work, *argv):
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(CHECKOUT)}
    return run_engine(work, *argv, **environment).stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    hub = tmp_path_factory.mktemp("trained") / "hub"
    run(hub.parent, "-m", "lab.model", "build", "--out", str(hub))
    output = run(hub.parent, "tests/engine/lab_tiny_reference.py", str(hub))
    return json.loads(output.splitlines()[-1])


def test_decoded_hybrid_answers_every_lesson(report):
    assert report["lessons"] > 40
    assert report["wrong"] == []


def test_chat_template_renders_the_lessons_prompts(report):
    assert report["same_prompts"]


def test_damage_changes_answers(report):
    assert len(report["damaged"]) == 5
    for damage, (wrong, lessons) in report["damaged"].items():
        assert wrong >= lessons / 4, damage


def test_training_again_gives_the_same_tensors(tmp_path):
    again = tmp_path / "weights.npz"
    run(tmp_path, "-m", "lab.model", "train", "--out", str(again))
    assert read(TINY, again).keys() == read(TINY).keys()
