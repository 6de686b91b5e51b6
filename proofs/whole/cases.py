"""Engine cases from plans."""

import json
from typing import Any

CONTEXT_TOKENS = 1000  # the timed steps grow it to about 1,100
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Without torch.compile, which takes a minute per engine."""
NOT_OF_THE_ENGINE = (
    "served_model_name",
    "disable_access_log_for_endpoints",
    "reasoning_parser",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "chat_template",
    "uds",
)


def case_of(engine: dict[str, Any]) -> dict[str, Any]:
    drafts = engine["drafts"]
    options = to_options(engine["argv"])
    sizes = sorted({1, 1 + drafts})
    options["compilation_config"] = {**GRAPHS, "cudagraph_capture_sizes": sizes}
    if drafts:  # names are counted on the CPU's copy of the files
        options["load_format"] = "auto"
    plain = engine["build"] is None
    return {
        "name": engine["name"],
        "tree": f"{engine['model']}-{'base' if plain else 'v2'}",
        "plugins": "" if plain else "spark",
        "prompts": "ids",
        "count_names": bool(drafts),
        "context_tokens": CONTEXT_TOKENS,
        "options": options,
    }


def to_options(argv: list[str]) -> dict[str, Any]:
    """Return the engine's options from the arguments of ``vllm serve``, without the server's."""
    options: dict[str, Any] = {}
    for place, word in enumerate(argv):
        if not word.startswith("--"):
            continue
        name = word.removeprefix("--").replace("-", "_")
        following = argv[place + 1] if place + 1 < len(argv) else "--"
        if not following.startswith("--"):
            options[name] = _value(following)
        elif name.startswith("no_"):
            options[name.removeprefix("no_")] = False
        else:
            options[name] = True
    return {name: value for name, value in options.items() if name not in NOT_OF_THE_ENGINE}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
