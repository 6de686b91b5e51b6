"""Jobs on the how-to pages: commands, edits and promised limits."""

from __future__ import annotations

import re

import pytest

from spark_deploy.config.checkout import CHECKOUT
from tests.owner import JOBS_PAGE as PAGE
from tests.owner import Job, jobs

# Largest numbers of commands and edits.
LIMITS = {
    "first server": (2, 0),
    "reuse downloaded models": (0, 0),
    "add a model": (2, 0),
    **dict.fromkeys(("second Spark", "switch model or profile", "switch by time of day"), (1, 1)),
    **dict.fromkeys(
        ("connect a client", "roll back", "free the GPU", "after a driver or system update"), (1, 0)
    ),
    **dict.fromkeys(
        ("see why a server is slow", "see why a server is down", "measure speed", "uninstall"),
        (1, 0),
    ),
}
JOBS = {job.name: job for job in jobs()}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_job_counts_its_commands_and_links_to_a_page_with_them(job: Job) -> None:
    assert len(job.typed) == job.commands
    for command in job.typed:
        name = re.search(r"spark-deploy ([a-z-]+)", command)
        assert name is not None, command
        if job.page:
            text = (PAGE.parent / job.page.partition("#")[0]).read_text("utf-8")
            assert f"spark-deploy {name[1]}" in text


@pytest.mark.parametrize("name", LIMITS)
def test_jobs_stay_within_their_limits(name: str) -> None:
    commands, edits = LIMITS[name]
    assert JOBS[name].commands <= commands
    assert JOBS[name].edits <= edits


def test_every_how_to_page_has_a_row() -> None:
    pages = [job.page.partition("#")[0] for job in JOBS.values() if job.page]
    linked = {(PAGE.parent / page).resolve() for page in pages}
    assert set((CHECKOUT / "docs/how-to").glob("*.md")) <= linked
