import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from spark_deploy.config.checkout import CHECKOUT

# Packages (files or folders) with their third-party imports. A package imports only packages above
# it in this list. The longest match decides.
PACKAGES: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (package, frozenset(outside.split()))
    for package, outside in (
        # Both sides.
        ("files/contract/spark_contract", ""),
        # The host's tools.
        ("files/host/spark_host/__init__.py", ""),
        ("files/host/spark_host/system", ""),
        ("files/host/spark_host/records", ""),
        ("files/host/spark_host/gateway", ""),
        ("files/host/spark_host/engine", ""),
        ("files/host/spark_host/watch", ""),
        ("files/host/spark_host/check", ""),
        ("files/host/spark_host/jobs.py", ""),
        ("files/host/spark_host/image.py", ""),
        ("files/host/spark_host/rollout", ""),
        ("files/host/spark_host/relay.py", ""),
        ("files/host/spark_host/cleanup", ""),
        ("files/host/spark_host/status.py", ""),
        ("files/host/spark_host/__main__.py", ""),
        # The builder of checkpoints.
        ("files/checkpoint/spark_checkpoint/__init__.py", ""),
        ("files/checkpoint/spark_checkpoint/progress.py", ""),
        ("files/checkpoint/spark_checkpoint/storage.py", ""),
        ("files/checkpoint/spark_checkpoint/headers.py", ""),
        ("files/checkpoint/spark_checkpoint/directory.py", ""),
        ("files/checkpoint/spark_checkpoint/tensor_sets.py", ""),
        ("files/checkpoint/spark_checkpoint/verify.py", ""),
        ("files/checkpoint/spark_checkpoint/number_formats.py", "numpy"),
        ("files/checkpoint/spark_checkpoint/sources", "urllib3"),
        ("files/checkpoint/spark_checkpoint/inspection.py", ""),
        ("files/checkpoint/spark_checkpoint/build", "numpy"),
        ("files/checkpoint/spark_checkpoint/autoround_job.py", "auto_round torch transformers"),
        ("files/checkpoint/spark_checkpoint/requantize.py", "numpy"),
        ("files/checkpoint/spark_checkpoint/ranking.py", "tokenizers"),
        ("files/checkpoint/spark_checkpoint/__main__.py", ""),
        # The engine's plugin.
        ("files/image/spark_vllm/__init__.py", ""),
        ("files/image/spark_vllm/served_names.py", ""),
        ("files/image/spark_vllm/checkpoint", "torch safetensors"),
        ("files/image/spark_vllm/head", "torch triton vllm"),
        ("files/image/spark_vllm/ngram_table.py", "numpy"),
        ("files/image/spark_vllm/qwen4_exp.py", "torch vllm"),
        ("files/image/spark_vllm/finite.py", "torch vllm"),
        ("files/image/spark_vllm/turboquant.py", "torch vllm"),
        ("files/image/spark_vllm/portable.py", "torch vllm"),
        ("files/image/spark_vllm/spark_inc.py", "torch vllm transformers"),
        ("files/image/spark_vllm/register.py", "vllm"),
        ("files/image/spark_vllm/check", "torch triton vllm yaml"),
        # The controller.
        ("spark_deploy/__init__.py", ""),
        ("spark_deploy/config", "yaml jsonschema pydantic pydantic_core pyinfra"),
        # Names become commits and digests: only this package queries hubs and registries.
        ("spark_deploy/lock", "yaml pydantic httpx2 huggingface_hub"),
        ("spark_deploy/plan", ""),
        ("spark_deploy/hosts", "pyinfra gevent paramiko cryptography"),
        ("spark_deploy/inventory", "pyinfra pyinfra_cli gevent paramiko click pydantic"),
        ("spark_deploy/bench", "yaml pydantic matplotlib"),
        ("spark_deploy/cli", "pyinfra gevent click rich yaml pydantic"),
        ("spark_deploy/__main__.py", ""),
        ("roles", "pyinfra"),
        ("deploys", "pyinfra"),
        ("deploy.py", "pyinfra"),
        ("inventory", ""),
        # Outside the product; no package above imports them.
        ("lab", "torch safetensors numpy tokenizers jinja2 aiohttp paramiko transformers"),
        ("tools", ""),
        (
            "proofs",
            "torch vllm transformers safetensors numpy triton tokenizers PIL huggingface_hub "
            "aiohttp matplotlib",
        ),
        ("tools/docs", "yaml rich mkdocs"),
    )
)
RANK = {package: rank for rank, (package, _) in enumerate(PACKAGES)}
# Modules that read the environment; only some packages may import them.
IMPURE = {"os", "time", "datetime", "socket", "subprocess", "random", "urllib", "io", "shutil",
          "glob", "tempfile", "yaml", "runpy", "importlib"}  # fmt: skip
# Paths may be named, but not read.
READING = {"open", "read_text", "read_bytes", "read_mapping", "load_schema", "glob", "rglob",
           "iterdir", "exists", "is_file", "is_dir", "stat", "expanduser", "cwd"}  # fmt: skip
# Where packages start that are not at the top of the checkout.
ROOTS = ("files/contract/", "files/host/", "files/checkpoint/", "files/image/", "")
OURS = {
    next(package.removeprefix(root) for root in ROOTS if package.startswith(root)).split("/")[0]
    for package, _ in PACKAGES
}
LONGEST_FILE = 400  # lines of a product module


def tracked():
    result = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    packages = tuple({package.split("/")[0] for package, _ in PACKAGES})
    existing = (name for name in result.stdout.split() if (CHECKOUT / name).is_file())
    return sorted(name for name in existing if name.startswith(packages))


