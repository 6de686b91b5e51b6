"""Write the generated files; ``--check`` only says whether they are current.

Schemas, group_vars/all.yml and settings.md come from the declarations (declared.py), models.md and
profiles.md from the catalog and the same arithmetic that plans use, the tables of what-is-proven.md
from the open questions and the reports of hosts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "files/host")]


from spark_contract.work.patterns import count  # noqa: E402
from spark_host.check.table import AROUND, CHECKS  # noqa: E402

from spark_deploy.catalog.load import read_catalog  # noqa: E402
from spark_deploy.catalog.model import HybridModel, Model, PlainModel  # noqa: E402
from spark_deploy.catalog.profile import Profile  # noqa: E402
from spark_deploy.catalog.types import Catalog  # noqa: E402
from spark_deploy.lockfile.resolve import size  # noqa: E402
from spark_deploy.planning.budget.memory import (  # noqa: E402
    context_tokens,
    gib,
    loaded_bytes,
    missing_bytes,
    plan_memory,
)
from spark_deploy.planning.budget.weights import weights_of  # noqa: E402
from spark_deploy.planning.resolve import problems_of  # noqa: E402
from spark_deploy.planning.types import MemoryPlan  # noqa: E402
from spark_deploy.settings.service.cluster import ClusterSettings  # noqa: E402
from spark_deploy.settings.types import Settings  # noqa: E402
from tools.docs.declared import DOCUMENTS, all_yml, cell, schema_file, settings_page  # noqa: E402
from tools.docs.proven import proven_page  # noqa: E402
from tools.docs.results import device_of, results_page  # noqa: E402
from tools.docs.speed import speed_page  # noqa: E402
from tools.docs.sweeps import sweeps_page  # noqa: E402

DEFAULT = Settings()


@functools.cache
def catalog() -> Catalog:
    """Return the catalog; read after its schemas are written."""
    return read_catalog()


def main() -> int:
    """Write or check all files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, 1 when out of date")
    check = parser.parse_args().check
    stale = [name for name, lines in FILES.items() if not _settle(CHECKOUT / name, lines, check)]
    for name in stale:
        sys.stderr.write(f"{name} is out of date; run `make docs`\n")
    return 1 if stale else 0


def _settle(path: Path, lines: Callable[[], Iterator[str]], check: bool) -> bool:
    text = "\n".join(lines()).rstrip() + "\n"
    if path.exists() and path.read_text("utf-8") == text:
        return True
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return not check


def models_page() -> Iterator[str]:
    """Yield the page of every model."""
    yield "<!-- generated from catalog/models by `make docs` -->"
    yield "# Models"
    yield ""
    yield (
        "Sizes are computed from the architecture, so they say what the engine loads, not what a "
        "repository happens to store. A new model is one new file in `catalog/models`."
    )
    models = catalog().models.values()
    for model in models:
        if isinstance(model, HybridModel):
            yield from _model(model)
    yield from ("", "## Repositories served as published", "", PLAIN_BEFORE, "")
    yield "| model | repository | asked for | choose this when | from |"
    yield "|---|---|---|---|---|"
    for plain in (model for model in models if isinstance(model, PlainModel)):
        told = " ".join(plain.imported) or "*ours, for the lab*"
        cells = (f"`{plain.name}`", f"`{plain.repository}`", plain.task, plain.choose_when, told)
        yield f"| {' | '.join(cell(one) for one in cells)} |"


def _model(model: HybridModel) -> Iterator[str]:
    shape, sizes = model.architecture, weights_of(model.architecture)
    tensors = model.tensors
    yield from ("", f"## {model.name}", "", f"{model.summary}.", "")
    yield from (f"**Choose this when** {model.choose_when}.", "")
    yield f"- base `{model.sources.base}`, FP8 donor `{model.sources.donor}`"
    yield (
        f"- {shape.layers} layers ({shape.linear_layers} gated delta nets, "
        f"{shape.attention_layers} full attention), {shape.experts} experts of which "
        f"{shape.experts_per_token} are routed, "
        f"{shape.max_context_tokens:,} tokens of native context"
    )
    yield (
        f"- base tree {size(sizes.tree_bytes)}: experts {size(sizes.experts_bytes)}, attention "
        f"{size(sizes.attention_bytes)}, shared experts {size(sizes.shared_bytes)}, LM head "
        f"{size(sizes.head_bytes)}, MTP {size(sizes.mtp_bytes)}, vision {size(sizes.vision_bytes)}"
    )
    yield (
        f"- {_count(tensors.base):,} tensors without MTP, {_count(tensors.base + tensors.mtp):,} "
        f"with it; {_count(tensors.swap):,} weights come from the donor, "
        f"{_count(tensors.donor_unmatched):,} of its tensors are expected to have no partner"
    )
    if tensors.counts is not None:
        yield f"- these counts: {tensors.counts.source}"
    for part in tensors.donor_shapes:
        yield (
            f"- donor `{part.modules}`: weight {list(part.weight)}, scales {list(part.scale)} "
            f"({part.source})"
        )
    yield f"- served on one host with: {', '.join(_served_with(model)) or 'no profile'}"
    for number in (2, 4):
        yield _together(model, number)


