import io
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from spark_deploy.cli import main
from spark_deploy.cli.console import print_wrapped, wrap_line
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.load import HostSettings, load_hosts
from spark_deploy.lock.resolve import write_lock
from tests.unit.cli.targets import write_inventory
from tests.unit.planning.plans import made_up_lock, shipped_catalog

PLAN = ("plan", "--estimate")
WIDTHS = [80, 100, 160]


@pytest.fixture
def spark_deploy(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_inventory(tmp_path / "inventory/spark.py", "spark-1")

    def run(*arguments):
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def lock_path(tmp_path):
    settings = load_hosts({"spark": ["a"]}, root=tmp_path)["a"].settings
    write_lock(tmp_path / "spark.lock.yml", made_up_lock(settings, shipped_catalog()))
    return tmp_path / "spark.lock.yml"


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("--profile", "v2-tq"),
         ("turboquant_k8v4", "(estimated, not locked)", "KV cache: ", "release     main-")),
        (("--data", "engine.vision=true"),
         ("8 questions", "tool call", "growing conversation", "images", "acceptance")),
        (("--data", "checkpoint.layout=full", "--data", "checkpoint.source=prebuilt"),
         ("int4-fp8-hybrid (estimated",)),
        (("--data", "checkpoint.source=requantized", "--data", "requantize.iters=0"),
         ("Qwen/Qwen3.5-122B-A10B (estimated, not locked), 250.2 GB",)),
        (("--model", "qwen3-4b", "--profile", "plain"),
         ("qwen3-4b with plain may not fit: some sizes are unknown\n",
          "downloads   files of unknown size and", "not counting files of unknown size",
          "weights, context and KV cache")),
    ],
)  # fmt: skip
def test_plan_with_estimate_and_verbose_needs_no_network(spark_deploy, words, texts):
    code, out, err = spark_deploy(*PLAN, "-v", *words)
    assert code == 0
    assert "--estimate" in err
    assert len(err.splitlines()) == 1
    assert all(text in out for text in texts)


def test_cluster_plan_tells_clients_to_use_the_head(spark_deploy, tmp_path):
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/spark.yml").write_text("cluster: {hosts: [spark-1, spark-2]}\n")
    (tmp_path / "sparks.py").write_text("spark = ['spark-1', 'spark-2']\n")
    _, out, _ = spark_deploy(*PLAN, "sparks.py")
    head, worker = (line for line in out.splitlines() if line.startswith("  serves "))
    assert "at http://127.0.0.1:8000/v1 (the host itself), together with spark-2" in head
    assert worker.endswith("qwen3.5-122b together with spark-1, which serves clients")


@pytest.mark.parametrize(
    ("own", "copies"),
    [("", True), ("model: qwen3.5-35b\n", False), ("fleet: {share: false}\n", False)],
)
def test_plan_lets_a_later_host_copy_downloads_from_an_earlier_host(
    spark_deploy, tmp_path, own, copies
):
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars/spark-2.yml").write_text(own)
    write_inventory(tmp_path / "inventory/spark.py", "spark-1", "spark-2")
    _, out, _ = spark_deploy(*PLAN)
    first, second = (line for line in out.splitlines() if line.startswith("  downloads "))
    assert "10.0 GB of images" in first
    assert ("10.0 GB of images" not in second, "from spark-1" in second) == (copies, copies)


@pytest.mark.parametrize(("profile", "is_tested"), [("v2", True), ("own", False)])
def test_plan_marks_a_profile_without_test_results(spark_deploy, tmp_path, profile, is_tested):
    (tmp_path / "catalog/profiles").mkdir(parents=True)
    text = "based_on: v2\nsummary: s\nchoose_when: c\nproven: []\n"
    (tmp_path / "catalog/profiles/own.yml").write_text(text)
    (tmp_path / "sparks.py").write_text("spark = ['spark-1']\n")
    _, out, _ = spark_deploy(*PLAN, "sparks.py", "--profile", profile)
    assert ("UNPROVEN" not in out) is is_tested


