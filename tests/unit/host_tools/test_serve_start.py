"""How an engine's container is started, and what must be there before a running one is touched."""

from __future__ import annotations

import fcntl
from collections.abc import Callable

import pytest
from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_host.engine import container, serve
from spark_host.gateway import gateway, traffic
from spark_host.system import docker
from stub_host import RELEASE, Host


@pytest.mark.parametrize(
    "arguments", [("--runtime=nvidia",), ("--runtime=runc", "--device=nvidia.com/gpu=all")]
)
def test_the_engine_gets_the_gpu_as_the_container_check_did(
    host: Host, arguments: tuple[str, ...]
) -> None:
    host.proven_gpu(*arguments)
    release = host.release()
    argv = container.docker_argv(release, host.paths)
    given = argv[: argv.index(release.image.tag)]  # what comes later is the engine's
    assert [word for word in given if word.startswith(("--runtime", "--device"))] == [*arguments]


def test_a_template_of_many_lines_reaches_the_engine_as_one_argument(host: Host) -> None:
    template = "{% for message in messages %}\n\t'{{ message }}' \"$x\" ü\n{% endfor %}\n"
    release = host.release(engine__argv=["/model", "--chat-template", template])
    assert container.docker_argv(release, host.paths)[-1] == template


def test_without_that_proof_nothing_is_started_and_the_way_out_is_named(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "is_up", lambda: True)
    host.release()
    assert docker.gpu_problem(host.paths) is None
    host.paths.gpu_receipt.unlink()
    assert docker.gpu_problem(host.paths) is not None
    words = "gpu-container.json: does not say how a container gets at the GPU; fix: run the deploy"
    with pytest.raises(HostToolError, match=words):
        serve.prepare(RELEASE, host.paths)


@pytest.mark.parametrize("way", [serve.prepare, serve.run], ids=["prepare", "run"])
def test_a_second_engine_is_refused_by_the_name_of_the_first(
    host: Host, monkeypatch: pytest.MonkeyPatch, way: Callable[[str, Paths], int]
) -> None:
    started: list[str] = []
    monkeypatch.setattr(serve.os, "execvpe", lambda program, *_: started.append(program))
    host.release()
    host.paths.run.mkdir(parents=True, exist_ok=True)
    with (host.paths.run / "engine.lock").open("w") as lock:
        lock.write("main-ffffffffffff\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            HostToolError, match="the engine of main-ffffffffffff runs on this host"
        ):
            way(RELEASE, host.paths)
    assert started == []


def test_a_gateway_without_its_account_is_a_problem_before_anything_is_touched(host: Host) -> None:
    nginx = host.paths.root / "usr/sbin/nginx"
    nginx.parent.mkdir(parents=True)
    nginx.touch(0o755)
    release = host.release()
    assert gateway.problem(release, host.paths) is None
    host.gateway(user="spark-nobody-here")
    words = "account spark-nobody-here: does not exist on this host; fix: systemd-sysusers"
    assert str(gateway.problem(release, host.paths)).startswith(words)


def test_a_server_that_ended_is_closed_to_clients_before_docker_is_asked(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = host.release()
    files.write_text(host.paths.traffic(release.service), "open\n")
    seen: list[bool] = []
    monkeypatch.setattr(
        docker, "remove_container", lambda _: seen.append(traffic.is_open("main", host.paths))
    )
    assert serve.after_stop(RELEASE, host.paths) == 0
    assert seen == [False]
