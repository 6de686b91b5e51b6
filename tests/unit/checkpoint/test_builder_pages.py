"""What was fetched, hashed or built does not stay in memory; the kernel's mincore(2) is asked."""

import ctypes
import json
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from builder_hub import fetch_order
from builder_trees import Workshop, run_tool
from spark_checkpoint.storage import read_buffers

BIG_BYTES = (40 << 20) + 12_345  # several steps, and an end that is no whole page
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip


def resident_bytes(path):
    """Return how much of a file is in the page cache."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file:
        address = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    try:
        done = LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found)
        assert done == 0, os.strerror(ctypes.get_errno())
    finally:
        LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(byte & 1 for byte in bytes(found)) * mmap.PAGESIZE


@pytest.fixture
def disk():
    """A directory on a disk: what lies in memory alone cannot be let go of."""
    made = Path(tempfile.mkdtemp(prefix="spark-pages-", dir="/var/tmp"))
    yield made
    shutil.rmtree(made)


def write_big(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(1 << 20) * (BIG_BYTES >> 20) + os.urandom(BIG_BYTES % (1 << 20)))
    return path


def load(path):
    """Have a file in memory, written to the disk, as a download leaves it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        file.read()
    assert resident_bytes(path) >= BIG_BYTES


def is_out_of_memory(path):
    return resident_bytes(path) < BIG_BYTES / 20


def test_a_fetched_file_is_out_of_memory(disk, hub):
    name = write_big(hub.root / "r/model.safetensors").name
    order = fetch_order(hub.root / "r", disk / "out", [f"{hub.url}/r/"], pieces=True)
    (disk / "fetch.json").write_text(json.dumps(order))
    run_tool("fetch", disk / "fetch.json")
    assert is_out_of_memory(disk / "out" / name)
    load(disk / "out" / name)
    run_tool("verify", "--full", disk / "out")
    assert is_out_of_memory(disk / "out" / name)


def test_a_file_copied_from_this_host_is_out_of_memory_on_both_sides(disk):
    there = write_big(disk / "cache/model.safetensors")
    there.chmod(0o600)  # not for everybody: copied, not linked
    load(there)
    order = fetch_order(disk / "cache", disk / "out", [], look_in=[str(disk / "cache")])
    (disk / "fetch.json").write_text(json.dumps(order))
    run_tool("fetch", disk / "fetch.json")
    assert is_out_of_memory(disk / "out" / there.name)
    assert is_out_of_memory(there)


def test_what_a_build_reads_and_writes_is_out_of_memory(disk):
    workshop = Workshop(disk)
    workshop.write_base()
    big = write_big(workshop.base_dir / "big.bin")
    workshop.write_receipt()
    workshop.write_donor()
    load(big)
    workshop.build(layout="full")
    assert is_out_of_memory(workshop.out / big.name)
    assert is_out_of_memory(big)


def test_a_base_without_a_revision_is_hashed_and_out_of_memory(disk):
    workshop = Workshop(disk)
    workshop.write_base(receipt=False)
    big = write_big(workshop.base_dir / "big.bin")
    workshop.write_donor()
    load(big)
    workshop.build(base={"dir": str(workshop.base_dir), "revision": None})
    assert is_out_of_memory(big)


def test_memory_is_let_go_of_while_a_file_is_still_read(disk):
    big = write_big(disk / "big.bin")
    load(big)
    read, beyond = 0, []
    for part in read_buffers(big):
        read += len(part)
        if read % (10 << 20) == 0:
            beyond.append(resident_bytes(big) - (BIG_BYTES - read))
    assert len(beyond) == 4
    assert max(beyond) < 20 << 20
    assert is_out_of_memory(big)


def test_a_span_of_a_file_leaves_the_rest_where_it_is(disk):
    big = write_big(disk / "big.bin")
    load(big)
    assert sum(map(len, read_buffers(big, 8 << 20, 16 << 20))) == 16 << 20
    assert BIG_BYTES - (17 << 20) < resident_bytes(big) < BIG_BYTES - (15 << 20)
