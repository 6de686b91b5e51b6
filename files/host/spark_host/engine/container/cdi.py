"""CDI specifications that an update of the driver left behind.

They name the driver's files by version, so a host that was updated and rebooted could start no
container that gets the GPU through one. Where none of another driver lies, nothing is done here.
"""

from __future__ import annotations

from spark_contract.machine import libcuda_version
from spark_contract.paths import Paths

from spark_host.records import proof
from spark_host.system.programs import ProgramSilent, Report, output_of


def refresh(report: Report, paths: Paths) -> None:
    """Make the specifications of another driver than the one that is loaded anew."""
    specs = [one for one in (paths.root / "etc/cdi").glob("*") if one.suffix in (".yaml", ".json")]
    try:
        driver = proof.driver() if specs else ""
    except ProgramSilent as error:
        report(f"{error}: whether the CDI specifications are of its driver is unknown")
        return
    for spec in sorted(specs) if driver else []:
        text = spec.read_text(errors="replace")
        version = libcuda_version(text)
        if "nvidia.com/gpu" not in text or version in ("", driver):
            continue
        report(f"{spec} is of driver {version}, {driver} is loaded; it is made anew")
        if output_of("nvidia-ctk", "cdi", "generate", f"--output={spec}") is None:
            # Not the end of the start: containers may get the GPU in another way.
            report(f"nvidia-ctk cdi generate --output={spec} failed; run it by hand to see why")
