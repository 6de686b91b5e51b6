"""A chat template of one's own: a file of the controller, whose text travels in the release.

The engine takes the text itself, so nothing has to be mounted, the release's digest holds it, and a
changed template is a new release with its proof and way back.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from spark_deploy.config.settings.engine.engine import EngineSettings
from spark_deploy.config.settings.rules import Broken

OPTION = "chat-template"
LARGEST_BYTES = 65_536
"""Of one argument Linux takes twice as much."""
_KEY = ("chat_template",)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")  # but for tab and line feed


def with_template(engine: EngineSettings, root: Path) -> EngineSettings | Broken:
    """Return the settings with the template's text as the engine's option, or what is wrong.

    Args:
        engine: settings that follow their schema.
        root: folder of the inventory, from which a relative path counts.
    """
    if engine.chat_template is None:
        return engine
    if any(name.replace("_", "-") == OPTION for name in engine.options):
        return Broken(_KEY, f"and engine.options say {OPTION}", "keep one of the two")
    path = root / Path(engine.chat_template).expanduser()
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read ({type(error).__name__})"
        return Broken(_KEY, what, "name a text file of this machine")
    if wrong := _wrong_with(text):
        return Broken(_KEY, f"{path} {wrong}", "name a file with a Jinja template of a chat")
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
