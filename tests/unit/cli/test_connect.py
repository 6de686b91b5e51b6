import json
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml

from spark_deploy.cli import main
from spark_deploy.cli.clients import EXPORT_KEY, connection_lines
from spark_deploy.cli.connect import make_connection
from tests.unit.cli.targets import target_of

SMALL = {"model": "jina-embeddings-v5-small", "profile": "plain", "port": 8001, "memory_gib": 6,
         "names": ["small"]}  # fmt: skip


@pytest.fixture
def site(tmp_path, monkeypatch):
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/spark.py").write_text("spark = ['spark-1', 'spark-2']\n")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/spark.yml").write_text("model: qwen3.5-35b\n")
    (tmp_path / "ssh").write_text("#!/bin/sh\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_local_tunnel_port_of_a_host_does_not_depend_on_the_selected_hosts(site, capsys):
    assert main(["connect", "spark-2", "--for", "env"]) == 0
    assert "export OPENAI_BASE_URL=http://127.0.0.1:8001/v1" in capsys.readouterr().out
    assert main(["connect", "--json"]) == 0
    servers = json.loads(capsys.readouterr().out)
    assert [server["base_url"][-8:] for server in servers] == [":8000/v1", ":8001/v1"]
    assert main(["connect"]) == 0
    out = capsys.readouterr().out
    assert "http://127.0.0.1:8001/v1 (on this machine, through the tunnel below)" in out
    assert "(this host)" not in out


@pytest.mark.parametrize("client", ["env", "claude"])
@pytest.mark.parametrize("extra", [[], ["--service", "small"]])
def test_suggested_commands_keep_the_service_and_inventory_options(client, extra, site, capsys):
    (site / "inventory/spark.py").rename(site / "inventory/other.py")
    settings = {"model": "qwen3.5-35b", "services": {"small": SMALL}}
    (site / "group_vars/spark.yml").write_text(yaml.safe_dump(settings))
    inventory = ["--inventory", "inventory/other.py"]
    assert main(["connect", "spark-1", *extra, "--for", client, *inventory]) == 0
    use, tunnel = capsys.readouterr().err.splitlines()
    [command] = re.findall(r"spark-deploy (connect .*?)[)\"]", use)
    base = ["connect", "spark-1", *extra]
    assert command.split() == [*base, "--for", client, *inventory]
    assert tunnel.partition("spark-deploy ")[2].split() == [*base, "--tunnel", *inventory]


@pytest.mark.parametrize("client", EXPORT_KEY)
@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("ssh: connect to host spark-1 port 22: No route to host", "spark-1: unreachable: "),
        ("cat: /etc/spark/api-key: No such file or directory", "/etc/spark/api-key"),
    ],
)
def test_shell_setup_is_empty_if_the_key_cannot_be_read(site, client, output, shown, capsys):
    (site / "ssh").write_text(f"#!/bin/sh\necho '{output}' >&2\nexit 1\n")
    assert main(["connect", "spark-1", "--for", client]) == 1
    out, err = capsys.readouterr()
    assert (out, shown in err) == ("", True)


def test_connect_sends_clients_of_a_cluster_to_the_head(site, capsys):
    (site / "group_vars/spark.yml").write_text("cluster: {hosts: [spark-1, spark-2]}\n")
    assert main(["connect", "--for", "env"]) == 0
    assert "http://127.0.0.1:8000/v1" in capsys.readouterr().out
    assert main(["connect", "spark-2"]) == 1
    assert (
        "spark-2: is a worker of a cluster; only the head spark-1 serves" in capsys.readouterr().err
    )


