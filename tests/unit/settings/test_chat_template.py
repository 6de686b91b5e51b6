import hashlib

import pytest

from spark_deploy.cli.plan_text import plan_lines
from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.plan.resolve import model_and_profile
from tests.unit.planning.plans import CATALOG, FIXTURE, plan_with

TEMPLATE = """{%- for message in messages %}
<|{{ message.role }}|>\t{{ message.content }} ü
{%- endfor %}
"""


def settings(root, output):
    (root / "group_vars").mkdir(exist_ok=True)
    (root / "group_vars/spark.yml").write_text(f"model: large\nprofile: v2\nengine: {output}\n")
    return load_hosts({"spark": ["a"]}, root=root, checkout=FIXTURE)["a"].settings


def argument(plan):
    argv = plan.release.engine.argv
    return argv[argv.index("--chat-template") + 1] if "--chat-template" in argv else None


@pytest.fixture
def root(tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.mark.parametrize("form", ["chat.jinja", "{root}/chat.jinja"])
def test_chat_template_text_reaches_the_engine(root, form):
    engine = f"{{chat_template: {form.format(root=root)}, options: {{seed: 7}}}}"
    plan = plan_with(settings(root, engine))
    assert argument(plan) == TEMPLATE
    assert "--seed" in plan.release.engine.argv


SERVICE = (
    "{max_context_tokens: 32768}\nservices: {embed: {model: small, profile: base, port: 8001, "
    "memory_gib: 24, engine: {max_context_tokens: 16384, chat_template: chat.jinja}}}"
)


def test_chat_template_of_a_service_reaches_only_its_engine(root):
    plan = plan_with(settings(root, SERVICE))
    assert [argument(served) for served in plan.served] == [None, TEMPLATE]


def test_rejects_missing_template_of_a_service(root):
    (root / "chat.jinja").unlink()
    with pytest.raises(SettingsError) as refused:
        settings(root, SERVICE)
    [problem] = refused.value.problems
    assert problem.where == "group_vars/spark.yml: services.embed.engine.chat_template"


def test_changed_template_text_changes_the_release(root):
    names = []
    for text in (TEMPLATE, TEMPLATE, TEMPLATE + " "):
        (root / "chat.jinja").write_text(text)
        names.append(plan_with(settings(root, "{chat_template: chat.jinja}")).release.name)
    without = plan_with(settings(root, "{}"))
    assert argument(without) is None
    assert names[0] == names[1]
    assert len({*names, without.release.name}) == 3


def test_plan_prints_line_count_and_hash_instead_of_template_text(root):
    chosen = settings(root, "{chat_template: chat.jinja}")
    text = "\n".join(plan_lines(plan_with(chosen), *model_and_profile(chosen, CATALOG)))
    digest = hashlib.sha256(TEMPLATE.encode()).hexdigest()[:12]
    assert f"--chat-template '<3 lines, sha256 {digest}>'" in text
    assert "message.role" not in text


WRONG = {
    "a file that is not there": (None, "cannot be read \\(FileNotFoundError\\)"),
    "bytes that are no text": (b"{{ messages }}\xff", "cannot be read \\(UnicodeDecodeError\\)"),
    "a control character": (b"{{ messages }}\x1b[2J", "contains a control character"),
    "another template": (b"{{ name }}", "does not use the `messages` variable"),
    "no template at all": (b"messages", "does not use the `messages` variable"),
    "an option": (b"-{{ messages }}", "starts with '-'"),
    "too large": (b"{{ messages }}" + b"x" * 65_536, "larger than 65536 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_rejects_invalid_template(root, case):
    data, output = WRONG[case]
    if data is None:
        (root / "chat.jinja").unlink()
    else:
        (root / "chat.jinja").write_bytes(data)
    with pytest.raises(SettingsError, match=output) as refused:
        settings(root, "{chat_template: chat.jinja}")
    assert "group_vars/spark.yml: engine.chat_template" in str(refused.value)


@pytest.mark.parametrize("option", ["chat-template", "chat_template"])
def test_rejects_a_chat_template_given_in_two_settings(root, option):
    with pytest.raises(SettingsError, match="keep only one"):
        settings(
            root, f"{{chat_template: chat.jinja, options: {{{option}: '{{{{ messages }}}}'}}}}"
        )
