import socket
from types import SimpleNamespace

import pytest

from spark_deploy.config.errors import SettingsError
from spark_deploy.inventory.host_keys import Endpoint, open_transport, query_host_key
from spark_deploy.inventory.login import try_key

CONFIGS = {
    "Host *\n  Port abc\n": "invalid literal",
    'Host *\n  ProxyCommand nc %h "\n': "No closing quotation",
    "Host\n": "Unparsable line Host",
    "Host *\n  ProxyJump me@jump\n": "ProxyJump makes a jump host connect through itself",
    "\xff\xfe\n": "can't decode byte",
}


def endpoint(folder, key_file=None):
    known_hosts, config = str(folder / "known_hosts"), str(folder / "config")
    key = str(key_file) if key_file else None
    return Endpoint("spark-1", "127.0.0.1", "me", 9, known_hosts, config, key)


def test_sets_socket_options_before_the_first_byte():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        transport = open_transport(sock, gss_kex=False)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        transport.close()
    proxy_command = SimpleNamespace(settimeout=lambda seconds: None, close=lambda: None)
    open_transport(proxy_command).close()


@pytest.mark.parametrize("query", [query_host_key, try_key])
@pytest.mark.parametrize(("text", "message"), CONFIGS.items())
def test_reports_broken_ssh_config(tmp_path, query, text, message):
    (tmp_path / "config").write_text(text, "latin-1")
    with pytest.raises(SettingsError, match=message):
        query(endpoint(tmp_path))


@pytest.mark.parametrize("text", ["a b c\n", "\xff\n"])
def test_reports_broken_known_hosts(tmp_path, text):
    (tmp_path / "config").touch()
    (tmp_path / "known_hosts").write_text(text, "latin-1")
    with pytest.raises(SettingsError, match="known_hosts: cannot be read"):
        query_host_key(endpoint(tmp_path))


def test_never_suggests_overwriting_a_key_file(tmp_path):
    wrong = tmp_path / "no_key"
    wrong.write_text("mine\n")
    with pytest.raises(SettingsError, match="set it to a private key") as refused:
        try_key(endpoint(tmp_path, wrong))
    assert "ssh-keygen -t" not in str(refused.value)