def test_litellm_configuration_lists_all_models_and_no_key(site, capsys):
    settings = {"model": "qwen3.5-35b", "serve": {"names": ["big"]}, "services": {"small": SMALL}}
    (site / "group_vars/spark.yml").write_text(yaml.safe_dump(settings))
    assert main(["connect", "--for", "litellm"]) == 0
    shown = capsys.readouterr()
    config = yaml.safe_load(shown.out)
    assert [
        (entry["model_name"], *entry["litellm_params"].values()) for entry in config["model_list"]
    ] == [
        (name, f"hosted_vllm/{name}", f"http://127.0.0.1:{port}/v1", f"os.environ/SPARK_KEY_{n}")
        for n, port in ((1, 8000), (2, 8001))
        for name in ("big", "small")
    ]
    exports = re.findall('^# export SPARK_KEY_(.)="\\$\\(ssh (.*?) ', shown.out, re.M)
    assert exports == [("1", "spark-1"), ("2", "spark-2")]
    assert config["general_settings"] == {"master_key": "os.environ/LITELLM_MASTER_KEY"}
    assert "--tunnel" in shown.err


def test_vllm_router_requires_identical_models_and_rejects_a_private_ca(site, capsys):
    settings = {"model": "qwen3.5-35b", "serve": {"expose": "lan", "tls": "off"}}
    (site / "group_vars/spark.yml").write_text(yaml.safe_dump(settings))
    assert main(["connect", "--for", "vllm-router"]) == 0
    words = capsys.readouterr().out.split()
    assert words[0] == "vllm-router"
    assert words[-3:] == ["--worker-urls", "http://spark-1:8000", "http://spark-2:8000"]
    (site / "host_vars").mkdir()
    (site / "host_vars/spark-2.yml").write_text(yaml.safe_dump({"serve": {"names": ["other"]}}))
    assert main(["connect", "--for", "vllm-router"]) == 1
    (site / "host_vars/spark-2.yml").unlink()
    settings["serve"]["tls"] = "private-ca"
    (site / "group_vars/spark.yml").write_text(yaml.safe_dump(settings))
    assert main(["connect", "--for", "vllm-router"]) == 1


# Only the tunnel to spark-1 opens its port.
SSH = f"""#!{sys.executable}
import re, signal, socket, sys, time

def end(*_):
    print("ended", file=log)
    sys.exit(0)

log = open(sys.argv[0] + ".log", "a", buffering=1)
signal.signal(signal.SIGTERM, end)
print(*sys.argv[1:], file=log)
if sys.argv[-1] == "spark-1":
    port = int(re.search(r"127.0.0.1:(\\d+):", " ".join(sys.argv))[1])
    server = socket.create_server(("127.0.0.1", port))
time.sleep(60)
"""


@pytest.mark.slow
def test_tunnels_stay_open_until_interrupted(site):
    (site / "ssh").write_text(SSH)
    port = free_port()
    process = start_tunnels(site, port)
    log, shown = site / "ssh.log", site / "stderr"
    url = f"spark-1: http://127.0.0.1:{port}/v1"
    wait_for(lambda: log.exists() and log.read_text().count("-L 127.0.0.1:") == 2)
    wait_for(lambda: url in shown.read_text())
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    assert "spark-2: http" not in shown.read_text(), "printed before the tunnel was open"
    assert log.read_text().count("ended") == 2


@pytest.mark.slow
def test_failed_tunnel_ends_the_command_and_names_its_host(site):
    (site / "ssh").write_text('#!/bin/sh\ncase "$*" in *spark-2) exit 255;; esac\nexec sleep 60\n')
    process = start_tunnels(site, free_port())
    assert process.wait(timeout=30) == 1
    assert "spark-2: tunnel ended with exit code 255" in (site / "stderr").read_text()


@pytest.mark.slow
def test_tunnel_never_uses_the_port_of_another_program(site):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = start_tunnels(site, port)
        assert process.wait(timeout=30) == 1
    shown = (site / "stderr").read_text()
    assert f"spark-1: port {port}" in shown
    assert "http" not in shown


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def start_tunnels(site, port):
    (site / "group_vars/spark.yml").write_text(f"model: qwen3.5-35b\nserve: {{port: {port}}}\n")
    run = "import sys; from spark_deploy.cli import main; sys.exit(main())"
    with (site / "stderr").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-c", run, "connect", "--tunnel"], stderr=stderr, cwd=site
        )


def wait_for(is_done):
    for _ in range(300):
        if is_done():
            return
        time.sleep(0.1)
    raise AssertionError("not in time")


