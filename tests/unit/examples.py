from hypothesis import settings


def examples(number: int) -> int:
    """Return the number of examples, or a tenth of it where the quick tests run alone."""
    return max(1, number * settings.default.max_examples // 100)
