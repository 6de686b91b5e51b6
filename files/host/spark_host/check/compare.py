"""``check --record`` and ``--compare``: compares answers of two releases to the same prompts.

Answers are greedy, with log-probabilities. Steps are compared up to and including the first
different token, because both answers have the same prefix until then.
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from spark_contract import files
from spark_contract.documents import to_json, to_plain
from spark_contract.release import CHAT, Release
from spark_contract.tool import HostToolError

from spark_host.check.probe import CheckError, Probe, quote, user_message
from spark_host.engine.client import Engine, EngineError
from spark_host.records import boot
from spark_host.system.host import Host

_MAX_PROMPTS = 500
_MAX_BYTES = 4 << 20
_MAX_TOKENS = 128
_TOP_LOGPROBS = 20  # the engine's default maximum
_MAX_EXAMPLES = 3
_FLOOR = 1e-6  # of the probability of an unlisted token


@dataclass(frozen=True, slots=True)
class Step:
    token: str
    best: dict[str, float]  # log-probabilities of the most likely tokens

    @property
    def top(self) -> str:
        return max(self.best, key=lambda token: self.best[token], default="")


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: str
    text: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    SCHEMA_VERSION: ClassVar[int] = 1

    release: str
    digest: str
    asked_at: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    recorded: str  # release
    running: str  # release
    prompts: int
    same_answers: int
    steps: int
    same_top: int  # steps with the same most likely token
    mean_nats: float  # mean Kullback-Leibler divergence per step
    max_nats: float
    max_nats_prompt: str
    different: tuple[tuple[str, str, str], ...]  # prompt and both answers

    def __str__(self) -> str:
        share = self.same_top / self.steps if self.steps else 0.0
        lines = [
            f"{self.recorded} and {self.running}: "
            f"identical answers to {self.same_answers} of {self.prompts} prompts",
            f"  {self.steps} steps after a shared prefix: same top token in {share:.2%}, "
            f"KL divergence {self.mean_nats:.2g} nats on average, "
            f"{self.max_nats:.2g} nats at most (prompt {quote(self.max_nats_prompt)})",
        ]
        for prompt, recorded, running in self.different[:_MAX_EXAMPLES]:
            lines.append(f"  {quote(prompt)}: recorded {quote(recorded)}, now {quote(running)}")
        return "\n".join(lines)


def divergence(a: dict[str, float], b: dict[str, float]) -> float:
    """Return a lower bound of KL(a || b) in nats, from top log-probabilities by token.

    A token that ``b`` lacks is at most as likely as b's least likely listed token, and at most as
    likely as all of b's unlisted tokens together. Tokens that both lack count as a single token.
    """
    probs_b = {token: math.exp(value) for token, value in b.items()}
    unlisted_mass_b = max(1.0 - sum(probs_b.values()), _FLOOR)
    max_unlisted_prob_b = max(min([unlisted_mass_b, *probs_b.values()]), _FLOOR)
    total, remaining_a, remaining_b = 0.0, 1.0, 1.0
    for token, value in a.items():
        prob_a = math.exp(value)
        max_prob_b = max(probs_b.get(token, max_unlisted_prob_b), _FLOOR)
        total += prob_a * (value - math.log(max_prob_b))
        remaining_a -= prob_a
        remaining_b -= probs_b.get(token, 0.0)
    if remaining_a > _FLOOR:
        total += remaining_a * math.log(remaining_a / max(remaining_b, _FLOOR))
    return max(total, 0.0)


def compare_answers(recorded: Answers, running: Answers) -> Comparison:
    by_prompt = {answer.prompt: answer for answer in running.answers}
    pairs = [(old, by_prompt[old.prompt]) for old in recorded.answers if old.prompt in by_prompt]
    steps, different = [], []
    for old, new in pairs:
        for a, b in _steps_after_same_prefix(old, new):
            steps.append((divergence(a.best, b.best), a.top == b.top, old.prompt))
        if [step.token for step in old.steps] != [step.token for step in new.steps]:
            different.append((old.prompt, old.text, new.text))
    max_nats, _, max_nats_prompt = max(steps, default=(0.0, True, ""))
    return Comparison(
        recorded.release,
        running.release,
        prompts=len(pairs),
        same_answers=len(pairs) - len(different),
        steps=len(steps),
        same_top=sum(same for _, same, _ in steps),
        mean_nats=sum(nats for nats, _, _ in steps) / len(steps) if steps else 0.0,
        max_nats=max_nats,
        max_nats_prompt=max_nats_prompt,
        different=tuple(different),
    )


def _steps_after_same_prefix(a: Answer, b: Answer) -> Iterator[tuple[Step, Step]]:
    for step_a, step_b in zip(a.steps, b.steps, strict=False):
        yield step_a, step_b
        if step_a.token != step_b.token:
            return


def collect_answers(release: Release, engine: Engine, prompts: list[str], host: Host) -> Answers:
    """Return the answers; raise HostToolError if they have no log-probabilities."""
    probe = Probe(release, engine, read_log=list)  # the log is not needed
    try:
        answers = tuple(_ask(probe, prompt) for prompt in prompts)
    except (CheckError, EngineError) as error:
        fix = "run `spark-check` and fix the reported failures"
        raise HostToolError(f"compare {release.name}", str(error), fix) from error
    return Answers(release.name, release.digest, host.clock.now(), answers)


def _ask(probe: Probe, prompt: str) -> Answer:
    is_chat = probe.path == CHAT
    options: dict[str, Any] = {"logprobs": _TOP_LOGPROBS, "return_tokens_as_token_ids": True}
    if is_chat:
        options |= {"logprobs": True, "top_logprobs": _TOP_LOGPROBS}
    body = probe.body([user_message(prompt)], _MAX_TOKENS, **options)
    reply = probe.engine.ask(probe.path, body, probe.plan.timeout_s)
    try:
        choice = reply["choices"][0]
        if is_chat:
            text = str(choice["message"].get("content") or "")
            steps = tuple(
                _parse_step(
                    step["token"], ((top["token"], top["logprob"]) for top in step["top_logprobs"])
                )
                for step in choice["logprobs"]["content"]
            )
        else:
            text, logprobs = str(choice["text"]), choice["logprobs"]
            pairs = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
            steps = tuple(_parse_step(token, best.items()) for token, best in pairs)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        message = f"the answer to {quote(prompt)} lacks log-probabilities for its tokens"
        raise CheckError(message) from error
    return Answer(prompt, text, steps)


def _parse_step(token: object, logprobs: Iterable[tuple[object, Any]]) -> Step:
    best = {str(candidate): round(float(value), 5) for candidate, value in logprobs}
    if not all(math.isfinite(value) and value <= 0.001 for value in best.values()):
        raise ValueError("invalid log-probability")
    return Step(str(token), best)


def check_prompts(release: Release) -> list[str]:
    copies = [f"Repeat exactly: {text}" for text in release.check.copy]
    return [question.prompt for question in release.check.questions] + copies


def read_prompts(path: Path) -> list[str]:
    fix = f"use a text file with one prompt per line, at most {_MAX_PROMPTS} prompts"
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        lines = [line.strip() for line in data.decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise HostToolError(str(path), f"cannot be read: {error}", fix, 2) from error
    prompts = list(dict.fromkeys(lines))
    if not prompts or len(prompts) > _MAX_PROMPTS or len(data) > _MAX_BYTES:
        message = f"contains {len(prompts)} prompts in {len(data)} bytes"
        raise HostToolError(str(path), message, fix, 2)
    return prompts


def _record_answers(file: str | None, host: Host) -> Answers:
    """Record the running release's answers to the prompts in ``file``, or to those of the check."""
    release = host.disk.load_release(boot.only_active_release(host), host.paths)
    caller_folder = Path(os.environ.get("SPARK_CALLED_FROM", ""))
    prompts = read_prompts(caller_folder / file) if file else check_prompts(release)
    answers = collect_answers(release, Engine.for_release(release, host.paths), prompts, host)
    path = host.paths.answers(release.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, to_json(answers), 0o600)
    return answers


