"""Files we manage on a host are compared and repaired as a whole."""

import base64
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from spark_deploy.hosts.facts import FileStates
from spark_deploy.hosts.files import pack_files, unpack_script
from spark_deploy.hosts.payload import read_tree
from spark_deploy.plan.types import FileState, ManagedFile, differing
from tests.unit.shell import run_script


def states_of(paths: list[Path]) -> dict[str, FileState]:
    fact = FileStates()
    return fact.process(run_script(fact.command([str(path) for path in paths])))


def test_the_fact_tells_mode_and_content_of_regular_files_only(tmp_path: Path) -> None:
    plain = tmp_path / "a b'c.conf"
    plain.write_bytes(b"x\n")
    plain.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(plain)

    states = states_of([plain, link, tmp_path, tmp_path / "absent"])

    assert list(states) == [str(plain)]
    assert states[str(plain)].mode == 0o640
    assert states[str(plain)].sha256 == hashlib.sha256(b"x\n").hexdigest()


@pytest.mark.parametrize(
    "drift",
    [
        None,
        FileState(0o644, "root:root", "0" * 64),
        FileState(0o600, "root:root", hashlib.sha256(b"x").hexdigest()),
        FileState(0o644, "user:root", hashlib.sha256(b"x").hexdigest()),
    ],
    ids=["absent", "content", "mode", "owner"],
)
def test_any_drift_of_a_file_makes_it_differ(drift: FileState | None) -> None:
    file = ManagedFile("/etc/a", b"x")
    right = FileState(0o644, "root:root", file.sha256)
    other = ManagedFile("/etc/b", b"x")

    states = {"/etc/b": right} | ({"/etc/a": drift} if drift else {})

    assert differing([file, other], states) == (file,)
    assert differing([file, other], {"/etc/a": right, "/etc/b": right}) == ()


def test_the_archive_holds_contents_by_position_so_no_path_can_steer_tar() -> None:
    files = [ManagedFile("../../etc/shadow", b"one"), ManagedFile("/b", b"two")]

    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(pack_files(files)))) as tar:
        members = {name: tar.extractfile(name).read() for name in tar.getnames()}

    assert members == {"0": b"one", "1": b"two"}


def test_a_file_is_written_beside_its_target_and_renamed_over_it(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "it's.conf"
    script = unpack_script([ManagedFile(str(target), b"new\n", 0o640)])

    # Only root may give files to root; the rest of the script is what is looked at here.
    script = script.replace("-o root -g root ", "")
    run_script(script, stdin=pack_files([ManagedFile(str(target), b"new\n")]))

    assert target.read_bytes() == b"new\n"
    assert target.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in target.parent.iterdir()] == ["it's.conf"]
    assert target.parent.stat().st_mode & 0o777 == 0o755


def test_a_tree_leaves_bytecode_out(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/run").write_text("#!/bin/sh\n")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/x.pyc").write_bytes(b"")
    (tmp_path / "a.py").write_text("")

    files = read_tree(tmp_path, "/opt/x")

    assert [file.path for file in files] == ["/opt/x/a.py", "/opt/x/bin/run"]
    assert "content" not in repr(files[0])
