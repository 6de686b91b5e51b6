"""Prepare and render conversations like the engine's API server; run by the engine's Python.

Arguments: files with a template, with conversations (JSON), and for the answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(template: str, conversations: str, answer: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template
    from vllm.renderers import chat_utils, hf

    text = chat_utils.load_chat_template(Path(template).read_text())  # as of an option
    assert text is not None
    prompts = []
    for messages, variables in json.loads(Path(conversations).read_text()):
        chat_utils._postprocess_messages(messages)
        prompt: Any = render_jinja_template(
            conversations=[messages], chat_template=text, **variables
        )
        prompts.append(prompt[0][0])
    found = {
        "content_format": hf._detect_content_format(text, default="string"),
        "handles_developer": hf._detect_developer_role_support(text),
        "variables": sorted(hf._resolve_chat_template_kwargs(text)),
        "prompts": prompts,
    }
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
