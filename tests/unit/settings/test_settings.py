import re
from typing import get_args

import pytest
from spark_contract.gateway import Expose

from spark_deploy.config.checkout import catalog_files
from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.load import load_hosts


@pytest.fixture
def root(tmp_path):
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "host_vars").mkdir()
    return tmp_path


def write(root, name, text):
    (root / name).write_text(text, encoding="utf-8")


def load(root, hosts=("spark-1",), **more):
    return load_hosts({"spark": list(hosts)}, root=root, **more)


def refused(root, hosts=("spark-1",), **more):
    with pytest.raises(SettingsError) as caught:
        load(root, hosts, **more)
    return str(caught.value)


def test_later_settings_files_override_earlier_ones_and_merge_mappings(root):
    write(root, "group_vars/all.yml", "serve: {port: 9000, drain_s: 1}\n")
    write(root, "group_vars/spark.yml", "serve: {port: 9001}\nprofile: base\n")
    write(root, "host_vars/spark-2.yml", "serve: {port: 9002}\n")
    result = load(root, ["spark-1", "spark-2"], overrides={"profile": "v2-tq"})
    assert [result[h].settings.serve.port for h in ("spark-1", "spark-2")] == [9001, 9002]
    assert {h.settings.serve.drain_s for h in result.values()} == {1}
    assert {h.settings.profile for h in result.values()} == {"v2-tq"}
    assert {h.settings.serve.max_body_bytes for h in result.values()} == {32 * 1024**2}


def test_lock_file_is_next_to_group_vars(root):
    assert load(root)["spark-1"].lock_path == root / "spark.lock.yml"


def test_empty_mappings_and_files_change_nothing(root):
    write(root, "group_vars/spark.yml", "serve:\nengine:\n")
    write(root, "host_vars/spark-1.yml", "# nothing yet\n")
    assert load(root)["spark-1"].settings.serve.port == 8000


def test_local_machine_reads_its_settings_from_host_vars_local(root):
    write(root, "host_vars/local.yml", "profile: base\n")
    assert load(root, ["@local"])["@local"].settings.profile == "base"


def test_generated_settings_override_group_files_but_not_host_files(root):
    write(root, "group_vars/spark.yml", "hub: {endpoint: 'http://a'}\n")
    write(root, "host_vars/spark-2.yml", "hub: {endpoint: 'http://c'}\n")
    result = load(root, ["spark-1", "spark-2"], generated={"hub": {"endpoint": "http://b"}})
    assert [h.settings.hub.endpoint for h in result.values()] == ["http://b", "http://c"]


def test_accepts_unquoted_off_for_tls(root):
    for text in ("off", '"off"', "false"):
        write(root, "group_vars/spark.yml", f"serve: {{expose: lan, tls: {text}}}\n")
        assert load(root)["spark-1"].settings.serve.tls == "off"


VLLM = {
    "max_model_len": ("max_context_tokens", 4096),
    "max_num_seqs": ("max_sequences", 4),
    "gpu_memory_utilization": ("memory_fraction", 0.5),
    "num_speculative_tokens": ("drafts", 1),
}


@pytest.mark.parametrize("alias", VLLM)
def test_accepts_vllm_names_for_engine_settings(root, alias):
    name, value = VLLM[alias]
    write(root, "group_vars/spark.yml", f"engine: {{{alias}: {value}}}\n")
    assert getattr(load(root)["spark-1"].settings.engine, name) == value
    write(root, "host_vars/spark-1.yml", f"engine: {{{name}: null}}\n")
    assert getattr(load(root)["spark-1"].settings.engine, name) is None
    overrides = {f"engine.{alias}": value}
    assert getattr(load(root, overrides=overrides)["spark-1"].settings.engine, name) == value


def test_rejects_a_setting_given_under_two_names(root):
    text = "engine: {max_num_seqs: 4, max_sequences: 5}\n"
    write(root, "group_vars/spark.yml", text)
    assert "group_vars/spark.yml: engine.max_num_seqs" in refused(root)


@pytest.mark.parametrize("expose", get_args(Expose))
def test_tls_requires_expose_lan(root, expose):
    write(root, "group_vars/spark.yml", f"serve: {{expose: {expose}, tls: private-ca}}\n")
    if expose == "lan":
        assert load(root)["spark-1"].settings.serve.tls == "private-ca"
    else:
        assert f"private-ca requires expose: lan, but expose is {expose}" in refused(root)


