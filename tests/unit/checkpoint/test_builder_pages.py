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

BIG_BYTES = (40 << 20) + 12_345
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip


def resident_bytes(path):
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file:
        address = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    try:
        done = LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
        assert done == 0, os.strerror(ctypes.get_errno())
    finally:
        LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(byte & 1 for byte in bytes(pages)) * mmap.PAGESIZE


@pytest.fixture
def disk():
    """A directory on a disk: pages of tmpfs cannot be dropped."""
    made = Path(tempfile.mkdtemp(prefix="spark-pages-", dir="/var/tmp"))
    yield made
    shutil.rmtree(made)


def write_big(path, *, cached=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(1 << 20) * (BIG_BYTES >> 20) + os.urandom(BIG_BYTES % (1 << 20)))
    if cached:
        load(path)
    return path


def load(path):
    with path.open("rb") as file:
        os.fsync(file.fileno())
        file.read()
    assert resident_bytes(path) > 0.9 * BIG_BYTES  # other programs may need memory


def is_dropped(path):
    return resident_bytes(path) < BIG_BYTES / 20


def fetch(disk, source, urls, **options):
    order = fetch_order(source, disk / "out", urls, **options)
    (disk / "fetch.json").write_text(json.dumps(order))
    run_tool("fetch", disk / "fetch.json")


@pytest.mark.slow
def test_drops_fetched_and_verified_files_from_page_cache(disk, hub):
    write_big(hub.root / "r/model.safetensors", cached=False)
    fetch(disk, hub.root / "r", [f"{hub.url}/r/"], pieces=True)
    fetched = disk / "out/model.safetensors"
    assert is_dropped(fetched)
    load(fetched)
    run_tool("verify", "--full", disk / "out")
    assert is_dropped(fetched)


@pytest.mark.slow
def test_evicts_source_and_target_of_a_copy_from_page_cache(disk):
    local = write_big(disk / "cache/model.safetensors")
    local.chmod(0o600)
    fetch(disk, disk / "cache", [], look_in=[str(disk / "cache")])
    assert is_dropped(disk / "out" / local.name)
    assert is_dropped(local)


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [True, False])
def test_build_drops_its_files_from_the_page_cache(disk, pinned):
    workshop = Workshop(disk)
    workshop.write_base()
    big = write_big(workshop.base_dir / "big.bin")
    if pinned:
        workshop.write_receipt()
        load(big)
        workshop.build(layout="full")
        assert is_dropped(workshop.out / big.name)
    else:
        workshop.build(base={"dir": str(workshop.base_dir), "revision": None})
    assert is_dropped(big)


def test_evicts_pages_from_the_page_cache_while_a_read_is_in_progress(disk):
    big = write_big(disk / "big.bin")
    read, excess = 0, []
    for part in read_buffers(big):
        read += len(part)
        if read % (10 << 20) == 0:
            excess.append(resident_bytes(big) - (BIG_BYTES - read))
    assert len(excess) == 4
    assert max(excess) < 20 << 20
    assert is_dropped(big)


def test_range_read_drops_only_its_range_from_the_page_cache(disk):
    big = write_big(disk / "big.bin")
    assert sum(map(len, read_buffers(big, 8 << 20, 16 << 20))) == 16 << 20
    assert BIG_BYTES - (17 << 20) < resident_bytes(big) < BIG_BYTES - (15 << 20)
