"""Whatever stands in a file or comes from a hub: an error of ours in parts, never another."""

import hashlib
import io
import json
import shutil
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi
from huggingface_hub.hf_api import ModelInfo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_deploy.cli.report import read_report
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import LockError, SparkError
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.hosts.status import Evidence
from spark_deploy.inventory.plans import read_inventory
from spark_deploy.lock import hub, registry
from spark_deploy.lock.file import read_lock
from spark_deploy.plan.resolve import problems_of
from tests.unit.examples import examples
from tests.unit.planning.plans import shipped_catalog

CATALOG = shipped_catalog()
FEW = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.dates(), st.binary(max_size=4), st.sampled_from(["v2", "/x", "0", "off", "generate"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.one_of(st.text(max_size=6), st.integers(), st.none()), inner, max_size=3
        )
    ),
    max_leaves=6,
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


def keys_of(schema: dict, prefix: str = "") -> list[str]:
    """Every dotted key of a schema, sections included."""
    found = []
    for key, part in schema.get("properties", {}).items():
        found += [prefix + key, *keys_of(part, f"{prefix}{key}.")]
    return found


SETTINGS = keys_of(json.loads((CHECKOUT / "schema/settings.schema.json").read_text()))


def said(error: SparkError) -> None:
    """Every problem says where, what and what to do."""
    assert error.problems
    for problem in error.problems:
        assert problem.where
        assert problem.what
        assert problem.fix
        str(problem).encode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "group_vars").mkdir()
    return tmp_path


@FEW
@given(st.dictionaries(st.sampled_from(SETTINGS), values, max_size=3))
def test_any_value_of_any_setting(root, chosen):
    data: dict = {}
    for key, value in chosen.items():
        *above, last = key.split(".")
        level = data
        for part in above:
            level = level.setdefault(part, {})
            if not isinstance(level, dict):
                break
        else:
            level[last] = value
    text = yaml.dump(data, allow_unicode=True)
    (root / "group_vars/spark.yml").write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        found = load_hosts({"spark": ["a"]}, root=root)["a"]
    except SparkError as error:
        said(error)
        return
    problems_of(found.settings, CATALOG)


@pytest.mark.slow
@FEW
@given(
    st.one_of(
        st.text(),
        st.binary().map(lambda raw: raw.decode("latin-1")),
        st.sampled_from(
            [
                "a: !!timestamp x",
                "a: !!bool x",
                "a: !!int x",
                "a: " + "1" * 5000,
                "a: 2026-13-01",
                "&a [*a]",
                "a: &b {c: *b}",
                "? [a]\n: 1",
                "a: " + "[" * 900,
                "a: " + "[" * 900 + "]" * 900,
                "a: !!python/name:os.system",
                "a: !!binary x",
                "<<: 1",
                "a: !!set {b}",
                "\ufeffa: 1",
                "%TAG",
            ]
        ),
    )
)
def test_any_text_as_a_file_of_settings(root, text):
    (root / "group_vars/spark.yml").write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        load_hosts({"spark": ["a"]}, root=root)
    except SparkError as error:
        said(error)


@FEW
@given(st.dictionaries(st.sampled_from(SETTINGS), json_values, max_size=3))
def test_any_value_on_the_command_line(root, chosen):
    try:
        found = load_hosts({"spark": ["a"]}, root=root, overrides=chosen)["a"]
    except SparkError as error:
        said(error)
        return
    problems_of(found.settings, CATALOG)


@FEW
@given(st.one_of(st.text(), values.map(lambda value: yaml.dump(value, allow_unicode=True)),
                 st.dictionaries(st.sampled_from(["schema_version", "sources", "images"]), values)
                 .map(lambda value: yaml.dump(value, allow_unicode=True))))  # fmt: skip
def test_any_lock(root, text):
    path = root / "spark.lock.yml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        read_lock(path)
    except SparkError as error:
        said(error)


@FEW
@given(st.one_of(values, st.lists(st.one_of(st.text(max_size=6), values), max_size=4)))
def test_any_list_of_hosts(root, hosts):
    path = root / "sparks.py"
    path.write_text(
        "from datetime import date\nimport datetime\nnan, inf = float('nan'), float('inf')\n"
        "from spark_deploy.inventory import group_from as _group_from\n"
        f"spark = _group_from('spark', hosts={hosts!r}, file=__file__)\n",
        encoding="utf-8", errors="surrogatepass",
    )  # fmt: skip
    try:
        read_inventory(path)
    except SparkError as error:
        said(error)


@FEW
@given(values)
def test_any_plain_inventory(root, hosts):
    path = root / "sparks.py"
    path.write_text(
        f"import datetime\nnan, inf = float('nan'), float('inf')\nspark = {hosts!r}\n",
        encoding="utf-8", errors="surrogatepass",
    )  # fmt: skip
    try:
        read_inventory(path)
    except SparkError as error:
        said(error)


def catalog_copy(root: Path) -> Path:
    copy = root / "checkout"
    if not copy.exists():
        for part in ("schema", "catalog"):
            shutil.copytree(CHECKOUT / part, copy / part)
    return copy


