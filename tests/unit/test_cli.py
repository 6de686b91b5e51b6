import json
import subprocess
import sys

import pytest

from spark_deploy.checkout import CHECKOUT

RUN = "import sys; from spark_deploy.cli import main; sys.exit(main())"


def spark_deploy(*arguments: str, cwd=CHECKOUT):
    command = [sys.executable, "-c", RUN, *arguments]
    environment = {"PYTHONPATH": str(CHECKOUT), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def test_a_plan_needs_neither_host_nor_hub_when_it_estimates(tmp_path):
    done = spark_deploy("plan", "--estimate", "--profile", "v2-tq", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("turboquant_k8v4", "(estimated, not locked)", "KV cache of", "release main-"):
        assert part in done.stdout


def test_a_plan_as_json_is_a_list_with_one_entry_for_each_host(tmp_path):
    done = spark_deploy("plan", "--estimate", "--json", cwd=tmp_path)
    [plan] = json.loads(done.stdout)
    assert (plan["host"], plan["model"], plan["profile"]) == ("spark-1", "qwen3.5-122b", "v2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "qwen3.5-397b"), "does not fit on one host"),
        (("--profile", "v3"), "'v3' is not a profile"),
        (("--limit", "spark-9"), "matches no host or group"),
        (("--data", "serve.port=x"), "is not a whole number"),
        (("nothing.py",), "is not a file"),
    ],
)
def test_a_mistake_is_one_message_with_a_fix(arguments, message):
    done = spark_deploy("plan", "--estimate", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_lock_check_names_what_is_missing_and_writes_nothing(tmp_path):
    (tmp_path / "group_vars").mkdir()
    inventory = tmp_path / "sparks.py"
    inventory.write_text(
        "from spark_deploy.inventory import group_from as _g\n"
        'spark = _g("spark", hosts=["a", "b"], file=__file__)\n'
    )
    done = spark_deploy("lock", str(inventory), "--check")
    assert done.returncode == 1
    assert done.stderr.count("is not locked") == 4, "each name once, not once for every host"
    assert not (tmp_path / "spark.lock.yml").exists()
