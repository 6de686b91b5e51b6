"""Run a deploy in this process, like the pyinfra command that we print."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pyinfra
from pyinfra.api import output
from pyinfra.api.config import Config
from pyinfra.api.connect import connect_all, disconnect_all
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.inventory import Inventory
from pyinfra.api.operations import run_ops
from pyinfra.api.state import BaseStateCallback, State, StateStage
from pyinfra.context import ctx_config, ctx_inventory, ctx_state

from spark_deploy.inventory.host_keys import readable_ssh_files


class _CallbackHandler(logging.Handler):
    def __init__(self, log: Callable[[str], None]):
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        self.log(record.getMessage())


def run_deploy(
    deploy: Path,
    hosts: Sequence[tuple[str, Mapping[str, Any]]],
    data: Sequence[str] = (),
    *,
    watcher: BaseStateCallback | None = None,
    log: Callable[[str], None] | None = None,
    dry: bool = False,
    as_json: bool = False,
    failed_hosts: set[str] | None = None,
) -> int:
    """Run a deploy on hosts; return pyinfra's exit code.

    ``watcher`` receives pyinfra's callbacks; ``log`` receives the log lines, which are otherwise
    printed. The names of failed hosts are added to ``failed_hosts``.
    """
    from pyinfra_cli.util import parse_cli_arg  # lets gevent patch this process

    pyinfra.is_cli = True  # makes pyinfra distinguish operations by their line in the deploy file
    os.environ.setdefault("PYINFRA_PROGRESS", "off")  # no spinner
    overrides = dict(item.split("=", 1) for item in data)
    with _logging(log):
        inventory = Inventory(  # type: ignore[no-untyped-call]  # pyinfra
            ([(name, dict(host_data)) for name, host_data in hosts], {}),
            override_data={key: parse_cli_arg(value) for key, value in overrides.items()},
        )
        config = Config()  # type: ignore[no-untyped-call]  # pyinfra
        config.lock_current_state()
        state = State(check_for_changes=dry)
        with ctx_config.use(config), ctx_inventory.use(inventory), ctx_state.use(state):
            state.cwd = str(Path.cwd())
            state.init(inventory, config)
            if watcher:
                state.add_callback_handler(watcher)  # type: ignore[no-untyped-call]  # pyinfra
            try:
                _run_stages(state, deploy, dry=dry, as_json=as_json)
            except PyinfraError as error:
                pyinfra.logger.error(str(error))
                return 1
            finally:
                disconnect_all(state)
                if failed_hosts is not None:
                    failed_hosts.update(host.name for host in state.failed_hosts)
            return 1 if state.failed_hosts else 0


def _run_stages(state: State, deploy: Path, *, dry: bool, as_json: bool) -> None:
    from pyinfra_cli.prints import print_meta, print_results, print_run_json
    from pyinfra_cli.util import load_deploy_file

    pyinfra.logger.info("--> Connecting to hosts...")
    state.set_stage(StateStage.Connect)
    with readable_ssh_files():
        connect_all(state)
    state.set_stage(StateStage.Prepare)
    load_deploy_file(state, str(deploy))
    if not dry:
        state.set_stage(StateStage.Execute)
        run_ops(state)
        state.set_stage(StateStage.Disconnect)
    if as_json:
        print_run_json(state, dry=dry)
    elif dry:
        print_meta(state)
    else:
        print_results(state)


@contextmanager
def _logging(log: Callable[[str], None] | None) -> Iterator[None]:
    """Send pyinfra's output to ``log``, by default to standard error."""
    from pyinfra_cli.log import LogFormatter, LogHandler

    handler: logging.Handler = _CallbackHandler(log) if log else LogHandler()
    handler.setFormatter(LogFormatter())
    logger, level, propagates = pyinfra.logger, pyinfra.logger.level, pyinfra.logger.propagate
    output.set_formatter((lambda text, *_, **__: text) if log else click.style)
    output.set_echo((lambda text="", **_: log(str(text))) if log else click.echo)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
