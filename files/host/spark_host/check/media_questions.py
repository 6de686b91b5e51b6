"""A check of sounds, for releases whose model hears."""

from __future__ import annotations

import base64
import math
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


_RATE_HZ = 16_000
_TONE_HZ = 440
_SECONDS = (1, 4)


def sound(probe: Probe) -> str:
    """A longer sound takes more of the context: what is dropped on the way takes none."""
    heard = [probe.streamed([_question_sounds(seconds)], 32) for seconds in _SECONDS]
    probe.tokens_seen += sum(one.tokens for one in heard)
    short, long = (one.prompt_tokens for one in heard)
    if not long > short:
        raise CheckError(
            f"a sound of {_SECONDS[1]} s takes {long} tokens, one of {_SECONDS[0]} s {short}"
        )
    return f"sounds of {_SECONDS[0]} and {_SECONDS[1]} s took {short} and {long} tokens"


def _question_sounds(seconds: int) -> Message:
    data = base64.b64encode(wav(seconds)).decode()
    return {
        "role": "user",
        "content": [
            {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
            {"type": "text", "text": "What do you hear? Answer with one word."},
        ],
    }


def wav(seconds: int) -> bytes:
    """Return a tone as a WAV file: one channel of 16 bit."""
    samples = (
        round(12_000 * math.sin(2 * math.pi * _TONE_HZ * at / _RATE_HZ))
        for at in range(seconds * _RATE_HZ)
    )
    data = b"".join(struct.pack("<h", one) for one in samples)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, _RATE_HZ, 2 * _RATE_HZ, 2, 16)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body
