from __future__ import annotations

import ast
import itertools
from typing import Any, get_args, get_type_hints

import pytest
from spark_vllm import SUPPORTED_ENGINES
from wheel_sources import fetch

from spark_deploy.config.catalog.profile import Speculation
from spark_deploy.config.settings.engine import check_schedule

CONFIG = "vllm/config/speculative.py"
SCHEDULE = "vllm/v1/spec_decode/dynamic/utils.py"
SAMPLER = "vllm/v1/worker/gpu/spec_decode/rejection_sampler.py"
CHOICES = ("draft_sample_method", "rejection_sample_method")


def source(version, file):
    return (fetch(version, {CONFIG, SCHEDULE, SAMPLER}) / file).read_text()


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_engine_accepts_every_speculation_value_used_in_profiles(version):
    module = ast.parse(source(version, CONFIG))
    aliases = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in module.body
        if isinstance(node, ast.Assign)
    }
    [config] = [n for n in module.body if getattr(n, "name", "") == "SpeculativeConfig"]
    assert isinstance(config, ast.ClassDef)
    fields = {
        ast.unparse(node.target): ast.unparse(node.annotation)
        for node in config.body
        if isinstance(node, ast.AnnAssign)
    }
    schedule = fields["num_speculative_tokens_per_batch_size"]
    assert schedule == "list[tuple[int, int, int]] | None"
    hints = get_type_hints(Speculation)
    for name in CHOICES:
        literal = aliases[fields[name]].removeprefix("Literal")
        ours = {value for kind in get_args(hints[name]) for value in get_args(kind)}
        assert ours <= set(ast.literal_eval(literal)), name
    assert "rejection_sample_method == 'block'" in ast.unparse(ast.parse(source(version, SAMPLER)))


def engine_lookup(version):
    namespace: dict[str, Any] = {}
    exec(source(version, SCHEDULE), namespace)
    return namespace["build_dynamic_sd_schedule_lookup"]


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_engine_and_plan_interpret_draft_schedules_the_same_way(version):
    lookup, accepted = engine_lookup(version), 0
    ranges = [(first, last, k) for first in range(1, 5) for last in range(1, 6) for k in (0, 2, 3)]
    for count in (1, 2):
        for schedule in itertools.product(ranges, repeat=count):
            if list(schedule) != sorted(schedule):
                continue
            try:
                drafts = lookup(
                    list(schedule), vllm_max_batch_size=8, vllm_num_speculative_tokens=2
                )
            except ValueError:
                assert list(check_schedule(schedule)), schedule
                continue
            assert not list(check_schedule(schedule)), schedule
            profile = Speculation(
                method="mtp", tokens=2, num_speculative_tokens_per_batch_size=schedule
            )
            assert [profile.draft_tokens(n) for n in range(1, 9)] == drafts[1:]
            accepted += 1
    assert accepted > 50
