import gzip
import hashlib
import io
import json
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin, urlsplit

from lab.errors import LabError
from lab.paths import LabPaths

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
_PLAIN_LAYER_TYPE = "application/vnd.docker.image.rootfs.diff.tar"
_LAYER_TYPE = f"{_PLAIN_LAYER_TYPE}.gzip"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ImageConfig:
    entrypoint: Sequence[str] = ()
    cmd: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    machine: str = "x86_64"


@dataclass(frozen=True, slots=True)
class Layer:
    path: Path
    digest: str  # of the bytes on disk
    diff_id: str  # of the tar itself
    size_bytes: int

    @property
    def media_type(self) -> str:
        return _PLAIN_LAYER_TYPE if self.digest == self.diff_id else _LAYER_TYPE


@dataclass(frozen=True, slots=True)
class PublishedImage:
    repository: str
    tag: str
    digest: str


def layer_from_tree(tree: Path, target: Path, *, prefix: str = "", gzip_level: int = 6) -> Layer:
    """Write ``tree`` as a layer under ``prefix``; owners become root, times zero.

    Level 0 does not compress: between hosts on the same machine that would cost more than it saves.
    """

    def normal(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        return info

    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(tree.rglob("*")):
            name = (Path(prefix) / path.relative_to(tree)).as_posix()
            tar.add(path, arcname=name, recursive=False, filter=normal)
    digest = diff_id = _file_digest(target)
    if gzip_level:
        target.write_bytes(gzip.compress(target.read_bytes(), gzip_level, mtime=0))
        digest = _file_digest(target)
    return Layer(target, digest, diff_id, target.stat().st_size)


def config_bytes(layers: Sequence[Layer], config: ImageConfig) -> bytes:
    body = {
        "architecture": _ARCHITECTURES[config.machine],
        "os": "linux",
        "config": {
            "Entrypoint": list(config.entrypoint) or None,
            "Cmd": list(config.cmd) or None,
            "Env": [f"{key}={value}" for key, value in sorted(config.env.items())],
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created_by": "virtual lab"} for _ in layers],
        "created": "2026-01-01T00:00:00Z",
    }
    return json.dumps(body, sort_keys=True).encode()


def manifest_bytes(layers: Sequence[Layer], config: bytes) -> bytes:
    body = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {
            "mediaType": _CONFIG_TYPE,
            "size": len(config),
            "digest": f"sha256:{hashlib.sha256(config).hexdigest()}",
        },
        "layers": [
            {"mediaType": layer.media_type, "size": layer.size_bytes, "digest": layer.digest}
            for layer in layers
        ],
    }
    return json.dumps(body, sort_keys=True).encode()


def push_image(
    registry: str, name: str, tag: str, layers: Sequence[Layer], config: ImageConfig
) -> str:
    base = f"http://{registry}/v2/{name}"
    packed_config = config_bytes(layers, config)
    for layer in layers:
        with layer.path.open("rb") as content:
            _upload_blob(base, layer.digest, content, layer.size_bytes)
    config_digest = f"sha256:{hashlib.sha256(packed_config).hexdigest()}"
    _upload_blob(base, config_digest, io.BytesIO(packed_config), len(packed_config))
    manifest = manifest_bytes(layers, packed_config)
    headers = {"Content-Type": MANIFEST_TYPE}
    _request("PUT", f"{base}/manifests/{tag}", manifest, headers)
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def has_manifest(registry: str, name: str, reference: str) -> bool:
    url = f"http://{registry}/v2/{name}/manifests/{reference}"
    return _exists(url, {"Accept": MANIFEST_TYPE})


def _upload_blob(base: str, digest: str, content: BinaryIO, size_bytes: int) -> None:
    if _exists(f"{base}/blobs/{digest}", {}):
        return
    location = _request("POST", f"{base}/blobs/uploads/", b"", {})
    upload = urljoin(f"{base}/", location)
    mark = "&" if urlsplit(upload).query else "?"
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size_bytes)}
    _request("PUT", f"{upload}{mark}digest={digest}", content, headers)


def _exists(url: str, headers: Mapping[str, str]) -> bool:
    try:
        _request("HEAD", url, None, headers)
    except LabError as error:
        if "HTTP 404" in error.what:
            return False
        raise
    return True


def _request(
    method: str, url: str, body: bytes | BinaryIO | None, headers: Mapping[str, str]
) -> str:
    request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)
    # Ignore proxies of the environment: the registry is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=120) as answer:
            return str(answer.headers.get("Location", ""))
    except urllib.error.HTTPError as error:
        detail = error.read(500).decode(errors="replace")
        what = f"HTTP {error.code} {detail}".strip()
        raise LabError(
            f"{method} {url}", what, "read run/registry.log in the lab's state"
        ) from error
    except OSError as error:
        raise LabError(f"{method} {url}", str(error), "check `lab status`") from error


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def read_published(paths: LabPaths) -> dict[str, PublishedImage]:
    path = paths.state / "images.json"
    if not path.exists():
        return {}
    return {name: PublishedImage(**body) for name, body in json.loads(path.read_text()).items()}


def write_published(paths: LabPaths, images: Iterable[tuple[str, PublishedImage]]) -> None:
    known = read_published(paths) | dict(images)
    text = json.dumps({name: asdict(image) for name, image in sorted(known.items())}, indent=1)
    (paths.state / "images.json").write_text(text + "\n")
