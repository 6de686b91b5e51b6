"""A check of sounds, for releases whose model hears."""

from __future__ import annotations

import base64
import math
import struct

from spark_host.check.probe import CheckError, Message, Probe

_RATE_HZ = 16_000
_TONE_HZ = 440
_SECONDS = (1, 4)


def sound(probe: Probe) -> str:
    """A longer sound takes more of the context: what is dropped on the way takes none."""
    heard = [probe.streamed([_question(seconds)], 32) for seconds in _SECONDS]
    probe.tokens_seen += sum(one.tokens for one in heard)
    short, long = (one.prompt_tokens for one in heard)
    if not long > short:
        raise CheckError(
            f"a sound of {_SECONDS[1]} s takes {long} tokens, one of {_SECONDS[0]} s {short}"
        )
    return f"sounds of {_SECONDS[0]} and {_SECONDS[1]} s took {short} and {long} tokens"


def _question(seconds: int) -> Message:
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
