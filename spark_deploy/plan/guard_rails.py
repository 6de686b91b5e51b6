"""Check a plan against the rules of `catalog/guard_rails.yml` and the limits of its model."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spark_deploy.config.catalog.architecture import Architecture
from spark_deploy.config.catalog.guard_rails import GuardRail, all_hold
from spark_deploy.config.catalog.model import Model, PlainModel
from spark_deploy.config.catalog.profile import Profile, Speculation
from spark_deploy.config.catalog.types import ENGINE_NAME, Catalog, Engines, version_of
from spark_deploy.config.errors import PlanError, Problem, one_line
from spark_deploy.config.schema_errors import closest, suggest
from spark_deploy.config.settings.allowed import IGNORED_VARIABLES, find_unlisted
from spark_deploy.config.settings.engine import (
    DEVICE_OPTIONS,
    canonical_options,
    parse_whole_number,
)
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.engine_arguments import extends_context, loads_unlisted_model
from spark_deploy.plan.kv_cache import context_tokens, native_context_tokens
from spark_deploy.plan.messages import parser_problems, template_problems
from spark_deploy.plan.types import MemoryPlan

_MAX_EXPERT_WIDTH = 1 << 20
_FORMAT_OPTIONS = ("quantization", "quantization-config", "hf-overrides")
_KERNEL_OPTIONS = ("linear-backend", "moe-backend", "kernel-config")
# Alternative spellings of speculative-config fields.
_DRAFT_OPTIONS = {
    "spec-method": "method",
    "spec-model": "model",
    "spec-tokens": "num_speculative_tokens",
}
_LOGGING_OPTIONS = ("enable-log-requests", "enable-log-outputs")
# Each allows unpickling of untrusted data.
_UNPICKLING_VARIABLES = ("VLLM_ALLOW_INSECURE_SERIALIZATION", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
# Quantization methods with scales per group of inputs.
_GROUPED_METHODS = ("auto-round", "gptq", "awq", "compressed-tensors", "bit")
_LOCAL_SOCKETS = ("unix://", "fd://")
# vLLM up to 0.24 counted the page cache as used memory: docs/decisions/0005.
_LAST_COUNTING_CACHE_AS_USED = 24
# First vLLM minor version tested with cached prefixes and drafts: recall-prefixes.json.
_FIRST_TESTED_PREFIXES = 33
_MAX_RANKS = 16
# Values per scale of the routed experts: each rank must get whole groups.
_GROUPS = {"int4": 128, "nvfp4": 16}
# Values per FP8 scale of the shared experts.
_FP8_BLOCK = 128


def release_facts(
    model: Model, profile: Profile, memory: MemoryPlan, settings: Settings
) -> dict[str, Any]:
    """Return the facts about a release that rules can use."""
    version = version_of(settings.images.get(model.image.role, ""))
    minor = int(version.split(".")[1]) if version else None  # of vLLM 0.x
    options = canonical_options(profile.options)
    attention = _mapping(options.get("attention-config"))
    plugin_options = _mapping(_mapping(options.get("additional-config")).get("spark"))
    drafts = _draft_config(profile, options)
    tokens = parse_whole_number(drafts.get("num_speculative_tokens")) or 0
    indexer = None if isinstance(model, PlainModel) else model.architecture.sparse_attention
    builds_full = profile.builds_checkpoint and profile.layout == "full"
    # Rules about formats ignore the repository of a published model, which has no alternative.
    formats = [] if isinstance(model, PlainModel) else [model.sources.base]
    formats.append(profile.kv_cache.dtype)
    formats += [str(options.get(name, "")) for name in _FORMAT_OPTIONS]
    return {
        "model": model.name,
        "profile": profile.name,
        "kv_cache": profile.kv_cache.dtype,
        "speculation_method": drafts.get("method"),
        "speculation_tokens": tokens,
        "separate_draft_model": drafts.get("model") is not None,
        "draft_vocabulary": (profile.speculation and profile.speculation.draft_vocabulary_tokens)
        or 0,
        "drafts_by_option": not options.keys().isdisjoint(("speculative-config", *_DRAFT_OPTIONS)),
        "unused_draft_settings": tuple(_unused_draft_settings(profile, settings)),
        "prefix_caching": profile.prefix_caching,
        "max_sequences": profile.limits.max_sequences,
        "max_batched_tokens": profile.limits.max_batched_tokens,
        "memory_fraction": memory.memory_fraction,
        "block_tokens": memory.block_tokens,
        "attention_backend": str(
            options.get("attention-backend") or attention.get("backend") or ""
        ).upper(),
        "has_attention_backend": "attention-backend" in options or "backend" in attention,
        "async_scheduling": options.get("async-scheduling") is not False,
        "xqa_decode": attention.get("use_trtllm_attention") is not False,
        "eager": options.get("enforce-eager") is True,
        "piecewise_graphs": _mapping(options.get("compilation-config")).get("cudagraph_mode")
        == "PIECEWISE",
        "devices": math.prod(parse_whole_number(options.get(name)) or 1 for name in DEVICE_OPTIONS),
        "executor": str(options.get("distributed-executor-backend") or "").lower(),
        "pipeline_stages": int(options.get("pipeline-parallel-size") or 1),
        "expert_width_per_device": _expert_width(model, options, settings.ranks),
        "hosts": settings.ranks,
        "deep_gemm": _uses_deep_gemm(profile, options),
        "formats": " ".join(formats).lower(),
        "online_quantization": "quantization-config" in options,
        "engine_counts_cache_as_used": minor is not None and minor <= _LAST_COUNTING_CACHE_AS_USED,
        "engine_prefixes_unproven": minor is not None and minor < _FIRST_TESTED_PREFIXES,
        "expose": settings.serve.expose,
        "tls": settings.serve.tls,
        "plugin": profile.plugin,
        "engine_mode": profile.engine_mode,
        "shared_experts": profile.shared_experts,
        "head": plugin_options.get("lm_head") or profile.head,
        "vision": profile.vision,
        "ngram_table": profile.ngram_table or "none",
        "sparse_attention": indexer is not None,
        "ring_fits_block": indexer is None
        or memory.block_tokens % indexer.ring_tokens(tokens) == 0,
        "load_format": str(options.get("load-format", profile.load_format)).lower(),
        "checkpoint_needs_plugin": profile.checkpoint_needs_plugin,
        "checkpoint_repeats_names": _repeats_names(model) and not builds_full,
        "plugins_by_environment": "VLLM_PLUGINS" in profile.environment,
        "trust_remote_code": options.get("trust-remote-code") not in (None, False),
        "unlisted_options": find_unlisted(options, profile.environment),
        "atomic_add": profile.environment.get("VLLM_MARLIN_USE_ATOMIC_ADD", "0") != "0",
        "unread_variables": not profile.environment.keys().isdisjoint(IGNORED_VARIABLES),
        "unpickles": any(
            profile.environment.get(name, "0").strip().lower() not in ("", "0", "false")
            for name in _UNPICKLING_VARIABLES
        ),
        "questions_logged": _logs_questions(profile.environment, options),
        "docker_listens": _has_network_listener(settings.docker.daemon.get("hosts", ())),
        "stretched_context": extends_context(profile),
        "compaction_proactiveness": settings.base.compaction_proactiveness,
        "old_runner": not profile.environment.get("VLLM_USE_V2_MODEL_RUNNER", "1").strip(" 0"),
    }


def _logs_questions(environment: Mapping[str, str], options: Mapping[str, Any]) -> bool:
    by_option = any(options.get(name) not in (None, False) for name in _LOGGING_OPTIONS)
    debug = environment.get("VLLM_LOGGING_LEVEL", "").strip().upper() == "DEBUG"
    return by_option or debug or "VLLM_REQUEST_BODY_LOG_LEVEL" in environment


def _has_network_listener(hosts: Any) -> bool:
    addresses = hosts if isinstance(hosts, (list, tuple)) else (hosts,)
    return any(not str(address).startswith(_LOCAL_SOCKETS) for address in addresses)


def _repeats_names(model: Model) -> bool:
    if isinstance(model, PlainModel):
        return model.metadata is not None and model.metadata.repeats_names
    return model.sources.repeats_names


def _expert_width(model: Model, options: Mapping[str, Any], ranks: int) -> int:
    """Return the width of each expert's part on a device."""
    if isinstance(model, PlainModel):
        # Experts without groups of weights, or of unknown size, are never too narrow.
        metadata, width = model.metadata, _MAX_EXPERT_WIDTH
        if metadata and any(name in metadata.quantization for name in _GROUPED_METHODS):
            width = metadata.expert_width or _MAX_EXPERT_WIDTH
    else:
        width = model.architecture.expert_width
    if options.get("enable-expert-parallel") is True:
        return width  # whole experts per device
    return width // max(ranks, int(options.get("tensor-parallel-size") or 1))


