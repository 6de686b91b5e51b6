"""A fetch that was broken, killed, slowed or done twice ends with a whole tree or says why."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time

from builder_hub import contents
from builder_trees import run_tool, tool_environment


def half(handler, path, data):
    """Send half of the large file, then break the connection."""
    if not path.endswith("file-1.bin") or handler.headers.get("Range"):
        return False
    handler.answer(200, data[: len(data) // 2], announced=len(data))
    handler.close_connection = True
    return True


def test_a_broken_download_continues_inside_the_file(order, hub, source, tmp_path):
    hub.fault = half
    run_tool("fetch", order())
    ranges = [h.get("Range") for p, h, _ in hub.requests if p.endswith("file-1.bin")]
    assert ranges == [None, "bytes=1250000-2499999"]
    assert contents(tmp_path / "out") == contents(source)


def size_bytes(parts):
    """Return the bytes of all parts; the small files' are renamed away in the meantime."""
    sizes = []
    for part in parts.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(part.stat().st_size)
    return sum(sizes)


def test_a_killed_fetch_continues_inside_the_file(order, hub, source, tmp_path):
    def slow(handler, path, data):
        if not path.endswith("file-1.bin"):
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:2_000_000])
        handler.wfile.flush()
        released.wait(20)
        return True

    released = threading.Event()
    hub.fault = slow
    process = subprocess.Popen(
        [sys.executable, "-m", "spark_checkpoint", "fetch", str(order())],
        env=tool_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    parts = tmp_path / ".out.partial/parts"
    deadline = time.monotonic() + 20
    while size_bytes(parts) < 1_000_000:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    released.set()
    hub.fault = None
    hub.requests.clear()
    run_tool("fetch", order())
    asked = [h.get("Range") for p, h, _ in hub.requests if p.endswith("file-1.bin")]
    assert len(asked) == 1
    assert int(re.fullmatch(r"bytes=(\d+)-2499999", asked[0])[1]) >= 1_000_000
    assert contents(tmp_path / "out") == contents(source)
    assert not (tmp_path / ".out.partial").exists()


def test_a_damaged_part_is_noticed_and_the_file_fetched_whole(order, hub, source, tmp_path):
    hub.fault = lambda h, path, data: path.endswith("file-1.bin") and (half(h, path, data) or True)
    assert run_tool("fetch", order(tries=1), check=False).returncode == 4
    part = max((tmp_path / ".out.partial/parts").iterdir(), key=lambda p: p.stat().st_size)
    part.write_bytes(bytes(part.stat().st_size))
    hub.fault = None
    done = run_tool("fetch", order())
    assert "the earlier part was damaged" in done.stderr
    assert contents(tmp_path / "out") == contents(source)


def test_a_source_that_cannot_continue_sends_the_file_whole(order, hub, source, tmp_path):
    hub.fault = lambda h, path, data: path.endswith("file-1.bin") and half(h, path, data)
    assert run_tool("fetch", order(tries=1), check=False).returncode == 4
    hub.fault, hub.ignore_ranges = None, True
    done = run_tool("fetch", order())
    assert "cannot continue" in done.stderr
    assert contents(tmp_path / "out") == contents(source)


def test_a_rate_limit_holds_for_all_files_together(order, source, tmp_path):
    began = time.monotonic()
    run_tool("fetch", order(rate_limit_bytes_per_s=2_800_000, parallel=4))
    assert time.monotonic() - began >= 2.8e6 / 2.8e6 * 0.9
    assert contents(tmp_path / "out") == contents(source)


def test_a_hub_that_promises_other_content_is_refused_at_the_first_byte(order, hub, source):
    hub.headers = {"X-Linked-ETag": f'"{"0" * 64}"', "X-Linked-Size": "2500000"}
    done = run_tool("fetch", order(), check=False)
    assert done.returncode == 3
    assert "the hub offers" in done.stderr


def test_two_fetches_of_one_tree_do_not_mix(order, hub, tmp_path):
    released = threading.Event()
    hub.fault = lambda h, path, data: released.wait(20) and False
    first = subprocess.Popen(
        [sys.executable, "-m", "spark_checkpoint", "fetch", str(order())],
        env=tool_environment(),
        stdout=subprocess.DEVNULL,
    )
    while not (tmp_path / ".out.partial/parts").exists():
        time.sleep(0.02)
    second = run_tool("fetch", order(), check=False)
    # A user of the host who may read the folder may lock it, and no fetch would ever begin.
    mode = (tmp_path / ".out.partial").stat().st_mode
    released.set()
    assert first.wait() == 0
    assert second.returncode == 3
    assert "another process is working here" in second.stderr
    assert mode & 0o777 == 0o711


def test_a_stopped_fetch_ends_soon_and_says_so(order, hub, tmp_path):
    hub.fault = lambda h, path, data: time.sleep(2) or False
    process = subprocess.Popen(
        [sys.executable, "-m", "spark_checkpoint", "fetch", str(order())],
        env=tool_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not hub.requests:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, message = process.communicate(timeout=10)
    assert process.returncode == 4
    assert "interrupted" in message
    assert "Traceback" not in message
