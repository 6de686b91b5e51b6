import contextlib
from pathlib import Path

import pytest
import yaml

from spark_deploy.config.errors import LockError, SettingsError
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.lock import hub, resolve
from spark_deploy.lock.types import EMPTY_LOCK, LockedSource, SourceFile

KEY = "0" * 64
REPOSITORY = {"url": "https://a.example", "suite": "noble", "components": ["main"],
              "key_url": "https://a.example/k", "key_sha256": KEY}  # fmt: skip


def repository(**changes):
    return {"repositories": {"vendor": {**REPOSITORY, **changes}}}


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


FOLDERS = ("paths.models_dir", "paths.sources_dir")
HOSTILE = [
    # Line breaks for apt sources, units, nginx, sudoers.
    *(repository(suite=text) for text in ("noble\nTrusted: yes", "noble\n", "a b", "-x", "")),
    *(repository(components=[text]) for text in ("main\nSigned-By:", "main\n", "a b", "[x]", "")),
    *(repository(url=text) for text in ("https://ann:word@a", "https://ann@a:80/x")),
    *(
        nested(f"hub.{key}", text)
        for key, text in (
            ("endpoint", "https://ann:word@a"),
            ("mirrors", ["https://a", "https://ann:word@b/c"]),
        )
    ),
    *(repository(url=text) for text in ("https://a\nx", "https://a/x\n", "ftp://a", "https://a b")),
    *(repository(key_url=text) for text in ("https://a/$(id)", "https://a/`id`", "https://a/'x")),
    *(repository(key_sha256=text) for text in (KEY + "\n", KEY[1:])),
    {"repositories": {"vendor\n": REPOSITORY}},
    # Fields of --mount, specifiers of units, system folders.
    *(nested(key, f"/data/a{text}") for key in FOLDERS for text in (",readonly", "%h", ":ro")),
    *(nested(key, f"/data/a{text}") for key in FOLDERS for text in ("\n", "'b", '"', "$x", "\\x")),
    *(nested(key, text) for key in FOLDERS for text in ("/tmp", "/etc/spark/x", "/usr/lib/x")),
    *(nested(key, text) for key in FOLDERS for text in ("/home/ann/models", "/root/x", "/run/x")),
    *(nested(key, text) for key in FOLDERS for text in ("/", "/srv", "/var", "/data/../etc/x")),
    *(nested(key, text) for key in FOLDERS for text in ("/var/lib/spark/x", "/dev/shm/x", "x")),
    *(nested("downloads.look_in", [text]) for text in ("/a\n", "/a b", "/$(id)", "/a/../etc")),
    *(nested("lock_file", text) for text in ("/etc/cron.d/x", "../x.yml", "a/../../x", "x\n")),
    *(nested("takeover", [text]) for text in ("-f", "a b", "a;b", "--all", "a\n")),
    *(nested("allow_memory_holders", [text]) for text in ("a\nb", "a\0")),
    *(nested("docker.users", [text]) for text in ("ann\n", "-G", "ann,root")),
    *(nested("serve.names", [text]) for text in ("a\n", "-a", "a b")),
    *(nested("serve.address", text) for text in ("a\n", "a b", "a;b")),
    *(nested("serve.tls_names", [text]) for text in ("a\n", "a b", "")),
    *(nested("ssh.hostname", text) for text in ("-oProxyCommand=id", "a\n", "a b", "1.2.3.999")),
    *(nested("fleet.address", text) for text in ("1.2.3.999", "1.2.3", "spark-1")),
    *(nested("ssh.user", text) for text in ("-oProxyCommand=id", "a\n", "a b", "")),
    *(nested("images.engine", text) for text in ("a:b\n", "-v", "a b", "a;b")),
    *(nested("hub.endpoint", text) for text in ("https://a\n", "https://a b", "file:///etc")),
    *(nested("hub.mirrors", [text]) for text in ("https://a\n", "https://")),
    *(nested("registries.insecure", [text]) for text in ("a:1\n", 'a":1', "a,b:1")),
    *(nested("expect.os", text) for text in ("ubuntu 24.04\n", "ubuntu")),
    *(nested("model", text) for text in ("lab-stub\n", "../x", "-x")),
    *(nested("releases.rollback_to", text) for text in ("main-0123456789ab\n", "-x")),
    *(nested("engine.environment", {text: "x"}) for text in ("A\n", "A=B", "a", "A B")),
    *(nested("engine.options", {text: 1}) for text in ("seed\n", "-x", "a b")),
    *(
        nested("proxy.direct", [f"lan{text}"])
        for text in ("'", '"', "\\", "$x", "%h", ";", "#", "\n")
    ),
    *(nested("docker.packages", [text]) for text in ("--allow-unauthenticated", "jq\n", "a b")),
    *(nested("expect.unit_overrides", [text]) for text in ("/a b", "a.conf", "/a\n")),
    *(nested("fabric.interfaces", [text]) for text in ("-x", "a/b", "a\n")),
    *(nested("ssh.allowed_from", [text]) for text in ('a",command="id', "a,*", "!a", "a\n")),
    *(nested("schedule", [{"at": text, "model": "m", "profile": "p"}]) for text in ("8\nx", "$x")),
    nested("docker.daemon", {"log-opts": {"max-size": "1m\n"}}),
]
GOOD = [
    repository(suite="./", components=[]),
    repository(suite="noble-updates/main", components=["main", "non-free-firmware"]),
    *(nested("paths.models_dir", text) for text in ("/data", "/mnt/disk-2/models", "/srv/x/m")),
    nested("downloads.look_in", ["/home/*/.cache/huggingface/hub", "/data/[ab]?"]),
    nested("lock_file", "locks/spark.lock.yml"),
    nested("hub.endpoint", "https://hub.example.org:8443/api"),
    nested("hub.endpoint", "https://hub.example.org/a@b"),
    *(nested("ssh.hostname", text) for text in ("fe80::1%eth0", "192.168.255.1", "10.0.0.1.sslip")),
    *(nested("fleet.address", text) for text in ("fd00::1", "192.168.100.11", "::ffff:10.0.0.1")),
    nested("ssh.user", "ann.b"),
    nested(
        "proxy.direct", [".example.org", "*.lan", "10.0.0.0/8", "[fd00::1]", "fd00::/8", "a_b:80"]
    ),
    nested("takeover", ["old-vllm_1"]),
]


