"""Every check: when it is asked, what it weighs and why. docs/reference/checks.md is made of this.

``must`` weighs what a broken server fails and a right one never does; it fails a start or a
change. ``warn`` weighs what a right server may show as well; it is told and kept with the proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spark_contract import release

from spark_host.check import evidence, media_questions
from spark_host.check.probe import Probe, Weight
from spark_host.check.questions import conversation, pooled
from spark_host.check.questions.conversation import needle, prefix_reuse


@dataclass(frozen=True, slots=True)
class Check:
    """One check: from which level on it runs, what it weighs, and when the release asks for it."""

    name: str
    level: str
    run: Callable[[Probe], str]
    weight: Weight
    broken_by: str
    right_and_failing: str
    wanted: Callable[[Probe], bool] = lambda _: True


NEVER = "cannot"
_TALKATIVE = "cannot: any instruct model answers the questions without thinking"

CHECKS = (
    Check(
        "served names", "quick", evidence.served_names, "must",
        "another engine, or other arguments, than the release's", NEVER,
    ),
    Check(
        release.CONTEXT_LENGTH, "quick", evidence.context_length, "must",
        "the engine lowered the context, or read another configuration", NEVER,
    ),
    Check(
        release.LOG_LINES, "quick", evidence.log_lines, "must",
        "plugin, kernels or scales other than those that were proven",
        "cannot: the image is named by its digest, so its words do not change",
        lambda p: bool(p.plan.log_required or p.plan.log_forbidden),
    ),
    Check(
        "first answer", "quick", conversation.first_answer, "must",
        "damaged weights, a wrong kernel, a wedged engine: garbage, one token, nothing", _TALKATIVE,
        lambda p: bool(p.plan.plain_questions),
    ),
    Check(
        "answers", "full", conversation.all_answers, "must",
        "damage that one short answer does not show",
        "it thinks, and is wrong or does not come to an end: told as a warning",
        lambda p: len(p.plan.questions) > 1,
    ),
    Check(
        "copy", "full", conversation.copies, "must",
        "damaged numbers: letters fall out or change",
        "cannot: what it says around the string is not looked at",
        lambda p: bool(p.plan.copy),
    ),
    Check(
        "stream", "full", conversation.stream, "must",
        "an answer that breaks off, or lacks its end or its count of tokens", _TALKATIVE,
        lambda p: bool(p.plan.plain_questions),
    ),
    Check(
        "repeat", "full", conversation.repeats, "warn",
        "states or caches that one request leaves to the next",
        "kernels add up in another order, and two words that are nearly as likely change places",
        lambda p: p.plan.repeat and bool(p.plan.plain_questions),
    ),
    Check(
        "sampled", "full", conversation.sampled, "must",
        "kernels of the sampler, which greedy requests never run: nothing, or one token",
        "it samples another answer than the expected one: told as a warning",
        lambda p: bool(p.plan.plain_questions),
    ),
    Check(
        "tool call", "full", conversation.tool_call, "must",
        "a call that stays text, arguments that are no JSON or of another type",
        "it calls no tool, or asks for other values: told as a warning",
        lambda p: p.plan.tool_call,
    ),
    Check(
        "reasoning", "full", conversation.reasoning, "must",
        "thinking that is mixed into the answer",
        "it does not think, or answers wrong after it: told as a warning",
        lambda p: p.plan.reasoning and bool(p.plan.plain_questions),
    ),
    Check(
        "conversation", "full", conversation.conversation, "must",
        "earlier turns that are lost or mixed up", _TALKATIVE,
        lambda p: p.plan.conversation and bool(p.plan.plain_questions),
    ),
    Check(
        "parallel", "full", conversation.parallel, "must",
        "requests that get each other's answers, or none, when several run", _TALKATIVE,
        lambda p: bool(p.plan.plain_questions),
    ),
    Check(
        "image", "full", media_questions.image, "must",
        "pictures that do not reach the model: all are called the same",
        "it has another word for a colour: told as a warning",
        lambda p: p.plan.image,
    ),
    Check(
        "sound", "full", media_questions.sound, "must",
        "sounds that do not reach the model: a longer one takes no more of the context",
        "cannot: what it says of them is not looked at",
        lambda p: p.plan.sound,
    ),
    Check(
        "embedding", "quick", pooled.embedding, "must",
        "damaged weights, another pooling than the model's, numbers that are none",
        "cannot: the one text says what the other says, the third is about something else",
        lambda p: p.plan.task == "embedding",
    ),
    Check(
        "embedding beside others", "full", pooled.embedding_repeat, "must",
        "texts of one request that get into each other's numbers", NEVER,
        lambda p: p.plan.task == "embedding",
    ),
    Check(
        "ranking", "quick", pooled.ranking, "must",
        "damaged weights, a head that is not loaded: documents in no order",
        "cannot: the one document answers the question, the other is about something else",
        lambda p: p.plan.task == "reranking",
    ),
    Check(
        "classes", "quick", pooled.classes, "must",
        "damaged weights, a head that is not loaded, numbers that are no probabilities",
        "cannot: which class is right is not looked at",
        lambda p: p.plan.task == "classification",
    ),
    Check(
        release.PREFIX_REUSE, "full", prefix_reuse, "must",
        "prefix caching that is off, or gives back what was not asked",
        "it does not find the number in turn 1, which no cache has a part in: told as a warning",
        lambda p: p.plan.prefix is not None,
    ),
    Check(
        release.ACCEPTANCE, "full", evidence.acceptance, "must",
        "speculation that is off, or a drafter without its weights: under a tenth is accepted",
        "below the floor and above a tenth it is slow and right: told as a warning",
        lambda p: p.plan.acceptance_floor is not None,
    ),
    Check(
        release.NEEDLE, "deep", needle, "warn",
        "positions or caches that are damaged far from the end",
        "the model loses one number in a text that fills three quarters of its context",
        lambda p: p.plan.needle is not None,
    ),
    Check(
        release.COUNTERS, "quick", evidence.counters_move, "must",
        "metrics that stand still, by which the watch would not see a stall", NEVER,
        lambda p: bool(p.plan.plain_questions) or p.plan.task in pooled.ASKED,
    ),
    Check(
        "metrics", "quick", evidence.metrics_required, "must",
        "a setting of the cache that the engine did not take", NEVER,
        lambda p: bool(p.plan.metrics_required),
    ),
    Check(
        release.HEALTH, "quick", evidence.healthy, "must",
        "an engine that died of the questions", NEVER,
    ),
)  # fmt: skip

# What stands around the questions; the runner asks it by itself.
AROUND = (
    (
        release.MEMORY, "at a start",
        "less memory available than `memory.floor_gib` while it starts: the engine is stopped; or "
        "the GPU driver found no contiguous memory",
        "cannot: the host would have died; what else holds memory is a reason, too",
    ),
    (
        release.READY, "quick", "it ends, or does not listen within `serve.start_timeout_s`",
        "it loads from a slow disk: raise the limit",
    ),
    (
        "same run", "quick", "it was started anew meanwhile",
        "cannot: what was asked is not what runs",
    ),
)  # fmt: skip