def _compare_with_recorded(name: str, host: Host) -> Comparison:
    """Compare the running release with recorded answers (a comparison with itself shows noise)."""
    recorded = host.disk.read(Answers, host.paths.answers(name))
    if recorded is None:
        fix = f"run `spark-check --record [FILE]` while {name} runs"
        raise HostToolError(f"compare {name}", "no recorded answers on this host", fix)
    release = host.disk.load_release(boot.only_active_release(host), host.paths)
    prompts = [answer.prompt for answer in recorded.answers]
    answers = collect_answers(release, Engine.for_release(release, host.paths), prompts, host)
    return compare_answers(recorded, answers)


def main(args: list[str], host: Host) -> int:
    as_json = "--json" in args
    match [arg for arg in args if arg != "--json"]:
        case ["--compare", name]:
            comparison = _compare_with_recorded(name, host)
            print(to_json(to_plain(comparison)) if as_json else comparison, flush=True)
        case ["--record", *file] if len(file) < 2 and not as_json:
            recording = _record_answers(file[0] if file else None, host)
            text = f"{len(recording.answers)} answers recorded; to compare after a change, run"
            print(f"{recording.release}: {text} `spark-check --compare {recording.release}`")
        case _:
            usage = "use --record [FILE], or --compare RELEASE [--json]"
            raise HostToolError("check", f"invalid arguments: {' '.join(args)}", usage, 2)
    return 0
