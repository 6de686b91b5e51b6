"""What a host's tools say of its jobs, older tools included."""

import json

from spark_deploy.facts.service.jobs import JobStates, parse_poll

# As tools before the contract answered for a job that they did not know.
UNKNOWN_TO_OLDER_TOOLS = [
    {
        "digest": "0123456789ab",
        "state": "failed",
        "result": "/var/lib/spark/jobs/0123456789ab/job.json: no such job, or not JSON",
        "log_tail": [],
    }
]


def test_a_job_that_older_tools_do_not_know_fails_no_prediction() -> None:
    found = parse_poll(json.dumps(UNKNOWN_TO_OLDER_TOOLS))["0123456789ab"]

    assert (found.state, found.title, found.progress) == ("failed", "0123456789ab", None)


def test_links_of_the_boot_pulled_jobs_and_a_lending_host_are_told_apart() -> None:
    said = ["[]", "linked spark-prepare@main-a.target", "pulled 0123456789ab", "lends now"]
    found = JobStates().process(said)
    assert (found.linked, found.pulled, found.lends) == (
        ("spark-prepare@main-a.target",),
        ("0123456789ab",),
        True,
    )
    assert not JobStates().process(said[:3]).lends
