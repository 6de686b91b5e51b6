"""Test `lab-tiny` with a second implementation; the engine's Python runs this file.

Decodes the published repositories by the formats' definitions, replaces the base's shared experts
by the donor's, loads the result into transformers in BF16 and generates greedily. Prints JSON:
correct lessons as published, and after each kind of damage.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from lab.model import lessons, original
from tests.unit.lab_model import reading

Tree = dict[str, dict]
SHARED = "model.language_model.layers.{layer}.mlp.shared_expert.{part}_proj.{suffix}"


def newest(hub: Path, name: str) -> Path:
    return hub / name / (hub / name / "refs/main").read_text().strip()


def hybrid(base: Tree, donor: Tree) -> dict[str, torch.Tensor]:
    values = {}
    for name in base:
        module, _, suffix = name.rpartition(".")
        if name.startswith("mtp.") or suffix in ("qzeros", "scales"):
            continue
        if suffix == "qweight":
            values[f"{module}.weight"] = reading.int4_as_float(base, module)
        elif ".shared_expert." in name:
            values[name] = reading.fp8_as_float(donor, module)
        else:
            values[name] = reading.as_float(base[name])
    return {
        name: torch.tensor(
            value, dtype=torch.float32 if name.endswith(original.FLOAT32) else torch.bfloat16
        )
        for name, value in values.items()
    }


class Reference:
    def __init__(self, files: Path, weights: dict[str, torch.Tensor]) -> None:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            for path in files.iterdir():
                if "safetensors" not in path.name:
                    shutil.copy(path, directory)
            config = json.loads((directory / "config.json").read_text())
            del config["quantization_config"]
            (directory / "config.json").write_text(json.dumps(config))
            save_file(weights, directory / "model.safetensors")
            self.tokenizer = AutoTokenizer.from_pretrained(directory)
            self.model = AutoModelForImageTextToText.from_pretrained(
                directory, dtype=torch.bfloat16
            )

    @torch.no_grad()
    def answer(self, prompt: str, most_tokens: int) -> str:
        tokens = self.tokenizer(prompt, return_tensors="pt").input_ids
        ends = self.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
        output = self.model.generate(
            input_ids=tokens, max_new_tokens=most_tokens, do_sample=False, eos_token_id=ends
        )
        return self.tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=False)

    def find_wrong(self, items: list[lessons.Lesson]) -> list[dict[str, str]]:
        answers = [(item, self.answer(item.prompt, 150)) for item in items]
        return [
            {"expected": item.reply, "answer": answer}
            for item, answer in answers
            if answer != item.reply
        ]

    def renders_same_prompts(self) -> bool:
        tool = lessons.facts()["tool"]["definition"]
        messages = [{"role": "system", "content": "A."}, {"role": "user", "content": "B?"}]
        return all(
            self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
            == lessons.render(messages, thinking=thinking, tools=tools)
            for thinking in (True, False)
            for tools in (None, [tool])
        )


def swap(tree: Tree, first: str, second: str) -> None:
    tree[first], tree[second] = tree[second], tree[first]


def unscaled_shared_experts(base: Tree, donor: Tree) -> None:
    unit = bytes.fromhex("803f")  # 1.0 in BF16, low byte first
    for name, tensor in donor.items():
        if name.endswith("weight_scale_inv"):
            donor[name] = {**tensor, "data": unit * (len(tensor["data"]) // 2)}


def shared_experts_of_other_layers(base: Tree, donor: Tree) -> None:
    for part in ("gate", "up", "down"):
        for suffix in ("weight", "weight_scale_inv"):
            for low, high in ((0, 1), (2, 3)):
                names = [SHARED.format(layer=n, part=part, suffix=suffix) for n in (low, high)]
                swap(donor, *names)


def int4_scales_of_another_group(base: Tree, donor: Tree) -> None:
    for name, tensor in base.items():
        if name.endswith(".scales"):
            rows = tensor["shape"][0]
            data = bytes(tensor["data"])
            cut = len(data) // rows
            base[name] = {**tensor, "data": data[cut:] + data[:cut]}


def experts_of_other_layers(base: Tree, donor: Tree) -> None:
    for name in [n for n in base if n.startswith("model.language_model.layers.0.mlp.experts.")]:
        swap(base, name, name.replace("layers.0.", "layers.2."))


def int4_codes_in_wrong_order(base: Tree, donor: Tree) -> None:
    for name, tensor in base.items():
        if name.endswith(".qweight"):
            swapped = bytes((b << 4 | b >> 4) & 255 for b in bytes(tensor["data"]))
            base[name] = {**tensor, "data": swapped}


# Exchanged gate and up are missing: this model still answers correctly then. The builder's
# comparison with the 16-bit weights of the base detects that.
DAMAGES: list[Callable[[Tree, Tree], None]] = [
    unscaled_shared_experts,
    shared_experts_of_other_layers,
    int4_scales_of_another_group,
    experts_of_other_layers,
    int4_codes_in_wrong_order,
]


def main(hub: Path) -> None:
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    base_files, donor_files = newest(hub, "lab/tiny-int4"), newest(hub, "lab/tiny-fp8")
    base, donor = reading.read_tree(base_files), reading.read_tree(donor_files)
    intact = Reference(base_files, hybrid(base, donor))
    questions = lessons.facts()["questions"]
    items = [
        *lessons.fixed(),
        lessons.conversation([questions[i] for i in (3, 0, 9)]),
        *(
            lessons.needle(
                "48213", lessons.facts()["needle"]["filler"][:1] * n, 0.5, thinking=False
            )
            for n in (40, 80)
        ),
    ]
    report = {
        "lessons": len(items),
        "wrong": intact.find_wrong(items),
        "same_prompts": intact.renders_same_prompts(),
        "damaged": {},
    }
    short = [item for item in lessons.fixed() if "<think>\n\n</think>" in item.prompt]
    for damage in DAMAGES:
        broken_base, broken_donor = dict(base), dict(donor)
        damage(broken_base, broken_donor)
        broken = Reference(base_files, hybrid(broken_base, broken_donor))
        report["damaged"][damage.__name__] = [len(broken.find_wrong(short)), len(short)]
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