@cache
def tree_of(name):
    return ast.parse((CHECKOUT / name).read_text("utf-8"))


@cache
def nodes_of(name):
    return tuple(ast.walk(tree_of(name)))


@cache
def imports(name):
    result: list[str] = []
    for node in nodes_of(name):
        if isinstance(node, ast.Import):
            result += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            result += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(result)


@cache
def file_of(module):
    path = module.replace(".", "/")
    while path:
        for root in ROOTS:
            for file in (f"{root}{path}.py", f"{root}{path}/__init__.py"):
                if file in _FILES:
                    return file
        path = path.rpartition("/")[0]
    return None


@cache
def package_of(name):
    matching = [package for package in RANK if name == package or name.startswith(f"{package}/")]
    return max(matching, key=len, default=None)


MODULES = tracked()
_FILES = frozenset(MODULES)


def imported(*packages):
    for name in MODULES:
        if name.startswith(packages):
            yield from ((name, result, result.split(".")[0]) for result in imports(name))


def none(offenders):
    assert not offenders, "\n" + "\n".join(offenders)


def test_every_module_belongs_to_a_package():
    packages = {name: package_of(name) for name in MODULES}
    none([name for name, package in packages.items() if package is None])
    assert set(RANK) == set(packages.values())


@pytest.mark.slow
def test_packages_import_only_from_their_own_or_a_lower_layer():
    wrong = []
    for name, result, top in imported(""):
        package, theirs = package_of(name), package_of(file_of(result) or "")
        assert package is not None, f"{name} has no package"
        if top in OURS and theirs is None:
            wrong.append(f"{name} imports {result}, which is not there")
        elif top in OURS and RANK[theirs] > RANK[package]:
            wrong.append(f"{name} imports {result}: {theirs} is above {package}")
    none(wrong)


def test_packages_import_only_their_allowed_libraries():
    standard, allowed = {*sys.stdlib_module_names, "__future__"}, dict(PACKAGES)
    none(
        [
            f"{name} imports {result}"
            for name, result, top in imported("spark_deploy/", "files/", "roles/")
            if top not in OURS | standard | allowed[package_of(name) or ""]
        ]
    )


def test_modules_have_no_import_cycles():
    graph = {
        name: {ours for result in imports(name) if (ours := _ours(result)) and ours != name}
        for name in MODULES
    }
    left = set(graph)
    while free := {name for name in left if not graph[name] & left}:
        left -= free
    assert left == set()


def _ours(imported):
    return file_of(imported) if imported.split(".")[0] in OURS else None


def faces(name):
    above = [str(parent) for parent in Path(name).parents]
    return {f"{folder}/__init__.py" for folder in above} & set(MODULES) - {name}


def reached_from(start):
    reached: set[str] = set()
    coming = {name for name in MODULES if name.startswith(start)}
    while coming:
        reached |= coming
        result = {_ours(imported) for name in coming for imported in imports(name)}
        result |= {face for name in coming for face in faces(name)}
        coming = {name for name in result if name} - reached
    return sorted(reached)


def test_plan_modules_do_not_read_files_or_import_impure_modules():
    reached = set(reached_from("spark_deploy/plan/")) - {"spark_deploy/__init__.py"}
    reading = [
        f"{name} line {node.lineno} reads"
        for name in reached
        for node in nodes_of(name)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in READING
    ]
    none([f"{name} imports {it}" for name, it, top in imported(*reached) if top in IMPURE])
    none(reading)


def test_roles_do_not_import_each_other():
    roles = [name for name in MODULES if name.startswith("roles/")]
    others = [
        f"{name} imports {result}" for name, result, top in imported("roles/") if top == "roles"
    ]
    labs = [
        f"{name} says {node.id}"
        for name in roles
        for node in nodes_of(name)
        if isinstance(node, ast.Name) and re.match(r"lab(_|$)", node.id.lower())
    ]
    none(others + labs)


def test_host_code_does_not_import_controller_code():
    result = imported("files", "lab", "bench")
    none([f"{name} imports {it}" for name, it, top in result if top in {"spark_deploy", "roles"}])


@pytest.mark.parametrize("side", ["host", "checkpoint", "image"])
def test_host_packages_do_not_import_each_other(side):
    mine = {"host": "spark_host", "checkpoint": "spark_checkpoint", "image": "spark_vllm"}[side]
    others = OURS - {mine, "spark_contract"}
    result = imported(f"files/{side}/")
    none([f"{name} imports {it}" for name, it, top in result if top in others])


def test_product_files_stay_below_the_line_limit():
    product = [name for name in MODULES if name.startswith(("spark_deploy/", "files/", "roles/"))]
    lengths = {name: len((CHECKOUT / name).read_text("utf-8").splitlines()) for name in product}
    none([f"{name}: {lines} lines" for name, lines in lengths.items() if lines > LONGEST_FILE])


@pytest.mark.parametrize(
    "path", sorted((CHECKOUT / "inventory").glob("*.py")), ids=lambda p: p.name
)
def test_inventory_modules_define_no_public_name_except_the_group(path):
    """Every public list or tuple of an inventory file is a group, imported names included."""
    tree = ast.parse(path.read_text("utf-8"))
    public = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            public |= {(alias.asname or alias.name) for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            public.add(node.name)
        elif isinstance(node, ast.Assign):
            public |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    assert {name for name in public if not name.startswith("_")} == {path.stem}
