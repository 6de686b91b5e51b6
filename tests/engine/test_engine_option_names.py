import ast
import re

import pytest
from spark_vllm import SUPPORTED_ENGINES
from wheel_sources import fetch

from spark_deploy.config.settings.engine import CHECKED_OPTIONS, OWNED_OPTIONS, option_problems
from spark_deploy.plan.engine_arguments import PREFILL_LINES

LINEAR = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
ARGUMENTS = "vllm/engine/arg_utils.py"
PARSER = "vllm/utils/argparse_utils.py"
SERVER_OPTIONS = {
    "api-key", "config", "host", "middleware", "port", "ssl-certfile", "ssl-keyfile",
    "tool-parser-plugin", "uds",
}  # fmt: skip
"""Options of ``vllm serve`` defined in another file."""


def tree(version, file):
    return ast.parse((fetch(version, {ARGUMENTS, PARSER}) / file).read_text())


def spellings(version):
    for node in ast.walk(tree(version, ARGUMENTS)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            arguments = [item.value for item in node.args if isinstance(item, ast.Constant)]
            names = {str(word)[2:] for word in arguments if str(word).startswith("--")}
            if names:
                yield names


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_aliases_of_reserved_options_are_reserved(version):
    options = list(spellings(version))
    assert len(options) > 150
    for names in options:
        for reserved in (set(OWNED_OPTIONS), set(CHECKED_OPTIONS)):
            assert not names & reserved or names <= reserved, names


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_no_engine_option_is_an_abbreviation_of_a_reserved_option(version):
    own = {name for names in spellings(version) for name in names}
    problems = option_problems(dict.fromkeys(own))
    assert [option for option, what, _ in problems if "abbreviation" in what] == []


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_reserved_options_exist_in_every_supported_engine(version):
    own = {name for names in spellings(version) for name in names}
    only_newer = {"device-memory-utilization"} if version == "0.30.0" else set()
    assert {*OWNED_OPTIONS, *CHECKED_OPTIONS} - SERVER_OPTIONS - only_newer - own == set()


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_engine_has_the_prefill_kernel_option_and_logs_the_selected_kernel(version):
    assert {"gdn-prefill-backend"} in list(spellings(version))
    text = (fetch(version, {LINEAR}) / LINEAR).read_text()
    assert '"Using %s GDN prefill kernel (requested=%s, head_k_dim=%s)."' in text
    for backend, pattern in PREFILL_LINES.items():
        chosen = re.search(rf'"{backend}": "([^"]+)",', text)
        line = f"Using {chosen[1]} GDN prefill kernel (requested={backend}, head_k_dim=128)."
        assert re.search(pattern, line)


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_engine_argument_parser_accepts_abbreviations(version):
    assert "allow_abbrev" not in ast.unparse(tree(version, PARSER))
