"""What a run of the builder can end with, and its exit codes."""

from __future__ import annotations

from spark_contract.errors import HostToolError


class BuilderError(HostToolError):
    """Base of all errors of the builder; ``code`` is the exit code of its kind."""

    code = 2

    def __init__(self, where: str, what: str, fix: str):
        super().__init__(where, what, fix, self.code)


class InputRefused(BuilderError):  # noqa: N818 - named after what happened, like its siblings
    """A plan, an argument or the tool's own surroundings cannot be used."""


class GateRefused(BuilderError):  # noqa: N818
    """The sources or the host are not what the plan says; nothing was published."""

    code = 3


class HeaderRefused(GateRefused):
    """A file breaks the safetensors format."""


class TransferFailed(BuilderError):  # noqa: N818
    """Reading, writing or the network failed; running again goes on from here."""

    code = 4


class TreeDiffers(BuilderError):  # noqa: N818
    """A finished tree is no longer what its receipt says."""

    code = 5
