"""The real engine, vLLM built for CPUs, changed over under clients: v2, v2-tq and v2 again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from spark_deploy.config.catalog.load import read_catalog
from tests.clients import clients, outages_s
from tests.labkit import SPARE, Guest, Site, guest_named, lab

pytestmark = pytest.mark.engine

NAME = SPARE[0]
# One of the questions that the lab's model was trained to answer; it does no sums.
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "temperature": 0,
    "max_tokens": 64,
    "chat_template_kwargs": {"enable_thinking": False},
}
CATALOG = read_catalog()
# An owner's own: what the model knows, and what it was never asked. A line twice is one prompt.
UNKNOWN = "Tell me about the sea."
PROMPTS = f"""\
What is the capital of Kenya?
Which planet is called the red planet?
Count from 1 to 20.

{UNKNOWN}
What is the capital of Kenya?
"""
ANSWERS = "/var/lib/spark/answers"
# A batch of the CPU engine may be summed in another order from one start to the next.
NOISE_NATS = 0.01
# The record with every prompt's answer in another prompt's place: a model that answers otherwise.
ALTERED = """
import json, sys
record = json.load(open(sys.argv[1]))
said = [(one["text"], one["steps"]) for one in record["answers"]]
for one, (text, steps) in zip(record["answers"], said[1:] + said[:1]):
    one["text"], one["steps"] = text, steps
json.dump({**record, "release": "main-ffffffffffff"}, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    lab("up", NAME, "--fresh", "--engine", "cpu")
    made = Site(tmp_path_factory.mktemp("real-engine"), hosts=[NAME])
    made.choose(model="lab-tiny", profile="v2")
    first = made.deploy()
    assert first.exit_code == 0, first.stderr[-4000:]
    return made


@pytest.fixture(scope="module")
def recorded(site: Site) -> str:
    """Keep what v2 answers before anything changes, as docs/how-to/switch.md says it."""
    guest = guest_named(NAME)
    guest.run(f"cat > prompts.txt <<'END'\n{PROMPTS}END")
    code, said = check(guest, "--record prompts.txt")
    assert code == 0, said
    release = guest.release()
    assert said == (
        f"{release}: 4 answers recorded; after a change: spark-check --compare {release}"
    )
    assert guest.run(f"stat -c '%U %a' {ANSWERS}/{release}.json") == "root 600"
    return release


def check(guest: Guest, words: str) -> tuple[int, str]:
    """Run ``spark-check`` on the host as its owner does; return its exit code and all it said."""
    said = guest.run(f"spark-check {words} 2>&1; echo $?")
    text, _, code = said.rpartition("\n")
    return int(code), text


def compared(guest: Guest, release: str) -> dict[str, Any]:
    """Hold what runs against the record of a release."""
    return guest.json(f"spark-check --compare {release} --json")


def test_v2_to_v2_tq_and_back_gives_clients_right_answers_or_a_time_to_come_back(
    site: Site, recorded: str, record_property: Callable[[str, object], None]
) -> None:
    guest = guest_named(NAME)
    first, tree = guest.release(), guest.run("ls -i1 /srv/spark/models/*/*.safetensors")
    with clients(guest, guest.names()[0], count=1, **ASKED) as seen:
        for profile in ("v2-tq", "v2"):
            before = guest.release()
            site.choose(profile=profile)
            run = site.deploy()
            assert run.exit_code == 0, run.stderr[-4000:]
            assert guest.release() != before
            proof = guest.json(f"cat /var/lib/spark/proofs/{guest.release()}.json")
            assert proof["ok"], proof
            argv = guest.argv()
            limits = CATALOG.profile(profile, "lab-tiny").limits
            assert argv[argv.index("--max-num-seqs") + 1] == str(limits.max_sequences)
            record_property(f"change to {profile}", json.dumps(guest.changes()[-1]))
            # Drafts are of v2 alone; the CPU engine has no cache of TurboQuant for v2-tq.
            assert ("--speculative-config" in argv) == (profile == "v2")
            assert "vllm:cache_config_info" in guest.metrics()

    others = [one.text for one in seen if one.kind == "other"]
    assert others == [], others[:3]
    assert len(outages_s(seen)) == 2
    record_property("outages_s", outages_s(seen))
    assert guest.release() == first == recorded
    assert guest.run("ls -i1 /srv/spark/models/*/*.safetensors") == tree
    site.deploy().must_have_changed_nothing()


def test_the_same_release_answers_an_owner_s_prompts_as_it_did_before_the_way_there_and_back(
    site: Site, recorded: str
) -> None:
    guest = guest_named(NAME)
    before = guest.run(f"sha256sum {ANSWERS}/*")
    code, said = check(guest, f"--compare {recorded}")
    assert code == 0, said
    first, second = said.splitlines()[:2]
    assert first == f"{recorded} and {recorded}: identical answers to 4 of 4 prompts"
    assert "same top token in 100.00%, KL divergence " in second
    found = compared(guest, recorded)
    assert found["mean_nats"] < NOISE_NATS, found
    assert (found["prompts"], found["parted"], found["steps"] > 8) == (4, [], True)
    assert guest.run(f"sha256sum {ANSWERS}/*") == before


def test_other_answers_are_told_apart_prompt_by_prompt(site: Site, recorded: str) -> None:
    guest = guest_named(NAME)
    other = "main-ffffffffffff"
    guest.run(f"cat > alter.py <<'END'\n{ALTERED}END")
    guest.run(f"python3 alter.py {ANSWERS}/{recorded}.json {ANSWERS}/{other}.json")
    found = compared(guest, other)
    assert (found["one"], found["other"]) == (other, recorded)
    assert (found["prompts"], found["same_answers"], len(found["parted"])) == (4, 0, 4)
    # All of them part at their first step, and what follows is not held against each other.
    assert (found["steps"], found["same_top"]) == (4, 0)
    assert found["mean_nats"] > 1, found
    code, said = check(guest, f"--compare {other}")
    assert code == 0, said
    assert "identical answers to 0 of 4 prompts" in said
    assert "same top token in 0.00%" in said
    assert "against 'Nairobi'" in said
    guest.run(f"rm {ANSWERS}/{other}.json")


def test_another_profile_on_the_same_tree_answers_alike_and_without_a_record_there_is_a_way(
    site: Site, recorded: str
) -> None:
    guest = guest_named(NAME)
    site.choose(profile="v2-tq")
    run = site.deploy()
    assert run.exit_code == 0, run.stderr[-4000:]
    release = guest.release()
    assert release != recorded
    found = compared(guest, recorded)
    assert (found["one"], found["other"]) == (recorded, release)
    # It has no drafts, and checks none: what the model was never asked may be a near tie.
    assert found["mean_nats"] < NOISE_NATS, found
    assert {prompt for prompt, _, _ in found["parted"]} <= {UNKNOWN}, found
    assert (found["prompts"], found["same_top"] > 0.9 * found["steps"]) == (4, True), found

    code, said = check(guest, f"--compare {release}")
    assert code == 1
    assert said == (
        f"error: compare {release}: nothing was recorded of it here; "
        f"fix: while {release} runs: spark-check --record [FILE]"
    )
    code, said = check(guest, f"--compare {recorded} and-another")
    assert code == 2
    assert "--record [FILE], or --compare RELEASE [--json]" in said
