"""Stub of an engine process: answers, hangs or dies, by the name of the case."""

import json
import os
import sys
import time
from pathlib import Path

case = json.loads(Path(sys.argv[1]).read_text())
sys.stdout.write(f"Using stub {case['tree']} {os.environ['CUDA_VISIBLE_DEVICES']}\n")
if case["name"] == "hangs":
    time.sleep(60)
if case["name"] != "dies":
    (Path(sys.argv[2]) / f"{case['name']}.json").write_text(json.dumps({"state": "ran"}))
