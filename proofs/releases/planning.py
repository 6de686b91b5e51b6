import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.hub.server import running
from proofs.releases import trees
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.lock import hub as hubs
from spark_deploy.lock.headers import read_anatomy
from spark_deploy.lock.resolve import write_lock
from spark_deploy.lock.types import EMPTY_LOCK, Lock

HERE = Path(__file__).parent / "inventory"
PAIR = 'cluster.hosts=["spark-1","spark-2"]'
PLANS = {
    "cluster-overlay": ["--model", "qwen3.5-122b", "--profile", "v2", "--data", PAIR],
    "cluster-full": [
        *("--model", "qwen3.5-122b", "--profile", "v2", "--data", PAIR),
        *("--data", "checkpoint.layout=full"),
    ],
    "plain-fp8": ["--model", "tiny-fp8", "--profile", "plain-mtp2"],
    "plain-bf16": ["--model", "tiny-bf16", "--profile", "plain-mtp2"],
    "published-bf16": ["--model", "tiny-bf16", "--profile", "plain"],
    "plain-ngram": ["--model", "tiny-bf16", "--profile", "plain-ngram"],
    "flash-nvme": ["--model", "qwen3.8-flash-next", "--profile", "flash-nvme"],
    "container": ["--model", "tiny", "--profile", "v2"],
    "seeing": ["--model", "tiny", "--profile", "v2-seeing"],
}


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "inventory"
        shutil.copytree(HERE, site)
        write_lock(site / "spark.lock.yml", make_lock(Path(folder) / "hub"))
        for name, chosen in PLANS.items():
            (out / f"{name}.json").write_text(run_plan(site / "two.py", chosen))


def make_lock(store: Path) -> Lock:
    for name in ("fp8", "bf16"):
        trees.publish_plain(store, name)
    catalog = read_catalog(user_dir=HERE)
    models = [catalog.model(f"tiny-{name}") for name in ("fp8", "bf16")]
    plain = [model for model in models if isinstance(model, PlainModel)]
    with running(store, store) as address:
        own = HubSettings(endpoint=address)
        sources = [
            hubs.look_up_repo(own.endpoint, model.repository, "main", None) for model in plain
        ]
        anatomies = [
            read_anatomy(m.repository, s.commit, own) for m, s in zip(plain, sources, strict=True)
        ]
    return EMPTY_LOCK.with_entries(sources, anatomies=anatomies)


def run_plan(inventory: Path, chosen: list[str]) -> str:
    arguments = ["plan", "spark-1", "--inventory", str(inventory), "--estimate", "--json", *chosen]
    command = [sys.executable, "-m", "spark_deploy", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