LOCKED = "Intel/Qwen3.5-122B-A10B-int4-AutoRound"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*PLAN, "--model", "qwen3.5-397b"), "does not fit on one host"),
        ((*PLAN, "--profile", "v9"), "--profile: unknown profile 'v9'"),
        ((*PLAN, "--limit", "spark-9"), "matches no host or group"),
        ((*PLAN, "--data", "serve.port=x"), "is not a whole number"),
        ((*PLAN, "nothing.py"), "is not an inventory file"),
        ((*PLAN, "--inventory", "nothing.py"), "is not an inventory file"),
        (("plan", "--data", "hub.endpoint=http://127.0.0.1:9"), ", or add --estimate to work off"),
        (("update", "--only", LOCKED.replace("Round", "Rund")), f"did you mean {LOCKED}?"),
        (("add", "--dry", "./hosts.yml"), "./hosts.yml: is neither a directory nor ORG/NAME"),
        (("bench", "--compare", "nothing.json"), "No such file or directory"),
        (("bench", "--compare", str(CHECKOUT / "docs/screens/recorded/bench.json"), "--out",
          "file/below"), "file/below: Not a directory"),
        (("rollback", "spark-1", "--to", "x", "-y"), '--to: "x" does not have the required form'),
    ],
)  # fmt: skip
def test_mistake_on_the_command_line_prints_one_message_with_a_fix(
    spark_deploy, tmp_path, words, message
):
    (tmp_path / "file").write_text("")
    code, out, err = spark_deploy(*words)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("fix:") == 1
    assert "Errno" not in err
    assert "pyinfra" not in err


def test_update_check_lists_missing_names_once(spark_deploy, tmp_path):
    inventory = write_inventory(tmp_path / "sparks.py", "a", "b")
    code, _, err = spark_deploy("update", str(inventory), "--check")
    assert (code, err.count("is not locked")) == (1, 4)
    assert not (tmp_path / "spark.lock.yml").exists()


@pytest.mark.usefixtures("lock_path")
def test_update_with_json_prints_the_lock_file(spark_deploy, tmp_path):
    inventory = write_inventory(tmp_path / "sparks.py", "a")
    code, out, _ = spark_deploy("update", str(inventory), "--check", "--json")
    [(path, lock)] = json.loads(out).items()
    assert (Path(path).name, "sources" in lock, "images" in lock) == ("spark.lock.yml", True, True)
    assert code in (0, 1)


@pytest.mark.parametrize("is_own", [True, False])
def test_default_inventory_is_found_in_the_current_directory_or_the_checkout(
    spark_deploy, lock_path, monkeypatch, is_own
):
    if is_own:
        (lock_path.parent / "group_vars").mkdir()
        write_inventory(lock_path.parent / "inventory/spark.py", "mine")
    monkeypatch.setattr(HostSettings, "lock_path", lock_path)
    code, out, err = spark_deploy("status", "--files", "--planned", "--json")
    assert (code, err) == (0, "")
    [(host, resources)] = json.loads(out).items()
    assert host == ("mine" if is_own else "spark-1")
    assert {entry["kind"] for entry in resources} >= {"file", "package", "tree", "image", "enabled"}
    _, text, _ = spark_deploy("status", "--files", "--planned")
    for command in ("spark-check", "spark-host"):
        assert re.search(rf"^  file +/usr/local/bin/{command}$", text, re.MULTILINE)


WORDS = st.lists(st.text("abcdef.,-/", min_size=1, max_size=12), min_size=1, max_size=40)


@given(WORDS, st.sampled_from(WIDTHS), st.sampled_from(["", "  serves      ", "host: "]))
def test_wrapped_lines_keep_every_word_and_fit_the_width(words, width, title):
    line = title + " ".join(words)
    result = wrap_line(line, width)
    assert " ".join(result).split() == line.split()
    assert max(map(len, result)) <= width


def test_a_long_word_is_not_split():
    line = f"  engine  {'x' * 90} --flag"
    assert wrap_line(line, 80)[-2:] == [line[:100], "          --flag"]


def test_wrapped_plan_keeps_its_columns(spark_deploy):
    _, text, _ = spark_deploy(*PLAN)
    for width in WIDTHS:
        out = io.StringIO()
        print_wrapped(text.splitlines(), Console(file=out, width=width))
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert " ".join(lines).split() == text.split()
        assert all(line.startswith(" " * 14) for line in lines if line.startswith("   "))


def test_a_wrapped_command_can_be_copied(tmp_path, spark_deploy):
    (tmp_path / "sparks.py").write_text("spark = ['spark-1.of-a-long-domain.example']\n")
    _, out, _ = spark_deploy("connect", "--inventory", "sparks.py")
    commands = [line for line in out.splitlines() if line[13:].startswith(("ssh ", "curl "))]
    assert len(commands) == 3
    for line, width in itertools.product(commands, WIDTHS):
        parts = [part[13:] for part in wrap_line(line, width)]
        assert all(part.endswith(" \\") for part in parts[:-1])
        assert shlex.split("\n".join(parts).replace("\\\n", "")) == shlex.split(line[13:])
        assert all("'" in part for part in parts if len(part) > width - 13)


@pytest.mark.parametrize("width", [80, 160])
def test_wrapped_error_message_fits_the_terminal_width(width, spark_deploy, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    code, _, err = spark_deploy(*PLAN, "--model", "qwen3.5-397b")
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err).splitlines()
    assert code == 1
    assert "does not fit on one host" in " ".join(line.strip() for line in lines)
    assert width / 2 < max(map(len, lines)) <= width
