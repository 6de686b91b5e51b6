"""The tool on a host: its names, and the words that a controller says to it."""

from __future__ import annotations

import shlex

from spark_contract.paths import CURRENT_TOOLS, SYSUSERS

TOOL = "spark-host"
CHECK_TOOL = "spark-check"  # the same tool's check, by a name of its own
COMMANDS_DIR = "/usr/local/bin"
HOST_TOOL = f"{CURRENT_TOOLS}/bin/{TOOL}"
MAKE_USERS = f"systemd-sysusers {SYSUSERS}"

CHECK = "check"
EVIDENCE = "evidence"
FABRIC = "fabric"
FABRIC_SPEED = "fabric-speed"
FENCE = "fence"
GATEWAY_NEW_KEY = "gateway-new-key"
GATEWAY_RELOAD = "gateway-reload"
IMAGE = "image"
LAYERS_OPTION = "--layers"
JOB = "job"
MANIFEST = "manifest"
NOTE = "note"
PRUNE = "prune"
RETIRE_SERVICE = "retire-service"
ROLLBACK = "rollback"
START_SERVICE = "start-service"
STATUS = "status"
STOP_SERVICE = "stop-service"
SWITCH_BEGIN = "switch-begin"
SWITCH_POLL = "switch-poll"
UNINSTALL = "uninstall"


def line(verb: str, *words: str) -> str:
    """Return the line of shell that says a word of the above to the tool on a host."""
    return shlex.join([HOST_TOOL, verb, *words])


def when_installed(command: str) -> str:
    """Return a line of shell that does nothing on a host without our tools."""
    return f"if [ -x {HOST_TOOL} ]; then {command}; fi"


SPEED = "speed: "  # begins a measurement that is not worse than the one before
PHASE = "phase="  # begins lines that tell how far work is
WAITED = "waited_s="  # in our own lines of an engine's log, not in the engine's
# FlashAttention 2 and Marlin hold PTX only: the driver took 3 to 5 minutes on one core (ptxas).
COMPILING = "compiling kernels for this GPU, first start only: 3 to 5 minutes"
STAND_IN = "+labstub"  # in versions of what only stands for the real thing
