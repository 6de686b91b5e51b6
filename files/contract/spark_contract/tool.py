"""Commands, output prefixes and errors of the host tools."""

import shlex
from dataclasses import dataclass

from spark_contract.paths import CURRENT_TOOLS, SYSUSERS

TOOL = "spark-host"
CHECK_TOOL = "spark-check"  # runs the check command
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


def command_line(command: str, *args: str) -> str:
    return shlex.join([HOST_TOOL, command, *args])


def when_installed(command: str) -> str:
    """Return a shell command that does nothing on a host without our tools."""
    return f"if [ -x {HOST_TOOL} ]; then {command}; fi"


SPEED = "speed: "  # prefix of a measurement without regression
PHASE = "phase="  # prefix of progress lines
WAITED = "waited_s="  # in our own lines of the engine's log
LIMIT = "limit_s="
# FlashAttention 2 and Marlin contain only PTX, which ptxas compiles in 3 to 5 minutes on one core.
COMPILING = "compiling kernels for this GPU on the first start: 3 to 5 minutes"
LAB_STUB_SUFFIX = "+labstub"  # in versions of lab stubs
ERROR = "error: "  # prefix of the last line of a failed tool
_FIX = "; fix: "


@dataclass(frozen=True, slots=True)
class Problem:
    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  fix: {self.fix}"

    @property
    def line(self) -> str:
        """The message that host tools print after ``ERROR``."""
        return f"{self.where}: {self.what}{_FIX}{self.fix}"


def parse_problem(line: str) -> Problem | None:
    if not line.startswith(ERROR):
        return None
    text, _, fix = line.removeprefix(ERROR).partition(_FIX)
    where, _, what = text.partition(": ")
    return Problem(where, what, fix or "see the messages above, then run the command again")


class HostToolError(Exception):
    """An error that ends a host tool with a single line instead of a traceback."""

    def __init__(self, where: str, what: str, fix: str, exit_code: int = 1):
        self.where = where
        self.what = what
        self.fix = fix
        self.exit_code = exit_code
        super().__init__(Problem(where, what, fix).line)
