import ast
import re

import pytest

from tests.unit.test_imports import MODULES, none, tree_of

# Caches of values that depend only on code or checkout. The payload is read once, so that every
# host of a run gets the same bytes.
REMEMBER = {
    "spark_deploy/config/documents.py",
    "spark_deploy/hosts/payload.py",
    "files/checkpoint/spark_checkpoint/headers.py",
    "files/checkpoint/spark_checkpoint/number_formats.py",
    "files/checkpoint/spark_checkpoint/sources/connections.py",
    "files/contract/spark_contract/documents.py",
}
KEPT = {
    # Processes that ignore signals.
    "files/host/spark_host/system/programs.py": "_stuck",
    # The socket of an answer, which urllib3 does not keep.
    "files/checkpoint/spark_checkpoint/sources/connections.py": "_sockets",
    # A script without importers.
    "files/checkpoint/spark_checkpoint/autoround_job.py": "ROOT",
}
# Mutable containers that start empty.
FILLED = re.compile(
    r"\{\}|\[\]|([a-z]+\.)?"
    r"(dict|defaultdict|OrderedDict|UserDict|UserList|list|set|deque|Counter|Weak\w+)\(.*\)"
)
FILLING = {"append", "add", "update", "setdefault", "extend", "insert", "pop", "popitem", "clear",
           "remove", "discard", "appendleft"}  # fmt: skip
# Values that differ in every run.
DRAWN = re.compile(
    r"(secrets|random|time|uuid|subprocess|socket|getpass|tempfile)\.\w+$"
    r"|os\.(getpid|getenv|urandom|environ|getcwd)\b"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "side", ["spark_deploy/", "files/contract/", "files/host/", "files/checkpoint/", "roles/"]
)
def test_modules_keep_no_state_between_runs(side):
    none(
        [
            f"{name} {result}"
            for name in MODULES
            if name.startswith(side)
            for result in state_of(tree_of(name), may_remember=name in REMEMBER)
            if KEPT.get(name, "\n") not in result
        ]
    )


def state_of(tree, *, may_remember=False):
    of_module = {
        name: node
        for name, node in _assigned(tree.body)
        if not re.search(r"Weak\w+\[Host\b", ast.unparse(node))
    }
    for target, node in of_module.items():
        if (value := node.value) is None:
            continue
        made = ast.unparse(value)
        if FILLED.fullmatch(made) or (isinstance(value, ast.List) and "None" in made):
            yield f"line {node.lineno}: {target} will be filled"
        calls = (ast.unparse(item.func) for item in ast.walk(value) if isinstance(item, ast.Call))
        if any(DRAWN.match(call) for call in calls):
            yield f"line {node.lineno}: {target} is found out when the module is imported"
    for part in ast.walk(tree):
        words = [ast.unparse(item) for item in getattr(part, "decorator_list", ())]
        yield from (
            f"remembers {word}"
            for word in words
            if re.match(r"(functools\.)?(lru_)?cache", word) and not may_remember
        )
        if isinstance(part, ast.Global):
            yield "has a global"
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _changes(part, set(of_module))


def _assigned(body):
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((item.id, node) for item in targets if isinstance(item, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _assigned(node.body)


def _changes(function, names):
    nodes = list(ast.walk(function))
    changed = [
        (node.lineno, value.id)
        for node in nodes
        if isinstance(value := _changed_by(node), ast.Name) and value.id in names
    ]
    if not changed:
        return
    own = {item.arg for item in ast.walk(function.args) if isinstance(item, ast.arg)}
    own |= {
        item.id for item in nodes if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    }
    for line, name in changed:
        if name not in own:
            yield f"line {line}: {function.name} changes {name}"


def _changed_by(node):
    if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value if node.func.attr in FILLING else None
    return None


@pytest.mark.parametrize(
    "code",
    [
        "known = {}",
        "known: dict[str, str] = dict()",
        "known = collections.UserDict()",
        "password = [None]",
        "key = secrets.token_hex(8)",
        "began = time.monotonic()",
        "answer = subprocess.run(['id'])",
        "names = ('a',)\ndef f():\n    global names",
        "table = {'a': 1}\ndef f():\n    table['b'] = 2",
        "table = {'a': 1}\ndef f():\n    table.update(b=2)",
        "plan = Holder(0)\ndef f():\n    plan.value = 3",
        "@functools.lru_cache\ndef f():\n    return ask()",
    ],
)
def test_module_state_check_finds_every_kind_of_state(code):
    assert list(state_of(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "TABLE = {'a': 1}",
        "WORDS = ('a', 'b')\ndef f():\n    table = {}\n    table['b'] = 2\n    table.update(c=3)",
        "leases: WeakKeyDictionary[Host, Held] = WeakKeyDictionary()",
        "FORM = re.compile('x')",
    ],
)
def test_module_state_check_accepts_constants(code):
    assert list(state_of(ast.parse(code))) == []
