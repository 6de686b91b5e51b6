"""Who may import whom: each room knows only the rooms before it."""

import ast
import sys
from pathlib import Path

import pytest

from spark_deploy.checkout import CHECKOUT

STDLIB = frozenset(sys.stdlib_module_names) | {"__future__"}
CATALOG = {"spark_deploy.catalog", "spark_deploy.settings_types", "spark_deploy.lock_types"}
BASICS = {
    "spark_deploy.errors",
    "spark_deploy.checkout",
    "spark_deploy.patterns",
    "spark_deploy.engine_options",
}
READING = {"spark_deploy.yamlfile", "spark_deploy.schema_check", "spark_deploy.settings_rules"}
TYPES = "spark_deploy.plan.types"
LOGIN = {"paramiko", "pyinfra.connectors", "spark_deploy.errors"}
HOST_SIDE = {
    "spark_deploy.host_care",
    "spark_deploy.loop",
    "spark_deploy.managed",
    "spark_deploy.daemon_json",
    "spark_deploy.preflight",
    "pyinfra",
    "gevent",
    "paramiko",
    "spark_deploy.errors",
    "spark_deploy.facts",
    "spark_deploy.operations",
    "spark_deploy.plan",
    "spark_deploy.commands",
    "spark_deploy.payload",
    "spark_deploy.secrets",
    "spark_deploy.certificates",
    "spark_deploy.checkout",
}
# Room (a file or folder) -> what its modules may import beside the standard library.
# The longest matching room counts.
ROOMS: dict[str, set[str]] = {
    "spark_deploy/errors.py": {"pyinfra.api.exceptions"},
    "spark_deploy/checkout.py": set(),
    "spark_deploy/patterns.py": set(),
    "spark_deploy/engine_options.py": set(),
    "spark_deploy/yamlfile.py": {"yaml", "spark_deploy.errors"},
    "spark_deploy/schema_check.py": {"jsonschema", *BASICS},
    "spark_deploy/settings_types.py": set(),
    "spark_deploy/settings_rules.py": {*BASICS, "spark_deploy.schema_check"},
    "spark_deploy/settings.py": {"yaml", *BASICS, *READING, "spark_deploy.settings_types"},
    "spark_deploy/tensor_sets.py": BASICS,
    "spark_deploy/catalog.py": {
        *BASICS,
        *READING,
        "spark_deploy.settings",
        "spark_deploy.tensor_sets",
    },
    "spark_deploy/lock_types.py": {"spark_deploy.plan.types"},
    "spark_deploy/managed.py": set(),
    "spark_deploy/certificates.py": {"cryptography", "spark_deploy.errors", "spark_deploy.plan"},
    "spark_deploy/host_care.py": {"spark_deploy.managed"},
    "spark_deploy/daemon_json.py": BASICS,
    "spark_deploy/plan": {
        *CATALOG,
        *BASICS,
        "spark_deploy.plan",
        "spark_deploy.commands",
        "spark_deploy.managed",
    },
    "spark_deploy/preflight": {
        "spark_deploy.errors",
        "spark_deploy.facts",
        "spark_deploy.plan.types",
        "spark_deploy.preflight",
    },
    "spark_deploy/commands.py": {*CATALOG, *BASICS, "spark_deploy.plan"},
    "spark_deploy/facts": {
        "pyinfra",
        "spark_deploy.facts",
        "spark_deploy.errors",
        "spark_deploy.managed",
    },
    "spark_deploy/operations": HOST_SIDE,
    "roles": HOST_SIDE,
    # Names become commits and digests: the network beyond the hosts is seen from here alone.
    "spark_deploy/secrets.py": {"spark_deploy.errors"},
    "spark_deploy/lock.py": {"yaml", *BASICS, *READING, "spark_deploy.lock_types", TYPES},
    "spark_deploy/hub.py": {
        "httpx2",
        "huggingface_hub",
        "spark_deploy.errors",
        "spark_deploy.lock_types",
        TYPES,
    },
    "spark_deploy/registry.py": {"spark_deploy.errors", "spark_deploy.lock_types"},
    "spark_deploy/locking.py": {
        *CATALOG,
        *BASICS,
        "spark_deploy.hub",
        "spark_deploy.lock",
        "spark_deploy.registry",
        "spark_deploy.secrets",
    },
    # What is carried to hosts, and the list of all that a deploy touches there.
    "spark_deploy/payload.py": {*BASICS, "spark_deploy.managed", "spark_deploy.plan.digest"},
    "spark_deploy/manifest.py": {
        "spark_deploy.facts.docker",
        "spark_deploy.host_care",
        "spark_deploy.managed",
        "spark_deploy.operations.base",
        "spark_deploy.payload",
        "spark_deploy.plan",
    },
    # First contact and connections: no plan, no settings.
    "spark_deploy/host_keys.py": LOGIN,
    "spark_deploy/bootstrap.py": {*LOGIN, "pyinfra.api", "spark_deploy.host_keys"},
    "spark_deploy/ssh.py": {"pyinfra.api"},
    "spark_deploy/loop.py": {"pyinfra.context"},
    # Where the rooms meet: inventory files, deploys, and the command that looks.
    "spark_deploy/inventory.py": {
        "click",
        *BASICS,
        "spark_deploy.bootstrap",
        "spark_deploy.certificates",
        "spark_deploy.plan.check",
        "spark_deploy.plan.gateway",
        "spark_deploy.schema_check",
        "spark_deploy.settings",
    },
    "spark_deploy/plans.py": {
        "pyinfra",
        "spark_deploy.inventory",
        "spark_deploy.locking",
        "spark_deploy.payload",
        "spark_deploy.plan",
    },
    "spark_deploy/cli": {
        *CATALOG,
        *BASICS,
        "gevent",
        "pyinfra",
        "spark_deploy.certificates",
        "spark_deploy.cli",
        "spark_deploy.facts",
        "spark_deploy.inventory",
        "spark_deploy.lock",
        "spark_deploy.locking",
        "spark_deploy.manifest",
        "spark_deploy.operations.preflight",
        "spark_deploy.operations.running",
        "spark_deploy.payload",
        "spark_deploy.plan",
        "spark_deploy.plans",
        "spark_deploy.preflight",
        "spark_deploy.schema_check",
        "spark_deploy.settings",
        "spark_deploy.ssh",
    },
    "spark_deploy/__main__.py": {"spark_deploy.cli"},
    "spark_deploy/__init__.py": set(),
}
# Reading the world is for the rooms that are made for it.
PURE = (
    "spark_deploy/plan",
    "spark_deploy/commands.py",
    "spark_deploy/engine_options.py",
    "spark_deploy/patterns.py",
    "spark_deploy/tensor_sets.py",
)
IMPURE = {"os", "time", "datetime", "socket", "subprocess", "random", "urllib", "pathlib", "io"}


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str | None:
    name = path.relative_to(CHECKOUT).as_posix()
    matching = [room for room in ROOMS if name == room or name.startswith(f"{room}/")]
    return max(matching, key=len, default=None)


