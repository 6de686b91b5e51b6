import ast
import functools

from spark_deploy.config.checkout import CHECKOUT

ROOTS = {"spark_vllm": CHECKOUT / "files/image", "proofs": CHECKOUT, "lab": CHECKOUT}
FILES = [
    *(CHECKOUT / "tests/gpu").glob("*.py"),
    *(CHECKOUT / "proofs").rglob("*.py"),
    CHECKOUT / "tests/unit/plugin/test_head_for_a_spark.py",
]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ROOTS:
            for alias in node.names:
                yield str(node.module), alias.name


@functools.cache
def names_in(file):
    return {
        identifier
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        for identifier in (
            getattr(node, "name", None),
            node.id if isinstance(node, ast.Name) else None,
            node.asname or node.name if isinstance(node, ast.alias) else None,
        )
    }


def exists(module, name):
    place = ROOTS[module.split(".")[0]] / module.replace(".", "/")
    if (place / f"{name}.py").is_file() or (place / name).is_dir():
        return True
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return file.is_file() and name in names_in(file)


def test_every_import_of_gpu_code_exists_in_the_engine():
    imports = {(module, name, path.name) for path in FILES for module, name in imported(path)}
    assert len(imports) > 100
    assert [entry for entry in imports if not exists(*entry[:2])] == []
