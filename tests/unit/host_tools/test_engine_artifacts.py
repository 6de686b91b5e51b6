import hashlib
import json
import os
import pwd

import pytest
from spark_contract.job import ReceiptProof
from spark_contract.tool import HostToolError
from spark_host import jobs
from spark_host.engine import container, serve
from stub_host import REPOSITORY

from tests.receipts import source_receipt

NOBODY = pwd.getpwnam("nobody")
SHARD, SMALL = "model-1.safetensors", "config.json"
DIGEST = "d" * 64


def entry(path):
    status = path.stat()
    return {
        "path": path.name, "size_bytes": status.st_size, "modified_ns": status.st_mtime_ns,
        "inode": status.st_ino, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }  # fmt: skip


def make_checkpoint(folder, *names):
    folder.mkdir(mode=0o755)
    for name in names:
        (folder / name).write_bytes(bytes(100_000))
    entries = [entry(folder / name) for name in names]
    (folder / "receipt.json").write_text(source_receipt(DIGEST, entries))
    return folder


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    folders = (str(REPOSITORY / "files" / name) for name in ("contract", "checkpoint"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    return make_checkpoint(tmp_path / "tree", SHARD, SMALL)


def release_of(host, checkpoint):
    tree = {"path": str(checkpoint), "digest": DIGEST}
    return host.release(tree=tree, engine__user="nobody")


def flip_byte(path):
    with path.open("r+b") as file:
        file.seek(50_000)
        file.write(b"\x01")


def replace_file(path, *, damaged=True):
    status, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes())
    if damaged:
        flip_byte(other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


def remove_stats(checkpoint, *keys):
    receipt = json.loads((checkpoint / "receipt.json").read_text())
    for file in receipt["files"]:
        for key in keys:
            del file[key]
    (checkpoint / "receipt.json").write_text(json.dumps(receipt))


def verify(host, checkpoint):
    reports: list[str] = []
    serve.verify_checkpoints(release_of(host, checkpoint), reports.append)
    return reports


def test_unchanged_checkpoint_is_not_hashed(host, checkpoint):
    os.chmod(checkpoint / SHARD, 0o444)
    os.link(checkpoint / SHARD, checkpoint.parent / "linked")
    assert verify(host, checkpoint) == []


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_byte, replace_file])
def test_start_rejects_a_checkpoint_with_a_changed_byte(host, checkpoint, damage):
    damage(checkpoint / SHARD)
    for _ in range(2):
        with pytest.raises(HostToolError) as refused:
            verify(host, checkpoint)
        assert refused.value.where == str(checkpoint / SHARD)
        assert "has sha256" in refused.value.what
        assert "move the directory elsewhere and run the deploy again" in refused.value.fix


def test_error_for_a_missing_checkpoint_file_names_the_file(host, checkpoint):
    (checkpoint / SMALL).unlink()
    with pytest.raises(HostToolError, match=r"config\.json: is missing"):
        verify(host, checkpoint)


def test_touched_checkpoint_files_are_hashed_once(host, checkpoint):
    before = json.loads((checkpoint / "receipt.json").read_text())
    os.utime(checkpoint / SHARD)
    replace_file(checkpoint / SMALL, damaged=False)
    [report] = verify(host, checkpoint)
    assert report.startswith("phase=verify hashing 2 of 2 files")
    assert verify(host, checkpoint) == []
    receipt = json.loads((checkpoint / "receipt.json").read_text())
    assert receipt["files"] == [entry(checkpoint / SHARD), entry(checkpoint / SMALL)]
    assert {**receipt, "files": 0} == {**before, "files": 0}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [("inode",), ("inode", "modified_ns")])
def test_receipt_without_file_stats_is_completed_by_hashing(host, checkpoint, keys):
    remove_stats(checkpoint, *keys)
    assert len(verify(host, checkpoint)) == 1
    assert verify(host, checkpoint) == []
    remove_stats(checkpoint, *keys)
    replace_file(checkpoint / SHARD)
    with pytest.raises(HostToolError, match="has sha256"):
        verify(host, checkpoint)