def load(tmp_path, settings):
    (tmp_path / "group_vars").mkdir(exist_ok=True)
    (tmp_path / "group_vars/all.yml").write_text(yaml.safe_dump(settings))
    load_hosts({"spark": ["spark-1"]}, root=tmp_path)


def test_rejects_hostile_setting_values(tmp_path):
    accepted = []
    for settings in HOSTILE:
        with contextlib.suppress(SettingsError):
            load(tmp_path, settings)
            accepted.append(settings)
    assert accepted == []


def test_accepts_ordinary_values(tmp_path):
    for settings in GOOD:
        load(tmp_path, settings)


GOOD_FILE = SourceFile("model.safetensors", 1, "a" * 64, None)


@pytest.mark.parametrize(
    "source",
    [
        LockedSource("org/repo", "main", "a" * 40 + "\n", (GOOD_FILE,)),
        LockedSource("org/repo", "main", "main", (GOOD_FILE,)),
        LockedSource("org/repo", "main", "a" * 40, (SourceFile("../x", 1, "a" * 64, None),)),
        LockedSource("org/repo", "main", "a" * 40, (SourceFile("/etc/x", 1, "a" * 64, None),)),
        LockedSource("org/repo", "main", "a" * 40, (SourceFile("a\nb", 1, "a" * 64, None),)),
        LockedSource("org/repo", "main", "a" * 40, (SourceFile("x", 1, "a" * 64 + "\n", None),)),
    ],
)
def test_rejects_hub_responses_that_violate_the_lock_schema(monkeypatch, source):
    monkeypatch.setattr(hub, "look_up_repo", lambda *_: source)
    names = resolve.Names(frozenset({("org/repo", "main")}), frozenset())
    settings = next(iter(load_hosts({"spark": ["spark-1"]}, root=Path("/nowhere")).values()))
    with pytest.raises(LockError, match="org/repo"):
        resolve.resolve(EMPTY_LOCK, names, settings.settings, (), lambda _: None)
