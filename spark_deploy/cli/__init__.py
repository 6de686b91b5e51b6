"""``spark-deploy``: the names and help texts of the commands, which are click commands."""

import errno
import importlib
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from difflib import get_close_matches

import click

SECTIONS = {
    "Set up": {
        "init": "Create a folder for your hosts and settings.",
        "up": "Deploy: make hosts serve the model in your settings.",
    },
    "Change": {
        "use": "Select another model or profile in your settings files.",
        "set": "Check KEY=VALUE and write it to your settings files.",
        "stop": "Stop serving, even after reboots, until you run start.",
        "start": "On stopped hosts, start the last release that passed its checks.",
        "rollback": "Return to the previous release.",
        "prune": "Remove files and images that releases no longer need.",
        "key": "Add, revoke or list named API keys with limits.",
        "rotate-key": "Replace the API key; reject the old key.",
        "uninstall": "Remove this project from hosts.",
        "fabric": "Configure or measure the links between hosts.",
    },
    "Inspect": {
        "plan": "Print the plan of a deploy without changing hosts.",
        "status": "Show releases, checks and differences from the plan.",
        "doctor": "Run the preflight check without changing hosts.",
        "ask": "Ask a question; print answer and tokens/s.",
        "connect": "Print URL, model name and client setup.",
        "top": "Show requests, tok/s, cache, memory and temperature.",
        "logs": "Print the merged logs of engines, gateways and jobs.",
        "bench": "Benchmark servers through their gateways; compare results.",
    },
    "Models and files": {
        "models": "List models that match all WORDs, with hosts needed and computed speed.",
        "update": "Lock the newest commits and image digests.",
        "settings": "Print settings whose names contain KEY, or all settings.",
        "add": "Add a model from a repository, shared file or recipe.",
        "share": "Write a model, its profile and its lock entries to a file.",
    },
}
COMMANDS = {name: text for commands in SECTIONS.values() for name, text in commands.items()}
_CHANGES = ("stop", "start", "rollback", "prune", "rotate-key", "uninstall", "fabric")
_MODULES = {
    **dict.fromkeys(_CHANGES, "changes"), **dict.fromkeys(("top", "logs"), "live"),
    "ask": "connect", "set": "settings", "use": "settings",
}  # fmt: skip
_OPTION_THAT_CONNECTS = {
    "plan": "--on-host", "update": "--from-hosts", "add": "--requantize", "bench": "--ladder",
}  # fmt: skip
_OPTION_THAT_STAYS_OFFLINE = {"status": "--planned", "share": "--offline"}
# Our command for each name that similar tools use.
_SIMILAR = {
    "ls": "models", "list": "models", "search": "models", "ps": "status", "run": "up",
    "serve": "up", "deploy": "up", "switch": "use", "chat": "ask", "rm": "uninstall",
    "remove": "uninstall", "pull": "add", "undo": "rollback",
}  # fmt: skip
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 for success, 1 for a problem, 2 for a usage error."""
    _open_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _parse_and_run(words)
        sys.stdout.flush()
    except OSError as error:
        return _print_os_error(error, as_json="--json" in words)
    return code


def _open_streams() -> None:
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream, mode = getattr(sys, name), "r" if name == "stdin" else "w"
        if stream is None:
            # Open the descriptor too, because child processes inherit it.
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _print_os_error(error: OSError, *, as_json: bool) -> int:
    """Print an error about a file or the output and return 1; re-raise other errors."""
    where = error.filename
    if where is None and error.errno in _OUTPUT_ERRORS:
        where = "output"
        # At exit Python flushes the remaining output, which would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if where is None or error.strerror is None:
        raise error
    if not isinstance(error, BrokenPipeError):  # `spark-deploy plan | head`
        # Imported late, because it imports pyinfra, which must not be imported without streams.
        from spark_deploy.config.errors import printable

        click.secho(printable(f"{where}: {error.strerror}"), fg="red", err=True)
        fix = "check path and permissions"
        if where == "ssh":
            fix = "install the OpenSSH client: apt-get install openssh-client"
        click.echo(f"  fix: {fix}", err=True)
        if as_json and where != "output":
            _print_json_errors([{"where": str(where), "what": error.strerror, "fix": fix}])
    return 1


def _parse_and_run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    elif arguments == ["version"]:
        arguments = ["--version"]
    as_json = "--json" in arguments
    try:
        command = GROUP.main(arguments, "spark-deploy", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        if as_json:
            fix = "see spark-deploy --help"
            _print_json_errors(
                [{"where": "command line", "what": error.format_message(), "fix": fix}]
            )
        return error.exit_code
    # --help and --version have already printed their text.
    return _run(command, as_json=as_json) if callable(command) else int(command or 0)


def _print_json_errors(problems: list[dict[str, str]]) -> None:
    print(json.dumps({"errors": problems}, indent=1))


def _run(command: Callable[[], int], *, as_json: bool) -> int:
    from spark_contract.documents import to_plain

    from spark_deploy.cli.console import print_problem
    from spark_deploy.config.errors import SparkError

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Commands print the reasons of failed connections; pyinfra would print them again.
    logging.getLogger("pyinfra").setLevel(logging.CRITICAL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the command handles it
    try:
        return command()
    except SparkError as error:
        for problem in error.problems:
            print_problem(problem)
        if as_json:
            _print_json_errors([to_plain(problem) for problem in error.problems])
        return 1
    except click.Abort:
        print("\nstopped; no changes made", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("\ninterrupted; work already started on hosts continues", file=sys.stderr)
        return 130


def _uses_pyinfra(name: str, arguments: Sequence[str]) -> bool:
    """Return whether a command connects to hosts through pyinfra."""
    if {"-h", "--help"} & {*arguments}:
        return False
    if name in _OPTION_THAT_CONNECTS:
        return _OPTION_THAT_CONNECTS[name] in arguments
    if name in _OPTION_THAT_STAYS_OFFLINE:
        return _OPTION_THAT_STAYS_OFFLINE[name] not in arguments
    return name in ("up", "doctor", "key", *_CHANGES)


class _Group(click.Group):
    """Imports the module of a command on use, to keep ``--help`` fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"spark_deploy.cli.{_MODULES.get(cmd_name, cmd_name)}")
        function = cmd_name.replace("-", "_")
        function = "set_" if function == "set" else function  # `set` is a builtin
        command: click.Command = getattr(module, function)
        command.help = COMMANDS[cmd_name]
        # Without this line, -h would work only for commands that this group starts.
        command.context_settings = self.context_settings
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the named command; suggest a name for an unknown command."""
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            close = get_close_matches(args[0], COMMANDS, n=1)
            guess = _SIMILAR.get(args[0]) or next(iter(close), "")
            hint = f" Did you mean {guess}?" if guess else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        if args and not ctx.resilient_parsing and _uses_pyinfra(args[0], args[1:]):
            # gevent must patch the standard library before any module imports ssl.
            from gevent import hub, monkey

            monkey.patch_all()
            from spark_deploy.config.errors import SparkError

            hub.Hub.NOT_ERROR += (KeyboardInterrupt, SparkError)
            threading.excepthook = _raise_interrupt_in_main_thread
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl(list(commands.items()))


def _raise_interrupt_in_main_thread(args: threading.ExceptHookArgs) -> None:
    """Pass on a Ctrl-C that reached a patched thread, which shares the main thread's signals."""
    from gevent import get_hub

    if args.exc_type is KeyboardInterrupt:
        get_hub().handle_system_error(args.exc_type, args.exc_value)
    else:
        threading.__excepthook__(args)


def project_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dgx-spark-deploy")
    except PackageNotFoundError:
        return "unknown (not installed)"


def _print_version(context: click.Context, _option: click.Parameter, is_set: bool) -> None:
    if is_set:
        click.echo(f"spark-deploy {project_version()}")
        context.exit()


GROUP = _Group(
    "spark-deploy",
    help="Turn NVIDIA DGX Sparks into tested model servers.",
    params=[
        click.Option(
            ["--version"], is_flag=True, expose_value=False, is_eager=True,
            callback=_print_version, help="Print the version and exit.",
        )
    ],
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
