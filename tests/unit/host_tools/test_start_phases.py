import pytest
from simulated_host import A, SimulatedHost
from spark_contract.tool import COMPILING
from spark_host.check import runner
from spark_host.engine import logs
from spark_host.engine.logs import StartPhases
from spark_host.rollout import steps
from stub_host import check, check_at_start, stored_proof

from tests.receipts import source_receipt

# vLLM 0.30 to 0.33 on several machines; paths are shortened.
LOG = """\
image (APIServer pid=1) INFO 09-21 12:49:40 [utils.py:233] non-default args: {'model': '/m'}
image (EngineCore pid=90) WARNING 09-21 12:49:50 [vllm.py:1] Enforce eager unset, torch.compile on
weights (EngineCore pid=90) INFO 09-21 12:49:58 [gpu_model_runner.py:4735] Starting to load model /m...
weights (EngineCore pid=90) INFO 09-21 12:50:11 [default_loader.py:397] Loading weights took 26.93 seconds
weights (EngineCore pid=90) INFO 09-21 12:50:11 [model_runner.py:310] Loading drafter model...
compile INFO 09-21 12:50:12 [model_runner.py:404] Model loading took 17.7 GiB memory and 12.00 seconds
compile INFO 09-21 12:50:13 [encoder_runner.py:131] Encoder cache will be initialized with a budget
compile INFO 09-21 12:50:28 [backends.py:1155] Dynamo bytecode transform time: 10.92 s
compile INFO 09-21 12:50:44 [backends.py:393] Compiling a graph for compile range (1, 2048) takes 15.65 s
compile (EngineCore pid=194) INFO 04-29 12:01:03 [gpu_model_runner.py:5963] Profiling CUDA graph memory: PIECEWISE=51 (largest=512)
graphs (EngineCore pid=194) INFO 04-29 12:01:07 [kv_cache_utils.py:1713] GPU KV cache size: 1,253,392 tokens
graphs (EngineCore pid=194) INFO 04-29 12:01:08 [default_loader.py:397] Loading weights took 0.2 seconds
graphs (EngineCore pid=90) INFO 11-21 10:01:30 [gpu_model_runner.py:6517] Graph capturing finished in 22 secs, took 0.50 GiB
ready (EngineCore pid=90) INFO 11-21 10:01:31 [core.py:413] init engine (profile, create kv cache, warmup model) took 55.50 s
ready (APIServer pid=1) INFO:     Application startup complete.
"""  # noqa: E501
LINES = [line.partition(" ")[::2] for line in LOG.splitlines()]


def test_start_phases_follow_the_log_and_never_go_back(host):
    phases, seen = StartPhases(host.release()), []
    for now_s, (expected, line) in enumerate(LINES):
        seen.append(line)
        phases.update(seen, now_s)
        assert phases.current == expected, line
    durations = phases.durations_s(20)
    assert list(durations) == ["image", "weights", "compile", "graphs", "ready"]
    assert durations == {"image": 2, "weights": 3, "compile": 5, "graphs": 3, "ready": 7}


def test_ignores_unknown_log_lines_and_lines_after_startup(host):
    phases = StartPhases(host.release())
    phases.update(["\x00\xff", "", "torch.compile and weights", "it's ready"], 3)
    assert phases.current == "image"
    phases.update([line for _, line in LINES], 4)
    assert phases.durations_s(6) == {"image": 4, "ready": 2}
    assert phases.durations_s(3.9) == {"image": 4, "ready": 0}


@pytest.mark.parametrize(("change_gb", "text"), [(-30, "30.0 of"), (5, "0.0 of"), (-99, "70.0 of")])
def test_loading_progress_is_computed_from_memory_used_since_the_start(
    host, monkeypatch, change_gb, text
):
    available = [10**11, 10**11 + change_gb * 10**9]
    monkeypatch.setattr(logs, "available_bytes", lambda: available.pop(0))
    tree, gb = host.paths.root / "tree", 10**9
    tree.mkdir()
    sizes = {"1.safetensors": 40 * gb, "2.safetensors": 30 * gb, "tokenizer.json": gb}
    files = [{"path": path, "size_bytes": size} for path, size in sizes.items()]
    files = [{**file, "sha256": "0" * 64, "modified_ns": 1, "inode": 1} for file in files]
    (tree / "receipt.json").write_text(source_receipt(files=files))
    phases = StartPhases(host.release(tree={"path": str(tree), "digest": "d" * 64}))
    phases.update([LINES[2][1]], 10)
    assert phases.text(58) == f"loading weights, {text} 70.0 GB, 48 s"


def test_start_records_its_phases_and_later_checks_keep_them(host, monkeypatch):
    monkeypatch.setattr(runner, "_PHASE_INTERVAL_S", 0.0)
    monkeypatch.setattr(runner, "_find_start_failure", lambda *_: None)
    release = host.release()
    host.start(release, STUB_LOAD_S="1")
    start = check_at_start(host, release)
    times_s = start.start_times_s
    assert [name for name in times_s if name != "graphs"] == ["image", "weights", "ready"]
    assert times_s["weights"] > 0.3
    assert check(host, release, "full").start_times_s == {}
    stored = stored_proof(host, release)
    assert (stored.start_times_s, stored.start_memory) == (times_s, start.start_memory)
    assert start.start_memory is not None
    check(host, release, "full", run="run-2")
    assert stored_proof(host, release).start_memory is None


def test_rollout_reports_only_the_progress_of_its_unit(monkeypatch, capfd):
    monkeypatch.setattr(steps, "_REPORT_INTERVAL_S", 0)
    sim = SimulatedHost()
    sim.journal = [
        "phase=memory waited_s=2 limit_s=9 1.0 GiB available, 2.0 GiB needed",
        f"phase=load waited_s=5 limit_s=100 loading weights, 1.0 of 2.0 GB, 3 s; {COMPILING}",
        "(EngineCore pid=90) INFO 11-21 10:00:00 [x.py:1] CANARY",
    ]
    sim.deploy(A)
    output = capfd.readouterr().out
    assert f"loading weights, 1.0 of 2.0 GB, 3 s; {COMPILING}\n" in output
    assert "limit_s" not in output
    assert "CANARY" not in output


# The API server's traceback follows the cause.
FOLLOWS = """\
(APIServer pid=395085)     raise RuntimeError(
(APIServer pid=395085)     ...<3 lines>...
(APIServer pid=395085) RuntimeError: Engine core initialization failed. See root cause above.
"""
MEMORY = "ValueError: Free memory on device (3.22/4.0 GiB) on startup is less than desired"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (f"(EngineCore_DP0 pid=17374) ERROR 09-28 15:47:24 [core.py:718] {MEMORY}", MEMORY),
        (f"{MEMORY}\n{FOLLOWS}", MEMORY),
        ("starting\nerror: memory: 0.1 GiB available, 0.7 GiB needed", "error: memory: 0.1"),
        ("\n".join(line for _, line in LINES), ""),
    ],
)
def test_finds_the_cause_of_a_failed_start_in_the_log(lines, message):
    cause = logs.error_message(lines.splitlines())
    assert cause.startswith(message)
    assert bool(cause) == bool(message)
