import json

import pytest
from spark_contract.units import TREE_NAME

from spark_deploy.config.errors import LockError, PlanError
from spark_deploy.lock import hub as lookup
from spark_deploy.lock.resolve import read_lock, write_lock
from spark_deploy.lock.types import EMPTY_LOCK, LockedSource, SourceFile, why_not_downloaded
from spark_deploy.plan.artifacts import locked_source, source_plan
from spark_deploy.plan.jobs import fetch_job
from tests.unit.checkpoint.builder_hub import Hub
from tests.unit.planning.plans import settings_of

REPO = "lab/mixed"
DOWNLOADED = ["config.json", "tokenizer.json", "chat_template.jinja", "README.md", "merges.txt"]
CODE = ["modeling_x.py", "pytorch_model.bin", "sub/training_args.BIN", "x.pt", "lib/libx.so.1"]


def entry(path):
    return {"rfilename": path, "size": 9, "blobId": "b" * 40}


@pytest.fixture
def look_up(tmp_path):
    with Hub(tmp_path / "hub") as hub:

        def look_up_files(*paths):
            listing = hub.root / "api/models" / REPO / "revision/main"
            listing.parent.mkdir(parents=True, exist_ok=True)
            body = {"id": REPO, "sha": "1" * 40, "siblings": [entry(path) for path in paths]}
            listing.write_text(json.dumps({**body, "tags": [], "gated": False}))
            return lookup.look_up_repo(hub.url, REPO, "main", None)

        yield look_up_files


def test_never_downloads_pickle_or_code(look_up, tmp_path):
    result = look_up(".gitattributes", *DOWNLOADED, "model.safetensors", *CODE)
    assert {file.path for file in result.files} == {*DOWNLOADED, "model.safetensors"}
    assert result.left_out.keys() == set(CODE)
    assert "pickle" in result.left_out["pytorch_model.bin"]
    assert "code" in result.left_out["modeling_x.py"]
    path = tmp_path / "spark.lock.yml"
    write_lock(path, EMPTY_LOCK.with_entries([result]))
    assert read_lock(path).source(REPO, "main") == result
    assert "modeling_x.py: code," in path.read_text()


def test_download_jobs_exclude_unsafe_files(look_up):
    settings = settings_of()
    source = source_plan(look_up("model.safetensors", "config.json", *CODE), settings)
    [order] = fetch_job(source).inputs
    fetched = {file["path"] for file in json.loads(order.content)["files"]}
    assert fetched == {"model.safetensors", "config.json"}


def test_rejects_repository_with_only_pickle_weights(look_up):
    with pytest.raises(LockError) as caught:
        look_up("config.json", "pytorch_model-00001-of-00002.bin", "modeling_x.py")
    [problem] = caught.value.problems
    assert "pytorch_model-00001-of-00002.bin" in problem.what
    assert "pickle" in problem.what
    assert "safetensors" in problem.fix
    assert "\n" not in problem.line


UNSAFE = (
    "a.PY x/y.Pkl w.ckpt a.tar.py liba.so go.sh a.pyw a.pyx a.pl a.rb a.lua a.mjs a.zsh a.ps1 a.cu "
    "a.o A.class a.p a.pk a.pth.tar a.pt.zip a.pkl.xz a.pickle.gz a.hdf5 a.marshal a.cloudpickle "
    "a.distcp a.json.xyz a.model.v3.py x.v3"
)
DATA = (
    "LICENSE .gitignore py a.py.md model.bin.index.json 1_Pooling/config.json model.safetensors "
    "tokenizer.model tokenizer.model.v3 tokenizer.model.v7m1 tekken.json qwen.tiktoken "
    "tiktoken.model sentencepiece.bpe.model spiece.model spm.model vocab.bpe bpe.codes merges.txt "
    "merges vocab.txt chat_template.jinja chat_templates/tool.jinja recipe.yaml figures/1.PNG"
)


def test_downloads_only_known_data_types():
    assert [path for path in UNSAFE.split() if not why_not_downloaded(path)] == []
    assert [path for path in DATA.split() if why_not_downloaded(path)] == []


def test_rejects_old_lock_that_lists_code():
    files = (
        SourceFile("model.safetensors", 1, sha256="a" * 64),
        SourceFile("modeling_x.py", 1, git_sha1="b" * 40),
    )
    old = EMPTY_LOCK.with_entries([LockedSource(REPO, "main", "1" * 40, files)])
    with pytest.raises(PlanError, match=r"modeling_x\.py is excluded") as caught:
        locked_source(old, REPO, "main")
    assert f"update --only {REPO}" in caught.value.problems[0].fix


def test_partial_download_has_a_separate_directory():
    weights = (SourceFile("model.safetensors", 1, sha256="a" * 64),)
    plain = LockedSource(REPO, "main", "1" * 40, weights)
    partial = LockedSource(REPO, "main", "1" * 40, weights, {"x.py": "is code"})
    settings = settings_of()
    assert source_plan(plain, settings).dir.endswith(f"/lab--mixed-{'1' * 12}")
    assert source_plan(partial, settings).dir != source_plan(plain, settings).dir
    assert TREE_NAME.match(source_plan(partial, settings).dir)
