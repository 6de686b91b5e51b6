"""What these tests share."""

from tests.judged_once import judged_once

__all__ = ["judged_once"]