def _together(model: HybridModel, count: int) -> str:
    """Say with which profiles so many hosts serve a model together, and what each then holds."""
    names = _served_with(model, count)
    if not names:
        return f"- served by {count} hosts together (`cluster.hosts`) with: no profile"
    chosen = DEFAULT.profile if DEFAULT.profile in names else names[0]
    profile = catalog().profile(chosen, model.name)
    plan = plan_memory(model, profile, _on(count, model.name, chosen))
    return (
        f"- served by {count} hosts together (`cluster.hosts`) with: {', '.join(names)}; with "
        f"{chosen} each holds {gib(plan.weights_bytes)} of weights, {gib(plan.drafter_bytes)} of "
        f"drafter and {gib(plan.kv_cache_bytes)} of KV cache, {plan.full_context_users:.1f} "
        f"requests of full length (computed, run on no Spark)"
    )


def profiles_page() -> Iterator[str]:
    """Yield the page of every profile and the guard rails."""
    yield "<!-- generated from catalog/profiles and catalog/guard_rails.yml by `make docs` -->"
    yield "# Profiles"
    yield ""
    yield (
        "A profile is one way of serving. Computed figures are arithmetic for one host with the "
        "default settings and were proven on no Spark. Published figures are those of others. What "
        "is listed as proven is all there is: rows of this project's result files, of small models "
        "on a GPU that is not a Spark's ([when, at which commit](../../proofs/results/README.md)). "
        "*Tokens* are what the cache holds beside the states "
        "of as many requests as the profile computes at once; a *full-length request* takes whole "
        "blocks and states of its own, so fewer of them fit than these tokens divided by their "
        "length. Which profile is the default and why: "
        "[decision 10](../decisions/0010-profiles-and-their-defaults.md)."
    )
    sizes = (f"{gib(model.architecture.vision_bytes)} with {model.name}" for model in _for_sparks())
    yield ""
    yield (
        "No profile keeps the vision tower. `engine.vision: on` does, for all hosts or one: the "
        f"proof then asks about pictures, and the KV cache gives up {', '.join(sizes)}."
    )
    for name in catalog().profile_names:
        yield from _profile(name)
    yield from _compared()
    yield from ("", "## Guard rails", "")
    yield (
        "Combinations that are refused (or warned of) before a host is touched. *Measured here*: a "
        "result file shows it, on a GPU that is not a Spark's; *read in source*; *reported* by "
        "others only. What is marked † can be taken on with `override_rails: {RULE: WHY}`; the "
        "plan then warns."
    )
    yield from ("", "| rule | effect | why | instead | known | from |", "|---|---|---|---|---|---|")
    for rail in catalog().rails:
        known = {"measured": "*measured here*", "read": "*read in source*"}
        told = known.get(rail.evidence, "*reported*")
        effect = f"{rail.effect} †" if rail.may_be_overridden else rail.effect
        cells = (f"`{rail.rule}`", effect, rail.reason, rail.fix, told, rail.source)
        yield f"| {' | '.join(cell(one) for one in cells)} |"