def files(*folders: str):
    for folder in folders:
        root = CHECKOUT / folder
        yield from sorted(root.rglob("*.py")) if root.is_dir() else [root]


MODULES = list(files("spark_deploy", "roles"))


def test_every_module_has_a_room_and_every_room_a_module():
    """A new file that fits no room is a question to answer first, not an exception."""
    rooms = {path.relative_to(CHECKOUT).as_posix(): room_of(path) for path in MODULES}
    assert [name for name, room in rooms.items() if room is None] == []
    assert set(ROOMS) == set(rooms.values())


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(CHECKOUT).as_posix())
def test_a_room_imports_only_the_rooms_before_it(path):
    allowed = ROOMS[room_of(path)]
    for name in imports(path):
        known = name.split(".")[0] in STDLIB or any(
            name == room or name.startswith(f"{room}.") for room in allowed
        )
        assert known, f"{path.relative_to(CHECKOUT)} imports {name}"


@pytest.mark.parametrize("path", [p for p in files(*PURE)], ids=lambda p: p.name)
def test_plans_are_pure(path):
    for name in imports(path):
        assert name.split(".")[0] not in IMPURE, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", list(files("roles")), ids=lambda p: p.name)
def test_a_role_imports_no_other_role(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "roles"]


@pytest.mark.parametrize("path", list(files("roles")), ids=lambda p: p.name)
def test_a_role_does_not_know_the_lab(path):
    names = {
        node.id
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Name)
    }
    assert not {name for name in names if name.lower() == "lab" or name.lower().startswith("lab_")}


@pytest.mark.parametrize("folder", ["files", "lab", "benchmarks"])
def test_what_runs_elsewhere_does_not_import_the_core(folder):
    if not (CHECKOUT / folder).is_dir():
        return
    for path in files(folder):
        used = {name.split(".")[0] for name in imports(path)}
        assert not used & {"spark_deploy", "roles"}, path


@pytest.mark.parametrize(
    "path", sorted((CHECKOUT / "inventory").glob("*.py")), ids=lambda p: p.name
)
def test_inventories_hide_their_helpers_from_pyinfra(path):
    """Every public list or tuple of an inventory file is a group, imported names included."""
    tree = ast.parse(path.read_text("utf-8"))
    public = set()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            public |= {(alias.asname or alias.name) for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            public.add(node.name)
        elif isinstance(node, ast.Assign):
            public |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    assert {name for name in public if not name.startswith("_")} == {path.stem}
