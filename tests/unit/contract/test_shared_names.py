import ast
import re

import pytest
from spark_contract import job, release

from spark_deploy.config.checkout import CHECKOUT

SIDES = ("spark_deploy", "roles", "deploys", "files/host", "files/checkpoint")
# Names with several words; single words may mean something else.
NAMES = {
    value
    for module in (release, job)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str) and re.search(r"[ /-]", value)
}


def string_constants(path):
    tree = ast.parse(path.read_text("utf-8"))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("side", SIDES)
def test_shared_names_come_from_the_contract(side):
    assert {"/v1/chat/completions", "log lines", "image-pull"} <= NAMES
    copies = {
        f"{path.relative_to(CHECKOUT)}: {text!r}"
        for path in (CHECKOUT / side).rglob("*.py")
        for text in string_constants(path)
        if text in NAMES or re.match(r"/v1/\S", text)
    }
    assert copies == set()
