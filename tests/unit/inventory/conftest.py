"""What these tests share."""

from tests.unit.judged_once import judged_once

__all__ = ["judged_once"]
