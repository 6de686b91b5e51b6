"""``check --record`` and ``--compare``: what two releases answer to the same prompts.

Each answer is greedy and keeps the best tokens of every step with their log-probabilities. Two
answers are held against each other as far as both began alike, so that like is compared with like.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from spark_contract import files
from spark_contract.documents import plain, text_of
from spark_contract.errors import HostToolError
from spark_contract.release import CHAT, Release

from spark_host.check.probe import CheckError, Probe, short, user
from spark_host.engine.client import Engine, EngineError
from spark_host.records import boot
from spark_host.system.ports import Host

_MOST_PROMPTS = 500
_MOST_BYTES = 4 << 20
_MOST_TOKENS = 128
_BEST = 20  # as many as the engine gives without being told otherwise
_SHOWN = 3
_FLOOR = 1e-6  # of a share that is not listed


@dataclass(frozen=True, slots=True)
class Step:
    """One token of an answer, and the best tokens at its place."""

    token: str
    best: dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt was answered."""

    prompt: str
    text: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """What one release answered."""

    SCHEMA_VERSION: ClassVar[int] = 1

    release: str
    digest: str
    asked_at: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How near the answers of two releases are."""

    one: str
    other: str
    prompts: int
    same_answers: int
    steps: int
    same_top: int  # steps at which both find the same token the best
    mean_nats: float  # Kullback-Leibler divergence of a step, of the other from the one
    most_nats: float
    most_at: str
    parted: tuple[tuple[str, str, str], ...]  # prompt, and what each said

    def __str__(self) -> str:
        """Say it in a few lines."""
        share = self.same_top / self.steps if self.steps else 0.0
        lines = [
            f"{self.one} and {self.other}: {self.same_answers} of {self.prompts} prompts are "
            "answered word for word alike",
            f"  {self.steps} steps behind equal beginnings: the same best token in {share:.2%}, "
            f"divergence {self.mean_nats:.2g} nats on average, {self.most_nats:.2g} at most "
            f"(prompt {short(self.most_at)})",
        ]
        for prompt, one, other in self.parted[:_SHOWN]:
            lines.append(f"  {short(prompt)}: {short(one)} against {short(other)}")
        return "\n".join(lines)


def divergence(one: dict[str, float], other: dict[str, float]) -> float:
    """Return KL(one || other) of two lists of best log-probabilities, in nats.

    A token that the other does not list is at most as likely there as the last it lists, and as all
    that it does not list; what neither lists counts as one. So it is never more than the whole's.
    """
    shares = {token: math.exp(value) for token, value in other.items()}
    left = max(1.0 - sum(shares.values()), _FLOOR)
    unlisted = max(min([left, *shares.values()]), _FLOOR)
    total, rest, other_rest = 0.0, 1.0, 1.0
    for token, value in one.items():
        share = math.exp(value)
        total += share * (value - math.log(max(shares.get(token, unlisted), _FLOOR)))
        rest, other_rest = rest - share, other_rest - shares.get(token, 0.0)
    if rest > _FLOOR:
        total += rest * math.log(rest / max(other_rest, _FLOOR))
    return max(total, 0.0)


def compared(one: Answers, other: Answers) -> Comparison:
    """Hold the answers of two releases against each other, prompt by prompt."""
    theirs = {answer.prompt: answer for answer in other.answers}
    pairs = [(mine, theirs[mine.prompt]) for mine in one.answers if mine.prompt in theirs]
    steps = [
        (divergence(a.best, b.best), _top(a) == _top(b), mine.prompt)
        for mine, their in pairs
        for a, b in _alike(mine, their)
    ]
    worst = max(steps, default=(0.0, True, ""))
    parted = [(a.prompt, a.text, b.text) for a, b in pairs if not _same(a, b)]
    return Comparison(
        one.release,
        other.release,
        prompts=len(pairs),
        same_answers=len(pairs) - len(parted),
        steps=len(steps),
        same_top=sum(same for _, same, _ in steps),
        mean_nats=sum(nats for nats, _, _ in steps) / len(steps) if steps else 0.0,
        most_nats=worst[0],
        most_at=worst[2],
        parted=tuple(parted),
    )


def _alike(one: Answer, other: Answer) -> list[tuple[Step, Step]]:
    """Return the steps behind equal beginnings; the one at which they part is the last."""
    found = []
    for a, b in zip(one.steps, other.steps, strict=False):
        found.append((a, b))
        if a.token != b.token:
            break
    return found


def _top(step: Step) -> str:
    return max(step.best, key=lambda token: step.best[token], default="")


def _same(one: Answer, other: Answer) -> bool:
    return [step.token for step in one.steps] == [step.token for step in other.steps]


def record(release: Release, engine: Engine, prompts: list[str], host: Host) -> Answers:
    """Ask the running engine every prompt and keep what it says.

    Raises:
        HostToolError: It gave no answer, or one without log-probabilities.
    """
    found = ask(release, engine, prompts, host)
    path = host.paths.answers(release.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Prompts are their owner's, so nobody else reads them.
    files.write_text(path, text_of(found), 0o600)
    return found


def ask(release: Release, engine: Engine, prompts: list[str], host: Host) -> Answers:
    """Ask the running engine every prompt; nothing is kept.

    Raises:
        HostToolError: It gave no answer, or one without log-probabilities.
    """
    probe = Probe(release, engine, list)
    try:
        answers = tuple(_answer(probe, prompt) for prompt in prompts)
    except (CheckError, EngineError) as error:
        fix = "spark-check says what is wrong with it"
        raise HostToolError(f"compare {release.name}", str(error), fix) from error
    return Answers(release.name, release.digest, host.clock.now(), answers)


def _answer(probe: Probe, prompt: str) -> Answer:
    chat = probe.path == CHAT
    more: dict[str, Any] = {"logprobs": _BEST, "return_tokens_as_token_ids": True}
    if chat:
        more |= {"logprobs": True, "top_logprobs": _BEST}
    body = probe.body([user(prompt)], _MOST_TOKENS, **more)
    said = probe.engine.ask(probe.path, body, probe.plan.timeout_s)
    try:
        choice = said["choices"][0]
        if chat:
            text = str(choice["message"].get("content") or "")
            steps = tuple(_chat_step(one) for one in choice["logprobs"]["content"])
        else:
            text = str(choice["text"])
            lists = choice["logprobs"]
            pairs = zip(lists["tokens"], lists["top_logprobs"], strict=True)
            steps = tuple(Step(token, _listed(best.items())) for token, best in pairs)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        what = f"the answer to {short(prompt)} has no log-probabilities of each token"
        raise CheckError(what) from error
    return Answer(prompt, text, steps)


def _chat_step(one: dict[str, Any]) -> Step:
    best = _listed((other["token"], other["logprob"]) for other in one["top_logprobs"])
    return Step(str(one["token"]), best)


def _listed(pairs: Any) -> dict[str, float]:
    found = {str(token): round(float(value), 5) for token, value in pairs}
    if not all(math.isfinite(value) and value <= 0.001 for value in found.values()):
        raise ValueError("a log-probability that is none")
    return found


def own_prompts(release: Release) -> list[str]:
    """Return what a release's check asks, for owners who name no prompts."""
    copies = [f"Repeat exactly: {text}" for text in release.check.copy]
    return [question.prompt for question in release.check.questions] + copies


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file, one a line.

    Raises:
        HostToolError: It cannot be read, is empty, or is too large.
    """
    fix = f"a text file with a prompt a line, at most {_MOST_PROMPTS}"
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        lines = [line.strip() for line in data.decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise HostToolError(str(path), f"cannot be read: {error}", fix, 2) from error
    prompts = list(dict.fromkeys(lines))
    if not prompts or len(prompts) > _MOST_PROMPTS or len(data) > _MOST_BYTES:
        what = f"has {len(prompts)} prompts in {len(data)} bytes"
        raise HostToolError(str(path), what, fix, 2)
    return prompts


def compare(name: str, host: Host) -> Comparison:
    """Ask what runs the prompts of a release's record, and compare; the same one tells the noise.

    Raises:
        HostToolError: There is no record, or no engine that answers.
    """
    before = host.disk.read(Answers, host.paths.answers(name))
    if before is None:
        fix = f"while {name} runs: spark-check --record [FILE]"
        raise HostToolError(f"compare {name}", "nothing was recorded of it here", fix)
    release = host.disk.load(boot.only_active(host), host.paths)
    prompts = [answer.prompt for answer in before.answers]
    return compared(before, ask(release, Engine.of(release, host.paths), prompts, host))


def main(words: list[str], host: Host) -> int:
    """Run ``check --record [FILE]`` or ``check --compare RELEASE [--json]``."""
    as_json = "--json" in words
    verb, *given = [word for word in words if word != "--json"]
    if verb == "--compare" and len(given) == 1:
        found = compare(given[0], host)
        print(text_of(plain(found)) if as_json else found, flush=True)
        return 0
    if verb == "--record" and len(given) < 2 and not as_json:
        release = host.disk.load(boot.only_active(host), host.paths)
        prompts = read_prompts(Path(given[0])) if given else own_prompts(release)
        kept = record(release, Engine.of(release, host.paths), prompts, host)
        print(f"{release.name}: {len(kept.answers)} answers are kept; after a change: "
              f"spark-check --compare {release.name}", flush=True)  # fmt: skip
        return 0
    what = f"does not take {' '.join(words)}"
    raise HostToolError("check", what, "--record [FILE], or --compare RELEASE [--json]", 2)
