import ast
import base64
import hashlib
import io
import os
import stat
import subprocess
import tarfile
import time
import zipfile
from types import SimpleNamespace

import pytest

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.hosts.facts import FileStates
from spark_deploy.hosts.files import (
    encode_lines,
    expect_files,
    file_states,
    pack_files,
    place_files,
    unpack_script,
    unzip_script,
)
from spark_deploy.hosts.payload import read_tree
from spark_deploy.plan.types import FileState, ManagedFile, outdated_files
from tests.unit.operations.fake_host import FakeHost, on
from tests.unit.shell import run_script

FIRST, SECOND = ManagedFile("/etc/one", b"1"), ManagedFile("/etc/two", b"2", 0o600)


class Disk(FakeHost):
    def __init__(self, *files):
        super().__init__(files=files)
        self.queries: list[tuple[str, ...]] = []

    def get_fact(self, fact, **arguments):
        self.queries.append(tuple(arguments["paths"]))
        return super().get_fact(fact, **arguments)


def place(*files):
    return list(place_files(files))


def test_one_command_reads_the_state_of_all_expected_files():
    host = Disk(FIRST, SECOND)
    with on(host):
        expect_files([FIRST.path])
        expect_files([SECOND.path, "/etc/none"])
        assert (place(SECOND), place(FIRST)) == ([], [])
        assert file_states(["/etc/none"]) == {}
    assert host.queries == [(FIRST.path, SECOND.path, "/etc/none")]


def test_cached_file_states_expire_after_a_command():
    host = Disk(FIRST)
    with on(host) as state:
        assert place(FIRST) == []
        assert len(place(SECOND)) == 1
        state.ops[host]["hash"] = SimpleNamespace(operation_meta=SimpleNamespace(executed=True))
        host.files[SECOND.path] = SECOND
        assert place(SECOND) == []
    assert host.queries == [(FIRST.path,), *[(FIRST.path, SECOND.path)] * 2]


def test_file_fact_reads_mode_and_hash_only_of_regular_files(tmp_path):
    plain, link = tmp_path / "a b'c.conf", tmp_path / "link"
    plain.write_bytes(b"x\n")
    plain.chmod(0o640)
    link.symlink_to(plain)
    paths = [str(path) for path in (plain, link, tmp_path, tmp_path / "absent")]
    states = FileStates().process(run_script(FileStates().command(paths)))
    assert list(states) == [str(plain)]
    assert states[str(plain)].mode == 0o640
    assert states[str(plain)].sha256 == hashlib.sha256(b"x\n").hexdigest()


@pytest.mark.parametrize(
    "drift",
    [
        None,
        FileState(0o644, "root:root", "0" * 64),
        FileState(0o600, "root:root", FIRST.sha256),
        FileState(0o644, "user:root", FIRST.sha256),
    ],
    ids=["absent", "content", "mode", "owner"],
)
def test_file_with_different_mode_owner_or_content_is_outdated(drift):
    right = FileState(0o644, "root:root", FIRST.sha256)
    other = ManagedFile("/etc/b", FIRST.content)
    states = {"/etc/b": right, **({FIRST.path: drift} if drift else {})}
    assert outdated_files([FIRST, other], states) == (FIRST,)
    assert outdated_files([FIRST, other], {"/etc/b": right, FIRST.path: right}) == ()


def test_file_paths_cannot_inject_tar_options():
    files = [ManagedFile("../../etc/shadow", b"first"), ManagedFile("/b", b"second")]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(pack_files(files)))) as tar:
        members = {name: tar.extractfile(name).read() for name in tar.getnames()}
    assert members == {"0": b"first", "1": b"second"}


def as_user(script):
    return script.replace("-o root -g root ", "").replace("-p /run", "")


def test_file_is_written_next_to_the_target_and_renamed(tmp_path):
    target = tmp_path / "deep" / "it's.conf"
    file = ManagedFile(str(target), b"new\n", 0o640)
    run_script(as_user(unpack_script([file])), stdin=pack_files([file]))
    assert target.read_bytes() == b"new\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert os.listdir(target.parent) == ["it's.conf"]
    assert stat.S_IMODE(target.parent.stat().st_mode) == 0o755


def test_failed_file_write_suggests_a_fix(tmp_path):
    (tmp_path / "file").write_text("")
    file = ManagedFile(f"{tmp_path}/file/below", b"new\n")
    result = subprocess.run(
        ["sh", "-c", as_user(unpack_script([file]))],
        input=pack_files([file]),
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "Not a directory" in result.stderr
    assert "fix: check for a full" in result.stderr


def test_archive_of_a_directory_omits_python_bytecode(tmp_path):
    for name in ("bin/run", "__pycache__/x.pyc", "a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
    files = read_tree(tmp_path, "/opt/x")
    assert [file.path for file in files] == ["/opt/x/a.py", "/opt/x/bin/run"]
    assert "content" not in repr(files[0])


PROGRAM = b"print('tools')\n" * 20_000


def zip_package():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        out.writestr("package/__init__.py", PROGRAM)
    return buffer.getvalue()


def unpack(home, content, sha256):
    return subprocess.run(
        ["sh", "-c", unzip_script(str(home), sha256, "made of this")],
        input=encode_lines(content), capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_next_run_removes_files_that_a_killed_run_unpacked(tmp_path):
    home, content = tmp_path / "tools/site", zip_package()
    script = unzip_script(str(home), hashlib.sha256(content).hexdigest(), "made of this")
    killed = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE)
    while not list(home.parent.glob("*")):
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert os.listdir(home.parent) != ["site"]
    unpack(home, content, hashlib.sha256(content).hexdigest())
    assert os.listdir(home.parent) == ["site"]


def test_unpacking_leaves_only_the_archive_members_and_the_receipt(tmp_path):
    home, content = tmp_path / "tools/site", zip_package()
    for _ in range(2):
        result = unpack(home, content, hashlib.sha256(content).hexdigest())
        assert result.returncode == 0, result.stderr
        assert (home / "package/__init__.py").read_bytes() == PROGRAM
        assert (home / ".receipt").read_text() == "made of this\n"
        assert os.listdir(home.parent) == ["site"]
        assert stat.S_IMODE(home.stat().st_mode) == 0o755


@pytest.mark.parametrize("received", [0, 100, -1])
def test_never_unpacks_an_archive_with_a_wrong_checksum(tmp_path, received):
    home, content = tmp_path / "tools/site", zip_package()
    home.mkdir(parents=True)
    (home / "before").touch()
    result = unpack(home, content[:received], hashlib.sha256(content).hexdigest())
    assert result.returncode != 0
    assert "checksum mismatch" in result.stderr
    assert os.listdir(home) == ["before"]
    assert os.listdir(home.parent) == ["site"]


def test_no_operation_uses_the_predictable_temp_paths_of_pyinfra():
    """With sudo pyinfra uploads through ``/tmp/pyinfra-HASH``, which any user can create."""
    uploads = {"FileUploadCommand", "put_file", "put", "template", "rsync", "sync", "script"}
    for room in ("spark_deploy/hosts", "roles", "deploys"):
        for path in sorted((CHECKOUT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyinfra"):
                    names = {alias.name for alias in node.names}
                    assert not names & {*uploads, "files", "server"}, path