WRONG = {
    "profil: v2": "did you mean profile?",
    "port: 80": "did you mean serve.port?",
    "proxy: {url: 'http://ann:p/w@rd@proxy:3128'}": 'http://...@proxy:3128" matches none',
    "allow_containers: {comfyui: -1}": "allow_containers.comfyui: -1 is less than the minimum of 0",
    'docker: {users: ["ann; reboot"]}': 'docker.users[0]: "ann; reboot" does not have',
    "profile: v9": f"unknown profile 'v9' (known: {', '.join(catalog_files('profiles'))})",
    "serve: {port: http}": '"http" is not a whole number',
    "watch: {stall_s: 1}": "fix: use 5 or more. Seconds before a restart",
    "expect: {gpu_name: 24.04}": "24.04 is not text",
    "serve: {expose: web}": "not one of loopback, docker, tailscale",
    "services: {a: {model: x, profile: y, port: 1, memory_gib: 9, idle_stop_s: 9}}": (
        "services.a.idle_stop_s: idle_stop_s has no effect"
    ),
    "serve: {expose: lan, tls: own-cert}": "serve.tls_key: is required by tls: own-cert",
    "serve: {tls_certificate: cert.pem}": "does not have the required form",
    "serve: {api_key: hunter2}": "none of the accepted forms",
    "hub: {token: {env: A, file: b}}": "hub.token",
    "keep_ready: [{model: qwen3.5-35, profile: v2}]": "did you mean qwen3.5-35b?",
    "keep_ready: [{model: qwen3.5-35b}]": "'profile' is a required property",
    "releases: {rollback_to: yesterday}": "does not have the required form",
    "memory: {reserve_gib: 120}": "is not less than",
    "paths: {sources_dir: /srv/spark/models/sources}": "is inside the folder of models_dir",
    "paths: {models_dir: /srv/spark, sources_dir: /data}": "/srv/spark/cache is inside",
    "paths: {state_dir: /data}": "state_dir: unknown key",
    "downloads: {outage_s: long}": "outage_s",
    "paths: {models_dir: models}": "does not have the required form",
    "engine: {options: {max_model_len: 4096}}": "is set elsewhere",
    "engine: {options: {host: 0.0.0.0}}": "elsewhere",
    "engine: {options: {1: x}}": "1 is not text",
    "engine: {environment: {HF_TOKEN: x}}": "may be a secret",
    "engine: {environment: {LD_PRELOAD: /cache/x.so}}": "load or run other code",
    "engine: {environment: {DOCKER_HOST: 'tcp://a'}}": "docker and container runtimes",
    'engine: {environment: {A: "x\\nLD_PRELOAD=/y"}}': "a line break",
    "engine: {max_sequences: 5000}": "5000 is greater than the maximum of 1024",
    "engine: {options: {chat-template: /home/me/chat.jinja}}": "/home/me/chat.jinja is not in",
    "engine: {options: {lora-modules: sql=/data/sql}}": "/data/sql is not in the engine's",
    "memory: {total_gib: .inf}": "memory.total_gib: inf is not a finite number",
    "memory: {total_gib: 1.0e+300}": "memory.total_gib: is too large",
    f"engine: {{options: {{seed: {2**63}}}}}": "seed: is too large",
    "engine: {memory_fraction: .nan}": "memory_fraction: nan is not",
    "profile: 2026-01-31": "2026-01-31 is a date",
    "profile: 2026-13-31": "has an invalid value",
    "? [a]\n: 1": "a key is a list or a mapping",
    "serve: &a {x: *a}": "contains itself",
    f"engine: {{options: {{a: {'[' * 600 + ']' * 600}}}}}": "too deeply",
    'model: "\\ud800"': "invalid Unicode character",
    "- v2": "contains a list",
    "serve: {port: 1": "line",
    "model: a\nmodel: b": "'model' is given twice",
    "serve: [1]": "[1] is not a mapping",
    "engine: {chat_template: ~nobody-here/x}": "engine.chat_template: ",
    "engine: {draft_vocabulary_text: ~nobody-here/x}": "engine.draft_vocabulary_text: ",
    "requantize: {calibration: ~nobody-here/x}": "requantize.calibration: ",
    "ssh: {key_file: ~nobody-here/x}": "ssh.key_file: nobody-here is not a user of this machine",
    "ssh: {known_hosts_file: ~nobody-here/x}": "ssh.known_hosts_file: nobody-here is not a user",
    "repositories: {v: {url: 'https://a', suite: b, components: [], key_url: 'https://a'}}": "sha",
}


@pytest.mark.parametrize(("text", "reason"), WRONG.items(), ids=lambda text: repr(text)[:60])
def test_settings_errors_include_location_cause_and_fix(root, text, reason):
    write(root, "group_vars/spark.yml", text + "\n")
    message = refused(root)
    assert "group_vars/spark.yml" in message
    assert reason in message
    assert "p/w" not in message
    for line in message.splitlines():
        if (output := line.strip()).startswith("fix: "):
            assert ACTION.match(output), output


ACTION = re.compile(
    r"fix: (did you mean|write|use|set|add|list|put|keep|lower|give|describe|correct|known|choose|"
    r"remove)\b"
)


def test_reports_all_mistakes_on_all_hosts(root):
    write(root, "group_vars/spark.yml", "serve: {port: x}\n")
    write(root, "host_vars/spark-1.yml", "profil: v2\n")
    write(root, "host_vars/spark-2.yml", "memory: {reserve_gib: many}\n")
    message = refused(root, ["spark-1", "spark-2"], overrides={"serve.expose": "web"})
    for part in ("serve.port", "profil:", "memory.reserve_gib", "--data: serve.expose"):
        assert part in message


def test_reports_a_mistake_in_group_settings_once(root):
    write(root, "group_vars/spark.yml", "profil: v2\n")
    assert refused(root, [f"spark-{n}" for n in range(9)]).count("unknown key") == 1


@pytest.mark.parametrize(
    "options",
    [
        "{chat-template: /vllm-workspace/examples/tool_chat_template_hermes.jinja}",
        "{chat-template: /model/chat_template.jinja}",
        "{chat-template: '{{ messages }}'}",
        "{root-path: /v1}",
        "{otlp-traces-endpoint: 'http://collector:4317/v1'}",
    ],
)
def test_accepts_container_paths_and_urls_in_options(root, options):
    write(root, "group_vars/spark.yml", f"engine: {{options: {options}}}\n")
    assert load(root)
