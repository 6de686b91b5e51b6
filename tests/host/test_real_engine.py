import json
from typing import Any

import pytest

from spark_deploy.config.catalog.load import read_catalog
from tests.clients import clients, outages_s
from tests.labkit import SPARE, Site, guest_named, lab

pytestmark = pytest.mark.engine

NAME = SPARE[0]
# A question that the lab's model was trained to answer.
REQUEST: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "temperature": 0,
    "max_tokens": 64,
    "chat_template_kwargs": {"enable_thinking": False},
}
CATALOG = read_catalog()
# Trained and unknown prompts; a repeated line counts once.
UNKNOWN = "Tell me about the sea."
PROMPTS = f"""\
What is the capital of Kenya?
Which planet is called the red planet?
Count from 1 to 20.

{UNKNOWN}
What is the capital of Kenya?
"""
ANSWERS = "/var/lib/spark/answers"
NOISE_NATS = 0.01


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    lab("up", NAME, "--fresh", "--engine", "cpu")
    site = Site(tmp_path_factory.mktemp("real-engine"), hosts=[NAME])
    site.choose(model="lab-tiny", profile="v2")
    site.deploy().assert_succeeded()
    return site


@pytest.fixture(scope="module")
def recorded(site):
    guest = guest_named(NAME)
    guest.run(f"cat > prompts.txt <<'END'\n{PROMPTS}END")
    assert exit_code(guest, "--record prompts.txt") == 0
    release = guest.release()
    assert guest.run(f"stat -c '%U %a' {ANSWERS}/{release}.json") == "root 600"
    return release


def exit_code(guest, options):
    return int(guest.run(f"spark-check {options} >/dev/null 2>&1; echo $?"))


def compare(guest, release):
    result: dict[str, Any] = guest.json(f"spark-check --compare {release} --json")
    return result


def test_clients_get_correct_answers_or_503_while_profiles_switch(site, recorded, record_property):
    guest = guest_named(NAME)
    first, tree = guest.release(), guest.run("ls -i1 /srv/spark/models/*/*.safetensors")
    with clients(guest, guest.names()[0], count=1, **REQUEST) as answers:
        for profile in ("v2-tq", "v2"):
            before = guest.release()
            site.choose(profile=profile)
            site.deploy().assert_succeeded()
            assert guest.release() != before
            proof = guest.proof()
            assert (proof["ok"], proof["portable"]) == (True, True)
            argv = guest.argv()
            limits = CATALOG.profile(profile, "lab-tiny").limits
            assert argv[argv.index("--max-num-seqs") + 1] == str(limits.max_sequences)
            record_property(f"change to {profile}", json.dumps(guest.rollout_times()[-1]))
            assert ("--speculative-config" in argv) == (profile == "v2")
            assert "vllm:cache_config_info" in guest.metrics()
            assert "spark portable mode" in guest.run(f"journalctl -u {guest.serving()[0]} -o cat")

    wrong = [answer.text for answer in answers if answer.kind == "other"]
    assert wrong == [], wrong[:3]
    assert len(outages_s(answers)) == 2
    record_property("outages_s", outages_s(answers))
    assert guest.release() == first == recorded
    assert guest.run("ls -i1 /srv/spark/models/*/*.safetensors") == tree
    site.deploy().assert_unchanged()


def test_release_gives_the_same_answers_after_switching_away_and_back(site, recorded):
    guest = guest_named(NAME)
    before = guest.run(f"sha256sum {ANSWERS}/*")
    result = compare(guest, recorded)
    assert result["mean_nats"] < NOISE_NATS, result
    assert (result["prompts"], result["parted"], result["steps"] > 8) == (4, [], True)
    assert guest.run(f"sha256sum {ANSWERS}/*") == before


def test_profiles_with_different_cache_formats_give_similar_answers(site, recorded):
    guest = guest_named(NAME)
    site.choose(profile="v2-tq")
    site.deploy().assert_succeeded()
    release = guest.release()
    assert release != recorded
    result = compare(guest, recorded)
    assert (result["one"], result["other"]) == (recorded, release)
    assert result["mean_nats"] < NOISE_NATS, result
    assert {prompt for prompt, _, _ in result["parted"]} <= {UNKNOWN}, result
    assert (result["prompts"], result["same_top"] > 0.9 * result["steps"]) == (4, True), result

    assert exit_code(guest, f"--compare {release}") == 1
    assert exit_code(guest, f"--compare {recorded} and-another") == 2
