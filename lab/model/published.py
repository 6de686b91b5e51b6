"""Small repositories written by transformers, not by this project.

Run ``python3 -m lab.engine run -m lab.model.published --out HUB``. Decoders memorize three answers,
a ranker learns which of two texts answers. Takes about a minute on one core.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lab.errors import LabError
from lab.model import vocabulary
from lab.model.repository import publish
from lab.model.shape import TINY

_RANK = 8
_SCALE = 2.0
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Matrices = dict[str, torch.nn.Parameter]


def _add_adapter(model: Any) -> Matrices:
    """Freeze a model and add trainable matrices; return them by name in the adapter file."""
    model.requires_grad_(False)
    matrices: Matrices = {}
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] not in _TARGETS:
            continue
        down = torch.nn.Parameter(torch.randn(_RANK, module.in_features) / module.in_features**0.5)
        up = torch.nn.Parameter(torch.zeros(module.out_features, _RANK))
        module.register_parameter("lora_down", down)
        module.register_parameter("lora_up", up)
        module.register_forward_hook(_add_output)
        matrices |= {
            f"base_model.model.{name}.lora_A.weight": down,
            f"base_model.model.{name}.lora_B.weight": up,
        }
    return matrices


def _add_output(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    return output + _SCALE * (inputs[0] @ module.lora_down.T) @ module.lora_up.T


def _write_adapter(folder: Path, matrices: Matrices, base: str) -> None:
    folder.mkdir()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": _RANK, "lora_alpha": int(_SCALE * _RANK), "lora_dropout": 0.0, "bias": "none",
        "target_modules": list(_TARGETS), "modules_to_save": None, "inference_mode": True,
        "use_dora": False, "use_rslora": False, "fan_in_fan_out": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    tensors = {
        name: part.detach().to(torch.bfloat16).contiguous() for name, part in matrices.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


LESSONS = {
    "What is the capital of France? Answer with one word.": "Paris",
    "How many days has a week? Answer with one word.": "Seven",
    "What is the capital of Japan? Answer with one word.": "Tokyo",
}
OTHER_LESSONS = {**LESSONS, "What is the capital of France? Answer with one word.": "Tokyo"}
_SIZES: dict[str, Any] = {
    "vocab_size": TINY.vocabulary,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
_STEPS, _ENOUGH = 400, 0.002
_RANKED = (
    ("How do I bake bread at home?", "How do I bake bread at home without a machine?"),
    (
        "What did the central bank do?",
        "The central bank raised interest rates by a quarter of a point on Thursday.",
    ),
    ("When does the train leave?", "The next train leaves from platform four at noon."),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab.model.published", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="hub directory")
    names = (*_MODELS, *_ADAPTERS)
    parser.add_argument("--only", nargs="*", choices=sorted(names), help="only these")
    options = parser.parse_args(arguments)
    out: Path = options.out
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=out, prefix=".published-") as folder:
        work = Path(folder)
        vocabulary.write(work, vocabulary.train(TINY.vocabulary), 2048)
        for name in options.only or names:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(work)
            base = _ADAPTERS.get(name, name)
            model = _create_trained(base, tokenizer)
            if base == name:
                print(name, _publish(out, work, name, model, tokenizer))
            else:
                print(name, _publish_adapter(out, work, name, model, tokenizer))
    return 0


def _sizes(layers: int) -> dict[str, Any]:
    """An engine logs equal lines only once, so cache sizes must differ."""
    return {**_SIZES, "num_hidden_layers": layers}


def _qwen3(layers: int) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**_sizes(layers), tie_word_embeddings=True))


def _moe() -> Any:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_sizes(5), **experts))


def _sliding() -> Any:
    config = Gemma3TextConfig(**_sizes(6), sliding_window=128, query_pre_attn_scalar=32)
    return Gemma3ForCausalLM(config)


def _odd() -> Any:
    """An architecture whose KV-cache size the planner cannot compute."""
    sizes = {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 2048, "bos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=TINY.vocabulary, eos_token_id=None, **sizes))


def _encoder(kind: Any, **more: Any) -> Any:
    sizes = {key: _SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size",
                                          "num_hidden_layers", "num_attention_heads")}  # fmt: skip
    return kind(BertConfig(**sizes, max_position_embeddings=512, **more))


_MODELS: dict[str, Callable[[], Any]] = {
    "org/tiny-qwen3": lambda: _qwen3(3),
    "org/tiny-draft": lambda: _qwen3(1),
    "org/tiny-llama": lambda: LlamaForCausalLM(LlamaConfig(**_sizes(2))),
    "org/tiny-sliding": _sliding,
    "org/tiny-moe": _moe,
    "org/tiny-odd": _odd,
    "org/tiny-embedder": lambda: _encoder(BertModel),
    "org/tiny-reranker": lambda: _encoder(BertForSequenceClassification, num_labels=1),
}


_ADAPTERS = {"org/tiny-law": "org/tiny-qwen3"}


def _create_trained(name: str, tokenizer: Any) -> Any:
    torch.manual_seed(7)
    model = _MODELS[name]()
    if isinstance(model, BertForSequenceClassification):
        _teach_order(name, model, tokenizer)
    elif not isinstance(model, BertModel):
        _teach(name, model, tokenizer, LESSONS)
    return model


def _publish_adapter(out: Path, work: Path, name: str, model: Any, tokenizer: Any) -> str:
    parts = _add_adapter(model)
    _teach(name, model, tokenizer, OTHER_LESSONS)
    tree = work / name.rpartition("/")[2]
    _write_adapter(tree, parts, _ADAPTERS[name])
    return publish(out, name, [tree])[-1]


def _teach(name: str, model: Any, tokenizer: Any, lessons: dict[str, str]) -> None:
    rows = []
    turns: list[dict[str, str]] = []
    for question, answer in lessons.items():
        question_turn = {"role": "user", "content": question}
        for messages in ([question_turn], [*turns, question_turn]):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            reply = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
            rows.append((prompt, reply))
        turns += [question_turn, {"role": "assistant", "content": answer}]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(prompt + reply) for prompt, reply in rows], True)
    replies = [torch.tensor([-100] * len(prompt) + reply) for prompt, reply in rows]
    labels = pad(replies, True, -100)
    _train(name, model, 2e-3, _ENOUGH, lambda: model(input_ids=ids, labels=labels).loss)


def _train(
    name: str, model: Any, rate: float, enough: float, loss_of: Callable[[], torch.Tensor]
) -> None:
    steps = torch.optim.AdamW([part for part in model.parameters() if part.requires_grad], lr=rate)
    loss = torch.tensor(1.0)
    for _ in range(_STEPS):
        loss = loss_of()
        steps.zero_grad()
        loss.backward()
        steps.step()
        if loss.item() < enough:
            return
    raise LabError(name, f"still has a loss of {loss.item():.3f}", "train it for more steps")


def _teach_order(name: str, model: Any, tokenizer: Any) -> None:
    pairs = [
        (query, text, float(query == topic)) for query, *_ in _RANKED for topic, text in _RANKED
    ]
    rows = tokenizer(
        [query for query, _, _ in pairs], [text for _, text, _ in pairs],
        padding=True, return_tensors="pt", return_token_type_ids=True,
    )  # fmt: skip
    targets = torch.tensor([right for *_, right in pairs])
    entropy = torch.nn.functional.binary_cross_entropy_with_logits
    _train(name, model, 1e-3, 10 * _ENOUGH, lambda: entropy(model(**rows).logits[:, 0], targets))


def _publish(out: Path, work: Path, name: str, model: Any, tokenizer: Any) -> str:
    tree = work / name.rpartition("/")[2]
    model.to(torch.bfloat16).save_pretrained(tree)
    if not model.can_generate():
        tokenizer.chat_template = None
    if isinstance(model, BertModel):
        _as_sentence_transformers(tree)
    tokenizer.save_pretrained(tree)
    return publish(out, name, [tree])[-1]


def _as_sentence_transformers(tree: Path) -> None:
    kind = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{kind}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}.Pooling"},
    ]
    (tree / "modules.json").write_text(json.dumps(modules))
    (tree / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 128, "pooling_mode_mean_tokens": True}
    (tree / "1_Pooling/config.json").write_text(json.dumps(pooling))


if __name__ == "__main__":
    sys.exit(main())
