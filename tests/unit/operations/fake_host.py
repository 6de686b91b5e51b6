"""A host for tests of operations: facts by name, files, and a shell with prepared results."""

import base64
import io
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import yaml
from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.state import StateStage
from pyinfra.connectors.util import CommandOutput, OutputLine
from pyinfra.context import ctx_host, ctx_state

from spark_deploy.hosts import facts
from spark_deploy.plan.types import FileState, ManagedFile
from tests.unit.facts.test_facts import output_of

FACT_CASES = Path(__file__).parents[1] / "facts"


class Failed(str):
    """The error output of a command that fails."""


class FakeHost:
    """Facts by name, from files or from sections; messages and commands are recorded.

    A callable fact gets the arguments. The ``shell`` returns output, ``Failed``, or an exception
    that ends the connection.
    """

    current_op_global_arguments: Any = None

    def __init__(
        self,
        sections: dict[str, Any] | None = None,
        *,
        name: str = "spark-1",
        files: Iterable[ManagedFile] | None = None,
        shell: Callable[[str], str | Exception] = lambda script: "",
        connected: bool = True,
        **facts: Any,
    ):
        self.name, self.shell, self.connected, self.facts = name, shell, connected, facts
        self.output = output_of(sections or {})
        self.files = None if files is None else {file.path: file for file in files}
        self.data: dict[str, Any] = {"_sudo": True}
        self.fact_reads = self.connects = 0
        self.noops: list[str] = []
        self.logs: list[str] = []
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.state: Any = SimpleNamespace(inventory=[], results={}, is_executing=True)
        transport = SimpleNamespace(is_active=lambda: self.connected)
        client = SimpleNamespace(get_transport=lambda: transport)
        self.connector = SimpleNamespace(client=client, disconnect=lambda: None)

    def get_fact(self, fact: Any, **arguments: Any) -> Any:
        arguments.pop("_sudo", None)
        assert isinstance(fact().command(**arguments), str)
        self.fact_reads += 1
        if fact.__name__ in self.facts:
            value = self.facts[fact.__name__]
            return value(**arguments) if callable(value) else value
        if fact is facts.FileStates and self.files is not None:
            present = [file for path in arguments["paths"] if (file := self.files.get(path))]
            return {file.path: state_of(file) for file in present}
        return fact().process(self.output)

    def run_shell_command(
        self, command: StringCommand, **options: Any
    ) -> tuple[bool, CommandOutput]:
        self.commands.append((command.get_raw_value(), options))
        result = self.shell(command.get_raw_value())
        if isinstance(result, Exception):
            self.connected = False
            raise result
        stream = "stderr" if isinstance(result, Failed) else "stdout"
        lines = [OutputLine(stream, line) for line in result.splitlines()]
        return stream == "stdout", CommandOutput(lines)

    def connect(self, **_: Any) -> None:
        self.connects += 1
        self.connected = True

    def disconnect(self) -> None:
        raise AssertionError("pyinfra's callbacks for the end of a run, which return the lease")

    def noop(self, text: str) -> None:
        self.noops.append(text)

    def log(self, text: str, **_: Any) -> None:
        self.logs.append(text)

    log_styled = log

    @property
    def log_text(self) -> str:
        return "\n".join(self.logs)


def local_shell(script: str) -> str:
    gevent.sleep(0.01)
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    return result.stdout if result.returncode == 0 else Failed(result.stdout + result.stderr)


def state_of(file: ManagedFile) -> FileState:
    return FileState(file.mode, "root:root", file.sha256)


@contextmanager
def on(host: Any, executing: bool = True):
    """Make ``host`` the current host of pyinfra."""
    host.state.is_executing = executing
    state = SimpleNamespace(
        is_executing=executing,
        current_stage=StateStage.Execute if executing else StateStage.Prepare,
        inventory=SimpleNamespace(get_host=lambda name: host),
        ops=defaultdict(dict),
        failed_hosts=set(),
    )
    with ctx_state.use(state), ctx_host.use(host):
        yield state


def describe(command: Any) -> str:
    if isinstance(command, FunctionCommand):
        return f"{command.function.__name__}({', '.join(map(str, command.args))})"
    return str(command)


def run_operation(
    host: FakeHost, operation: Any, *arguments: Any, executing: bool = True, **named: Any
) -> list[str]:
    with on(host, executing):
        return [describe(command) for command in operation._inner(*arguments, **named)]


def unpack_sent(command: Any) -> list[bytes]:
    archive = base64.b64decode(command.connector_arguments.get("_stdin", ""))
    if not archive:
        return []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return [file.read() for member in tar if (file := tar.extractfile(member))]


def sections_of(fact: dict[str, Any]) -> dict[str, Any]:
    like = fact.get("like")
    sections = yaml.safe_load((FACT_CASES / f"{like}.yml").read_text())["sections"] if like else {}
    sections.pop("end", None)
    return {**sections, **fact, "like": [], "end": []}
