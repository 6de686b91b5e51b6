"""The 16-bit repository that lab-tiny's other two are roundings of, for quantising it anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lab.content import content_key

NAME = "lab/tiny"
MODEL_DIR = Path(__file__).with_name("model")


def ensure_sixteen_bit(hub: Path) -> None:
    """Have the repository of what the lab's trained weights are now.

    Imported inside, not above: the lab's long-lived processes run without the model's files.
    """
    key = content_key("16-bit", trees=[MODEL_DIR, Path(__file__)])
    mark = hub / ".sixteen-bit.json"
    if mark.exists() and json.loads(mark.read_text()) == {"key": key}:
        return
    from lab.model import repository, vocabulary, weights
    from lab.model.shape import TINY
    from lab.model.spread import spread

    work = hub / ".sixteen-bit.part"
    shutil.rmtree(work, ignore_errors=True)
    trained = spread(TINY, weights.read(TINY))
    repository.write_plain(work, TINY, trained, vocabulary.train(TINY.vocabulary))
    repository.publish(hub, NAME, [work])
    mark.write_text(json.dumps({"key": key}))
