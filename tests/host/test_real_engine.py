"""The real engine, vLLM built for CPUs, changed over under clients: v2, v2-tq and v2 again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from spark_deploy.catalog.load import read_catalog
from tests.clients import clients, outages_s
from tests.labkit import SPARE, Site, guest_named, lab

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    lab("up", NAME, "--fresh", "--engine", "cpu")
    made = Site(tmp_path_factory.mktemp("real-engine"), hosts=[NAME])
    made.choose(model="lab-tiny", profile="v2")
    first = made.deploy()
    assert first.exit_code == 0, first.stderr[-4000:]
    return made


def test_v2_to_v2_tq_and_back_gives_clients_right_answers_or_a_time_to_come_back(
    site: Site, record_property: Callable[[str, object], None]
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
    assert guest.release() == first
    assert guest.run("ls -i1 /srv/spark/models/*/*.safetensors") == tree
    site.deploy().must_have_changed_nothing()
