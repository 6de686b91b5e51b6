"""The text that a quantised model is tuned with: a file of the controller, which travels whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from spark_deploy.config.settings.rules import Broken
from spark_deploy.config.settings.service import RequantizeSettings

LARGEST_BYTES = 64 << 20
_KEY = ("calibration",)


def with_calibration(found: RequantizeSettings, root: Path) -> RequantizeSettings | Broken:
    """Return the settings with the file's content in place of its name, or what is wrong.

    Args:
        found: settings that follow their schema.
        root: folder of the inventory, from which a relative path counts.
    """
    if found.calibration is None:
        return found
    path = root / Path(found.calibration).expanduser()
    fix = 'name a file of this machine with a line {"text": "..."} for each text'
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return Broken(_KEY, f"{path} cannot be read ({type(error).__name__})", fix)
    if len(text) > LARGEST_BYTES:
        return Broken(_KEY, f"{path} is larger than {LARGEST_BYTES} bytes", "take a part of it")
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict) or not isinstance(said.get("text"), str):
            return Broken(_KEY, f"{path}, line {number} holds no text", fix)
    if not lines:
        return Broken(_KEY, f"{path} is empty", fix)
    return dataclasses.replace(found, calibration=text)
