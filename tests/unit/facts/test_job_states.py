"""States of jobs as the host tools report them."""

from spark_deploy.hosts.status import JobStates


def test_links_of_the_boot_pulled_jobs_and_a_lending_host_are_told_apart() -> None:
    said = ["[]", "linked spark-prepare@main-a.target", "pulled 0123456789ab", "lends now"]
    found = JobStates().process(said)
    assert (found.linked, found.pulled, found.lends) == (
        ("spark-prepare@main-a.target",),
        ("0123456789ab",),
        True,
    )
    assert not JobStates().process(said[:3]).lends