def test_connect_prints_urls_even_if_the_settings_cannot_be_deployed(site):
    (site / "group_vars/spark.yml").write_text("model: qwen3.5-397b\n")
    assert main(["plan", "--estimate"]) == 1
    assert main(["connect", "spark-1", "--for", "env"]) == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--for", "env"), "2 hosts selected: spark-1, spark-2"),
        (("spark-1", "--for", "env", "--json"), "--for and --json"),
        (("spark-1", "--for", "env", "--tunnel"), "--for and --tunnel"),
        (("spark-1", "--tunnel", "--json"), "--tunnel and --json"),
    ],
)
def test_incompatible_options_are_rejected(site, words, text, capsys):
    assert main(["connect", *words]) == 1
    assert text in capsys.readouterr().err


TUNNEL = "ssh -N -o ExitOnForwardFailure=yes -L 127.0.0.1:8000:127.0.0.1:8000 spark@10.0.0.9"
LOCAL_URL = "http://127.0.0.1:8000/v1"
PRIVATE_CA = {
    "serve.expose": "lan", "serve.tls": "private-ca", "serve.ca_dir": "/keys/ca",
    "serve.address": "spark.example.org",
}  # fmt: skip
OWN_CERTIFICATE = {
    "serve.expose": "lan", "serve.tls": "own-cert", "serve.tls_certificate": "/c.pem",
    "serve.tls_key": "/k.pem",
}  # fmt: skip
TAILNET = {"serve.expose": "tailscale"}


@pytest.mark.parametrize(
    ("settings", "extra", "url", "tunnel"),
    [
        ({}, {}, LOCAL_URL, TUNNEL),
        ({}, {"host_index": 2}, "http://127.0.0.1:8002/v1", TUNNEL.replace("8000:1", "8002:1")),
        ({"serve.expose": "lan", "serve.port": 9000}, {}, "http://10.0.0.9:9000/v1", None),
        ({"serve.expose": "lan"}, {"host_index": 2}, "http://10.0.0.9:8000/v1", None),
        ({"serve.expose": "docker"}, {}, LOCAL_URL, TUNNEL),
        (PRIVATE_CA, {}, "https://spark.example.org:8000/v1", None),
        (OWN_CERTIFICATE, {}, "https://10.0.0.9:8000/v1", None),
        (TAILNET, {}, LOCAL_URL, TUNNEL),
        (TAILNET, {"tailnet_address": "100.101.102.103"}, "http://100.101.102.103:8000/v1", None),
        ({**TAILNET, "serve.address": "a.tail"}, {}, "http://a.tail:8000/v1", None),
    ],
)
def test_connect_prints_the_url_and_tunnel_for_each_kind_of_gateway(
    tmp_path, settings, extra, url, tunnel
):
    server = make_connection(target_of(tmp_path, **settings), **extra)
    assert (server.base_url, server.tunnel) == (url, tunnel)
    assert f"{url}/chat/completions" in server.example
    assert "$(" not in server.example
    assert (server.ca, "--cacert /keys/ca/ca.pem" in server.example) == (
        ("/keys/ca/ca.pem", True) if settings is PRIVATE_CA else (None, False)
    )


def test_connect_prints_models_key_tunnel_and_container_addresses(tmp_path):
    for sudo, command in ((True, "sudo cat"), (False, "cat")):
        local = make_connection(target_of(tmp_path, "@local", {"_sudo": sudo}))
        assert (local.tunnel, local.read_key) == (None, f"{command} /etc/spark/api-key")
    server = make_connection(target_of(tmp_path, **{"serve.expose": "docker"}))
    assert (server.model, server.names) == ("lab-model", ("lab-model", "other"))
    assert server.read_key == "ssh spark@10.0.0.9 sudo cat /etc/spark/api-key"
    text = "\n".join(connection_lines(server))
    assert "tunnel     ssh -N" in text
    assert "containers http://host.docker.internal:8000/v1" in text
    assert "--add-host host.docker.internal:host-gateway" in text
