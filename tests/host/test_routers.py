"""LiteLLM and vLLM's router in front of two hosts, configured by `connect` (PyPI)."""

import re

import pytest

from tests.labkit import CAPITAL, SPARE, Site, guest_named, lab
from tests.routers import LITELLM_KEY, chat, port, programs, running

__all__ = ["port", "programs"]

HOSTS = SPARE[:2]
KEY = "0123456789abcdef-of-both-hosts"

pytestmark = pytest.mark.timeout(1800)  # installs packages


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    lab("up", *HOSTS, "--fresh", "--engine", "stub")
    root = tmp_path_factory.mktemp("site")
    (root / "key").write_text(KEY + "\n")
    site = Site(root, hosts=list(HOSTS))
    serve = {"expose": "lan", "api_key": {"file": str(root / "key")}}
    site.choose(model="lab-stub", profile="v2", serve=serve)
    site.deploy().assert_succeeded()
    yield site
    lab("down", *HOSTS)


def answer_counts():
    successes = re.compile(r"^vllm:request_success_total\S* (\d+)", re.M)
    return [sum(map(int, successes.findall(guest_named(name).metrics()))) for name in HOSTS]


@pytest.mark.parametrize("router", ["litellm", "vllm-router"])
def test_router_uses_both_hosts_and_skips_a_host_that_is_off(
    site, router, programs, tmp_path, port
):
    key = {"litellm": LITELLM_KEY, "vllm-router": KEY}[router]

    def assert_answered(requests):
        for number in range(requests):
            session = {"X-Session-Id": f"chat-{number}"}
            answer = chat(port, key, "lab-model", CAPITAL, **session)
            assert "Paris" in str(answer), f"{number}: {answer}"

    printed = site.cli("connect", "--for", router)
    assert printed.returncode == 0, printed.stderr
    with running(router, printed.stdout, programs, tmp_path, port):
        before = answer_counts()
        assert_answered(20)
        assert all(now > then for now, then in zip(answer_counts(), before, strict=True))
        assert chat(port, "sk-wrong", "lab-model") in (400, 401)
        lab("break", "kill-guest", HOSTS[1])
        assert_answered(8)
    lab("up", HOSTS[1], "--engine", "stub")
    guest_named(HOSTS[1]).wait("curl -fsS http://127.0.0.1:8000/health", seconds=200)
