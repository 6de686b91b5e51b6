import json
import random
from typing import Any

COLORS = {
    "red": (220, 20, 20),
    "green": (20, 180, 20),
    "blue": (20, 20, 220),
    "yellow": (230, 220, 20),
    "white": (240, 240, 240),
    "black": (15, 15, 15),
}
SINGLE_PICTURE = "What colour is this picture? Answer with one word."
SEVERAL_PICTURES = "What colours are these pictures, in order?"


IDS_LENGTHS = [200, 96, 33]
PICTURE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>What is the capital of France?"
PICTURES = (1, 2, 1)
CONTEXT_TOKENS, CONTEXT_SEED = 4064, 9
FILLER = "The sky is blue. "


def random_prompts(lengths: list[int]) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(1000) for _ in range(size)] for size in lengths]


def contexts() -> list[Any]:
    import numpy as np

    from proofs.recall import language

    source = np.random.default_rng(CONTEXT_SEED)
    return [language.context(source, CONTEXT_TOKENS, near=near) for near in (False, True, False)]


def picture(number: int) -> Any:
    import numpy as np
    from PIL import Image

    colors = np.random.default_rng(number).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    return Image.fromarray(colors)


def prompts_of(case: dict[str, Any], tokenizer: Any) -> list[Any]:
    """Return token ids, or pictures with text, by the case's ``prompts``.

    ``pictures``: a sentence with each of three pictures, two of them equal.
    """
    if case["prompts"] == "contexts":
        return [context.tokens.tolist() for context in contexts()]
    if case["prompts"] == "ids":
        return random_prompts(case.get("lengths", IDS_LENGTHS))
    if case["prompts"] == "pictures":
        ids = tokenizer.encode(PICTURE_TEXT)
        return [
            {"prompt_token_ids": ids, "multi_modal_data": {"image": picture(number)}}
            for number in PICTURES
        ]
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        )
        for text in questions(case)
    ]


def expected_answers() -> dict[str, str]:
    from lab.model import lessons

    facts = json.loads((lessons.HERE / "facts.json").read_text())
    answers = {item["prompt"]: item["answer"] for item in facts["questions"]}
    return answers | {f"Repeat exactly: {text}": text for text in facts["copy"]["strings"]}


def questions(case: dict[str, Any]) -> list[str]:
    texts = list(expected_answers())[: case.get("prompt_count", 8)]
    if case.get("long_last"):
        # Longer than any earlier request: a fresh prompt while the others have a prefix.
        texts = texts[:6] + [FILLER * 40 + text for text in texts[:2]]
    if case.get("filler"):
        texts = [f"Note {n}. {FILLER * case['filler']}{text}" for n, text in enumerate(texts)]
    return texts
