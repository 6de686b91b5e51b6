import json
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spark_contract import tool

from spark_deploy.hosts import docker, docker_facts, gpu
from spark_deploy.hosts.commands import CommandError
from spark_deploy.hosts.operations import HostError
from tests.unit.facts.test_facts import lines_of, output_of
from tests.unit.operations.fake_host import Failed, local_shell, sections_of
from tests.unit.shell import install_stub

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(max_size=5), json_values, max_size=4)


def test_daemon_json_merge_appends_to_lists_and_merges_objects():
    present = {"insecure-registries": ["a:1"], "log-opts": {"max-size": "1m"}, "bip": "10.0.0.1/24"}
    wanted = {"insecure-registries": ["b:1", "a:1"], "log-opts": {"max-file": "3"}}
    assert docker.merge(present, wanted) == {
        "insecure-registries": ["a:1", "b:1"],
        "log-opts": {"max-size": "1m", "max-file": "3"},
        "bip": "10.0.0.1/24",
    }


@given(json_objects, json_objects)
def test_daemon_json_merge_is_idempotent_and_keeps_every_key(present, wanted):
    merged = docker.merge_with_runtime(present, wanted)
    assert docker.merge_with_runtime(merged, wanted) == merged
    assert set(merged) >= set(present) | set(wanted)
    assert docker.parse_daemon_json(json.dumps(merged)) == merged


@pytest.mark.parametrize("text", ["[]", "{", '"x"', "{'a': 1}", '{"a": 1,}'])
def test_rejects_a_daemon_json_that_is_not_a_json_object(text):
    with pytest.raises(ValueError):  # noqa: PT011 - any JSON error
        docker.parse_daemon_json(text)


@pytest.mark.parametrize(
    ("key", "value", "info", "met"),
    [
        ("runtimes", {"nvidia": {}}, {"Runtimes": {"runc": {}}}, False),
        ("runtimes", {"nvidia": {}}, {"Runtimes": {"nvidia": {}}}, True),
        ("live-restore", True, {"LiveRestoreEnabled": False}, False),
        ("insecure-registries", ["10.0.0.0/8"],
         {"RegistryConfig": {"InsecureRegistryCIDRs": ["10.0.0.0/8"]}}, True),
        ("insecure-registries", ["r:5000"],
         {"RegistryConfig": {"IndexConfigs": {"r:5000": {"Secure": True}}}}, False),
        ("insecure-registries", ["r:5000"],
         {"RegistryConfig": {"IndexConfigs": {"r:5000": {"Secure": False}}}}, True),
        ("registry-mirrors", ["https://m"], {"RegistryConfig": {"Mirrors": ["https://m/"]}}, True),
        ("registry-mirrors", ["https://m"], {"RegistryConfig": {"Mirrors": None}}, False),
        ("data-root", "/data", {"DockerRootDir": "/var/lib/docker"}, False),
        ("bip", "10.0.0.1/24", {}, True),
    ],
)  # fmt: skip
def test_daemon_json_keys_are_compared_with_docker_info(key, value, info, met):
    assert (docker.unmet_keys({key: value}, info) == ()) is met


# Docker 20.10 runs in the lab; output of 28 and 29 is recorded.
FACTORY = "DockerState/factory_without_runtime"  # Docker 29.2.1 of DGX OS
OLD = "DockerState/docker_28_without_cdi"
NEW = "DockerState/docker_29_with_cdi"


def state(like, **changes):
    return docker_facts.DockerState().process(output_of(sections_of({"like": like, **changes})))


@pytest.mark.parametrize(
    ("like", "changes", "expected"),
    [
        (FACTORY, {}, gpu.RUNTIME),
        (FACTORY, {"toolkit-mode": ["auto"]}, gpu.RUNTIME),
        (FACTORY, {"toolkit-mode": ["legacy"]}, gpu.RUNTIME),
        (FACTORY, {"toolkit-mode": ["cdi"]}, gpu.CDI),
        (FACTORY, {"runtime": []}, gpu.CDI),
        (NEW, {}, gpu.RUNTIME),
        (NEW, {"toolkit-mode": ["cdi"]}, gpu.CDI),
        (OLD, {}, gpu.RUNTIME),
        # Without CDI in docker the toolkit's runtime resolves the specification itself.
        (OLD, {"toolkit-mode": ["cdi"]}, gpu.RUNTIME),
        ("DockerState/nothing_installed", {}, gpu.RUNTIME),
    ],
)
def test_containers_get_the_gpu_through_runtime_or_cdi_as_docker_supports(like, changes, expected):
    docker_state = state(like, **changes)
    assert gpu.gpu_arguments(docker_state) == expected
    assert gpu.gpu_problem(docker_state) is None


def test_rejects_a_host_with_neither_runtime_nor_cdi():
    assert gpu.gpu_problem(state(OLD, runtime=[])) is not None


@pytest.mark.parametrize(
    ("capture", "cause"),
    [
        ("docker-run--unknown-runtime--03.txt", "not registered"),
        ("docker-run--unknown-runtime-old--05.txt", "not registered"),
        ("docker-run--no-device-driver--04.txt", "no GPU driver"),
        ("docker-run--cdi-unresolvable--02.txt", "through CDI"),
        ("docker-run--cdi-mode-gpus-flag--01.txt", "accepts only CDI"),
        ("docker-logs--exec-format-error--01.txt", "a different architecture"),
        ("nvidia-smi--driver-library-mismatch--01.txt", "module and the installed library"),
        ("nvidia-smi--no-driver--01.txt", "lists no GPU"),
    ],
)
def test_error_explains_why_a_container_lacks_the_gpu(capture, cause):
    output = "\n".join(lines_of({"capture": capture}))
    problem = gpu.explain_gpu_error(output, "image@sha256:00")
    assert cause in problem.what
    assert problem.fix


IMAGE = f"nvidia/cuda@sha256:{'5' * 64}"


@pytest.fixture
def tool_folder(tmp_path, monkeypatch):
    def run(host, command, *, timeout_s):
        output = local_shell(command)
        if isinstance(output, Failed):
            raise CommandError(command, output)
        return output.splitlines()

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "heartbeat", lambda *_: nullcontext())
    monkeypatch.setattr(tool, "HOST_TOOL", str(tmp_path / "spark-host"))
    return tmp_path


def test_failed_image_pull_shows_the_fix_from_the_host_tools(tool_folder):
    line = f"error: {IMAGE}: the pull stalls: no bytes in 300 s; fix: look at the registry"
    install_stub(tool_folder, "spark-host", f"echo phase=pull bytes=5; echo '{line}' >&2; exit 1")
    with pytest.raises(HostError, match=r"no bytes in 300 s\n  fix: look at the registry"):
        gpu._pull(None, IMAGE)


@pytest.mark.parametrize("script", ["exit 0", "exit 2", None])
def test_gpu_is_checked_after_the_image_pull_if_host_tools_are_outdated(tool_folder, script):
    if script:
        install_stub(tool_folder, "spark-host", f'[ "$*" = "image {IMAGE}" ] || exit 9\n{script}')
    gpu._pull(None, IMAGE)
