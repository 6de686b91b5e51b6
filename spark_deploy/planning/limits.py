"""What a model, an engine and one host cannot do, whatever the memory: told with the numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from spark_deploy.catalog.engines import CALLED, Engines, version_of
from spark_deploy.catalog.model import Architecture, Model, PlainModel
from spark_deploy.catalog.profile import Profile
from spark_deploy.catalog.types import Catalog
from spark_deploy.documents.schema_check import closest
from spark_deploy.errors import Problem
from spark_deploy.planning.budget.memory import context_tokens, native_context_tokens
from spark_deploy.planning.engine.options import (
    BRING_OWN_CLASS,
    brings_own_class,
    stretches_context,
)
from spark_deploy.settings.types import Settings


def limit_problems(model: Model, profile: Profile) -> Iterator[Problem]:
    """Yield what of the effective profile the model or the engine refuses at its start."""
    most, wanted = native_context_tokens(model), context_tokens(model, profile)
    if wanted > most and _knows_context(model) and not stretches_context(profile):
        what = f"{wanted:,} tokens are more than {model.name} was made for ({most:,})"
        fix = f"set engine.max_context_tokens to {most} or less, or leave it out"
        yield Problem("engine.max_context_tokens", what, fix)
    if profile.speculation and profile.speculation.by_own_layers and not _can_draft(model):
        what = f"{model.name} has no MTP layer to draft with"
        fix = "set engine.drafts: 0, or choose a profile without drafts"
        yield Problem(f"profile {profile.name}", what, fix)
    if model.adapters and profile.speculation:
        what = f"{model.name} has adapters, and nobody proved that drafts fit their answers"
        yield Problem(f"profile {profile.name}", what, "set engine.drafts: 0")
    limits = profile.limits
    if limits.max_sequences > limits.max_batched_tokens:
        what = (
            f"{limits.max_sequences} are more than the {limits.max_batched_tokens} tokens of one "
            f"step of profile {profile.name}"
        )
        fix = f"set engine.max_sequences to {limits.max_batched_tokens} or less"
        yield Problem("engine.max_sequences", what, fix)


def architecture_problems(
    model: Model, profile: Profile, settings: Settings, engines: Engines
) -> Iterator[Problem]:
    """Yield why the engine cannot load a repository: it has no class of that name.

    Of an image whose tag tells no version nobody knows; it says so itself, after the download.
    """
    if not isinstance(model, PlainModel) or model.anatomy is None:
        return
    image, named = settings.images.get(model.image.role, ""), model.anatomy.architecture
    version, engine = engines.of_image(image)
    if engine is None or not named or brings_own_class(profile) or engine.lists(named):
        return
    others = [one for one, engine in engines.engines.items() if engine.lists(named)]
    fix = (
        f"name an image of {CALLED} {', '.join(others)}" if others else "choose another repository"
    )
    what = f"its architecture {named} is not one that {CALLED} {version} lists"
    yield Problem(f"model {model.name}", what, f"{fix}, or {BRING_OWN_CLASS}")


def parser_problems(model: Model, settings: Settings, engines: Engines) -> Iterator[Problem]:
    """Yield parsers that the engine would refuse once everything is downloaded."""
    version, engine = engines.of_image(settings.images.get(model.image.role, ""))
    if engine is None:
        return
    named = {"tool_call": model.parsers.tool_call, "reasoning": model.parsers.reasoning}
    for kind, parser in named.items():
        listed = getattr(engine, kind)
        if parser is not None and parser not in listed:
            guess = closest(parser, listed)
            fix = f"did you mean {guess}? Without" if guess else "leave it out: without"
            what = f"{parser} is no parser of {CALLED} {version}"
            yield Problem(f"model {model.name}: parsers.{kind}", what, f"{fix} one it stays text")


def _can_draft(model: Model) -> bool:
    """Whether it has layers of its own to draft with, as far as anybody knows."""
    if isinstance(model, PlainModel):
        return model.anatomy is None or model.anatomy.drafter_bytes > 0
    return model.architecture.mtp_layers > 0


def _knows_context(model: Model) -> bool:
    """Whether the longest context of a model is known, not taken for lack of a better one."""
    if isinstance(model, PlainModel):
        return model.anatomy is not None and model.anatomy.context_tokens is not None
    return True


def role_problems(settings: Settings, catalog: Catalog) -> Iterator[Problem]:
    """Yield images that nothing asks for: a misspelt role leaves the default in its place."""
    model = catalog.models.get(settings.model)
    told = {*Settings().images, *([model.image.role] if model else [])}
    for role in (role for role in settings.images if role not in told):
        known = sorted({"gpu_check", *(model.image.role for model in catalog.models.values())})
        if role not in known:
            guess = closest(role, known)
            fix = f"did you mean images.{guess}?" if guess else f"known: {', '.join(known)}"
            yield Problem(f"images.{role}", "no model has its engine under this name", fix)


def engine_problems(
    model: Model, profile: Profile, settings: Settings, engines: Collection[str]
) -> Iterator[Problem]:
    """Yield why our plugin cannot be laid on the image, as far as its tag tells a version.

    Other images are judged by the plugin's own check while its layer is built.
    """
    image = settings.images.get(model.image.role, "")
    version = version_of(image)
    if version and version not in engines and profile.plugin and model.image.plugin:
        known = ", ".join(sorted(engines))
        what = f"{image} is engine {version}, which the plugin does not know (known: {known})"
        fix = "name an image of one of these, or choose a profile without the plugin"
        yield Problem(f"images.{model.image.role}", what, fix)


_MOST_RANKS = 16
# INT4 and FP8 scales belong to so many values: a part of a matrix ends where one of them does.
_GROUP = 128


def spread_problems(model: Model, profile: Profile, settings: Settings) -> Iterator[Problem]:
    """Yield why the model cannot be spread over the hosts of the cluster, and what could."""
    ranks = settings.ranks
    if isinstance(model, PlainModel):
        if ranks > 1:
            what = f"{model.name} is served as published, which is by one host here"
            yield Problem("cluster.hosts", what, "let each host serve by itself")
        return
    shape = model.architecture
    group = _GROUP if profile.engine_mode == "native" else 1
    if ranks == 1 or not (uneven := list(_uneven(shape, ranks, group))):
        return
    fitting = [
        str(n)
        for n in range(2, _MOST_RANKS + 1)
        # One group on a rank is what the guard rail experts-of-one-group refuses.
        if not list(_uneven(shape, n, group)) and shape.expert_width // n > group
    ]
    fix = f"name {' or '.join(fitting)} hosts" if fitting else "let each host serve by itself"
    what = f"{model.name} cannot be cut into {ranks} equal parts: {', '.join(uneven)}"
    yield Problem("cluster.hosts", what, fix)


def _uneven(shape: Architecture, ranks: int, group: int) -> Iterator[str]:
    """Name what cannot be cut into so many parts that end where a group of scales does."""
    if shape.kv_heads % ranks and ranks % shape.kv_heads:  # repeated where they are fewer
        yield f"{shape.kv_heads} heads of keys and values"
    heads = {"attention heads": shape.attention_heads}
    if (net := shape.linear_attention) is not None:
        heads |= {"key heads of linear attention": net.key_heads}
        heads |= {"value heads of linear attention": net.value_heads}
    yield from (f"{count} {what}" for what, count in heads.items() if count % ranks)
    widths = {"routed": shape.expert_width, "shared": shape.shared_expert_width}
    for what, width in widths.items():
        if width % (ranks * group):
            yield f"{what} experts {width} wide in groups of {group}"
