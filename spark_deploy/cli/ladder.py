"""``spark-deploy bench --ladder``: each stage served, proven and measured, then back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from spark_deploy.bench.result import BenchResult
from spark_deploy.cli import run_pyinfra
from spark_deploy.cli.hosts import Target, build_plan, select_hosts
from spark_deploy.cli.options import Options
from spark_deploy.cli.terminal import note
from spark_deploy.config.errors import SparkError


def stages_of(host: Target) -> list[str]:
    """Return the profiles that are stages of what a host serves, in their order.

    Raises:
        SparkError: none is.
    """
    model = host.settings.settings.model
    found = {one.stage: name for (name, of), one in host.catalog.profiles.items() if of == model}
    found.pop(None, None)
    if not found:
        fix = "give profiles of catalog/ a `stage`"
        raise SparkError.one(host.name, f"no profile is a stage of {model}", fix)
    return [found[stage] for stage in sorted(filter(None, found))]


def climb(
    options: Options, measure: Callable[[Target], BenchResult]
) -> tuple[int, list[BenchResult]]:
    """Serve and measure the stages, then what the settings say again.

    Returns:
        An exit code, and what was measured until then.

    Raises:
        SparkError: a stage does not fit, before anything is changed; or nobody agreed.
    """
    hosts = select_hosts(options)
    names, stages = [host.name for host in hosts], stages_of(hosts[0])
    steps = [replace(options, profile=stage) for stage in stages]
    for step in steps:
        for host in select_hosts(step):
            build_plan(host)
    run_pyinfra.agreed(
        options.yes,
        f"{', '.join(names)}: serve {', '.join(stages)} one after the other, and then what the "
        "settings say? Clients get 503 while engines change.",
    )
    results: list[BenchResult] = []
    try:
        for step in steps:
            if code := _served(step, names):
                note(f"{step.profile} does not serve: the ladder ends here")
                return code, results
            results += [measure(host) for host in select_hosts(step)]
    finally:
        note("back to what the settings say")
        back = _served(options, names)
    return back, results


def _served(options: Options, names: Sequence[str]) -> int:
    """Run a deploy as `up` does; returns its exit code."""
    words = run_pyinfra.line("up", options, names, ["-y"])
    run_pyinfra.show(words)
    return run_pyinfra.watched("up", words, names, options)
