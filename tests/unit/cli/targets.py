from pathlib import Path

from spark_deploy.cli.hosts import Target
from spark_deploy.config.settings.load import load_hosts
from tests.unit.planning.plans import shipped_catalog

CATALOG = shipped_catalog()


def target_of(tmp_path: Path, name: str = "lab-1", data: dict | None = None, **settings) -> Target:
    overrides = {
        "model": "lab-stub",
        "ssh.hostname": "10.0.0.9",
        "serve.names": ["lab-model", "other"],
        **settings,
    }
    result = load_hosts({"lab": [name]}, root=tmp_path, overrides=overrides)[name]
    data = data or {"ssh_hostname": "10.0.0.9", "ssh_user": "spark", "_sudo": True}
    return Target(name, data, result, CATALOG)


def write_inventory(path: Path, *hosts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "from spark_deploy.inventory import group_from as _group_from\n"
        f'spark = _group_from("spark", hosts={list(hosts)!r}, file=__file__)\n'
    )
    return path
