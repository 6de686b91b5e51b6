from tests.labkit import rollouts_overlap


def test_rollout_updates_hosts_one_by_one_starting_with_canary(fleet):
    fleet.settle()
    fleet.site.choose(serve={"names": ["once"]}, rollout={"canary": fleet.guests[1].name})
    fleet.site.deploy().assert_succeeded()
    (second, _), (_, canary) = (guest.rollout_times()[-1] for guest in fleet.guests)
    assert canary < second


def test_rollout_updates_the_configured_number_of_hosts_at_once(fleet):
    fleet.settle()
    fleet.site.choose(serve={"names": ["both"]}, rollout={"at_once": "all"})
    fleet.site.deploy().assert_succeeded()
    assert rollouts_overlap(fleet.guests)
