"""Pinned packages are asked about; that nobody answered is said, and taken for no answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tools import advisories
from tools.requirements import pins

Answer = Callable[[list[dict[str, Any]]], bytes]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], list[Any]]]:
    """Have somebody answer as the given function says; what was asked is in the list."""
    servers = []

    def serve(answer: Answer) -> list[Any]:
        asked: list[Any] = []

        class Server(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                asked.extend(json.loads(body)["queries"])
                said = answer(json.loads(body)["queries"])
                self.send_response(200)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("SPARK_ADVISORIES_URL", f"http://127.0.0.1:{server.server_port}/")
        return asked

    yield serve
    for server in servers:
        server.shutdown()


def no_hole(queries: list[dict[str, Any]]) -> bytes:
    return json.dumps({"results": [{} for _ in queries]}).encode()


def hole_in_jinja(queries: list[dict[str, Any]]) -> bytes:
    hole = {"vulns": [{"id": "GHSA-aaaa", "modified": "2026-01-01T00:00:00Z"}]}
    return json.dumps(
        {"results": [hole if one["package"]["name"] == "jinja2" else {} for one in queries]}
    ).encode()


def test_every_pin_is_asked_about_by_name_and_version(answering, capsys) -> None:
    asked = answering(no_hole)
    assert advisories.main() == 0
    wanted = {
        (pin.name, pin.version)
        for file in advisories.FILES
        for pin in pins(advisories.CHECKOUT / file)
    }
    assert {(one["package"]["name"], one["version"]) for one in asked} == wanted
    assert len(wanted) > 50
    assert f"none about {len(wanted)} packages" in capsys.readouterr().out


def test_a_hole_is_named_and_fails_until_it_is_accepted_with_a_reason(
    answering, capsys, tmp_path, monkeypatch
) -> None:
    answering(hole_in_jinja)
    assert advisories.main() == 1
    said = capsys.readouterr().out
    assert "jinja2 " in said
    assert "GHSA-aaaa" in said
    (tmp_path / "accepted").write_text("# comment\nGHSA-aaaa no template of others is read\n")
    monkeypatch.setattr(advisories, "ACCEPTED", tmp_path / "accepted")
    assert advisories.main() == 0
    (tmp_path / "accepted").write_text("GHSA-aaaa\n")
    with pytest.raises(ValueError, match="say why"):
        advisories.main()


@pytest.mark.parametrize(
    "said",
    [b"", b"[]", b"{}", b'{"results": []}', b'{"results": [1]}', b"<html>", b'{"results": null}'],
)
def test_an_answer_that_is_none_is_said_and_fails_nothing(answering, capsys, said: bytes) -> None:
    answering(lambda queries: said)
    assert advisories.main() == 0
    assert "could not be asked" in capsys.readouterr().out


def test_without_a_network_it_says_that_nothing_was_looked_at(monkeypatch, capsys) -> None:
    monkeypatch.setenv("SPARK_ADVISORIES_URL", "http://127.0.0.1:9/")
    assert advisories.main() == 0
    assert "were NOT looked at" in capsys.readouterr().out
