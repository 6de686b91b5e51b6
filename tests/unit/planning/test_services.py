"""Several services on one host: each with a plan of its own, and all of them fit together."""

from __future__ import annotations

import json
import re

import pytest
from spark_contract.documents import parse, text_of
from spark_contract.release import Release, service_of

from spark_deploy.config.errors import SparkError
from spark_deploy.plan.jobs import keep_of, served_jobs_of
from spark_deploy.plan.memory import GIB
from spark_deploy.plan.release import release_files_of
from tests.unit.planning.plans import plan_of, problems

SMALL = {
    "model": "small",
    "profile": "base",
    "port": 8001,
    "memory_gib": 24,
    "engine": {"max_context_tokens": 16384},
}
ROOM = {"engine.max_context_tokens": 32768}


def with_services(**services):
    return plan_of(services=services, **ROOM)


def test_each_service_has_a_release_a_gateway_and_a_socket_of_its_own():
    plan = with_services(embed=SMALL)
    main, embed = plan.served
    assert [service_of(one.serve.name) for one in plan.served] == ["main", "embed"]
    assert (embed.model, embed.profile) == ("small", "base")
    assert (main.gateway.settings.port, embed.gateway.settings.port) == (8000, 8001)
    assert embed.gateway.settings.path.endswith("/embed.json")
    paths = [[file.path for file in release_files_of(one)] for one in plan.served]
    assert not set(paths[0]) & set(paths[1])
    assert parse(Release, text_of(embed.serve)) == embed.serve


def test_the_main_service_leaves_what_the_others_take():
    alone, beside = plan_of(**ROOM), with_services(embed=SMALL)
    given = round(alone.memory.memory_fraction - beside.memory.memory_fraction, 2)
    total = alone.memory.total_bytes
    assert beside.memory.needed_bytes < alone.memory.needed_bytes
    assert given > 0
    engines = sum(one.memory.memory_fraction for one in beside.served)
    assert engines * total <= total - 12 * GIB + 0.01 * total


def test_an_engine_never_gets_more_than_memory_gib():
    plan = with_services(embed=SMALL)
    [embed] = plan.services
    words = list(embed.serve.engine.argv)
    share = float(words[words.index("--gpu-memory-utilization") + 1])
    assert share * plan.memory.total_bytes <= 24 * GIB
    assert plan.needs.memory_needed_bytes == sum(one.memory.needed_bytes for one in plan.served)


def test_a_service_that_changes_leaves_the_release_of_the_main_one_as_it_is():
    one = with_services(embed=SMALL)
    other = with_services(embed={**SMALL, "names": ["vectors"], "port": 8002})
    assert one.serve == other.serve
    assert one.services[0].serve != other.services[0].serve


def test_too_little_memory_is_refused_with_the_number_that_would_do():
    [found] = problems(services={"embed": {**SMALL, "memory_gib": 3}}, **ROOM)
    assert found.where == "services.embed"
    enough = float(found.fix.split("memory_gib to ")[1].split(",")[0])
    assert problems(services={"embed": {**SMALL, "memory_gib": enough}}, **ROOM) == []
    assert problems(services={"embed": {**SMALL, "memory_gib": enough - 2.5}}, **ROOM) != []


def test_what_does_not_fit_beside_the_main_one_is_refused():
    found = problems(services={"second": {**SMALL, "memory_gib": 90}})
    assert any("does not fit on one host" in one.what for one in found)


def test_what_services_would_have_to_give_up_for_the_main_one_is_said():
    asked = {"second": {**SMALL, "memory_gib": 90}}
    [fix] = [one.fix for one in problems(services=asked, **ROOM) if "on one host" in one.what]
    words = re.search(r"lower services\.second\.memory_gib to (\d+) together", fix)
    assert words is not None, fix
    enough = int(words[1])
    assert problems(services={"second": {**SMALL, "memory_gib": enough}}, **ROOM) == []
    assert problems(services={"second": {**SMALL, "memory_gib": enough + 1}}, **ROOM) != []


def test_ports_and_downloads_of_all_are_looked_at_and_kept_by_a_prune():
    plan = with_services(embed=SMALL)
    assert plan.needs.ports == (8000, 8001)
    keep = keep_of(plan)
    assert keep.releases == {one.serve.name for one in plan.served}
    assert plan.services[0].tree.dir in keep.folders
    titles = [work.job.title for work in served_jobs_of(plan, ())]
    assert len(titles) == len(set(titles))
    for one in plan.served:
        assert any(one.sources[0].locked.repo in title for title in titles)


@pytest.mark.parametrize(
    ("services", "where", "what"),
    [
        ({"main": SMALL}, "services.main", "name of the main service"),
        ({"a": {**SMALL, "port": 8000}}, "services.a.port", "is the port of serve.port"),
        ({"a": SMALL, "b": SMALL}, "services.b.port", "is the port of services.a.port"),
        ({"a": {**SMALL, "memory_gib": 1}}, "services.a.memory_gib", "less than a hundredth"),
        ({"a": {**SMALL, "model": "smal"}}, "services.a.model", "did you mean small?"),
        ({"a": {**SMALL, "engine": {"options": {"port": 1}}}}, "services.a.engine.options", ""),
        ({"A b": SMALL}, "services", "A b"),
        ({"a": {**SMALL, "paths": ["/metrics"]}}, "services.a.paths", "/metrics"),
        (
            {
                "a": {**SMALL, "paths": ["/v1/score"]},
                "b": {**SMALL, "port": 8002, "paths": ["/v1/score"]},
            },
            "services.b.paths",
            "is answered by services.a",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_planned(services, where, what):
    with pytest.raises(SparkError) as refused:
        with_services(**services)
    text = " ".join(problem.line for problem in refused.value.problems)
    assert where in text
    assert what in text


def test_paths_of_the_main_gateway_go_to_the_service_that_asks_for_them():
    plan = with_services(embed={**SMALL, "paths": ["/v1/embeddings"]})
    main, embed = (one.gateway.settings for one in plan.served)
    assert (main.routes, embed.routes) == ({"/v1/embeddings": "embed"}, {})
    # Who answers what is no part of a release: nothing restarts for it.
    assert plan.serve == with_services(embed=SMALL).serve


def test_the_main_gateway_knows_the_names_of_all_and_brings_what_reads_them():
    plan = with_services(embed={**SMALL, "names": ["vectors", "v"]})
    main, embed = (one.gateway.settings for one in plan.served)
    assert main.names == {"main": plan.serve.names, "embed": ("vectors", "v")}
    assert embed.names is None
    assert parse(type(main), text_of(main)) == main
    assert "libnginx-mod-http-js" in plan.base.packages
    alone = plan_of(**ROOM)
    assert alone.gateway.settings.names is None
    assert "libnginx-mod-http-js" not in alone.base.packages


def test_two_services_answer_to_no_common_name():
    with pytest.raises(SparkError) as refused:
        with_services(embed={**SMALL, "names": ["vectors", "large"]})
    [problem] = refused.value.problems
    assert problem.where == "services.embed.names"
    assert "services.embed.names" in problem.line


def test_the_whole_plan_is_plain_data():
    from spark_deploy.plan.host import document

    assert json.loads(json.dumps(document(with_services(embed=SMALL))))["services"]
