import importlib
import inspect
import json
import pkgutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase

import spark_deploy.hosts
from tests.unit.facts.test_facts import output_of
from tests.unit.hostile import BOMBS
from tests.unit.statuses import SERVICE, STATUS

HERE = Path(__file__).parent


def all_facts():
    for module in pkgutil.walk_packages(spark_deploy.hosts.__path__, "spark_deploy.hosts."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, FactBase) and kind.__module__ == module.name:
                yield kind


FACTS = {fact.__name__: fact for fact in all_facts()}
TEXTS = [bomb.decode(errors="replace") for bomb in BOMBS]
ODD = st.one_of(
    st.sampled_from(
        [
            *TEXTS,
            *("", " ", "\t\t\t", "== end", "== ", "==  ", "2 3", "ii  x", "Mem: ٣"),
            *("\x00", "\x1b[2J\x1b]0;owned\x07", "\udcff", "\u202egnp.exe", "\\", '"'),
            *("9" * 400, "é" * 5, "/" * 300, "A" * 100_000),
            *["-", "=", ":", "a:b:c:d:e", "-1", "1e400", "NaN", "0x", "%", "[1e999]"],
            *('{"a": NaN}', "error: a: b", "error: "),
        ]
    ),
    st.text(max_size=40),
    st.from_regex(r"[0-9a-f.:/-]{0,30}( [0-9.]{0,9}){0,8}", fullmatch=True),
)


def good_outputs(name):
    cases = [yaml.safe_load(path.read_text()) for path in sorted((HERE / name).glob("*.yml"))]
    outputs = [output_of(case["sections"]) for case in cases]
    return [*outputs, [json.dumps({**STATUS, "services": {"main": SERVICE}})], ["== end"], []]


@st.composite
def hostile_output(draw, name):
    lines = list(draw(st.sampled_from(good_outputs(name))))
    for _ in range(draw(st.integers(0, 4))):
        damage = draw(st.sampled_from(("replace", "insert", "drop", "cut", "join")))
        at = draw(st.integers(0, max(0, len(lines) - 1)))
        if damage == "insert" or not lines:
            lines.insert(at, draw(ODD))
        elif damage == "drop":
            del lines[at]
        else:
            kept = {"replace": 0, "join": None}.get(damage, draw(st.integers(0, len(lines[at]))))
            lines[at] = lines[at][:kept] + ("" if damage == "cut" else draw(ODD))
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FACTS))
def test_any_host_output_yields_a_value_or_a_single_error(name):
    fact = FACTS[name]()

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
    @given(lines=hostile_output(name))
    def process(lines):
        started_s = time.process_time()
        with suppress(FactProcessError):
            fact.process(lines)
        assert time.process_time() - started_s < 5

    process()


def test_hostile_output_tests_cover_every_fact():
    assert len(FACTS) > 15
    assert {"HostSurvey", "Status", "PythonSite", "LoginAccess"} <= set(FACTS)
