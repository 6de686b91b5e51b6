"""A chat template of one's own: a file of the controller, whose text travels in the release.

The engine takes the text itself, so nothing has to be mounted, the release's digest holds it, and a
changed template is a new release with its proof and way back.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from spark_deploy.config.documents import Violation
from spark_deploy.config.settings.engine import EngineSettings
from spark_deploy.config.settings.service import RequantizeSettings

OPTION = "chat-template"
LARGEST_BYTES = 65_536
"""Of one argument Linux takes twice as much."""
_KEY = ("chat_template",)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")  # but for tab and line feed


def with_template(engine: EngineSettings, root: Path) -> EngineSettings | Violation:
    """Return the settings with the template's text as the engine's option, or what is wrong.

    Args:
        engine: settings that follow their schema.
        root: folder of the inventory, from which a relative path counts.
    """
    if engine.chat_template is None:
        return engine
    if any(name.replace("_", "-") == OPTION for name in engine.options):
        return Violation(_KEY, f"and engine.options say {OPTION}", "keep one of the two")
    path = root / Path(engine.chat_template).expanduser()
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read ({type(error).__name__})"
        return Violation(_KEY, what, "name a text file of this machine")
    if wrong := _wrong_with(text):
        return Violation(_KEY, f"{path} {wrong}", "name a file with a Jinja template of a chat")
    return dataclasses.replace(engine, options={**engine.options, OPTION: text})


def _wrong_with(text: str) -> str | None:
    if len(text.encode()) > LARGEST_BYTES:
        return f"is larger than {LARGEST_BYTES} bytes"
    if _CONTROL.search(text):
        return "holds a control character"
    if "messages" not in text or "{" not in text:
        return "reads no messages"
    if text.startswith("-"):
        return "begins with '-', which the engine would read as an option"
    return None


MAX_CALIBRATION_BYTES = 64 << 20


def with_calibration(found: RequantizeSettings, root: Path) -> RequantizeSettings | Violation:
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
        return Violation(("calibration",), f"{path} cannot be read ({type(error).__name__})", fix)
    if len(text) > MAX_CALIBRATION_BYTES:
        return Violation(
            ("calibration",),
            f"{path} is larger than {MAX_CALIBRATION_BYTES} bytes",
            "take a part of it",
        )
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict) or not isinstance(said.get("text"), str):
            return Violation(("calibration",), f"{path}, line {number} holds no text", fix)
    if not lines:
        return Violation(("calibration",), f"{path} is empty", fix)
    return dataclasses.replace(found, calibration=text)
