"""The containers of a host, and which of them are model servers or hold the GPU."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_contract.host.digests import DIGEST12
from spark_contract.host.units import RELEASE_LABEL, SERVICE_LABEL

# No environment but one word, and no command line: both carry other people's keys.
_FIELDS = {
    "id": ".Id",
    "name": ".Name",
    "image": ".Config.Image",
    "state": ".State.Status",
    "restart": ".HostConfig.RestartPolicy.Name",
    "runtime": ".HostConfig.Runtime",
    "requests": ".HostConfig.DeviceRequests",
    "labels": ".Config.Labels",
}
# A list that ends in null, because a variable that is not set prints nothing.
_VISIBLE = (
    '{{range .Config.Env}}{{$words := split . "="}}'
    '{{if eq (index $words 0) "NVIDIA_VISIBLE_DEVICES"}}{{json (index $words 1)}},{{end}}{{end}}'
)
_FORMAT = (
    "{"
    + ",".join(f'"{key}":{{{{json {path}}}}}' for key, path in _FIELDS.items())
    + f',"visible":[{_VISIBLE}null]}}'
)

SCRIPT = rf"""
echo '== containers'
if command -v docker >/dev/null 2>&1; then
  ids=$(timeout 20 docker ps -aq --no-trunc) ||
    echo "unreachable $(systemctl show -p ActiveState --value docker.service)"
  [ -n "$ids" ] && timeout 30 docker inspect --format '{_FORMAT}' $ids
fi
"""


def images_script(references: Sequence[str]) -> str:
    """Print those of ``references`` (tags or name@digest) that the host has."""
    names = " ".join(shlex.quote(reference) for reference in references)
    return rf"""
echo '== images'
has() {{ timeout 20 docker image inspect "$@" >/dev/null 2>&1 && printf '%s\n' "$@"; }}
set -- {names}
command -v docker >/dev/null 2>&1 && [ $# != 0 ] && {{ has "$@" || for one; do has "$one"; done; }}
"""


# Names of servers that load models; matched against the image's repository name.
_ENGINES = re.compile(
    r"vllm|sglang|ollama|llama[._-]?cpp|llama-server|text-generation|tritonserver|trtllm|"
    r"tensorrt|lmdeploy|exllama|tabbyapi|lmstudio|comfyui|nim/|aphrodite|localai"
)

# Of a release or a job. Others name containers after this machine, too.
_OURS = re.compile(rf"spark-[a-z0-9-]+-{DIGEST12}")


@dataclass(frozen=True, slots=True)
class Container:
    """One container as ``docker inspect`` shows it."""

    id: str
    name: str
    image: str
    state: str  # created running paused restarting removing exited dead
    restart: str  # no always unless-stopped on-failure
    uses_gpu: bool
    labels: dict[str, str]

    @property
    def ours(self) -> bool:
        """Whether our own units run it."""
        labelled = {RELEASE_LABEL, SERVICE_LABEL} & set(self.labels)
        return bool(labelled) or _OURS.fullmatch(self.name) is not None

    @property
    def is_engine(self) -> bool:
        """Whether it serves models or holds the GPU, as far as can be told from outside."""
        return self.uses_gpu or bool(_ENGINES.search(self.image.lower()))

    @property
    def alive(self) -> bool:
        """Whether it runs now or is about to."""
        return self.state in ("running", "restarting", "paused")

    @property
    def comes_back(self) -> bool:
        """Whether docker may start it again without being asked."""
        return self.restart == "always" or (self.restart == "unless-stopped" and self.alive)


def parse(lines: Iterable[str]) -> tuple[Container, ...]:
    """Read one JSON object a line, as ``SCRIPT`` prints them."""
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found.append(
            Container(
                id=row["id"],
                name=row["name"].lstrip("/"),
                image=row["image"],
                state=row["state"],
                restart=row["restart"] or "no",
                uses_gpu=_asks_for_gpu(row["requests"])
                or (row["runtime"] == "nvidia" and _is_given_gpu(row.get("visible") or [None])),
                labels=row["labels"] or {},
            )
        )
    return tuple(found)


def silent(lines: Iterable[str]) -> str:
    """Return the state of the unit whose daemon did not answer; "" when it did."""
    return next((line.split(" ")[1] for line in lines if line.startswith("unreachable ")), "")


def _is_given_gpu(visible: Sequence[str | None]) -> bool:
    """Whether NVIDIA's runtime, often the default one, has anything to do for this container."""
    return visible[0] not in (None, "", "void", "none")


def _asks_for_gpu(requests: object) -> bool:
    if not isinstance(requests, list):
        return False
    words = json.dumps(requests).lower()
    return '"gpu"' in words or "nvidia" in words
