"""One step of a deploy each: one public ``apply(*, plan)``."""
