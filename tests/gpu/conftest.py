from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "files" / "image"))

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # torch would start a thread per core in every test
    cores_per_test = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores_per_test)))

LONGEST = ("[sizes]", "damaged_vision_towers", "ngram_table_from_a_file", "two_hosts", "[two-gpus]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = _missing()
    # The longest start first, so that parallel workers end at about the same time.
    own = f"{here.parent.name}/{here.name}/"
    items.sort(key=lambda i: not (own in i.nodeid and any(text in i.nodeid for text in LONGEST)))
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionfinish(session: pytest.Session) -> None:
    kept = os.environ.get("SPARK_GPU_RESULTS")
    worker = hasattr(session.config, "workerinput")
    if kept and not worker and not _missing():
        from proofs import stages

        stages.merge_rows(Path(kept))


@pytest.fixture(autouse=True)
def free_gpu_memory() -> Iterator[None]:
    """Return this process's cached memory: engines of parallel tests need it."""
    yield
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def trees(shared_directory: Path) -> Path:
    from proofs.trees import make as maker

    def make(out: Path) -> None:
        maker.make(out, _hub(shared_directory))

    return _path_variable("TREES") or make_once(shared_directory, "trees", make)


@pytest.fixture(scope="session")
def recall_weights() -> Path:
    from proofs.recall import trees

    return _path_variable("RECALL") or trees.HERE


@pytest.fixture(scope="session")
def eyes(shared_directory: Path) -> Path:
    return _path_variable("EYES") or make_once(
        shared_directory, "eyes.npz", lambda out: _run("proofs.releases.eyes", str(out))
    )


@pytest.fixture(scope="session")
def quality_trees(trees: Path, recall_weights: Path, shared_directory: Path) -> Path:
    from proofs.trees import make as maker

    def make(done: Path) -> None:
        if not (trees / "recall-plain").exists():
            maker.make_quality(trees, recall_weights)
        done.touch()

    make_once(shared_directory, "quality", make)
    return trees


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture
def results(tmp_path: Path) -> Path:
    kept = os.environ.get("SPARK_GPU_RESULTS")
    return Path(kept) if kept else tmp_path / "results"


def _path_variable(name: str) -> Path | None:
    path = os.environ.get(f"SPARK_GPU_{name}")
    return Path(path) if path else None


def _hub(shared: Path) -> Path:
    from lab.model import build

    return _path_variable("HUB") or make_once(shared, "hub", build.build)


def make_once(shared: Path, name: str, make: Callable[[Path], None]) -> Path:
    out, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(out)
            done.touch()
    return out


def _run(module: str, *arguments: str) -> None:
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=root, check=True)


def _missing() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "needs a CUDA machine: torch is not installed here"
    return None if torch.cuda.is_available() else "needs a CUDA machine: torch sees no device"
