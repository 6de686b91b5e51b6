"""Rollouts to variations of a deployed release: some values of ``release.json`` differ."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.labkit import Guest

_EVIDENCE = """
import glob, json, os
WANTS = "/etc/systemd/system/multi-user.target.wants"
def read(path):
    return json.load(open(path))
good = read("/var/lib/spark/good/main.json")
print(json.dumps({
    "proven": sorted(os.path.basename(path)[:-5]
                     for path in glob.glob("/var/lib/spark/proofs/*.json") if read(path)["ok"]),
    "boots": sorted(name for name in os.listdir(WANTS) if name.startswith("spark-serve@")),
    "boots_changed_ns": os.stat(WANTS).st_mtime_ns,
    "good": [good["release"], good["previous"]],
}))
"""


def evidence(guest: Guest) -> dict[str, Any]:
    """Return the proven releases and the boot list, with the time of its last change."""
    values: dict[str, Any] = guest.json(f"python3 - <<'END'\n{_EVIDENCE}END")
    return values


def forget_other_proofs(guest: Guest, release: str) -> None:
    guest.run(f"find /var/lib/spark/proofs -name '*.json' ! -name '{release}.json' -delete")


@dataclass(frozen=True)
class Outcome:
    old: str
    before: dict[str, Any]
    result: dict[str, Any]
    after: dict[str, Any]
    serving: list[str]
    answers: bool


@dataclass
class Trial:
    guest: Guest
    old: str
    data: dict[str, Any]

    @classmethod
    def on(cls, guest: Guest) -> Trial:
        old = guest.release()
        forget_other_proofs(guest, old)
        return cls(guest, old, guest.release_document())

    @contextmanager
    def candidate(self, title: str, *, env: dict[str, str], **changes: Any) -> Iterator[str]:
        name = self._write(title, env, changes)
        try:
            yield name
        finally:
            if self.guest.serving() != [f"spark-serve@{self.old}.service"]:
                self.change_to(self.old)
            self._forget(name)

    def outcome(self, title: str, *, env: dict[str, str], **changes: Any) -> Outcome:
        before = evidence(self.guest)
        with self.candidate(title, env=env, **changes) as name:
            result = self.change_to(name)
            after, serving = evidence(self.guest), self.guest.serving()
            answers = self.guest.answers()
        return Outcome(self.old, before, result, after, serving, answers)

    def _write(self, title: str, env: dict[str, str], changes: dict[str, Any]) -> str:
        data = copy.deepcopy(self.data)
        digest = hashlib.sha256(title.encode()).hexdigest()
        name = f"main-{digest[:12]}"
        data |= {"name": name, "digest": digest}
        data["engine"]["argv"] = [
            "--enable-prefix-caching" if word == "--no-enable-prefix-caching" else word
            for word in data["engine"]["argv"]
        ]
        data["engine"]["env"] |= {"STUB_LOG": "spark plugin is on", **env}
        data["timeouts"] |= {"start_s": 30, "stop_s": 5, "drain_s": 2}
        data["check"] |= {
            "timeout_s": 15, "bench": None, "image": True, "acceptance_floor": 0.5,
            "prefix": {"block_tokens": 100}, "conversation": True, "repeat": True,
            "log_required": ["spark plugin is on"], "log_forbidden": ["setting cudagraph_mode="],
        }  # fmt: skip
        for path, value in changes.items():
            section, _, key = path.partition("__")
            data[section][key] = value
        drop_in = "/etc/systemd/system/spark-serve@{}.service.d"
        self.guest.run(
            f"mkdir -p /etc/spark/releases/{name} && "
            f"cp -r {drop_in.format(self.old)} {drop_in.format(name)} && "
            f"cat > /etc/spark/releases/{name}/release.json <<'END'\n{json.dumps(data)}\nEND\n"
            "systemctl daemon-reload"
        )
        return name

    def change_to(self, name: str) -> dict[str, Any]:
        unit = f"spark-switch@{name}.service"
        self.guest.run(f"systemctl reset-failed 'spark-s*@{name}.service'; systemctl start {unit}; "
                       f"systemctl is-active {unit} && exit 1 || :")  # fmt: skip
        result: dict[str, Any] = self.guest.json(f"cat /var/lib/spark/switch/{name}.json")
        return result

    def _forget(self, name: str) -> None:
        self.guest.run(
            f"rm -rf /etc/spark/releases/{name} /etc/systemd/system/spark-*@{name}.*.d "
            f"/var/lib/spark/proofs/{name}.json /var/lib/spark/switch/{name}.json; "
            f"systemctl reset-failed 'spark-*@{name}.service'; systemctl daemon-reload"
        )
