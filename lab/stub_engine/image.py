"""Makes the stub engine's image and pushes it to a registry, without a Docker daemon.

``python3 lab/stub_engine/image.py push REGISTRY NAME TAG`` prints the image's digest. The layer
holds the program, ``/tmp`` and nothing else; equal sources give the equal digest.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parent
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


@dataclass(frozen=True, slots=True)
class Image:
    """An image as a registry stores it."""

    layer: bytes
    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        """The identity to pin: ``sha256:...`` of the manifest."""
        return digest_of(self.manifest)


def digest_of(data: bytes) -> str:
    """Return ``sha256:<hex>`` of bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def compile_engine() -> Path:
    """Build the static program (needs make, a C compiler and libc's static library)."""
    subprocess.run(["make", "-s", "-C", str(HERE)], check=True, stdout=sys.stderr)
    return HERE / "build" / "vllm"


def build(program: Path) -> Image:
    """Return the image of a program."""
    plain = _layer(program.read_bytes())
    layer = gzip.compress(plain, compresslevel=9, mtime=0)
    config = _json(
        {
            "architecture": _ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": {
                "Entrypoint": ["/usr/bin/vllm", "serve"],
                "Env": ["PATH=/usr/bin", "HOME=/root"],
                "WorkingDir": "/",
                "Labels": {"org.opencontainers.image.title": "stub engine"},
            },
            "rootfs": {"type": "layers", "diff_ids": [digest_of(plain)]},
            "history": [{"created_by": "lab/stub_engine/image.py"}],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _reference(_CONFIG, config),
            "layers": [_reference(_LAYER, layer)],
        }
    )
    return Image(layer, config, manifest)


def push(image: Image, registry: str, name: str, tag: str) -> str:
    """Push an image to a registry that speaks plain HTTP; return its digest."""
    for blob in (image.layer, image.config):
        _push_blob(registry, name, blob)
    answer = _request(registry, "PUT", f"/v2/{name}/manifests/{tag}", image.manifest, _MANIFEST)
    if answer[0] != 201:
        raise SystemExit(f"{registry}: manifest of {name}:{tag}: HTTP {answer[0]}")
    return image.digest


def _push_blob(registry: str, name: str, blob: bytes) -> None:
    digest = digest_of(blob)
    if _request(registry, "HEAD", f"/v2/{name}/blobs/{digest}")[0] == 200:
        return
    status, location = _request(registry, "POST", f"/v2/{name}/blobs/uploads/")
    if status != 202:
        raise SystemExit(f"{registry}: upload to {name}: HTTP {status}")
    parts = urlsplit(location)
    query = f"{parts.query}&digest={digest}" if parts.query else f"digest={digest}"
    status, _ = _request(registry, "PUT", f"{parts.path}?{query}", blob, "application/octet-stream")
    if status != 201:
        raise SystemExit(f"{registry}: blob of {name}: HTTP {status}")


def _request(
    registry: str, method: str, path: str, body: bytes | None = None, kind: str | None = None
) -> tuple[int, str]:
    connection = HTTPConnection(registry, timeout=60)
    headers = {"Content-Type": kind} if kind else {}
    if body is None and method != "HEAD":
        headers["Content-Length"] = "0"
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, answer.headers.get("Location", "")


def _layer(program: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, mode in (("usr", 0o755), ("usr/bin", 0o755), ("root", 0o700), ("tmp", 0o1777)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        entry = tarfile.TarInfo("usr/bin/vllm")
        entry.size, entry.mode = len(program), 0o755
        archive.addfile(entry, io.BytesIO(program))
    return out.getvalue()


def _reference(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": kind, "size": len(data), "digest": digest_of(data)}


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def main(words: list[str]) -> int:
    """Run ``push REGISTRY NAME TAG`` or ``digest``."""
    image = build(compile_engine())
    if words[:1] == ["push"] and len(words) == 4:
        print(push(image, *words[1:]))
        return 0
    if words == ["digest"]:
        print(image.digest)
        return 0
    print("image.py push REGISTRY NAME TAG | digest", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
