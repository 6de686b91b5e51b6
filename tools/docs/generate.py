"""Write the generated files; ``--check`` only reports whether they are current.

Schemas, group_vars/all.yml, settings.md and pictures are generated. Other pages have generated
tables between marks: from the catalog, plans, result files, open questions and reports of hosts.
"""

import argparse
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "files/host")]

from spark_deploy.cli.models import advice, fitting_profiles, settings_on  # noqa: E402
from spark_deploy.config.catalog.load import read_catalog  # noqa: E402
from spark_deploy.config.catalog.model import HybridModel, Model, PlainModel  # noqa: E402
from spark_deploy.config.catalog.profile import Profile  # noqa: E402
from spark_deploy.config.catalog.types import Catalog  # noqa: E402
from spark_deploy.config.settings.types import Settings  # noqa: E402
from spark_deploy.plan.memory import gib, loaded_bytes, plan_memory, weight_sizes  # noqa: E402
from tools.docs import evidence, screens, speed  # noqa: E402
from tools.docs.declared import DOCUMENTS, all_yml, command_rows, row, schema_file, settings_page  # noqa: E402

DEFAULT = Settings()


@functools.cache
def catalog() -> Catalog:
    return read_catalog()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only compare; exit with 1 if out of date"
    )
    check = parser.parse_args().check
    stale = [name for name, lines in FILES.items() if not _settle(CHECKOUT / name, lines, check)]
    for name in stale:
        sys.stderr.write(f"{name} is out of date; run `make docs`\n")
    return 1 if stale else 0


def _settle(path: Path, make: Callable[[], Iterable[str]], check: bool) -> bool:
    text = "\n".join(make()).rstrip() + "\n"
    if path.exists() and path.read_text("utf-8") == text:
        return True
    if not check:
        path.write_text(text, encoding="utf-8")
    return not check


def fill(name: str, parts: dict[str, Callable[[], Iterable[str]]]) -> Iterator[str]:
    """Yield a page with new content between the marks of each part, which must exist."""
    text = (CHECKOUT / name).read_text("utf-8")
    for part, make in parts.items():
        begin, end = f"<!-- begin of {part}: `make docs` -->", f"<!-- end of {part} -->"
        if begin not in text or end not in text:
            raise ValueError(f"{name} lacks {begin} or {end}")
        before, _, rest = text.partition(begin)
        lines = "\n".join(make()).strip()
        text = f"{before}{begin}\n\n{lines}\n\n{end}{rest.partition(end)[2]}"
    yield text


def hybrid_models() -> Iterator[str]:
    for model in _for_sparks():
        yield from _model(model)
    yield from ("", "## Memory on several hosts", "")
    yield "Per host, if several hosts serve a model together (`cluster.hosts`):"
    yield ""
    yield "| model | hosts | profile | weights | drafter | KV cache | full-length requests |"
    yield "|---|---|---|---|---|---|---|"
    for model in _for_sparks():
        yield from (_cluster_row(model, count) for count in (2, 4) if _fitting(model, count))


def plain_models() -> Iterator[str]:
    yield from ("| model | repository | task | choose this when |", "|---|---|---|---|")
    for model in catalog().models.values():
        if isinstance(model, PlainModel):
            yield row(f"`{model.name}`", f"`{model.repository}`", model.task, model.choose_when)


def _model(model: HybridModel) -> Iterator[str]:
    shape, sizes = model.architecture, weight_sizes(model.architecture)
    yield from ("", f"## {model.name}", "", f"{model.summary}.", "")
    yield from (f"**Choose this when** {model.choose_when}.", "")
    donor = f", FP8 source `{model.sources.donor}`" if model.sources.donor else ""
    yield f"- base `{model.sources.base}`{donor}"
    yield (
        f"- {shape.layers} layers ({shape.linear_layers} Gated DeltaNet layers, "
        f"{shape.attention_layers} full attention), {shape.experts} routed experts, "
        f"{shape.experts_per_token} active per token, "
        f"{shape.max_context_tokens:,} tokens of native context"
    )
    yield (
        f"- base checkpoint {_gb(sizes.tree_bytes)}, of which experts {_gb(sizes.experts_bytes)}, "
        f"MTP {_gb(sizes.mtp_bytes)}, "
        f"vision {_gb(sizes.vision_bytes)}"
        + (f", n-gram table {_gb(sizes.ngram_bytes)}" if sizes.ngram_bytes else "")
    )
    profiles = (catalog().profile(name, model.name) for name in _fitting(model))
    names = [profile.name for profile in profiles if _is_for_use(profile)]
    yield f"- profiles that fit on one host: {', '.join(names) or 'none'}"
    for count in (2, 4):
        yield from () if _fitting(model, count) else _fixes(model, count)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def _fixes(model: HybridModel, count: int) -> Iterator[str]:
    profile_name = next(iter(_fitting(model)), DEFAULT.profile)
    fix = advice(model.name, profile_name, catalog(), count)
    first, *others = re.split("(?:;|,) or ", fix)
    yield f"- on {count} hosts no profile fits: {'you can' if others else first}"
    yield from (f"  - {choice}" for choice in ([first, *others] if others else ()))