def _uses_deep_gemm(profile: Profile, options: Mapping[str, Any]) -> bool:
    kernels = " ".join(str(options.get(name, "")) for name in _KERNEL_OPTIONS)
    by_option = "deep_gemm" in kernels.lower().replace("-", "_")
    return by_option or profile.environment.get("VLLM_USE_DEEP_GEMM", "0") != "0"


def _draft_config(profile: Profile, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the engine's speculative config, set by an option or the profile."""
    drafts, config = profile.speculation, {}
    if "speculative-config" in options:
        config = dict(_mapping(options["speculative-config"]))
    elif drafts:
        config = {"method": drafts.method, "num_speculative_tokens": drafts.tokens}
        config["model"] = drafts.repository
    return config | {
        field: options[name] for name, field in _DRAFT_OPTIONS.items() if name in options
    }


def _unused_draft_settings(profile: Profile, settings: Settings) -> Iterator[str]:
    drafts = profile.speculation
    for name in (*Speculation.__slots__, "drafter"):
        is_used = drafts and (name != "draft_vocabulary_text" or drafts.draft_vocabulary_tokens)
        if not is_used and getattr(settings.engine, name, None):
            yield f"engine.{name}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def apply_rails(
    rails: Sequence[GuardRail],
    facts: Mapping[str, Any],
    overridden: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return the warnings; raise PlanError if rules reject the plan.

    ``overridden`` has the reason for each rejecting rule that the owner overrides.
    """
    _reject_unknown_facts(rails, facts)
    rejections, warnings = list(_override_problems(rails, overridden)), []
    applicable = [rail for rail in rails if all_hold(rail.applies, facts)]
    for rail in applicable:
        lists = [facts[fact] for fact in rail.applies if isinstance(facts[fact], tuple)]
        listed = one_line(", ".join(value for values in lists for value in values))
        reason = f"{listed}: {rail.reason}" if lists else rail.reason
        if rail.effect == "warn":
            warnings.append(f"{rail.rule}: {reason}; {rail.fix}")
        elif rail.rule in overridden:
            warnings.append(f"{rail.rule} is overridden ({overridden[rail.rule]}): {reason}")
        else:
            fix = f"{rail.fix}, or set override_rails: {{{rail.rule}: REASON}}"
            where = f"model {facts['model']} with profile {facts['profile']}"
            message = f"rejected by guard rail {rail.rule}: {reason}"
            rejections.append(Problem(where, message, fix if rail.may_be_overridden else rail.fix))
    if rejections:
        raise PlanError(rejections)
    return tuple(warnings)


def _override_problems(
    rails: Sequence[GuardRail], overridden: Mapping[str, str]
) -> Iterator[Problem]:
    """Yield overrides of unknown rules, and of rules that cannot be overridden."""
    allowed = [rail.rule for rail in rails if rail.may_be_overridden]
    for rule in sorted(set(overridden).difference(allowed)):
        exists = any(rail.rule == rule for rail in rails)
        message = "cannot be overridden" if exists else "no such guard rail"
        fix = suggest(rule, allowed, f"allowed: {', '.join(allowed)}")
        yield Problem(f"override_rails: {rule}", message, fix)


def _reject_unknown_facts(rails: Sequence[GuardRail], facts: Mapping[str, Any]) -> None:
    """Raise PlanError for rules about unknown facts, because they would never apply."""
    problems = []
    for rail in rails:
        compared = (test["below_fact"] for test in rail.applies.values() if "below_fact" in test)
        for name in (*rail.applies, *compared):
            if name not in facts:
                fix = suggest(name, facts, f"known: {', '.join(sorted(facts))}")
                where = f"catalog/guard_rails.yml: {rail.rule}: {name}"
                problems.append(Problem(where, "unknown fact", fix))
    if problems:
        raise PlanError(problems)


def model_profile_problems(
    model: Model, profile: Profile, settings: Settings, engines: Engines
) -> list[Problem]:
    return [
        *_limit_problems(model, profile),
        *_multi_host_problems(model, profile, settings),
        *_architecture_problems(model, profile, settings, engines),
        *parser_problems(model, settings, engines),
        *template_problems(model, settings),
    ]


def _limit_problems(model: Model, profile: Profile) -> Iterator[Problem]:
    if isinstance(model, PlainModel):
        context_is_known = model.metadata is not None and model.metadata.context_tokens is not None
        can_draft = model.metadata is None or model.metadata.drafter_bytes > 0
    else:
        context_is_known, can_draft = True, model.architecture.mtp_layers > 0
    native, context = native_context_tokens(model), context_tokens(model, profile)
    if context > native and context_is_known and not extends_context(profile):
        message = f"{context:,} tokens exceed the context of {model.name} ({native:,})"
        fix = f"set engine.max_context_tokens to {native} or less, or remove the setting"
        yield Problem("engine.max_context_tokens", message, fix)
    if profile.speculation and profile.speculation.uses_model_layers and not can_draft:
        message = f"{model.name} has no MTP layer for drafts"
        fix = "set engine.drafts: 0, or choose a profile without drafts"
        yield Problem(f"profile {profile.name}", message, fix)
    if model.adapters and profile.speculation:
        message = f"drafts have never been tested with adapters, and {model.name} has adapters"
        yield Problem(f"profile {profile.name}", message, "set engine.drafts: 0")
    table = None if isinstance(model, PlainModel) else model.architecture.ngram_table
    if (table is None) != (profile.ngram_table is None):
        message = f"{model.name} has an n-gram table, but the profile does not set ngram_table"
        fix = f"choose a profile that `spark-deploy models {model.name}` lists"
        if table is None:
            setting = f"ngram_table: {profile.ngram_table}"
            message = f"{model.name} has no n-gram table, but the profile sets {setting}"
        yield Problem(f"profile {profile.name}", message, fix)
    limits = profile.limits
    if limits.max_sequences > limits.max_batched_tokens:
        message = f"{limits.max_sequences} exceeds max_batched_tokens ({limits.max_batched_tokens})"
        fix = f"set engine.max_sequences to {limits.max_batched_tokens} or less"
        yield Problem("engine.max_sequences", message, fix)


def _architecture_problems(
    model: Model, profile: Profile, settings: Settings, engines: Engines
) -> Iterator[Problem]:
    """Yield a problem if the engine lists no class for the repository's architecture.

    If the image's tag has no version, the engine reports the problem itself, after the download.
    """
    if not isinstance(model, PlainModel) or model.metadata is None:
        return
    image, name = settings.images.get(model.image.role, ""), model.metadata.architecture
    version, engine = engines.for_image(image)
    if engine is None or not name or loads_unlisted_model(profile) or engine.supports(name):
        return
    others = ", ".join(v for v, engine in engines.engines.items() if engine.supports(name))
    fix = f"use an image with {ENGINE_NAME} {others}" if others else "choose another repository"
    message = f"{ENGINE_NAME} {version} does not support the architecture {name}"
    yield Problem(f"model {model.name}", message, f"{fix}, or set engine.options.model-impl")


def role_problems(settings: Settings, catalog: Catalog) -> Iterator[Problem]:
    """Yield image roles that no model uses; a misspelled role would leave the default active."""
    added = set(settings.images).difference(Settings().images)
    if not added:  # avoids reading all models
        return
    known = sorted({"gpu_check", *(model.image.role for model in catalog.models.values())})
    for role in sorted(added.difference(known)):
        guess = closest(role, known)
        fix = f"did you mean images.{guess}?" if guess else f"known: {', '.join(known)}"
        yield Problem(f"images.{role}", "no model uses this image role", fix)


def engine_problems(
    model: Model, profile: Profile, settings: Settings, engines: Collection[str]
) -> Iterator[Problem]:
    """Yield a problem if the plugin does not support the engine version in the image's tag.

    Images without a version are checked while the plugin layer is built.
    """
    image = settings.images.get(model.image.role, "")
    version = version_of(image)
    if version and version not in engines and profile.plugin and model.image.plugin:
        known = ", ".join(sorted(engines))
        message = f"{image} contains vLLM {version}; the plugin supports {known}"
        fix = "use an image of a supported version, or a profile without the plugin"
        yield Problem(f"images.{model.image.role}", message, fix)


def _multi_host_problems(model: Model, profile: Profile, settings: Settings) -> Iterator[Problem]:
    ranks = settings.ranks
    if isinstance(model, PlainModel):
        if ranks > 1:
            message = f"{model.name} is served as published, so it can run on one host only"
            yield Problem("cluster.hosts", message, "serve the model on each host separately")
        return
    shape = model.architecture
    group = _GROUPS[shape.experts_scheme] if profile.engine_mode == "native" else 1
    shared_group = _FP8_BLOCK if group > 1 and profile.shared_experts != "keep" else 1
    uneven = list(_indivisible_sizes(shape, ranks, group, shared_group))
    if ranks == 1 or not uneven:
        return
    fitting = [
        str(count)
        for count in range(2, _MAX_RANKS + 1)
        # The guard rail experts-of-one-group rejects a single group per rank.
        if shape.expert_width // count > group
        and not list(_indivisible_sizes(shape, count, group, shared_group))
    ]
    fix = f"use {' or '.join(fitting)} hosts" if fitting else "serve it on each host separately"
    message = f"{model.name} cannot be split evenly over {ranks} hosts: {', '.join(uneven)}"
    yield Problem("cluster.hosts", message, fix)


def _indivisible_sizes(
    shape: Architecture, ranks: int, group: int, shared_group: int
) -> Iterator[str]:
    """Name the dimensions that cannot be split into ``ranks`` parts of whole groups."""
    if shape.kv_heads % ranks and ranks % shape.kv_heads:  # vLLM can replicate KV heads
        yield f"{shape.kv_heads} KV heads"
    heads = {"attention heads": shape.attention_heads}
    if (net := shape.linear_attention) is not None:
        heads |= {"key heads of linear attention": net.key_heads}
        heads |= {"value heads of linear attention": net.value_heads}
    yield from (f"{count} {name}" for name, count in heads.items() if count % ranks)
    widths = {
        "routed": (shape.expert_width, group),
        "shared": (shape.shared_expert_width, shared_group),
    }
    for name, (width, size) in widths.items():
        if width % (ranks * size):
            yield f"{name} experts of width {width} in groups of {size}"
