"""How a container gets at the GPU on this host: through NVIDIA's runtime, or as a CDI device.

Decided once, from what the host has; the container check proves it, its receipt keeps it, and the
engine is started in the very same way.
"""

from __future__ import annotations

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.facts.docker import Docker

# Good with toolkit modes auto and legacy, and with every docker since 19.03.
RUNTIME = ("--runtime=nvidia",)
# Not through the runtime as well: where nvidia is the default it would add the devices once more.
CDI = ("--runtime=runc", "--device=nvidia.com/gpu=all")
SPECIFICATION = "/etc/cdi/nvidia.yaml"


def arguments(state: Docker) -> tuple[str, ...]:
    """Return the arguments of ``docker run`` that give a container the GPU.

    CDI only where the host's owner decided for it: the toolkit is forced to it, or there is no
    NVIDIA runtime. Hosts that have both serve through the runtime; freezes under load were seen
    with CDI there.
    """
    forced = state.toolkit_mode == "cdi"
    return CDI if without_runtime(state) or (forced and state.cdi_directories) else RUNTIME


def without_runtime(state: Docker) -> bool:
    """Whether the toolkit is there without its runtime, so that registering one would be a lie."""
    return bool(state.toolkit_version) and not state.runtime


def lacks_specification(state: Docker) -> bool:
    """Whether containers need a CDI specification that nobody has written yet."""
    # An engine without CDI uses one, too: the runtime resolves it where the toolkit is forced.
    needed = arguments(state) == CDI or state.toolkit_mode == "cdi"
    return needed and not state.cdi


def problem(state: Docker) -> Problem | None:
    """Say why no container can get at the GPU here; ``None`` when one can."""
    if arguments(state) != CDI or state.cdi_directories or not state.info:
        return None
    return Problem(
        "docker",
        f"the toolkit has no nvidia-container-runtime, and docker {state.info['ServerVersion']} "
        "does not read CDI specifications",
        "install nvidia-container-runtime, or set docker.daemon: {features: {cdi: true}} "
        "(docker 25 and newer)",
    )
