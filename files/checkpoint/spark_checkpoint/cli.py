"""The command line: fetch, build, verify and what only looks. Exit codes are in errors.py."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from spark_contract import files, orders
from spark_contract.documents import plain
from spark_contract.errors import ERROR, HostToolError
from spark_contract.fetching import CopyPlan, FetchPlan, LayersPlan, Wire
from spark_contract.orders import (
    CONFIG,
    GENERATION,
    RECIPE_VERSION,
    TOKENIZER,
    BuildPlan,
    RequantizePlan,
)

from spark_checkpoint import TOOL_VERSION
from spark_checkpoint.errors import InputRefused, TransferFailed
from spark_checkpoint.inspect.commands import check_base, describe, discard, fits
from spark_checkpoint.inspect.inspection import match_plan_names, open_subject, report, text_of
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.sources.fetch import fetch
from spark_checkpoint.sources.layers import fetch_layers
from spark_checkpoint.storage import room_left
from spark_checkpoint.verify import verify_checkpoint

_LONGEST_LINE = 4000
_FIXES = {
    errno.ENOSPC: "free space on this filesystem, then run again: it goes on from here",
    errno.EDQUOT: "raise the quota, then run again: it goes on from here",
    errno.EROFS: "mount the filesystem writable",
    errno.EACCES: "run as root",
    errno.EPERM: "run as root",
    errno.EIO: "check the disk (dmesg)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # A stopped unit ends like an interrupted one: partial work stays for the next run.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        arguments = _parser().parse_args(argv)
        with Progress(
            quiet=arguments.command in (orders.INSPECT, orders.HOLD, orders.DESCRIBE)
        ) as progress:
            return _run(arguments, progress)
    except HostToolError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        return _fail(_told(error), TransferFailed.code)
    except KeyboardInterrupt:
        return _fail("interrupted: nothing was published; fix: run again", TransferFailed.code)


def _told(error: OSError) -> str:
    where, what = error.filename or "this host", error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename:
        what += f" ({room_left(Path(os.fsdecode(error.filename)))})"
    fix = _FIXES.get(error.errno or 0, "see the kernel log (dmesg)")
    return f"{where}: {what}; fix: {fix}"


def _run(arguments: argparse.Namespace, progress: Progress) -> int:
    if arguments.command == orders.FETCH:
        fetch(files.load(FetchPlan, arguments.order, "is missing"), progress)
    elif arguments.command == orders.LAYERS:
        order = files.load(LayersPlan, arguments.order, "is missing")
        fetch_layers(order, arguments.manifests, progress)
    elif arguments.command == orders.BUILD:
        # numpy comes with it, which nothing else needs.
        from spark_checkpoint.build.build import build

        copies = arguments.or_copy and files.load(CopyPlan, arguments.or_copy, "is missing")
        build(read_build_plan(arguments.plan), progress, copies)
    elif arguments.command == orders.REQUANTIZE:
        from spark_checkpoint.requantize.requantize import requantize

        copies = arguments.or_copy and files.load(CopyPlan, arguments.or_copy, "is missing")
        requantize(files.load(RequantizePlan, arguments.order, "is missing"), progress, copies)
    elif arguments.command == orders.VERIFY:
        verify_checkpoint(arguments.dir, progress, full=arguments.full)
    elif arguments.command == orders.DISCARD:
        discard(arguments.base, arguments.tree, progress)
    else:
        return _look(arguments)
    progress.finish()
    return 0


def read_build_plan(path: Path) -> BuildPlan:
    """Return the plan in a file; one for another builder is refused."""
    plan = files.load(BuildPlan, path, "is missing")
    if plan.recipe_version not in (None, RECIPE_VERSION):
        raise InputRefused(
            str(path),
            f"made for recipe version {plan.recipe_version}, this builder has {RECIPE_VERSION}",
            "install the host tools that belong to the plan, or plan again",
        )
    return plan


def _look(arguments: argparse.Namespace) -> int:
    # Somebody waits for it; nothing is lost by asking again.
    wire = Wire(token_file=arguments.token_file, parallel=8, tries=3)
    if arguments.command == orders.DESCRIBE:
        subject = open_subject(
            arguments.place, arguments.endpoint, wire, leave_out=arguments.leave_out,
            documents=(CONFIG, GENERATION, TOKENIZER) if arguments.all_documents else (CONFIG,),
        )  # fmt: skip
        print(json.dumps(plain(describe(subject))), flush=True)
        return 0
    subject = open_subject(arguments.place, arguments.endpoint, wire)
    if arguments.command == orders.HOLD:
        print(json.dumps(plain(check_base(subject, read_build_plan(arguments.plan)))), flush=True)
        return 0
    data = report(subject)
    data["against"] = [fits(subject, read_build_plan(path)) for path in arguments.against]
    text = json.dumps(data, indent=2) if arguments.json else _printable(text_of(data))
    print(text, flush=True)
    if arguments.plan is not None:
        note(f"{subject.place}: {match_plan_names(subject, read_build_plan(arguments.plan))}")
    return 0


def _fail(message: str, code: int) -> int:
    line = _printable(" ".join(message.split()))
    if len(line) > _LONGEST_LINE:  # of a name that somebody made so
        line = f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 4 :]}"
    print(ERROR + line, file=sys.stderr, flush=True)
    return code


def _printable(text: str) -> str:
    """Return a text with names in it that are other people's: none moves a terminal's cursor."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)


