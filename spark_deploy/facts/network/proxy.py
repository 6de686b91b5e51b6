"""Whether docker's daemon runs with the proxy of a file; neither is told, for its password."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from spark_deploy.facts.reading import HostFact


class DaemonProxy(HostFact[str]):
    """``same``, ``same-proxy`` (another no_proxy) or ``differs``; empty when it does not run.

    Names count in small or in large letters, as programs take them.
    """

    default = str

    def command(self, path: str) -> str:
        lines = (
            "grep -aiE '^(http|https|no)_proxy=' | sed 's/^[^=]*/\\L&/; s,/$,,' | LC_ALL=C sort -u"
        )
        return (
            "pid=$(systemctl show -p MainPID --value docker.service 2>/dev/null); "
            '[ "${pid:-0}" -gt 0 ] || exit 0; '
            f"a=$(tr '\\0' '\\n' < /proc/$pid/environ | {lines}); "
            f"b=$(cat {shlex.quote(path)} 2>/dev/null | {lines}); "
            'if [ "$a" = "$b" ]; then echo same; exit; fi; '
            "without() { printf '%s\\n' \"$1\" | grep -v ^no_; }; "
            '[ "$(without "$a")" = "$(without "$b")" ] && echo same-proxy || echo differs'
        )

    def process(self, output: Iterable[str]) -> str:
        return next((line.strip() for line in output if line.strip()), "")
