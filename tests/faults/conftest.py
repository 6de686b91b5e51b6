"""Faults are planted on the same two hosts."""

from tests.host.conftest import fleet

__all__ = ["fleet"]
