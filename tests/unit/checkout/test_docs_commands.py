import re
import shlex

import click

from spark_deploy.cli import GROUP
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


def error_in(line):
    name, *words = shlex.split(line, comments=True)
    command = GROUP.get_command(click.Context(GROUP), name)
    if command is None:
        return "no such command"
    try:
        if words:
            command.make_context(name, [word.strip("[]") for word in words])
    except click.exceptions.Exit:
        pass
    except click.UsageError as error:
        return error.message
    return None


def test_spark_deploy_commands_in_docs_exist():
    assert len(SHOWN) > 40
    assert {"init", "up", "rollback", "connect"} <= {line.split()[0] for _, line in SHOWN}
    errors = [(page, line, error_in(line)) for page, line in SHOWN]
    assert [error for error in errors if error[2]] == []
