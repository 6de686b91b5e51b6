import ast
import importlib
import re
import subprocess
import sys

import pytest
import spark_host.__main__ as host
from spark_contract import job, release, tool

from spark_deploy.config.checkout import CHECKOUT
from tests.unit.test_imports import MODULES, nodes_of

COMMAND = re.compile(rf"{tool.TOOL} ([a-z]+(?:-[a-z]+)*)")


def contract_commands():
    """Return the commands in the contract: constants named like their value."""
    return {
        value
        for name, value in vars(tool).items()
        if isinstance(value, str) and value == name.lower().replace("_", "-")
    }


def test_host_tool_has_every_command_of_the_contract():
    assert {"status", "switch-poll", "gateway-reload"} <= contract_commands()
    assert contract_commands() <= set(host.VERBS)


def test_help_lists_every_command(capsys):
    assert host.main(["help"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == list(host.VERBS)


def test_units_start_existing_commands():
    output = {
        word
        for file in (CHECKOUT / "files/units").iterdir()
        for word in re.findall(rf"{re.escape(tool.HOST_TOOL)} (\S+)", file.read_text("utf-8"))
    }
    assert len(output) > 10
    assert output <= set(host.VERBS)


def test_each_host_command_imports_only_its_own_module():
    functions = [function.split(":") for function, *_ in host.VERBS.values()]
    for module, name in functions:
        assert callable(getattr(importlib.import_module(f"spark_host.{module}"), name))
    code = "import sys, spark_host.__main__; print(*sys.modules)"
    path = f"{CHECKOUT / 'files/host'}:{CHECKOUT / 'files/contract'}"
    output = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path},
                          capture_output=True, text=True, check=True)  # fmt: skip
    modules = {f"spark_host.{module}" for module, _ in functions} - {"spark_host.__main__"}
    assert not modules & set(output.stdout.split())


def test_host_command_lines_are_built_only_by_the_contract():
    literal_commands = {
        str(path.relative_to(CHECKOUT))
        for folder in ("spark_deploy", "roles", "deploys")
        for path in (CHECKOUT / folder).rglob("*.py")
        if re.search(rf"HOST_TOOL\}} [a-z]|/bin/{tool.TOOL} [a-z]", path.read_text("utf-8"))
    }
    assert literal_commands == set()


@pytest.mark.parametrize("name", ["spark_deploy", "files", "roles", "deploys", "docs", "README.md"])
def test_messages_and_docs_refer_to_existing_commands(name):
    place = CHECKOUT / name
    pages = [place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.md")]
    result = {
        (word, str(page.relative_to(CHECKOUT)))
        for page in pages
        if "decisions" not in page.parts
        for word in COMMAND.findall(page.read_text("utf-8"))
    }
    assert {item for item in result if item[0] not in {*host.VERBS, "help"}} == set()


SIDES = ("spark_deploy/", "roles/", "deploys/", "files/host/", "files/checkpoint/")
# Names with several words; single words may mean something else.
NAMES = {
    value
    for module in (release, job)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str) and re.search(r"[ /-]", value)
}


def test_shared_names_are_defined_only_in_the_contract():
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
