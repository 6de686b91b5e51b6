"""A check of pictures, for releases that keep the model's eyes."""

from __future__ import annotations

import base64
import re
import struct
import zlib

from spark_host.check.probe import CheckError, Message, Probe, content, short

_SIDE_PIXELS = 64
_COLOURS = (("red", (220, 20, 20)), ("blue", (20, 20, 220)))


def image(probe: Probe) -> str:
    """Plain pictures are told apart: a server that sees nothing says the same of all."""
    said = [content(probe.chat([_question(rgb)], 64)) for _, rgb in _COLOURS]
    for (colour, _), answer in zip(_COLOURS, said, strict=True):
        if not re.search(rf"\b{colour}\b", answer, re.IGNORECASE):
            what = f"a picture that is all {colour} was called {short(answer)}"
            raise CheckError(what, None if len(set(said)) == 1 else "warn")
    return f"{len(_COLOURS)} pictures were named by their colour"


def _question(rgb: tuple[int, int, int]) -> Message:
    url = "data:image/png;base64," + base64.b64encode(png(rgb)).decode()
    return {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What colour is this picture? Answer with one word."},
        ],
    }


def png(rgb: tuple[int, int, int]) -> bytes:
    """Return a square PNG of one colour (RFC 2083); stored, not compressed."""
    row = b"\0" + bytes(rgb) * _SIDE_PIXELS
    head = struct.pack(">IIBBBBB", _SIDE_PIXELS, _SIDE_PIXELS, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(row * _SIDE_PIXELS, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
