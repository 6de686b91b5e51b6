import hashlib
import json
import re
import secrets
import subprocess
import time

import pytest

from tests.labkit import CHECKOUT, SPARE, Site, guest_named, lab

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

FIRST, SECOND = SPARE[:2]
KEY = secrets.token_urlsafe(32)
GATEWAY, BALANCER = 8000, 8008
FILLER = "The grass is green and the sky is blue. "
LONGEST = 1200  # tokens; at least some seconds on a CPU


class Engines:
    def __init__(self, root):
        lab("up", FIRST, SECOND, "--fresh", "--engine", "cpu")
        self.guests = [guest_named(FIRST), guest_named(SECOND)]
        (root / "key").write_text(KEY + "\n")
        self.serve = {"expose": "lan", "api_key": {"file": str(root / "key")},
                      "start_timeout_s": 2000}  # fmt: skip
        self.site = Site(root, hosts=[FIRST, SECOND])
        replicas = {"hosts": [FIRST, SECOND], "port": BALANCER}
        # The CPU engine's cache blocks are longer than the conversation of this check.
        profile = (CHECKOUT / "catalog/profiles/agent.yml").read_text()
        assert "prefix_reuse: true" in profile
        own = root / "catalog/profiles/chat.yml"
        own.parent.mkdir(parents=True)
        own.write_text(profile.replace("prefix_reuse: true", "prefix_reuse: false"))
        self.site.choose(model="lab-tiny", profile="chat", replicas=replicas, serve=self.serve)

    def start(self, body, *args, port=BALANCER, key=KEY):
        curl = subprocess.Popen(
            ["curl", "-K", "-", "-sSN", "-m", "300", "-H", "Content-Type: application/json", *args,
             "-w", "\n%{http_code}", "-d", json.dumps({"model": "lab-model", **body}),
             f"http://{self.guests[0].ip}:{port}/v1/chat/completions"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        curl.stdin.write(f'header = "Authorization: Bearer {key}"\n')
        curl.stdin.close()
        curl.stdin = None
        return curl

    def ask(self, messages, *args, **options):
        body = {"messages": messages, "max_tokens": 8, "temperature": 0,
                "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
        text, _, status = self.start(body, *args, **options).communicate()[0].rpartition("\n")
        return int(status), json.loads(text)

    def count(self, name):
        pattern = re.compile(rf"^vllm:{name}\S* (\S+)", re.M)
        numbers = [pattern.findall(guest.metrics()) for guest in self.guests]
        assert all(numbers), name
        return sum(float(number) for found in numbers for number in found)

    def hit_rate(self, conversations, *, header):
        hits = queries = 0.0
        filler = self.filler()
        for number in range(conversations):
            words = ["-H", f"X-Session-Id: {KEY[:8]}{number}"] if header else []
            messages = [{"role": "user", "content": f"{secrets.token_hex(4)} {filler}"}]
            for turn in range(3):
                before = [self.count(f"prefix_cache_{kind}_total") for kind in ("hits", "queries")]
                status, answer = self.ask(messages, *words)
                assert status == 200, answer
                if turn:
                    hits += self.count("prefix_cache_hits_total") - before[0]
                    queries += self.count("prefix_cache_queries_total") - before[1]
                text = answer["choices"][0]["message"]["content"] or ""
                messages += [{"role": "assistant", "content": text},
                             {"role": "user", "content": "Go on."}]  # fmt: skip
        return hits / queries

    def filler(self):
        lines = self.guests[0].run(
            "journalctl -o cat | grep -o 'attention block size to [0-9][0-9]*'"
        )
        block_tokens = int(lines.split()[-1])
        _, answer = self.ask([{"role": "user", "content": FILLER * 20}])
        return FILLER * (45 * block_tokens // answer["usage"]["prompt_tokens"])


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    engines = Engines(tmp_path_factory.mktemp("conversations"))
    engines.site.deploy(timeout_s=2000).assert_succeeded()
    yield engines
    lab("down", FIRST, SECOND)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("port", [GATEWAY, BALANCER])
def test_generation_stops_if_the_client_disconnects(engines, port, stream):
    before = engines.count("generation_tokens_total")
    client = engines.start(
        {"messages": [{"role": "user", "content": "Tell me about the sea."}], "stream": stream,
         "max_tokens": LONGEST, "min_tokens": LONGEST, "ignore_eos": True}, port=port,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while engines.count("generation_tokens_total") == before:
        assert time.monotonic() < deadline
    assert client.poll() is None
    client.kill()
    client.communicate()
    while engines.count("num_requests_running"):
        assert time.monotonic() < deadline
    generated = engines.count("generation_tokens_total") - before
    assert generated < LONGEST
    time.sleep(2)
    assert engines.count("generation_tokens_total") == before + generated


def test_follow_up_request_reaches_the_host_with_the_cached_prefix(engines, record_property):
    anywhere = engines.hit_rate(4, header=False)
    at_home = engines.hit_rate(4, header=True)
    record_property("prefix hits of later turns", f"{anywhere:.2f} without header, {at_home:.2f}")
    assert at_home > 0.5
    assert at_home > 1.5 * anywhere


def test_named_keys_can_be_used_rate_limited_counted_and_revoked(engines):
    runs = [guest.invocation() for guest in engines.guests]
    token, question = f"sk-{secrets.token_urlsafe(32)}", [{"role": "user", "content": "Hello."}]
    anna = {"sha256": hashlib.sha256(token.encode()).hexdigest(), "max_requests_per_min": 3}
    engines.site.choose(serve={**engines.serve, "keys": {"anna": anna}})
    engines.site.deploy(deploy="deploys/key.py").assert_succeeded()
    engines.site.deploy(deploy="deploys/key.py").assert_unchanged()
    engines.site.deploy().assert_unchanged()
    statuses = [engines.ask(question, key=token)[0] for _ in range(6)]
    assert statuses == [200] * 4 + [429] * 2
    gateway = engines.guests[0].status()["services"]["main"]["gateway"]
    assert gateway["usage"]["anna"]["requests"] == 4
    for guest in engines.guests:
        assert guest.run(f"grep -rlF {token} /etc /run /var/lib/spark || :") == ""

    engines.site.choose(serve=engines.serve)
    engines.site.deploy(deploy="deploys/key.py").assert_succeeded()
    assert engines.ask(question, key=token)[0] == 401
    assert engines.ask(question)[0] == 200
    assert [guest.invocation() for guest in engines.guests] == runs
