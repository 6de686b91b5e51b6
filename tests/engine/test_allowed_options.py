import ast
import functools
import re

import pytest
from spark_vllm import SUPPORTED_ENGINES
from wheel_sources import fetch

from spark_deploy.config.settings.allowed import (
    ALLOWED_OPTIONS,
    ALLOWED_VARIABLES,
    IGNORED_VARIABLES,
    find_unlisted,
)

ENVIRONMENT, ARGUMENTS = "vllm/envs.py", "vllm/engine/arg_utils.py"
SERVER = "vllm/entrypoints/common/cli_args.py"  # of 0.33.0; in other versions elsewhere
MODULES = """
attention aux_output cache compilation kernel load lora mamba model multimodal observability
offload parallel pooler quantization reasoning scheduler speculative structured_outputs vllm
"""
FILES = {ENVIRONMENT, ARGUMENTS, SERVER, *(f"vllm/config/{name}.py" for name in MODULES.split())}
# Classes of JSON options; vLLM reads others without a class.
CLASSES = {
    "attention-config": "AttentionConfig",
    "compilation-config": "CompilationConfig",
    "compilation-config.dynamic_shapes_config": "DynamicShapesConfig",
    "compilation-config.pass_config": "PassConfig",
    "eplb-config": "EPLBConfig",
    "kernel-config": "KernelConfig",
    "limit-mm-per-prompt.image": "ImageDummyOptions",
    "pooler-config": "PoolerConfig",
    "quantization-config": "QuantizationConfigArgs",
    "quantization-config.linear": "QuantSpec",
    "quantization-config.moe": "QuantSpec",
    "speculative-config": "SpeculativeConfig",
    "structured-outputs-config": "StructuredOutputsConfig",
}
TEXTS = {
    "chat-template", "compilation-config.backend", "compilation-config.compile_sizes",
    "compilation-config.custom_ops", "compilation-config.splitting_ops",
    "distributed-executor-backend", "dtype", "generation-config", "kv-cache-dtype-skip-layers",
    "load-format", "lora-dtype", "mm-encoder-attn-backend", "mm-encoder-attn-dtype", "model-impl",
    "quantization-config.targets.*", "reasoning-parser", "show-hidden-metrics-for-version",
    "speculative-config.kv_cache_dtype", "structured-outputs-config.reasoning_parser",
    "tokenizer-mode", "tool-call-parser", "video-pruning-method",
}  # fmt: skip
CODE = re.compile(
    r"(?i)(^|[-_.])(class|cls|config[-_]file|connector|dir|file|folder|middleware|module|passes|path|"
    r"plugins?|processors|root|script|so)($|[-_.])"
)


@functools.cache
def sources(version):
    root = fetch(version, FILES)
    present = sorted(file for file in FILES if (root / file).exists())
    return {file: ast.parse((root / file).read_text()) for file in present}


@functools.cache
def fields(version):
    classes, aliases = {}, {}
    for file, module in sources(version).items():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = {
                    ast.unparse(item.target): ast.unparse(item.annotation)
                    for item in node.body
                    if isinstance(item, ast.AnnAssign)
                }
            elif isinstance(node, ast.Assign) and file != ENVIRONMENT:
                aliases[ast.unparse(node.targets[0])] = re.sub("'.*?'", "", ast.unparse(node.value))
    for own in classes.values():
        for name, annotation in own.items():
            own[name] = re.sub(
                r"\w+", lambda word: aliases.get(word[0], word[0]), re.sub("'.*?'", "", annotation)
            )
    return classes


@functools.cache
def options(version):
    classes = {name.lower(): item for name, item in fields(version).items()}
    result = {}
    for node in ast.walk(sources(version)[ARGUMENTS]):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            text = ast.unparse(node)
            field = re.search(r"(\w+)_kwargs\['(\w+)'\]", text)
            annotation = "str" * ("type=str" in text)
            if field:
                config = f"{field[1].replace('_', '')}config"
                annotation = classes.get(config, {}).get(field[2], "")
            names = (word.value for word in node.args if isinstance(word, ast.Constant))
            result |= {name[2:]: annotation for name in names if name.startswith("--")}
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        for field_name, annotation in fields(version).get(name, {}).items():
            result[field_name.replace("_", "-")] = annotation
    return result


@functools.cache
def keys(version):
    return {
        f"{option}.{key}": annotation
        for option, name in CLASSES.items()
        for key, annotation in fields(version)[name].items()
    }


@functools.cache
def variables(version):
    text = ast.unparse(sources(version)[ENVIRONMENT])
    return frozenset(re.findall(r"^    (\w+): ", text, re.MULTILINE))


def nested(path, value):
    option, *rest = path.split(".")
    for key in reversed(rest):
        value = {key: value}
    return {option: value}


def of_all(read):
    for version in SUPPORTED_ENGINES:
        yield from read(version)


def test_allowed_options_exist_in_every_supported_engine():
    known = {*of_all(options), *of_all(keys), "quantization-config.targets.*"}
    in_free_form = (
        "additional-config.spark.", "default-chat-template-kwargs.", "hf-overrides.",
        "limit-mm-per-prompt.", "override-generation-config.",
    )  # fmt: skip
    assert {name for name in ALLOWED_OPTIONS - known if not name.startswith(in_free_form)} == set()


def test_allowed_variables_exist_in_every_supported_engine():
    own = {name for name in ALLOWED_VARIABLES if name.startswith("VLLM_")}
    assert own - {*of_all(variables)} == set(IGNORED_VARIABLES)


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_allowed_options_accept_only_numbers_switches_and_keywords(version):
    free = re.compile(r"\b(str|dict|Any|Path|type|object)\b")
    for name, annotation in {**options(version), **keys(version)}.items():
        if name in ALLOWED_OPTIONS - TEXTS:
            assert not free.search(annotation), (name, annotation)


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_no_allowed_option_accepts_a_module_or_a_path(version):
    names = {*options(version), *keys(version)} - {"chat-template"}
    assert len(names) > 300
    for name in names:
        for value in ("ours.module", "ours.module:Class", "/model/ours.py", "../ours", ["a.b"]):
            assert find_unlisted(nested(name, value), {}), (name, value)


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_options_that_refer_to_code_or_files_are_rejected(version):
    suspicious = [name for name in {*options(version), *keys(version)} if CODE.search(name)]
    assert len(suspicious) > 15
    for name in suspicious:
        for value in (True, 1, "word"):
            assert find_unlisted(nested(name, value), {}), name
    # VLLM_PLUGINS selects among installed plugins; all load without it.
    suspicious = [name for name in variables(version) - {"VLLM_PLUGINS"} if CODE.search(name)]
    assert len(suspicious) > 10
    for name in suspicious:
        assert find_unlisted({}, {name: "word"}), name