def checks_page() -> Iterator[str]:
    """Yield the page of every check of a server."""
    yield "<!-- generated from files/host/spark_host/check/table.py by `make docs` -->"
    yield "# Checks of a server"
    yield from ("", CHECKS_BEFORE, "")
    yield "| check | from | weight | what breaks it | how a right server could still fail it |"
    yield "|---|---|---|---|---|"
    around = [(name, level, "must", broken, right) for name, level, broken, right in AROUND]
    asked = [
        (one.name, one.level, one.weight, one.broken_by, one.right_and_failing) for one in CHECKS
    ]
    for name, level, weight, broken, right in [*around, *asked]:
        yield f"| {name} | {level} | `{weight}` | {cell(broken)} | {cell(right)} |"


def _profile(name: str) -> Iterator[str]:
    shown = catalog().profile(name, Settings().model)
    yield from ("", f"## {name}", "", f"{shown.summary}.", "")
    yield from (f"**Choose this when** {shown.choose_when}.", "")
    drafts = (
        f"{shown.speculation.tokens} draft tokens ({shown.speculation.method})"
        if shown.speculation
        else "no drafts"
    )
    plugin = "with our plugin" if shown.plugin else "unmodified engine image"
    yield (
        f"Shared experts {shown.shared_experts}, LM head {shown.head}, KV cache "
        f"{shown.kv_cache.dtype}, {drafts}, {plugin}."
    )
    yield from ("", "| model | weights | drafter | KV cache | tokens | full-length requests |")
    yield "|---|---|---|---|---|---|"
    for model in _for_sparks():
        yield _memory_row(model, catalog().profile(name, model.name))
    if shown.published:
        yield from ("", "| published | figure | source |", "|---|---|---|")
        for figure in shown.published:
            yield f"| {cell(figure.what)} | {cell(figure.value)} | {cell(figure.source)} |"
    else:
        yield from ("", "Nobody has published a figure of it.")
    if not shown.proven:
        yield from ("", "Nothing is proven of it yet.")
        return
    yield from ("", "| proven by this project | on | result |", "|---|---|---|")
    for row in shown.proven:
        link = f"[{row.result}](../../proofs/results/gpu/{row.result})"
        yield f"| {cell(row.what)} | {device_of(row.result)} | {link} |"


def _memory_row(model: Model, profile: Profile) -> str:
    weights, drafter = (gib(value) for value in loaded_bytes(model, profile))
    if not _fits(model, profile):
        return f"| {model.name} | {weights} | {drafter} | does not fit on one host | | |"
    plan = plan_memory(model, profile, Settings())
    requests = f"{plan.full_context_users:.1f} of {context_tokens(model, profile):,}"
    cells = (
        model.name,
        weights,
        drafter,
        gib(plan.kv_cache_bytes),
        f"{plan.kv_tokens:,}",
        requests,
    )
    return f"| {' | '.join(cells)} |"


def _fits(model: Model, profile: Profile) -> bool:
    return missing_bytes(model, profile, Settings()) <= 0


def _on(count: int, model: str, profile: str) -> Settings:
    """Return the settings of a host, or of one of so many that serve together."""
    hosts = tuple(f"spark-{number + 1}" for number in range(count)) if count > 1 else ()
    return Settings(model=model, profile=profile, cluster=ClusterSettings(hosts=hosts))


def _served_with(model: Model, count: int = 1) -> list[str]:
    """Return the profiles that the plan does not refuse for ``model`` on so many hosts."""
    pairs = ((name, _on(count, model.name, name)) for name in catalog().profile_names)
    return [name for name, settings in pairs if not problems_of(settings, catalog())]


def _for_sparks() -> list[HybridModel]:
    models = (one for one in catalog().models.values() if isinstance(one, HybridModel))
    return [model for model in models if not model.name.startswith("lab-")]


def _count(patterns: tuple[str, ...]) -> int:
    return sum(count(pattern) for pattern in patterns)


def _compared() -> Iterator[str]:
    yield from ("", "## Computed beside published", "")
    yield COMPARED_BEFORE
    yield from (
        "",
        "| KV cache | published | as 0.19 counts | requests of 262,144 |",
        "|---|---|---|---|",
    )
    counted = {dtype: _plan_at_090(dtype) for dtype in ("auto", *PRESETS)}
    beside = {"auto": PUBLISHED_PLAIN, _nearest(counted): PUBLISHED_TURBOQUANT}
    apart = []
    for dtype, found in counted.items():
        then = _as_counted_then(found)
        groups = f"{found.kv_tokens:,} tokens / {GROUPS} groups = {then:,}"
        said = ""
        if dtype in beside:
            tokens, users = beside[dtype]
            said = f"{tokens:,} tokens, {users}"
            apart.append(f"{abs(then / tokens - 1):.0%}".removesuffix("%"))
        row = f"| {dtype} | {said} | {groups} | {found.full_context_users} |"
        yield row.replace("|  |", "| |")
    yield ""
    yield COMPARED_AFTER.replace("APART", " and ".join(apart))


