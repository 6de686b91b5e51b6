"""Comparison of recorded answers, step by step up to the first different token."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from threading import Thread
from typing import Any

import pytest
from spark_contract.errors import HostToolError
from spark_contract.release import Release
from spark_host.check import compare, runner
from spark_host.check.compare import Answer, Answers, Step
from spark_host.system import systemd
from stub_host import Host

OLD, NEW = "main-0123456789ab", "main-ba9876543210"


class Words:
    def __init__(self) -> None:
        self.said: dict[str, list[tuple[str, dict[str, float]]]] = {}
        self.asked: list[dict[str, Any]] = []
        self.logprobs = True

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        steps = self.said[body["messages"][0]["content"]]
        content = [
            {
                "token": token,
                "logprob": best[token],
                "top_logprobs": [{"token": t, "logprob": v} for t, v in best.items()],
            }
            for token, best in steps
        ]
        text = " ".join(token for token, _ in steps)
        choice: dict[str, Any] = {"message": {"content": text}, "finish_reason": "stop"}
        choice["logprobs"] = {"content": content} if self.logprobs else None
        return {"choices": [choice], "usage": {"completion_tokens": len(steps)}}


@pytest.fixture
def words(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Words]:
    engine = Words()

    class Handler(BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return "unix"

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            data = json.dumps(engine.answer(json.loads(self.rfile.read(size)))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingMixIn, UnixStreamServer):
        daemon_threads = True

    path = host.paths.run / "engines" / "main" / "engine.sock"
    path.parent.mkdir(parents=True)
    server = Server(str(path), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield engine
    server.shutdown()
    server.server_close()


def running(monkeypatch: pytest.MonkeyPatch, release: Release) -> None:
    def show(units: Any, _: Any) -> dict[str, Any]:
        return {unit: {"ActiveState": "active"} for unit in units if release.name in unit}

    monkeypatch.setattr(systemd, "show", show)


SURE = {"yes": math.log(0.9), "no": math.log(0.1)}
UNSURE = {"yes": math.log(0.6), "no": math.log(0.4)}


def ask(host: Host, *words: str) -> int:
    return runner.main(list(words), host.paths)


def test_compares_a_release_with_recorded_answers(
    host: Host, words: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Is it so?\n\nAnd that?\nIs it so?\n")
    old, new = host.release(OLD), host.release(NEW)
    words.said = {"Is it so?": [("yes", SURE)], "And that?": [("yes", SURE), ("yes", SURE)]}
    running(monkeypatch, old)
    assert ask(host, "--record", str(prompts)) == 0
    capsys.readouterr()
    turned = {"no": SURE["yes"], "yes": SURE["no"]}
    words.said = {"Is it so?": [("yes", UNSURE)], "And that?": [("no", turned), ("yes", SURE)]}
    running(monkeypatch, new)
    assert ask(host, "--compare", OLD, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompts"], found["same_answers"]) == (2, 1)
    # Steps after the first difference have another prefix.
    assert (found["steps"], found["same_top"]) == (2, 1)
    near = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    far = 0.9 * math.log(0.9 / 0.1) + 0.1 * math.log(0.1 / 0.9)
    assert found["mean_nats"] == pytest.approx((near + far) / 2, abs=1e-3)
    assert found["most_at"] == "And that?"
    assert found["parted"] == [["And that?", "yes yes", "no yes"]]


def test_prompt_file_is_relative_to_the_callers_folder(
    host: Host, words: Words, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("Is it so?\n")
    words.said = {"Is it so?": [("yes", SURE)]}
    running(monkeypatch, host.release(OLD))
    monkeypatch.setenv("SPARK_CALLED_FROM", str(tmp_path))
    monkeypatch.chdir("/")
    assert ask(host, "--record", "prompts.txt") == 0
    assert len(words.asked) == 1
    assert ask(host, "--record", str(tmp_path / "prompts.txt")) == 0
    with pytest.raises(HostToolError, match=f"{tmp_path}/other.txt: cannot be read"):
        ask(host, "--record", "other.txt")


def test_recording_is_greedy_and_readable_only_by_root(
    host: Host, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = host.release(OLD)
    words.said = {p: [("yes", SURE)] for p in compare.check_prompts(release)}
    running(monkeypatch, release)
    assert ask(host, "--record") == 0
    assert {body["temperature"] for body in words.asked} == {0}
    assert {body["top_logprobs"] for body in words.asked} == {20}
    mode = stat.S_IMODE(host.paths.answers(OLD).stat().st_mode)
    assert mode == 0o600


def test_comparing_a_release_with_itself_keeps_the_recording(
    host: Host, words: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = host.release(OLD)
    words.said = {p: [("yes", SURE)] for p in compare.check_prompts(release)}
    running(monkeypatch, release)
    ask(host, "--record")
    before = host.paths.answers(OLD).read_bytes()
    capsys.readouterr()
    ask(host, "--compare", OLD)
    assert "identical answers to 4 of 4 prompts" in capsys.readouterr().out
    assert host.paths.answers(OLD).read_bytes() == before


def test_missing_recording_names_the_record_command(
    host: Host, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(monkeypatch, host.release(NEW))
    with pytest.raises(HostToolError, match=r"while main-0123456789ab runs: spark-check --record"):
        ask(host, "--compare", OLD)


def test_missing_log_probabilities_are_an_error(
    host: Host, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = host.release(OLD)
    words.said = {p: [("yes", SURE)] for p in compare.check_prompts(release)}
    words.logprobs = False
    running(monkeypatch, release)
    with pytest.raises(HostToolError, match="has no log-probabilities of each token"):
        ask(host, "--record")
    assert not host.paths.answers(OLD).exists()


@pytest.mark.parametrize(
    "given", [["--compare"], ["--compare", "a", "b"], ["--record", "a", "b"], ["--record", "--x"]]
)
def test_compare_refuses_other_arguments(host: Host, given: list[str]) -> None:
    with pytest.raises(HostToolError):
        ask(host, *given)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe", b"one\n" * 3 + b"x" * (5 << 20)])
def test_refuses_invalid_prompt_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(HostToolError, match=r"prompts\.txt"):
        compare.read_prompts(path)


def test_identical_answers_have_no_divergence() -> None:
    answers = (Answer("p", "yes", (Step("yes", SURE), Step("no", UNSURE))),)
    one = Answers(OLD, "d", "now", answers)
    found = compare.compare_answers(one, one)
    assert (found.mean_nats, found.most_nats, found.same_answers) == (0.0, 0.0, 1)


def test_divergence_of_unlisted_tokens() -> None:
    sure = {"yes": math.log(0.99)}
    other = {"no": math.log(0.99), "yes": math.log(0.01)}
    assert compare.divergence(sure, other) > 4
    assert compare.divergence({"yes": 0.0}, {"no": 0.0}) > 10
