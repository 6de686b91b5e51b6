from hypothesis import settings


def examples(number: int) -> int:
    return max(1, number * settings.default.max_examples // 100)
