"""``catalog/engines.yml`` against the model registry of every supported engine.

``ENGINES=write pytest tests/engine/test_engine_architectures.py`` writes it.
"""

import ast
import os
import textwrap

import pytest
from spark_vllm import SUPPORTED_ENGINES
from wheel_sources import RELEASES, fetch

from spark_deploy.config.catalog.load import read_catalog, read_families
from spark_deploy.config.checkout import CHECKOUT

REGISTRY = "vllm/model_executor/models/registry.py"
FILE = CHECKOUT / "catalog/engines.yml"
GENERATES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
POOLS = (
    "_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS",
    "_TOKEN_CLASSIFICATION_MODELS", "_SEQUENCE_CLASSIFICATION_MODELS",
)  # fmt: skip
PARSERS = {
    "tool_call": ("vllm/tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning": ("vllm/reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
}
HEAD = """\
# yaml-language-server: $schema=../schema/engines.schema.json
#
# Architectures and parsers of each supported engine; other names are refused before any download.
# Do not edit: `ENGINES=write pytest tests/engine/test_engine_architectures.py` writes it.
"""


def tables(version, file=REGISTRY):
    result: dict[str, set[str]] = {}
    for node in ast.parse((fetch(version, {file}) / file).read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Dict):
            keys = (key.value for key in value.keys if isinstance(key, ast.Constant))
            result[target.id] = {str(key) for key in keys}
    return result


def names(version, groups):
    names_of = tables(version)
    united = set().union(*(names_of[group] for group in groups))
    return sorted(united, key=lambda name: (name.lower(), name))


def parsers(version, kind):
    file, table = PARSERS[kind]
    return sorted(tables(version, file)[table])


def lines():
    yield from (*HEAD.splitlines(), "engines:")
    for version in SUPPORTED_ENGINES:
        release = RELEASES[version]
        wheel = f"{release.project} {release.version}, {release.platform}"
        yield f"  {version}:"
        yield f"    source: {REGISTRY} of the wheel {wheel}, sha256 {release.sha256[:12]}"
        listed = {"generates": names(version, GENERATES), "pools": names(version, POOLS)}
        listed |= {kind: parsers(version, kind) for kind in PARSERS}
        for key, values in listed.items():
            text = textwrap.fill(
                ", ".join(values), 92, initial_indent=" " * 6,
                subsequent_indent=" " * 6, break_long_words=False,
            )  # fmt: skip
            yield from (f"    {key}: [", *text.splitlines(), "    ]")


def test_recorded_architectures_match_the_engine_sources():
    text = "\n".join(lines()) + "\n"
    if os.environ.get("ENGINES") == "write":
        FILE.write_text(text, encoding="utf-8")
    assert FILE.read_text("utf-8") == text, "run with ENGINES=write and review the difference"


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_every_model_group_of_the_engine_is_known(version):
    ignored = {
        "_SPECULATIVE_DECODING_MODELS", "_TRANSFORMERS_BACKEND_MODELS", "_VLLM_MODELS",
        "_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS",
    }  # fmt: skip
    groups = {name for name, keys in tables(version).items() if name.isupper() and keys}
    assert groups - ignored == {*GENERATES, *POOLS} & groups


@pytest.mark.parametrize("kind", PARSERS)
def test_engine_has_every_parser_listed_in_the_catalog(kind):
    listed = set(parsers(SUPPORTED_ENGINES[-1], kind))
    assert len(listed) > 30
    catalog = read_catalog()
    named = {getattr(family, kind) for family in read_families().families}
    named |= {getattr(model.parsers, kind) for model in catalog.models.values()}
    assert named - {None} - listed == set()


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_catalog_lists_exactly_the_supported_engines(version):
    engine = read_catalog().engines.engines[version]
    assert engine.supports("LlamaForCausalLM")
    assert engine.supports("BertModel")
    assert not engine.supports("UnknownForCausalLM")
