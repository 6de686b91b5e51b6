"""What reports of Sparks say of the computed speed: the plan's range is moved by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spark_deploy.catalog.model import HybridModel
from spark_deploy.catalog.types import Catalog
from spark_deploy.checkout import CHECKOUT
from spark_deploy.cli.hosts import say
from spark_deploy.cli.looks.report.document import HostReport
from spark_deploy.cli.looks.report.markdown import read_report
from spark_deploy.errors import SparkError
from spark_deploy.planning.budget.speed import Calibration, calibrated, speed_of

ONE_STREAM = "one_stream_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one Spark measured of one request, beside what is computed."""

    report: str
    model: str
    profile: str
    tokens_per_s: float
    computed_tokens_per_s: float


def calibration(root: Path, catalog: Catalog) -> Calibration:
    """Return what the reports of this checkout and of an inventory's folder say together."""
    found = measured(files_of(root), catalog)
    return calibrated((one.tokens_per_s, one.computed_tokens_per_s) for one in found)


def files_of(root: Path) -> list[Path]:
    """Return the reports of the checkout, and those that lie in a folder or its ``reports``."""
    found = [*(CHECKOUT / "reports").glob("*.md"), *(root / "reports").glob("*.md")]
    found += root.glob("spark-report-*.md")
    return sorted({path.resolve() for path in found if path.name != "README.md"})


def measured(paths: Iterable[Path], catalog: Catalog) -> Iterator[Measured]:
    """Yield the speed of each Spark that was measured with a pair that the catalog knows.

    Of a host that several reports are of, each is a measurement of its own.
    """
    for path in paths:
        try:
            hosts = read_report(path).hosts
        except (OSError, SparkError) as error:
            say(f"{path}: the speed is computed without it: {error}")
            continue
        yield from (one for host in hosts for one in _of(path.name, host, catalog))


def _of(report: str, host: HostReport, catalog: Catalog) -> Iterator[Measured]:
    serving = host.serving
    if serving is None or not host.is_spark or serving.portable:
        return
    profile = catalog.profiles.get((serving.profile, serving.model))
    found = serving.speed.get(ONE_STREAM)
    if profile is None or not found:
        return
    model = catalog.model(serving.model)
    if isinstance(model, HybridModel):
        computed = speed_of(model.architecture, profile).tokens_per_s
        yield Measured(report, model.name, profile.name, found, computed)
