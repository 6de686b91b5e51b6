"""Every promise of SECURITY.md names a test that is there."""

from __future__ import annotations

import ast
import re

from spark_deploy.config.checkout import CHECKOUT

PAGE = (CHECKOUT / "SECURITY.md").read_text("utf-8")
PROMISES = PAGE.partition("## Promises")[2].partition("\n## ")[0]
ROWS = [line for line in PROMISES.splitlines() if line.startswith("| ")][1:]


def test_security_promises_name_existing_tests() -> None:
    assert len(ROWS) > 25
    for row in ROWS:
        named = re.findall(r"`((?:unit|host)/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            tree = ast.parse((CHECKOUT / "tests" / file).read_text("utf-8"))
            there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert name in there, f"{file} has no {name}"
