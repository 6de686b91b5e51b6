"""An nginx for tests: this machine's, or the one that the lab gives its guests, unpacked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from lab.paths import lab_paths

MODULE = "ngx_http_js_module.so"


def found_nginx(folder: Path) -> Path | None:
    """Return a program that runs here, unpacked where this machine has none; ``None``: nowhere."""
    installed = shutil.which("nginx", path="/usr/sbin:/usr/bin")
    if installed:
        return Path(installed)
    # The lab has sets of several distributions; those of earlier checkouts have no module.
    sets = sorted(lab_paths().cache.glob("debs-*"), key=lambda one: (not _named(one, _WITH), one))
    for one in sets:
        place = folder / one.name
        for package in (*_named(one, "nginx_*.deb"), *_named(one, _WITH)):
            subprocess.run(["dpkg-deb", "-x", str(package), str(place)], check=True)
        program = place / "usr/sbin/nginx"
        if program.exists() and subprocess.run([program, "-v"], check=False).returncode == 0:
            return program
    return None


_WITH = "libnginx-mod-http-js_*.deb"


def _named(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def put_below(root: Path, program: Path) -> bool:
    """Have a host below ``root`` know this nginx and its JavaScript; false: that is missing."""
    module = program.parents[1] / "lib/nginx/modules" / MODULE
    for place, target in (("sbin/nginx", program), (f"lib/nginx/modules/{MODULE}", module)):
        link = root / "usr" / place
        link.parent.mkdir(parents=True)
        link.symlink_to(target)
    return module.exists()
