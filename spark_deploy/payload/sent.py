"""Host tools that come along with a question and leave nothing behind.

For what must work on a host that has none of our tools, older ones, or half of them: they travel
on standard input and are imported from memory.
"""

from __future__ import annotations

import base64
import io
import shlex
import tarfile

from spark_deploy.payload.content import read_payload

_LOADER = """
import base64, importlib.abc, importlib.util, io, sys, tarfile
class Sent(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def __init__(self, text):
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text)), mode="r:xz") as tar:
            self.files = {name: tar.extractfile(name).read().decode() for name in tar.getnames()}
    def path(self, name):
        base = name.replace(".", "/")
        return next((p for p in (base + "/__init__.py", base + ".py") if p in self.files), None)
    def find_spec(self, name, path=None, target=None):
        found = self.path(name)
        package = bool(found) and found.endswith("/__init__.py")
        spec = importlib.util.spec_from_loader(name, self, is_package=package) if found else None
        return spec
    def is_package(self, name):
        return self.path(name).endswith("/__init__.py")
    def get_source(self, name):
        return self.files[self.path(name)]
sys.meta_path.insert(0, Sent(sys.stdin.read()))
from spark_host.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
_ROOMS = ("spark_contract/", "spark_host/")


def sent_command(*words: str) -> str:
    """Return the command that runs a verb of the tools that come on its standard input."""
    return shlex.join(["python3", "-I", "-B", "-c", _LOADER, *words])


def sent_tools() -> str:
    """Return the tools as text for standard input."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for file in read_payload().tools.files:
            if file.path.startswith(_ROOMS):
                info = tarfile.TarInfo(file.path)
                info.size = len(file.content)
                tar.addfile(info, io.BytesIO(file.content))
    return base64.encodebytes(buffer.getvalue()).decode()
