"""The part of a gateway that chooses among the services of its host by the name of a model.

nginx reads no bodies, so a script of nginx's own JavaScript does; it says what it reads and why.
"""

from __future__ import annotations

import json
from importlib import resources

from spark_contract.errors import HostToolError
from spark_contract.host.paths import Paths
from spark_contract.serving.gateway import Gateway

SCRIPT = "names.js"
# Where the packages of the distributions and of nginx.org put it.
_MODULE = "usr/lib/nginx/modules/ngx_http_js_module.so"


def module(settings: Gateway, paths: Paths) -> str:
    """Return what has nginx load its JavaScript; nothing for a host with one service.

    Raises:
        HostToolError: It is not installed.
    """
    if not settings.names:
        return ""
    place = paths.root / _MODULE
    if not place.is_file():
        fix = "run the deploy again, or apt-get install libnginx-mod-http-js"
        raise HostToolError("nginx's JavaScript", f"{place} is not there", fix)
    return f"load_module {place};"


def imported(settings: Gateway, paths: Paths) -> str:
    """Return what has nginx read the script, which must lie beside its configuration."""
    if not settings.names:
        return ""
    return f"js_import names from {paths.gateway_run(settings.service) / SCRIPT};"


def script_text(settings: Gateway, paths: Paths) -> str:
    """Return the script with this host's services; that of the gateway itself is the first."""
    named = settings.names or {}
    first = {settings.service: named[settings.service]}
    services = [
        {"service": one, "traffic": str(paths.traffic(one)), "names": list(names)}
        for one, names in (first | named).items()
    ]
    script = resources.files("spark_host.gateway").joinpath(f"templates/{SCRIPT}").read_text()
    known = (("SERVICES", services), ("ROUTES", settings.routes))
    return "".join(f"const {name} = {json.dumps(value)};\n" for name, value in known) + script
