"""Scripts of hosts, run by a real shell with stand-in programs."""

import subprocess
from pathlib import Path


def install_stub(folder: Path, name: str, script: str) -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def run_script(script: str, *folders: Path, stdin: str = "", **environment: str) -> list[str]:
    path = ":".join([*map(str, folders), "/usr/bin:/bin"])
    result = subprocess.run(
        ["sh", "-c", script], input=stdin, capture_output=True, text=True, timeout=30, check=False,
        env={"PATH": path, **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
