"""Every deliberate error of the builder: where, what, how to fix it, and the exit code."""

from __future__ import annotations

EXIT_OK = 0
EXIT_INPUT = 2
EXIT_GATE = 3
EXIT_TRANSFER = 4
EXIT_DIFFERS = 5


class BuilderError(Exception):
    """Base of all errors a user can meet; printed as one line, never as a traceback."""

    exit_code = EXIT_INPUT

    def __init__(self, where: str, what: str, fix: str):
        self.where, self.what, self.fix = where, what, fix
        super().__init__(f"{where}: {what}; fix: {fix}")


class InputRefused(BuilderError):  # noqa: N818 - named after what happened, like its siblings
    """A plan, an argument or the tool's own surroundings cannot be used."""

    exit_code = EXIT_INPUT


class GateRefused(BuilderError):  # noqa: N818
    """The sources or the host are not what the plan says; nothing was published."""

    exit_code = EXIT_GATE


class HeaderRefused(GateRefused):
    """A file breaks the safetensors format."""


class TransferFailed(BuilderError):  # noqa: N818
    """Reading, writing or the network failed; running again goes on from here."""

    exit_code = EXIT_TRANSFER


class TreeDiffers(BuilderError):  # noqa: N818
    """A finished tree is no longer what its receipt says."""

    exit_code = EXIT_DIFFERS
