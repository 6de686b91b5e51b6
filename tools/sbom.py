"""Write what we add to an engine's image, and send to hosts, as CycloneDX: ``make sbom``.

Made from the Dockerfile, the plugin's files and the pinned requirements of the builder; the same
tree gives the same bytes. What the base image holds is its publisher's to list.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts.payload.content import SITE_REQUIREMENTS, read_payload
from tools.requirements import pins

CHECKOUT = Path(__file__).resolve().parent.parent
TARGET = CHECKOUT / "dist/spark.cdx.json"
Component = dict[str, Any]


def document() -> dict[str, Any]:
    """Return the whole list."""
    plugin = _plugin()
    components = [_base(), plugin, *_on_hosts()]
    whole = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _layer()},
        "components": components,
        "dependencies": [
            {"ref": "image", "dependsOn": ["base", plugin["bom-ref"]]},
            {"ref": plugin["bom-ref"], "dependsOn": []},
        ],
    }
    named = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    return {**whole, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, named)}"}


def text() -> str:
    """Return the list as it is written."""
    return json.dumps(document(), indent=1, sort_keys=True) + "\n"


def _layer() -> Component:
    digest = read_payload().image_context_digest
    return {
        "type": "container",
        "bom-ref": "image",
        "name": "spark-vllm",
        "version": digest[:12],
        "properties": [{"name": "spark.context", "value": digest}],
    }


def _base() -> Component:
    image = Settings().images["engine"]
    name, _, tag = image.partition(":")
    return {"type": "container", "bom-ref": "base", "name": name, "version": tag}


def _plugin() -> Component:
    """Return our plugin, every file of the image's build context below it."""
    project = (CHECKOUT / "files/image/pyproject.toml").read_text("utf-8")
    if "\ndependencies = []\n" not in project:
        raise ValueError("the plugin has dependencies: list them here")
    return {
        "type": "library",
        "bom-ref": "plugin",
        "name": _said(project, "name"),
        "version": _said(project, "version"),
        "licenses": [{"license": {"id": _said(project, "license")}}],
        "components": [
            {
                "type": "file",
                "bom-ref": f"file:{file.path}",
                "name": file.path,
                "hashes": [{"alg": "SHA-256", "content": file.sha256}],
            }
            for file in sorted(read_payload().image_context, key=lambda file: file.path)
        ],
    }


def _said(project: str, key: str) -> str:
    [found] = re.findall(rf'^{key} = (?:{{ text = )?"([^"]+)"', project, re.MULTILINE)
    return str(found)


def _on_hosts() -> Iterator[Component]:
    for pin in pins(CHECKOUT / SITE_REQUIREMENTS):
        # One of several versions, by the Python of the host.
        yield {
            "type": "library",
            "bom-ref": f"pkg:pypi/{pin.name}@{pin.version}",
            "name": pin.name,
            "version": pin.version,
            "purl": f"pkg:pypi/{pin.name}@{pin.version}",
            "scope": "optional",
            "hashes": [{"alg": "SHA-256", "content": one} for one in pin.sha256],
        }


def main() -> int:
    """Write the list."""
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{TARGET.relative_to(CHECKOUT)}: written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
