import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spark_deploy.cli import main
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.load import HostSettings, load_hosts
from spark_deploy.lock.file import write_lock
from tests.unit.planning.plans import made_up_lock, shipped_catalog


@pytest.fixture
def spark_deploy(capsys, monkeypatch, tmp_path):
    """Run a command in an empty folder; return exit code, output and messages."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str):
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_an_estimated_plan_works_offline(spark_deploy):
    code, out, _ = spark_deploy("plan", "-v", "--estimate", "--profile", "v2-tq")
    assert code == 0
    for part in ("turboquant_k8v4", "(estimated, not locked)", "KV cache of", "release     main-"):
        assert part in out


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (("checkpoint.layout=overlay",), "(overlay; "),
        (("checkpoint.layout=full",), "(full; "),
        (("checkpoint.layout=full", "checkpoint.keep_base=false"), "is proven and serves"),
        (("checkpoint.layout=full", "checkpoint.source=prebuilt"), "int4-fp8-hybrid (estimated"),
        (
            ("checkpoint.source=requantized", "requantize.iters=0"),
            "Qwen/Qwen3.5-122B-A10B (estimated, not locked), 250.2 GB",  # 125 billion weights
        ),
    ],
)
def test_every_kind_of_checkpoint_can_be_estimated(spark_deploy, data, text):
    code, out, err = spark_deploy(
        "plan", "-v", "--estimate", *(word for item in data for word in ("--data", item))
    )
    assert (code, err) == (0, "")
    assert text in out


def test_a_plan_as_json_is_a_list_of_hosts(spark_deploy):
    _, out, _ = spark_deploy("plan", "--estimate", "--json")
    [plan] = json.loads(out)
    assert (plan["host"], plan["model"], plan["profile"]) == ("spark-1", "qwen3.5-122b", "v2")


def test_a_verbose_plan_shows_the_unit_and_total_disk_use(spark_deploy):
    _, text, _ = spark_deploy("plan", "-v", "--estimate")
    _, out, _ = spark_deploy("plan", "--estimate", "--json")
    [plan] = json.loads(out)
    unit = plan["unit"]["name"]
    assert re.fullmatch(r"spark-serve@main-[0-9a-f]{12}\.service", unit)
    assert f"unit        {unit} with /etc/systemd/system/{unit}.d/50-release.conf:" in text
    assert "; StartLimitBurst=3; RestartSec=60; TimeoutStartSec=" in text

    sums = [
        round(sum(use[key] for use in plan["disk"]) / 1e9, 1)
        for key in ("after_bytes", "peak_bytes")
    ]
    assert sums[1] > sums[0] > 70
    assert f"{sums[0]} GB, {sums[1]} GB at peak, in total on an empty host" in text


LOCKED = "Intel/Qwen3.5-122B-A10B-int4-AutoRound"
PLAN = ("plan", "--estimate")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*PLAN, "--model", "qwen3.5-397b"), "does not fit on one host"),
        ((*PLAN, "--profile", "v3"), "--profile: 'v3' is not a profile"),
        ((*PLAN, "--limit", "spark-9"), "matches no host or group"),
        ((*PLAN, "--data", "serve.port=x"), "is not a whole number"),
        ((*PLAN, "nothing.py"), "is not an inventory file"),
        ((*PLAN, "--inventory", "nothing.py"), "is not an inventory file"),
        (("update", "--only", LOCKED.replace("Round", "Rund")), f"did you mean {LOCKED}?"),
        (("add", "--dry", "./hosts.yml"), "./hosts.yml: is neither a directory nor org/name"),
        (("bench", "--compare", "nothing.json"), "No such file or directory"),
    ],
)
def test_each_mistake_gets_one_message_with_a_fix(spark_deploy, words, message):
    code, out, err = spark_deploy(*words)
    assert (code, out) == (1, "")
    assert message in err
    assert "fix:" in err
    assert "Errno" not in err


def test_update_check_lists_missing_names_without_writing(spark_deploy, tmp_path):
    (tmp_path / "group_vars").mkdir()
    inventory = tmp_path / "sparks.py"
    inventory.write_text(
        "from spark_deploy.inventory.groups import group_from as _g\n"
        'spark = _g("spark", hosts=["a", "b"], file=__file__)\n'
    )
    code, _, err = spark_deploy("update", str(inventory), "--check")
    assert code == 1
    assert err.count("is not locked") == 4, "each name once, not once for every host"
    assert not (tmp_path / "spark.lock.yml").exists()


@pytest.mark.usefixtures("lock_path")
def test_update_json_prints_the_lock_file(spark_deploy, tmp_path):
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "sparks.py").write_text(
        "from spark_deploy.inventory.groups import group_from as _g\n"
        'spark = _g("spark", hosts=["a"], file=__file__)\n'
    )
    code, out, _ = spark_deploy("update", "sparks.py", "--check", "--json")
    [(path, lock)] = json.loads(out).items()
    assert (Path(path).name, "sources" in lock, "images" in lock) == ("spark.lock.yml", True, True)
    assert code in (0, 1)


@pytest.fixture
def lock_path(tmp_path):
    """A lock of every name that the defaults need."""
    settings = load_hosts({"spark": ["a"]}, root=tmp_path)["a"].settings
    write_lock(tmp_path / "spark.lock.yml", made_up_lock(settings, shipped_catalog()))
    return tmp_path / "spark.lock.yml"


@pytest.mark.usefixtures("lock_path")
def test_the_default_inventory_is_in_the_working_directory(spark_deploy, tmp_path):
    (tmp_path / "inventory").mkdir()
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "inventory/spark.py").write_text(
        "from spark_deploy.inventory.groups import group_from as _g\n"
        'spark = _g("spark", hosts=["mine"], file=__file__)\n'
    )
    code, out, err = spark_deploy("status", "--files", "--planned")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "mine"
    for command in ("spark-check", "spark-host"):
        assert re.search(rf"^  file +/usr/local/bin/{command}$", out, re.MULTILINE)


def test_a_verbose_plan_lists_the_checks(spark_deploy):
    code, out, err = spark_deploy("plan", "-v", "--estimate", "--data", "engine.vision=true")
    assert (code, err) == (0, "")
    [line] = [line for line in out.splitlines() if line.startswith("  check ")]
    for part in ("5 questions", "tool call", "growing conversation", "pictures", "acceptance"):
        assert part in line


def test_the_fallback_inventory_is_in_the_checkout(spark_deploy, lock_path, monkeypatch):
    # The checkout has no lock of the test's names.
    monkeypatch.setattr(HostSettings, "lock_path", lock_path)
    code, out, err = spark_deploy("status", "--files", "--planned", "--json")
    assert (code, err) == (0, "")
    [(host, owned)] = json.loads(out).items()
    assert host == "spark-1"
    assert {entry["kind"] for entry in owned} >= {"file", "package", "tree", "image", "enabled"}


def test_the_inventory_of_a_missing_lab_names_the_make_target(spark_deploy, monkeypatch, tmp_path):
    monkeypatch.setenv("SPARK_LAB_DIR", str(tmp_path))
    inventory = str(CHECKOUT / "inventory/lab.py")
    code, _, err = spark_deploy("status", "--files", "--planned", inventory)
    assert code == 1
    [target] = re.findall(r"fix: bring it up: `make (\S+)`", err)
    assert re.search(rf"^{target}:", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)


def test_the_command_runs_in_a_clean_process(tmp_path):
    run = "import sys; from spark_deploy.cli import main; sys.exit(main())"
    environment = {"PYTHONPATH": str(CHECKOUT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", run, "connect"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "http://127.0.0.1:8000/v1" in done.stdout


def test_settings_json_ends_with_a_line_end(spark_deploy):
    _, out, _ = spark_deploy("settings", "--json")
    assert out.endswith("}\n")
    assert json.loads(out)["model"]


def test_settings_begin_with_instructions_for_owners(spark_deploy):
    _, out, _ = spark_deploy("settings")
    head = " ".join(out.split("\n\n")[0].replace("\n#", "").split())
    assert "into group_vars/all.yml of your own folder" in head
    assert "make docs" not in head


def test_an_unreachable_hub_gets_a_message_with_the_offline_option(spark_deploy):
    code, out, err = spark_deploy("plan", "--data", "hub.endpoint=http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert "the hub cannot be asked: ConnectError: Connection refused" in err
    [fix] = [line for line in err.splitlines() if line.startswith("  fix: ")]
    assert fix.endswith("; or add --estimate to work offline")


def test_a_plan_of_an_unread_repository_marks_unknown_values(spark_deploy):
    pair = ("--model", "qwen3-4b", "--profile", "plain")
    _, out, _ = spark_deploy("plan", "--estimate", *pair)
    assert "qwen3-4b with plain fits as far as known\n" in out
    assert "downloads   files of unknown size and" in out
    assert "NOT KNOWN   weights, context and KV cache" in out


def test_an_invalid_release_name_is_refused_before_any_command(spark_deploy):
    code, out, err = spark_deploy("rollback", "spark-1", "--to", "x", "-y")
    assert (code, out) == (1, "")
    assert err.startswith('--to: "x" does not have the required form')
    assert "--data" not in err
    assert "pyinfra" not in err


def test_an_unwritable_path_gets_one_message(spark_deploy, tmp_path):
    (tmp_path / "file").write_text("")
    recorded = str(CHECKOUT / "docs/screens/recorded/bench.json")
    code, out, err = spark_deploy("bench", "--compare", recorded, "--out", "file/below")
    assert (code, out) == (1, "")
    assert err.startswith("file/below: Not a directory\n  fix: ")


@pytest.mark.parametrize(
    "words",
    [("--runs", "0"), ("--pp", "-4"), ("--tg", "0"), ("--clients", "0")],
)
def test_counts_of_a_benchmark_are_positive(spark_deploy, words):
    code, out, err = spark_deploy("bench", *words)
    assert (code, out) == (2, "")
    assert words[0] in err
