import ast
import re

from spark_contract import job, release

from tests.unit.test_rooms import MODULES, nodes_of

SIDES = ("spark_deploy/", "roles/", "deploys/", "files/host/", "files/checkpoint/")
# Names with several words; single words may mean something else.
NAMES = {
    value
    for module in (release, job)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str) and re.search(r"[ /-]", value)
}


def test_shared_names_come_from_the_contract():
    assert {"/v1/chat/completions", "log lines", "image-pull"} <= NAMES
    copies = {
        f"{name}: {node.value!r}"
        for name in MODULES
        if name.startswith(SIDES)
        for node in nodes_of(name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value in NAMES or re.match(r"/v1/\S", node.value)
    }
    assert copies == set()
