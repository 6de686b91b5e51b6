import json
import math
import stat
from typing import Any

import pytest
from socket_servers import json_server
from spark_contract.tool import HostToolError
from spark_host.check import compare, runner
from spark_host.system import systemd

OLD, NEW = "main-0123456789ab", "main-ba9876543210"
SURE = {"yes": math.log(0.9), "no": math.log(0.1)}
UNSURE = {"yes": math.log(0.6), "no": math.log(0.4)}


class FakeEngine:
    def __init__(self):
        self.steps: dict[str, list[tuple[str, dict[str, float]]]] = {}
        self.requests: list[dict[str, Any]] = []
        self.logprobs = True

    def answer(self, body):
        self.requests.append(body)
        steps = self.steps[body["messages"][0]["content"]]
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
def engine(host):
    fake = FakeEngine()
    with json_server(host.paths.engine_socket("main"), lambda _, body: fake.answer(body)):
        yield fake


@pytest.fixture
def serve(host, monkeypatch):
    def activate(name):
        def show(units, _):
            return {unit: {"ActiveState": "active"} for unit in units if name in unit}

        monkeypatch.setattr(systemd, "show", show)
        return host.release(name)

    return activate


def run_check(host, *words):
    return runner.main(list(words), host.paths)


def test_compares_a_release_with_recorded_answers(host, engine, serve, capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Is it so?\n\nAnd that?\nIs it so?\n")
    engine.steps = {"Is it so?": [("yes", SURE)], "And that?": [("yes", SURE), ("yes", SURE)]}
    serve(OLD)
    assert run_check(host, "--record", str(prompts)) == 0
    swapped = {"no": SURE["yes"], "yes": SURE["no"]}
    engine.steps = {"Is it so?": [("yes", UNSURE)], "And that?": [("no", swapped), ("yes", SURE)]}
    serve(NEW)
    capsys.readouterr()
    assert run_check(host, "--compare", OLD, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["recorded"], result["running"]) == (OLD, NEW)
    assert (result["prompts"], result["same_answers"]) == (2, 1)
    # Steps after the first difference have another prefix.
    assert (result["steps"], result["same_top"]) == (2, 1)
    near = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    far = 0.9 * math.log(0.9 / 0.1) + 0.1 * math.log(0.1 / 0.9)
    assert result["mean_nats"] == pytest.approx((near + far) / 2, abs=1e-3)
    assert result["max_nats_prompt"] == "And that?"
    assert result["different"] == [["And that?", "yes yes", "no yes"]]


def test_prompt_file_path_is_relative_to_the_callers_folder(
    host, engine, serve, monkeypatch, tmp_path
):
    (tmp_path / "prompts.txt").write_text("Is it so?\n")
    engine.steps = {"Is it so?": [("yes", SURE)]}
    serve(OLD)
    monkeypatch.setenv("SPARK_CALLED_FROM", str(tmp_path))
    monkeypatch.chdir("/")
    assert run_check(host, "--record", "prompts.txt") == 0
    assert len(engine.requests) == 1
    with pytest.raises(HostToolError, match=f"{tmp_path}/other.txt: cannot be read"):
        run_check(host, "--record", "other.txt")


def test_answers_are_decoded_greedily_and_recorded_in_a_private_file(host, engine, serve, capsys):
    engine.steps = {p: [("yes", SURE)] for p in compare.check_prompts(serve(OLD))}
    assert run_check(host, "--record") == 0
    settings = {(body["temperature"], body["top_logprobs"]) for body in engine.requests}
    assert settings == {(0, 20)}
    path = host.paths.answers(OLD)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    capsys.readouterr()
    assert run_check(host, "--compare", OLD) == 0
    assert "identical answers to 4 of 4 prompts" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_error_for_a_missing_recording_shows_the_record_command(host, engine, serve):
    serve(NEW)
    with pytest.raises(
        HostToolError, match=r"run `spark-check --record \[FILE\]` while main-0123456789ab runs"
    ):
        run_check(host, "--compare", OLD)


def test_missing_log_probabilities_are_an_error(host, engine, serve):
    engine.steps = {p: [("yes", SURE)] for p in compare.check_prompts(serve(OLD))}
    engine.logprobs = False
    with pytest.raises(HostToolError, match="lacks log-probabilities for its tokens"):
        run_check(host, "--record")
    assert not host.paths.answers(OLD).exists()


@pytest.mark.parametrize(
    "words", [["--compare"], ["--compare", "a", "b"], ["--record", "a", "b"], ["--record", "--x"]]
)
def test_rejects_invalid_arguments(host, words):
    with pytest.raises(HostToolError):
        run_check(host, *words)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe", b"one\n" * 3 + b"x" * (5 << 20)])
def test_rejects_invalid_prompt_files(tmp_path, content):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(HostToolError, match=r"prompts\.txt"):
        compare.read_prompts(path)


def test_tokens_missing_from_a_distribution_increase_the_divergence():
    sure = {"yes": math.log(0.99)}
    assert compare.divergence(sure, {"no": math.log(0.99), "yes": math.log(0.01)}) > 4
    assert compare.divergence({"yes": 0.0}, {"no": 0.0}) > 10
