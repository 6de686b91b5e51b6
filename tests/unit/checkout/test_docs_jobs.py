"""Jobs on the how-to pages: commands, edits and promised limits."""

from __future__ import annotations

import re

import pytest

from spark_deploy.config.checkout import CHECKOUT
from tests.owner import JOBS_PAGE as PAGE
from tests.owner import Job, jobs

# Limits for each job: commands and edits.
PROMISED = {
    "first server": (2, 0),
    "reuse what the host has": (0, 0),
    "second Spark": (1, 1),
    "connect a client": (1, 0),
    "switch model or profile": (1, 1),
    "go back": (1, 0),
    "day and night": (1, 1),
    "free the GPU": (1, 0),
    "after an update": (1, 0),
    "add a model": (2, 0),
    "why slow": (1, 0),
    "why dead": (1, 0),
    "measure it": (1, 0),
    "uninstall": (1, 0),
}


JOBS = jobs()


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_jobs_count_their_commands(job: Job) -> None:
    assert len(job.typed) == job.commands
    assert all("spark-deploy " in command for command in job.typed)


@pytest.mark.parametrize("name", PROMISED)
def test_jobs_take_no_more_steps_than_promised(name: str) -> None:
    [job] = [item for item in JOBS if item.name == name]
    commands, edits = PROMISED[name]
    assert (job.commands <= commands, job.edits <= edits) == (True, True), job


@pytest.mark.parametrize("job", [job for job in JOBS if job.page], ids=lambda job: job.name)
def test_job_pages_show_their_commands(job: Job) -> None:
    text = (PAGE.parent / str(job.page).partition("#")[0]).read_text("utf-8")
    for command in job.typed:
        name = re.search(r"spark-deploy ([a-z-]+)", command)
        assert name is not None
        assert f"spark-deploy {name[1]}" in text


def test_every_how_to_page_has_a_row() -> None:
    linked = {(PAGE.parent / str(job.page).partition("#")[0]).resolve() for job in JOBS if job.page}
    assert set((CHECKOUT / "docs/how-to").glob("*.md")) <= linked