def _as_counted_then(plan: MemoryPlan) -> int:
    return (plan.kv_tokens or 0) // GROUPS


def _nearest(counted: dict[str, MemoryPlan]) -> str:
    """Return the preset whose cache, as counted then, is nearest to the published one."""
    tokens, _ = PUBLISHED_TURBOQUANT
    return min(PRESETS, key=lambda dtype: abs(_as_counted_then(counted[dtype]) - tokens))


def _plan_at_090(dtype: str) -> MemoryPlan:
    [model] = (one for one in _for_sparks() if one.name == DEFAULT.model)
    profile = catalog().profile(DEFAULT.profile, model.name)
    profile = dataclasses.replace(
        profile,
        kv_cache=dataclasses.replace(profile.kv_cache, dtype=dtype),
        limits=dataclasses.replace(profile.limits, memory_fraction=0.9, max_sequences=1),
    )
    return plan_memory(model, profile, Settings())


# Cache groups of this architecture, and tokens and users as published.
GROUPS = 4
PUBLISHED_PLAIN = (355_000, "1 user")
PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
PUBLISHED_TURBOQUANT = (1_400_000, "5 users")

PLAIN_BEFORE = """
Files of `kind: plain` name a repository and what its engine needs; profile `plain` serves them.
Weights, context and cache are read from the repository's own headers and `config.json` at the
locked commit, and stand in the lock. Those marked *imported* were made from the publishers' own
pages and recipes and never run by this project. How to add one:
[add a model](../how-to/add-a-model.md).
""".strip()

COMPARED_BEFORE = """
Published by the community for Qwen3.5-122B on vLLM 0.19, with two draft tokens; neither memory
fraction nor preset stands beside the figures. Their commands take 0.88 to 0.90; ours is computed
for 0.90, of which the reserve of 12 GiB leaves 0.89. The figure with TurboQuant stands beside the
preset that comes nearest to it; profile `v2-tq` has `turboquant_k8v4`, which holds less.
""".strip()

COMPARED_AFTER = """
The engine of that time logged the number of blocks divided by the number of cache groups
(`v1/core/kv_cache_utils.py` of 0.19.1), and this architecture has four: one of attention, three of
gated delta nets. A request needs a page for each piece of its context in the first one only, and
a few blocks for its state in the others, so about four times as many tokens fit as that line
says, and the users counted from it are too few by as much. 0.33.0 logs the requests of full length
that fit, times their length. What is left between published and ours (APART %) is what weights
and runtime took then and what we estimate. The figure that decides is what a running engine logs;
the plan's is for choosing and refusing before the first byte.
""".strip()

CHECKS_BEFORE = """
`must` is what a broken server fails and a right one never does: it fails a start, and sends a
change back. `warn` is what a right server may show as well: it is told by the deploy and by
`status`, stands in the proof, and ends nothing. Where the last column says so, one part of a check
weighs less than the rest. An engine that answers with an error fails whatever is asked.

`quick` is asked at every start, `full` when a release is proven, `deep` by `spark-check --deep`. A
question with `thinking: off` in a model's file is one that any instruct model answers at once; the
first of them is asked at every start. With `thinking: true` the model may think, and may be wrong.
""".strip()

FILES: dict[str, Callable[[], Iterator[str]]] = {
    **{f"schema/{name}.schema.json": functools.partial(schema_file, name) for name in DOCUMENTS},
    "group_vars/all.yml": all_yml,
    "docs/reference/settings.md": settings_page,
    "docs/reference/models.md": models_page,
    "docs/reference/profiles.md": profiles_page,
    "proofs/results/README.md": results_page,
    "proofs/results/sweeps/README.md": sweeps_page,
    "docs/reference/speed.md": lambda: speed_page(catalog()),
    "docs/reference/checks.md": checks_page,
    "docs/reference/what-is-proven.md": functools.partial(proven_page, CHECKOUT),
}

if __name__ == "__main__":
    sys.exit(main())
