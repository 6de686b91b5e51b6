"""The lab's own error: where, what, how to fix."""

from __future__ import annotations


class LabError(Exception):
    """Something the person running the lab can fix; printed as one message, no traceback."""

    def __init__(self, where: str, what: str, fix: str):
        self.where, self.what, self.fix = where, what, fix
        super().__init__(f"{where}: {what}\n  fix: {fix}")