class _Parser(argparse.ArgumentParser):
    """Refuses wrong arguments in the form of every other refusal."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments."""
        raise InputRefused("arguments", message, f"see `python3 -m {self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=orders.BUILDER,
        description="Fetches sources, builds hybrid checkpoints and proves both.",
        epilog="exit codes: 0 ok, 2 bad input, 3 gate refused, 4 I/O or network, 5 tree differs",
    )
    parser.add_argument(
        "--version", action="version", version=f"{TOOL_VERSION} recipe {RECIPE_VERSION}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(orders.FETCH, help="have a repository at a commit, verified")
    one.add_argument("order", type=Path, metavar="FETCH.json")
    one = commands.add_parser(
        orders.LAYERS, help="have the blobs and manifests of an image, verified"
    )
    one.add_argument("order", type=Path, metavar="LAYERS.json")
    one.add_argument("manifests", type=Path, metavar="DIR")
    one = commands.add_parser(orders.BUILD, help="build the checkpoint of a plan")
    one.add_argument("plan", type=Path, metavar="PLAN.json")
    one.add_argument(orders.OR_COPY, type=Path, metavar="COPY.json", help="hosts that have it")
    one = commands.add_parser(orders.REQUANTIZE, help="quantise a 16-bit repository with AutoRound")
    one.add_argument("order", type=Path, metavar="REQUANTIZE.json")
    one.add_argument(orders.OR_COPY, type=Path, metavar="COPY.json", help="hosts that have it")
    one = commands.add_parser(orders.VERIFY, help="check a tree against its receipt")
    one.add_argument("dir", type=Path, metavar="DIR")
    depth = one.add_mutually_exclusive_group()
    depth.add_argument(
        "--quick",
        action="store_true",
        help="sizes, headers, index and touched files (what it does without an option)",
    )
    depth.add_argument("--full", action="store_true", help="hash every file")
    one = commands.add_parser(
        orders.DISCARD, help="remove the base of a full tree, after proving it"
    )
    one.add_argument("base", type=Path, metavar="BASE_DIR")
    one.add_argument(
        orders.TREE, type=Path, required=True, metavar="DIR", help="made from this base"
    )
    one = commands.add_parser(
        orders.HOLD, help="hold a plan's base and donor against it, by headers"
    )
    one.add_argument("plan", type=Path, metavar="PLAN.json")
    _place(one)
    one = commands.add_parser(
        orders.DESCRIBE, help="print what an engine would load, and config.json"
    )
    _place(one)
    one.add_argument(orders.LEAVE_OUT, action="append", default=[], metavar="PATTERN")
    one.add_argument(
        orders.ALL_DOCUMENTS, action="store_true", help="tokenizer and generation, too"
    )
    one = commands.add_parser(orders.INSPECT, help="print what a tree or repository holds")
    _place(one)
    one.add_argument("--plan", type=Path, help="PLAN.json to hold the names against")
    one.add_argument(
        orders.AGAINST, type=Path, action="append", default=[], metavar="PLAN.json",
        help="say as which part it fits into this plan; may be given often",
    )  # fmt: skip
    one.add_argument(orders.JSON, action="store_true", help="print JSON")
    return parser


def _place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="DIR|ORG/NAME[@REVISION]")
    parser.add_argument(
        orders.ENDPOINT, help="hub address (default: HF_ENDPOINT, or the public hub)"
    )
    parser.add_argument(orders.TOKEN_FILE, help="file holding a hub token")