FILES = ("models/qwen3.5-35b.yml", "profiles/v2.yml", "guard_rails.yml")


@pytest.mark.slow
@settings(FEW, max_examples=15)
@given(st.sampled_from(FILES), st.data())
def test_any_catalog_file(root, name, data):
    copy = catalog_copy(root)
    original = (CHECKOUT / "catalog" / name).read_text("utf-8")
    content = yaml.safe_load(original)
    schema = {"models": "model", "profiles": "profile"}.get(name.split("/")[0], "guard_rails")
    keys = keys_of(json.loads((CHECKOUT / f"schema/{schema}.schema.json").read_text()))
    *above, last = data.draw(st.sampled_from(keys)).split(".")
    level = content
    for part in above:
        level = level.get(part) if isinstance(level, dict) else None
    if isinstance(level, dict):
        level[last] = data.draw(values)
    path = copy / "catalog" / name
    try:
        path.write_text(yaml.dump(content, allow_unicode=True), errors="surrogatepass")
        try:
            catalog = read_catalog(copy)
            for model in ("qwen3.5-35b", "qwen3.5-122b"):
                catalog.profile("v2", model)
        except SparkError as error:
            said(error)
    finally:
        path.write_text(original)


@FEW
@given(st.one_of(json_values, st.fixed_dictionaries(
    {"sha": json_values, "siblings": st.lists(st.fixed_dictionaries(
        {"rfilename": json_values}, optional={"size": json_values, "blobId": json_values,
        "lfs": json_values}), max_size=2)}, optional={"id": json_values})))  # fmt: skip
def test_any_answer_of_a_hub(monkeypatch_of_hub, answer):
    monkeypatch_of_hub(answer)
    try:
        hub.look_up("http://hub.invalid", "org/base", "main", None)
    except SparkError as error:
        said(error)


@pytest.fixture
def monkeypatch_of_hub(monkeypatch):
    """Have the hub's client make what it makes of an answer."""

    def answering(answer):
        monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: ModelInfo(**answer))

    return answering


@pytest.fixture
def registry_says(monkeypatch):
    def answering(*bodies: bytes, status: int = 200, headers: dict[str, str] | None = None):
        left = list(bodies)

        def opened(request, timeout):
            more = Message()
            for key, value in (headers or {}).items():
                more[key] = value
            if status != 200 and len(left) > 1:
                left.pop(0)
                raise urllib.error.HTTPError("http://r", status, "no", more, None)
            answer = io.BytesIO(left.pop(0) if left else b"")
            answer.headers = more  # type: ignore[attr-defined]
            return answer

        monkeypatch.setattr(urllib.request, "urlopen", opened)

    return answering


@FEW
@given(
    st.one_of(
        st.binary(max_size=12),
        json_values.map(lambda v: json.dumps(v).encode()),
        st.fixed_dictionaries({}, optional={"manifests": json_values, "layers": json_values}).map(
            lambda v: json.dumps(v).encode()
        ),
    )
)
def test_any_answer_of_a_registry(registry_says, body):
    registry_says(body, body)
    try:
        registry.look_up("registry.invalid/a:b", arch="aarch64")
    except SparkError as error:
        said(error)


@FEW
@given(
    st.one_of(
        json_values,
        st.fixed_dictionaries({"config": json_values}),
        st.fixed_dictionaries({"config": st.fixed_dictionaries({"Entrypoint": json_values})}),
    )
)
def test_any_configuration_of_an_engines_image(registry_says, answer):
    configuration = json.dumps(answer).encode()
    digest = f"sha256:{hashlib.sha256(configuration).hexdigest()}"
    manifest = json.dumps({"config": {"digest": digest}, "layers": []}).encode()
    registry_says(manifest, configuration)
    with pytest.raises(LockError) as caught:
        registry.look_up("registry.invalid/a:b", arch="aarch64", engine=True)
    said(caught.value)


@FEW
@given(
    st.one_of(
        st.binary(),
        json_values.map(json.dumps),
        st.fixed_dictionaries({"schema_version": st.just(1), "at": json_values,
                               "version": st.text(), "hosts": json_values}).map(json.dumps),
    )
)  # fmt: skip
def test_any_file_that_is_sent_as_a_report(root, text):
    path = root / "report.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SparkError) as caught:
        read_report(path)
    said(caught.value)


@FEW
@given(st.one_of(st.text(), json_values.map(json.dumps)))
def test_anything_that_a_hosts_tools_print(text):
    """Tools of any version may lie on a host, and hosts print what they like."""
    Evidence().process(text.splitlines())


@FEW
@given(
    st.binary(max_size=12),
    st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=30),
)
def test_any_question_for_a_login_and_any_token(registry_says, body, challenge):
    asks = f'Bearer realm="https://auth.invalid/token",service="{challenge}"'
    registry_says(b"first", body, body, status=401, headers={"WWW-Authenticate": asks})
    with pytest.raises(LockError) as caught:
        registry.look_up("registry.invalid/a:b", arch="aarch64")
    said(caught.value)
