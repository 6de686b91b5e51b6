import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from spark_contract import files

from spark_deploy.cli import models
from spark_deploy.cli.add import make_draft
from spark_deploy.config.catalog.load import read_families
from spark_deploy.config.checkout import read_mapping
from spark_deploy.config.errors import SparkError
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.lock.headers import describe_repository, make_metadata
from spark_deploy.lock.hub import ModelCard
from tests import forked
from tests.unit.checkpoint.builder_hub import Hub
from tests.unit.cli.test_add import COMMIT, CONFIG, ENTRIES, add, make_site
from tests.unit.hostile import hostile
from tests.unit.lockfile.hub_trees import write_repository
from tests.unit.planning.plans import shipped_catalog

REPO = "org/tiny"
INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
DOCUMENTS: dict[str, Any] = {
    "config.json": {**CONFIG, "quantization_config": {"quant_method": "fp8", "bits": 8},
                    "audio_config": {}, "auto_map": {"AutoModel": "m.M"}},
    "generation_config.json": {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
    "tokenizer_config.json": {"chat_template": "{{ messages }}", "model_max_length": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with Hub(tmp_path_factory.mktemp("hub")) as running, pytest.MonkeyPatch.context() as patch:
        forked.fork_builder(patch)
        folder = running.root / REPO / "resolve" / COMMIT
        folder.mkdir(parents=True)
        for name, text in DOCUMENTS.items():
            (folder / name).write_text(json.dumps(text))
        write_repository(running.root, REPO, ENTRIES, COMMIT, DOCUMENTS["config.json"])
        yield running


def answers_of(hub):
    folder = hub.root / REPO / "resolve" / COMMIT
    result = {name: (folder / name).read_bytes() for name in (*DOCUMENTS, INDEX)}
    return {**result, "main": (hub.root / f"api/models/{REPO}/revision/main").read_bytes()}


def draft_with(hub, end, answer):
    hub.fault = lambda item, path, data: item.serve(answer) or True if path.endswith(end) else None
    try:
        result = describe_repository(
            f"{REPO}@main", HubSettings(endpoint=hub.url), all_documents=True
        )
        metadata = make_metadata(REPO, result)
        card, engines = ModelCard("mit", True, "text-generation"), shipped_catalog().engines
        draft = make_draft(metadata, result, card, engines, read_families(), "main")
    except SparkError as error:
        [problem] = error.problems
        assert problem.line.isprintable()
        assert len(problem.line) < 4200
        return {}
    assert all(len(item) < 1000 for item in draft.open_questions)
    path = hub.root / "draft.yml"
    path.write_text(draft.text())
    data, problems = read_mapping(path, label="draft")
    assert problems == []
    assert all(line.isprintable() for line in draft.text().splitlines())
    return data


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_hub_response_yields_a_draft_model_or_a_single_error(hub, data):
    end, text = data.draw(st.sampled_from(sorted(answers_of(hub).items())))
    assert draft_with(hub, end, data.draw(hostile(text))).get("kind", "plain") == "plain"


def listed(hub, *extra, size=1, **changes):
    text = json.loads(answers_of(hub)["main"])
    text["siblings"][0]["size"] = size
    text["siblings"] += [{"rfilename": name, "size": 1} for name in extra]
    return json.dumps({**text, **changes}).encode()


def of_length(number):
    return number.to_bytes(8, "little") + b"{}"


REFUSED = {
    "a commit that is a path": ("main", lambda hub: listed(hub, sha="../../../etc")),
    "a commit of a megabyte": ("main", lambda hub: listed(hub, sha="a" * 1_000_000)),
    "more shards than any model": (
        "main", lambda hub: listed(hub, *(f"{n}.safetensors" for n in range(5000))),
    ),
    "a header longer than the file": (SHARD, lambda hub: of_length(1000)),
    "a header of eight exabytes": (SHARD, lambda hub: of_length(2**63)),
    "a name of a megabyte": (
        SHARD, lambda hub: of_length(1_000_006)[:8] + b'{"' + b"x" * 1_000_000 + b'":1}',
    ),
    "an index of files that are not there": (
        INDEX, lambda hub: b'{"weight_map": {"a": "../../../etc/passwd"}}',
    ),
    "a config.json of 200 MB": ("config.json", lambda hub: b'{"a": "' + b"x" * 200_000_000 + b'"}'),
    "a number that is none": ("config.json", lambda hub: b'{"num_hidden_layers": 1e400}'),
    "the same key twice": (
        "config.json",
        lambda hub: b'{"model_type": "qwen3", "hidden_size": 1, "hidden_size": -1}',
    ),
}  # fmt: skip
LONG = "an index of a million names"
SLOW = (LONG, "a config.json of 200 MB", "a million values")
ACCEPTED = {
    "a size that exceeds every number": ("main", lambda hub: listed(hub, size=10**400)),
    "a negative size": ("main", lambda hub: listed(hub, size=-(10**30))),
    "names that lead elsewhere": (
        "main", lambda hub: listed(hub, "../../x.json", "/etc/passwd", "a\x1b[2J", "\u202egnp.exe"),
    ),
    "sampling without a number": (
        "generation_config.json",
        lambda hub: b'{"temperature": 1e400, "top_p": NaN, "top_k": ' + b"9" * 4000 + b"}",
    ),
    LONG: (
        INDEX, lambda hub: json.dumps(
            {"weight_map": dict.fromkeys(map(str, range(1_000_000)), SHARD)}
        ).encode(),
    ),
    "a type of a megabyte": (
        "config.json", lambda hub: json.dumps({**CONFIG, "model_type": "x" * 1_000_000}).encode(),
    ),
}  # fmt: skip


def quick_or_slow(name):
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.mark.parametrize("case", [quick_or_slow(name) for name in REFUSED])
def test_invalid_hub_responses_are_rejected(hub, case):
    end, answer = REFUSED[case]
    assert draft_with(hub, end, answer(hub)) == {}


@pytest.mark.parametrize("case", [quick_or_slow(name) for name in ACCEPTED])
def test_unusual_hub_responses_yield_a_valid_file(hub, case):
    end, answer = ACCEPTED[case]
    assert draft_with(hub, end, answer(hub))["repository"] == REPO


def aliases(levels):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, levels)]
    return "\n".join(lines)


FILES = {
    "aliases of aliases": (aliases(12), "has more than 200000 values"),
    "a million values": (f"a: [{'1,' * 1_000_000}]", "has more than 200000 values"),
    "nine megabytes": (f"a: {'x' * 9_000_000}", "is larger than"),
    "addresses in addresses": (f"shared: 1\nname: '{'://' * 300_000}'", "the required form"),
    "a date for a name": ("model: 2026-01-01\ncommand: vllm serve", "expected a Hub repository"),
    "a file name for a repository": (
        "model: org/../../x\ncommand: vllm serve x",
        "expected a Hub repository",
    ),
    "a line more": ('model: "org/x\\n"\ncommand: vllm serve x', "expected a Hub repository"),
    "a name that no file can have": (
        f"model: org/{'x' * 5000}\ncommand: vllm serve x",
        "expected a Hub repository",
    ),
}


@pytest.mark.parametrize("case", [quick_or_slow(name) for name in FILES])
def test_hostile_file_is_rejected_without_writing(hub, tmp_path, case, capsys):
    text, output = FILES[case]
    site = make_site(tmp_path / "site", hub)
    (tmp_path / "r.yaml").write_text(text)
    assert add(site, str(tmp_path / "r.yaml")) == 1
    err = capsys.readouterr().err
    assert output in err
    assert "Traceback" not in err
    assert len(err) < 2000
    assert not list(site.rglob("catalog/*/*"))


RECIPE = 'model: org/tiny\nsummary: x\ndescription: "a\\e[2Jb"\n"\\e[2J": 1\ncommand: vllm serve x'


def test_recipe_cannot_send_control_characters_to_the_terminal(hub, tmp_path, capsys):
    hub.fault = None
    site = make_site(tmp_path / "site", hub)
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert add(site, str(tmp_path / "r.yaml")) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err


class Ended(BaseException):
    """An interruption."""


@pytest.mark.parametrize("at", [1, 2, 3])
def test_add_writes_all_catalog_files_or_none(tmp_path, at, monkeypatch):
    model = {"kind": "plain", "summary": "s", "choose_when": "c", "repository": "org/x"}
    texts = {
        ("models", "mine"): yaml.safe_dump(model),
        ("profiles", "mine"): "based_on: plain\nsummary: s\nchoose_when: c\n",
    }
    (tmp_path / "catalog/profiles").mkdir(parents=True)
    (tmp_path / "catalog/profiles/mine.yml").write_text("# mine\n")
    calls = iter(range(1, 9))

    def may_end(call):
        def called(*words):
            if next(calls) == at:
                raise Ended
            call(*words)

        return called

    monkeypatch.setattr(models, "_check", may_end(models._check))
    monkeypatch.setattr(models.files, "write_text", may_end(files.write_text))
    with pytest.raises(Ended):
        models.write_files(tmp_path, texts, force=True)
    result = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in result] == ["mine.yml"]
    assert result[0].read_text() == "# mine\n"
