"""How an engine's container is started: as the deploy proved that containers see the GPU here."""

from __future__ import annotations

import pytest
from spark_serve import docker, serve
from spark_serve.errors import HostToolError
from stub_host import RELEASE, Host


@pytest.mark.parametrize(
    "arguments", [("--runtime=nvidia",), ("--runtime=runc", "--device=nvidia.com/gpu=all")]
)
def test_the_engine_gets_the_gpu_as_the_container_check_did(
    host: Host, arguments: tuple[str, ...]
) -> None:
    host.proven_gpu(*arguments)
    release = host.release()
    argv = serve.docker_argv(release, host.paths)
    given = argv[: argv.index(release.image_tag)]  # what comes later is the engine's
    assert [word for word in given if word.startswith(("--runtime", "--device"))] == [*arguments]


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