def test_rollout_verifies_the_checkpoint_before_the_old_engine_stops(host, checkpoint, monkeypatch):
    monkeypatch.setattr(serve, "check_artifacts", lambda _: None)
    release = release_of(host, checkpoint)
    assert serve.find_problem(release, host.paths) is None
    flip_byte(checkpoint / SHARD)
    problem = serve.find_problem(release, host.paths)
    assert "has sha256" in problem.what


def test_start_verifies_the_checkpoint_after_removing_the_container(host, checkpoint, monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(serve.docker, "is_up", lambda: True)
    monkeypatch.setattr(serve.docker, "remove_container", lambda _: order.append("container"))
    monkeypatch.setattr(serve, "check_artifacts", lambda _: order.append("artifacts"))
    flip_byte(checkpoint / SHARD)
    with pytest.raises(HostToolError, match="has sha256"):
        serve.prepare(release_of(host, checkpoint).name, host.paths)
    assert order == ["container", "artifacts"]


def test_drafter_and_adapter_are_verified_too(host, checkpoint, tmp_path):
    drafter = make_checkpoint(tmp_path / "drafter", SHARD)
    tree, companion = ({"path": str(path), "digest": DIGEST} for path in (checkpoint, drafter))
    release = host.release(tree=tree, companions=[companion])
    serve.check_checkpoints(release)
    other = host.release(tree=tree, companions=[{**companion, "digest": "e" * 64}])
    assert str(drafter) in refusal(other).where
    replace_file(drafter / SHARD)
    with pytest.raises(HostToolError, match="drafter"):
        serve.verify_checkpoints(release, print)


def refusal(release):
    with pytest.raises(HostToolError) as refused:
        serve.check_checkpoints(release)
    return refused.value


def test_container_runs_as_numeric_user(host):
    argv = container.docker_argv(host.release(engine__user="nobody"), host.paths)
    option = argv.index("--user")
    assert argv[option + 1] == f"{NOBODY.pw_uid}:{NOBODY.pw_gid}"
    assert option < argv.index("spark-vllm:stub")


def test_error_for_a_missing_account_includes_the_fix(host):
    release = host.release(engine__user="spark-absent")
    with pytest.raises(HostToolError, match=r"spark-absent[\s\S]*systemd-sysusers"):
        container.docker_argv(release, host.paths)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
@pytest.mark.parametrize("name", [SHARD, "receipt.json", "", "more", "more/tokenizer"])
@pytest.mark.parametrize(("owner", "mode"), [(NOBODY.pw_uid, 0o755), (0, 0o775), (0, 0o757)])
def test_rejects_checkpoint_writable_by_others(host, checkpoint, name, owner, mode):
    (checkpoint / "more").mkdir(mode=0o755)
    (checkpoint / "more/tokenizer").write_bytes(b"x")
    release = release_of(host, checkpoint)
    receipt = ReceiptProof(str(checkpoint / "receipt.json"), DIGEST)
    serve.check_checkpoints(release)
    assert jobs.has_valid_receipt(receipt)

    os.chown(checkpoint / name, owner, 0)
    (checkpoint / name).chmod(mode)

    problem = refusal(release)
    assert str(checkpoint / name).rstrip("/") in problem.what
    assert "run the deploy again" in problem.fix
    # The job is done only while no other account can write to the checkpoint.
    assert not jobs.has_valid_receipt(receipt)


def test_rejects_link_in_a_checkpoint(host, checkpoint):
    (checkpoint / "link").symlink_to("/etc/hostname")
    assert "is a link" in refusal(release_of(host, checkpoint)).what


@pytest.mark.parametrize(("name", "mode"), [(SHARD, 0o600), ("", 0o700)])
def test_rejects_checkpoint_that_the_engine_cannot_read(host, checkpoint, name, mode):
    release = release_of(host, checkpoint)
    serve.check_checkpoints(release)

    (checkpoint / name).chmod(mode)

    problem = refusal(release)
    assert problem.where == str(checkpoint / name).rstrip("/")
    assert "chmod o+rX" in problem.fix
