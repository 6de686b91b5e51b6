"""Download, build and verify checkpoints on the host that serves them.

Third-party packages: urllib3 for downloads, numpy for builds.
"""

from spark_contract.tool import HostToolError

TOOL_VERSION = "0.1.0"


class BuilderError(HostToolError):
    code = 2

    def __init__(self, where: str, what: str, fix: str):
        super().__init__(where, what, fix, self.code)


class InputError(BuilderError):
    """A plan, an argument or the environment is invalid."""


class ValidationError(BuilderError):
    code = 3


class TransferError(BuilderError):
    code = 4


class ReceiptMismatchError(BuilderError):
    code = 5
