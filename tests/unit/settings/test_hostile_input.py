import hashlib
import io
import json
import urllib.error
import urllib.request
from email.message import Message

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spark_deploy.cli.report import read_report
from spark_deploy.config.checkout import CHECKOUT, read_mapping
from spark_deploy.config.errors import LockError, SparkError
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.hosts.status import Evidence
from spark_deploy.inventory.plans import read_inventory
from spark_deploy.lock import registry
from spark_deploy.lock.resolve import read_lock
from spark_deploy.plan.resolve import plan_problems
from tests.unit.hostile import JSON, YAML, accepted_or_refused, check_problems, tries
from tests.unit.planning.plans import shipped_catalog

CATALOG = shipped_catalog()


def keys_of(level, prefix=""):
    keys = []
    for key, part in level.get("properties", {}).items():
        keys += [prefix + key, *keys_of(part, f"{prefix}{key}.")]
    return keys


def schema_keys(name):
    return keys_of(json.loads((CHECKOUT / f"schema/{name}.schema.json").read_text()))


SETTINGS = schema_keys("settings")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "group_vars").mkdir()
    return tmp_path


def write(path, text):
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


def put(document, key, value):
    *above, last = key.split(".")
    level = document
    for part in above:
        level = level.setdefault(part, {})
        if not isinstance(level, dict):
            return
    level[last] = value


@tries(40)
@given(st.dictionaries(st.sampled_from(SETTINGS), YAML, max_size=3))
def test_any_setting_value_is_accepted_or_reported(root, chosen):
    data: dict = {}
    for key, value in chosen.items():
        put(data, key, value)
    write(root / "group_vars/spark.yml", yaml.dump(data, allow_unicode=True))
    with accepted_or_refused():
        loaded = load_hosts({"spark": ["a"]}, root=root)["a"]
        plan_problems(loaded.settings, CATALOG)


ODD_YAML = (
    *("a: !!timestamp x", "a: !!bool x", "a: !!int x", "a: " + "1" * 5000, "a: 2026-13-01"),
    *("&a [*a]", "a: &b {c: *b}", "? [a]\n: 1", "a: " + "[" * 900, "a: " + "[" * 900 + "]" * 900),
    *("a: !!python/name:os.system", "a: !!binary x", "<<: 1", "a: !!set {b}", "\ufeffa: 1", "%TAG"),
)


@pytest.mark.parametrize("number", ["22:00", "1" + ":2" * 1000, "1:30.5"])
def test_numbers_with_colons_are_read_as_text(root, number):
    (root / "x.yml").write_text(f"a: {number}\n")
    assert read_mapping(root / "x.yml", label="x.yml") == ({"a": number}, [])


@pytest.mark.slow
@tries(40)
@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")) | st.sampled_from(ODD_YAML))
def test_any_settings_file_is_accepted_or_reported(root, text):
    write(root / "group_vars/spark.yml", text)
    with accepted_or_refused():
        load_hosts({"spark": ["a"]}, root=root)


@tries(40)
@given(st.dictionaries(st.sampled_from(SETTINGS), JSON, max_size=3))
def test_any_data_argument_is_accepted_or_reported(root, chosen):
    with accepted_or_refused():
        loaded = load_hosts({"spark": ["a"]}, root=root, overrides=chosen)["a"]
        plan_problems(loaded.settings, CATALOG)


def dumped(values):
    return values.map(lambda value: yaml.dump(value, allow_unicode=True))


LOCK_KEYS = st.sampled_from(["schema_version", "sources", "images"])


@tries(40)
@given(st.text() | dumped(YAML) | dumped(st.dictionaries(LOCK_KEYS, YAML)))
def test_any_lock_file_is_accepted_or_reported(root, text):
    with accepted_or_refused():
        read_lock(write(root / "spark.lock.yml", text))


HEAD = "import datetime\nfrom datetime import date\nnan, inf = float('nan'), float('inf')\n"
OURS = "from spark_deploy.inventory import group_from as _group_from\n"


@tries(40)
@given(YAML | st.lists(st.text(max_size=6) | YAML, max_size=4), st.booleans())
def test_any_host_list_is_accepted_or_reported(root, hosts, ours):
    group = f"_group_from('spark', hosts={hosts!r}, file=__file__)" if ours else repr(hosts)
    with accepted_or_refused():
        read_inventory(write(root / "sparks.py", f"{HEAD}{OURS}spark = {group}\n"))


@pytest.fixture
def registry_answers(monkeypatch):
    def answer_with(*bodies, challenge=""):
        left = list(bodies)

        def opened(request, timeout):
            headers = Message()
            if challenge:
                headers["WWW-Authenticate"] = challenge
            if challenge and len(left) > 1:
                left.pop(0)
                raise urllib.error.HTTPError("http://r", 401, "no", headers, None)
            answer = io.BytesIO(left.pop(0) if left else b"")
            answer.headers, answer.length = headers, 0
            return answer

        monkeypatch.setattr(registry, "open_url", opened)

    return answer_with


def encoded(values):
    return values.map(lambda value: json.dumps(value).encode())


MANIFEST = st.fixed_dictionaries({}, optional={"manifests": JSON, "layers": JSON})


@tries(40)
@given(st.binary(max_size=12) | encoded(JSON | MANIFEST))
def test_any_registry_response_is_accepted_or_reported(registry_answers, body):
    registry_answers(body, body)
    with accepted_or_refused():
        registry.look_up_image("registry.invalid/a:b", arch="aarch64")


ENTRYPOINT = st.fixed_dictionaries({"Entrypoint": JSON})


@tries(40)
@given(encoded(JSON | st.fixed_dictionaries({"config": JSON | ENTRYPOINT})))
def test_any_engine_image_config_is_accepted_or_reported(registry_answers, configuration):
    digest = f"sha256:{hashlib.sha256(configuration).hexdigest()}"
    manifest = json.dumps({"config": {"digest": digest}, "layers": []}).encode()
    registry_answers(manifest, configuration)
    with pytest.raises(LockError) as caught:
        registry.look_up_image("registry.invalid/a:b", arch="aarch64", engine=True)
    check_problems(caught.value)


@tries(40)
@given(
    st.binary(max_size=12),
    st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=30),
)
def test_any_registry_login_challenge_is_accepted_or_reported(registry_answers, body, service):
    challenge = f'Bearer realm="https://auth.invalid/token",service="{service}"'
    registry_answers(b"first", body, body, challenge=challenge)
    with pytest.raises(LockError) as caught:
        registry.look_up_image("registry.invalid/a:b", arch="aarch64")
    check_problems(caught.value)


REPORT = st.fixed_dictionaries(
    {"schema_version": st.just(1), "at": JSON, "version": st.text(), "hosts": JSON}
)


@tries(40)
@given(st.binary() | encoded(JSON | REPORT))
def test_any_report_file_is_accepted_or_reported(root, data):
    path = root / "report.json"
    path.write_bytes(data)
    with pytest.raises(SparkError) as caught:
        read_report(path)
    check_problems(caught.value)


@tries(40)
@given(st.text() | JSON.map(json.dumps))
def test_any_host_tool_output_is_accepted_or_reported(text):
    Evidence().process(text.splitlines())
