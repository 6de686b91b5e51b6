import re
import shlex

import click
import pytest

from spark_deploy.cli import COMMANDS, GROUP
from spark_deploy.config.checkout import CHECKOUT

PAGES = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *CHECKOUT.glob("docs/**/*.md")]
# In code blocks or inline code, up to a comment or shell operator.
_COMMAND = re.compile(
    r"(?:^|[`\s(])spark-deploy ([a-z][a-z-]+(?:'[^'\n]*'|[^`\n#;|&>)\"'])*)", re.MULTILINE
)
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def find_commands():
    for page in PAGES:
        for code in _CODE.findall(page.read_text("utf-8")):
            for command in _COMMAND.findall(code):
                yield page.name, command.strip().rstrip(",")


SHOWN = sorted(set(find_commands()))


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=lambda text: text.replace(" ", "_"))
def test_commands_on_pages_exist(page, line):
    name, *words = shlex.split(line, comments=True)
    assert name in COMMANDS, f"{page}: {name}"
    command = GROUP.get_command(click.Context(GROUP), name)
    assert command is not None
    if not words:
        return  # only the name, as in a sentence
    try:
        command.make_context(name, [word.strip("[]") for word in words])
    except click.exceptions.Exit:  # --help
        pass
    except click.UsageError as error:
        pytest.fail(f"{page}: spark-deploy {line}: {error.message}")


def test_deploys_on_pages_exist():
    deploys = {
        (page.name, deploy)
        for page in PAGES
        for deploy in re.findall(r"\bdeploys/[a-z_]+\.py", page.read_text("utf-8"))
    }
    assert len(deploys) >= 5
    assert [item for item in deploys if not (CHECKOUT / item[1]).is_file()] == []


def test_searches_find_commands():
    assert len(SHOWN) > 40
    assert {"init", "up", "rollback", "connect"} <= {line.split()[0] for _, line in SHOWN}
