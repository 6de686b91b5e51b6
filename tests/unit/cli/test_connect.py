"""`spark-deploy connect`: for one client, and tunnels that are held open."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from spark_deploy.cli import main


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/spark.py").write_text("spark = ['spark-1', 'spark-2']\n")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/spark.yml").write_text("model: qwen3.5-35b\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_client_is_told_of_one_host(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["connect", "--for", "env"]) == 1
    assert "2 hosts: spark-1, spark-2" in capsys.readouterr().err


def test_a_host_has_the_same_port_here_whether_it_is_named_alone_or_not(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", "spark-2", "--for", "env"]) == 0
    told = capsys.readouterr()
    assert "export OPENAI_BASE_URL=http://127.0.0.1:8001/v1" in told.out
    assert "spark-deploy connect spark-2 --tunnel" in told.err
    assert 'eval "$(spark-deploy connect spark-2 --for env)"' in told.err
    assert main(["connect"]) == 0
    assert "http://127.0.0.1:8001/v1 " in capsys.readouterr().out


@pytest.mark.parametrize("client", ["env", "claude"])
def test_what_is_to_be_typed_next_is_about_the_same_server(
    client: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "inventory/spark.py").rename(site / "inventory/other.py")
    small = {"model": "jina-embeddings-v5-small", "profile": "plain", "port": 8001, "memory_gib": 6}
    told = {"model": "qwen3.5-35b", "services": {"small": small}}
    (site / "group_vars/spark.yml").write_text(yaml.safe_dump(told))
    where = ["--inventory", "inventory/other.py"]
    for more in ([], ["--service", "small"]):
        assert main(["connect", "spark-1", *more, "--for", client, *where]) == 0
        use, tunnel = capsys.readouterr().err.splitlines()
        said = (
            re.findall(r"spark-deploy (connect .*?)[)\"]", use) + tunnel.split("spark-deploy ")[1:]
        )
        assert [one.split() for one in said] == [
            ["connect", "spark-1", *more, "--for", client, *where],
            ["connect", "spark-1", *more, "--tunnel", *where],
        ]


def test_where_the_shell_finds_no_such_program_its_path_is_said(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(["connect", "spark-1", "--for", "env"]) == 0
    ours = Path(sys.executable).with_name("spark-deploy")
    assert f'eval "$({ours} connect spark-1 --for env)"' in capsys.readouterr().err


def test_of_a_cluster_clients_are_told_of_the_head_alone(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "group_vars/spark.yml").write_text("cluster: {hosts: [spark-1, spark-2]}\n")
    assert main(["connect", "--for", "env"]) == 0
    assert "http://127.0.0.1:8000/v1" in capsys.readouterr().out
    assert main(["connect", "spark-2"]) == 1
    assert "spark-2: computes for spark-1, which answers" in capsys.readouterr().err


def test_tunnels_of_all_hosts_stay_open_until_interrupted_and_end_with_it(
    site: Path,
) -> None:
    """With an ssh that stays, and writes down that it was ended."""
    ssh = site / "ssh"
    ssh.write_text(
        "#!/bin/bash\ntrap 'echo ended >> $0.log; exit 0' TERM\n"
        'echo "$*" >> $0.log\nwhile true; do sleep 0.1; done\n'
    )
    ssh.chmod(0o755)
    log = site / "ssh.log"
    held = start(site)
    wait(lambda: log.exists() and log.read_text().count("-L 127.0.0.1:") == 2)
    assert held.poll() is None
    held.send_signal(signal.SIGINT)
    _, said = held.communicate(timeout=30)
    assert held.returncode == 0, said
    assert "spark-1: http://127.0.0.1:8000/v1\nspark-2: http://127.0.0.1:8001/v1" in said
    assert log.read_text().count("ended") == 2


@pytest.mark.slow
def test_a_tunnel_that_ends_by_itself_ends_the_command_with_its_host(site: Path) -> None:
    ssh = site / "ssh"
    ssh.write_text('#!/bin/sh\ncase "$*" in *spark-2) exit 255;; esac\nexec sleep 60\n')
    ssh.chmod(0o755)
    held = start(site)
    _, said = held.communicate(timeout=30)
    assert held.returncode == 1
    assert "spark-2: tunnel ended with exit code 255" in said


def start(site: Path) -> subprocess.Popen[str]:
    run = "import sys; from spark_deploy.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", run, "connect", "--tunnel"],
        env={**os.environ, "PATH": f"{site}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE, text=True, cwd=site,
    )  # fmt: skip


def wait(done) -> None:
    for _ in range(300):
        if done():
            return
        time.sleep(0.1)
    raise AssertionError("not in time")


def test_whom_to_talk_to_does_not_hang_on_a_choice_that_can_be_served(site: Path) -> None:
    (site / "group_vars/spark.yml").write_text("model: qwen3.5-397b\n")
    assert main(["plan", "--estimate"]) == 1
    assert main(["connect", "spark-1", "--for", "env"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--for", "env", "--json"), "--for and --json"),
        (("--for", "env", "--tunnel"), "--for and --tunnel"),
        (("--tunnel", "--json"), "--tunnel and --json"),
    ],
)
def test_two_forms_of_one_answer_are_refused(
    site: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", "spark-1", *words]) == 1
    assert said in capsys.readouterr().err


def test_an_address_behind_a_tunnel_says_so(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["connect"]) == 0
    told = capsys.readouterr().out
    assert "http://127.0.0.1:8001/v1 (here, through the tunnel below)" in told
    assert "(this host)" not in told
