"""The one error class of the host tools: where, what, how to fix."""

from __future__ import annotations


class HostToolError(Exception):
    """A mistake or a state that a person can act on; printed as one line, never as a traceback."""

    def __init__(self, where: str, what: str, fix: str, exit_code: int = 1):
        self.where = where
        self.what = what
        self.fix = fix
        self.exit_code = exit_code
        super().__init__(f"{where}: {what}; fix: {fix}")