def _cluster_row(model: HybridModel, count: int) -> str:
    names = _fitting(model, count)
    chosen = DEFAULT.profile if DEFAULT.profile in names else names[0]
    profile = catalog().profile(chosen, model.name)
    plan = plan_memory(model, profile, settings_on(count, model.name, chosen))
    sizes = map(gib, (plan.weights_bytes, plan.drafter_bytes, plan.kv_cache_bytes))
    names_of_row = (f"`{model.name}`", count, f"`{chosen}`")
    return row(*names_of_row, *sizes, f"{plan.full_context_users:.1f}")


def profile_sections() -> Iterator[str]:
    profiles = [catalog().profile(name, Settings().model) for name in catalog().profile_names]
    yield ("| profile | choose this when | shared experts | LM head | KV cache | drafts | plugin |")
    yield "|---|---|---|---|---|---|---|"
    for shown in filter(_is_chosen_by_users, profiles):
        drafts = shown.speculation.tokens if shown.speculation else 0
        parts = (shown.shared_experts, shown.head, shown.kv_cache.dtype, drafts)
        yield row(f"`{shown.name}`", shown.choose_when, *parts, "yes" if shown.plugin else "no")
    stages = (f"`{shown.name}`" for shown in profiles if not _is_chosen_by_users(shown))
    yield f"\n{', '.join(stages)}: stages between `base` and `v2` that `bench --ladder` compares."
    for model in _for_sparks():
        fitting = [catalog().profile(name, model.name) for name in _fitting(model)]
        fitting = [profile for profile in fitting if _is_for_use(profile)]
        if not fitting:
            continue
        yield from ("", f"### Memory of {model.name}", "")
        yield "| profile | weights | drafter | KV cache | tokens | full-length requests |"
        yield "|---|---|---|---|---|---|"
        yield from (_memory_row(model, profile) for profile in fitting)


def _is_for_use(profile: Profile) -> bool:
    return profile.name != "plain" and _is_chosen_by_users(profile)


def _is_chosen_by_users(profile: Profile) -> bool:
    return not profile.choose_when.startswith("you compare stages")


def rail_rows() -> Iterator[str]:
    yield from ("| rule | effect | reason | evidence |", "|---|---|---|---|")
    for rail in catalog().rails:
        effect = f"{rail.effect} †" if rail.may_be_overridden else rail.effect
        yield row(f"`{rail.rule}`", effect, rail.reason, rail.evidence)


def profile_proofs() -> Iterator[str]:
    proofs: dict[tuple[str, str], dict[str, None]] = {}
    for name in catalog().profile_names:
        for proof in catalog().profile(name, Settings().model).proven:
            statement = (proof.what, evidence.device_of(proof.result))
            link = f"[{name}](results/gpu/{proof.result})"
            proofs.setdefault(statement, {})[link] = None
    yield from ("| what was verified | GPU | profiles and result files |", "|---|---|---|")
    for (shown, device), links in proofs.items():
        yield row(shown, device, ", ".join(links))


def _memory_row(model: Model, profile: Profile) -> str:
    weights, drafter = (gib(value) for value in loaded_bytes(model, profile))
    plan = plan_memory(model, profile, Settings())
    cells = (f"`{profile.name}`", weights, drafter, gib(plan.kv_cache_bytes))
    return row(*cells, f"{plan.kv_tokens:,}", f"{plan.full_context_users:.1f}")


def _fitting(model: Model, count: int = 1) -> list[str]:
    return sorted(fitting_profiles(model.name, catalog(), count))


def _for_sparks() -> list[HybridModel]:
    models = (model for model in catalog().models.values() if isinstance(model, HybridModel))
    return [model for model in models if not model.name.startswith("lab-")]


FILES: dict[str, Callable[[], Iterable[str]]] = {
    **{f"schema/{name}.schema.json": functools.partial(schema_file, name) for name in DOCUMENTS},
    **{
        f"docs/screens/{name}.svg": functools.partial(screens.picture, name)
        for name in screens.SCREENS
    },
    "group_vars/all.yml": all_yml,
    "docs/reference/settings.md": settings_page,
}
PARTS: dict[str, dict[str, Callable[[], Iterable[str]]]] = {
    "docs/reference/commands.md": {"commands": command_rows},
    "docs/reference/models.md": {"hybrid models": hybrid_models, "plain models": plain_models},
    "docs/reference/profiles.md": {"profiles": profile_sections, "guard rails": rail_rows},
    "docs/reference/speed.md": {
        "comparison": lambda: speed.compared_rows(catalog()),
        "measurements": lambda: speed.measured_rows(catalog()),
    },
    "proofs/speed-model.md": {
        "numbers": speed.number_rows,
        "parts of v3": lambda: speed.v3_rows(catalog()),
        "depth": lambda: speed.depth_rows(catalog()),
        "steps": lambda: speed.step_rows(catalog()),
    },
    "docs/reference/what-is-proven.md": {
        "parts": functools.partial(evidence.proven_rows, CHECKOUT),
        "questions": functools.partial(evidence.question_rows, CHECKOUT),
    },
    "proofs/engine-proofs.md": {"kernels": evidence.kernel_rows},
    "proofs/profiles.md": {"profiles": profile_proofs},
    "proofs/results/README.md": {
        folder: functools.partial(evidence.result_rows, folder) for folder in ("gpu", "cpu")
    },
    "proofs/results/sweeps/README.md": {"sweeps": evidence.sweep_sections},
}
FILES |= {name: functools.partial(fill, name, parts) for name, parts in PARTS.items()}

if __name__ == "__main__":
    sys.exit(main())
