import shutil
import subprocess
from pathlib import Path

from lab.paths import lab_paths

MODULE = "ngx_http_js_module.so"


def find_nginx(folder: Path) -> Path | None:
    installed = shutil.which("nginx", path="/usr/sbin:/usr/bin")
    if installed:
        return Path(installed)
    # The lab has packages of several distributions; old sets lack the module.
    sets = sorted(
        lab_paths().cache.glob("debs-*"),
        key=lambda folder: (not _packages(folder, _MODULE_DEB), folder),
    )
    for packages in sets:
        place = folder / packages.name
        for package in (*_packages(packages, "nginx_*.deb"), *_packages(packages, _MODULE_DEB)):
            subprocess.run(["dpkg-deb", "-x", str(package), str(place)], check=True)
        program = place / "usr/sbin/nginx"
        if program.exists() and subprocess.run([program, "-v"], check=False).returncode == 0:
            return program
    return None


_MODULE_DEB = "libnginx-mod-http-js_*.deb"


def _packages(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def link_into(root: Path, program: Path) -> bool:
    module = program.parents[1] / "lib/nginx/modules" / MODULE
    for place, target in (("sbin/nginx", program), (f"lib/nginx/modules/{MODULE}", module)):
        link = root / "usr" / place
        link.parent.mkdir(parents=True)
        link.symlink_to(target)
    return module.exists()
