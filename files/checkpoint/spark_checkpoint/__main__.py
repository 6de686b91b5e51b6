"""Command line of the checkpoint builder."""

import argparse
import errno
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from spark_contract import builder_api, files
from spark_contract.builder_api import (
    CONFIG,
    GENERATION,
    RECIPE_VERSION,
    TOKENIZER,
    BuildPlan,
    RankPlan,
    RequantizePlan,
)
from spark_contract.documents import to_plain
from spark_contract.fetching import CopyPlan, FetchPlan, LayersPlan, TransferOptions
from spark_contract.tool import ERROR, HostToolError

from spark_checkpoint import TOOL_VERSION, InputError, TransferError
from spark_checkpoint.progress import Progress, printable
from spark_checkpoint.storage import describe_free_space
from spark_checkpoint.verify import discard_base, verify_checkpoint

_MAX_LINE_LENGTH = 4000
_FIXES = {
    errno.ENOSPC: "free space on this filesystem, then run the command again to resume",
    errno.EDQUOT: "raise the quota, then run the command again to resume",
    errno.EROFS: "mount the filesystem writable",
    errno.EACCES: "run the command as root",
    errno.EPERM: "run the command as root",
    errno.EIO: "look for disk errors in the kernel log (`dmesg`)",
}


def main(argv: Sequence[str] | None = None) -> int:
    # Handle SIGTERM like Ctrl-C: the next run resumes partial work.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # By default, garbage collection takes 40% of the time to read a large model's headers.
    gc.set_threshold(100_000)
    try:
        arguments = _parser().parse_args(argv)
        is_inspection = arguments.command in (
            builder_api.INSPECT,
            builder_api.CHECK_SOURCES,
            builder_api.DESCRIBE,
        )
        with Progress(quiet=is_inspection) as progress:
            if is_inspection:
                _inspect(arguments)
            else:
                _run(arguments, progress)
                progress.finish()
            return 0
    except HostToolError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        fix = "run the deploy again, or add the packages in requirements.txt to PYTHONPATH"
        return _fail(f"{error.name} is not installed; fix: {fix}", InputError.code)
    except OSError as error:
        where = error.filename or "this host"
        problem = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename:
            problem += f" ({describe_free_space(Path(os.fsdecode(error.filename)))})"
        fix = _FIXES.get(error.errno or 0, "see the kernel log (`dmesg`)")
        return _fail(f"{where}: {problem}; fix: {fix}", TransferError.code)
    except KeyboardInterrupt:
        message = "interrupted: the result is incomplete; fix: run the command again to resume"
        return _fail(message, TransferError.code)


def _run(arguments: argparse.Namespace, progress: Progress) -> None:
    if arguments.command == builder_api.VERIFY:
        verify_checkpoint(arguments.dir, progress, full=arguments.full)
        return
    if arguments.command == builder_api.DISCARD:
        discard_base(arguments.base, arguments.tree, progress)
        return
    if arguments.command == builder_api.RANK:
        from spark_checkpoint.ranking import rank

        rank(files.load(RankPlan, arguments.plan, "is missing"), progress)
        return
    from spark_checkpoint.sources.fetch import fetch, fetch_layers

    if arguments.command == builder_api.FETCH:
        fetch(files.load(FetchPlan, arguments.plan, "is missing"), progress)
    elif arguments.command == builder_api.LAYERS:
        plan = files.load(LayersPlan, arguments.plan, "is missing")
        fetch_layers(plan, arguments.manifests, progress)
    else:
        copies = arguments.or_copy and files.load(CopyPlan, arguments.or_copy, "is missing")
        if arguments.command == builder_api.BUILD:
            from spark_checkpoint.build.build import build

            build(read_build_plan(arguments.plan), progress, copies)
        else:
            from spark_checkpoint.requantize import requantize

            requantize(files.load(RequantizePlan, arguments.plan, "is missing"), progress, copies)


def _inspect(arguments: argparse.Namespace) -> None:
    from spark_checkpoint.build.source_checks import check_sources_by_headers, match_plan
    from spark_checkpoint.inspection import describe, format_report, open_checkpoint, report

    # A user is waiting, so use more connections and fewer tries.
    transfer = TransferOptions(token_file=arguments.token_file, parallel=8, tries=3)
    documents = (CONFIG, GENERATION, TOKENIZER) if arguments.all_documents else (CONFIG,)
    checkpoint = open_checkpoint(
        arguments.source, arguments.endpoint, transfer, arguments.leave_out, documents
    )
    if arguments.command == builder_api.DESCRIBE:
        text = json.dumps(to_plain(describe(checkpoint)))
    elif arguments.command == builder_api.CHECK_SOURCES:
        plan = read_build_plan(arguments.plan)
        text = json.dumps(to_plain(check_sources_by_headers(checkpoint, plan)))
    else:
        plans = map(read_build_plan, arguments.against)
        data = {**report(checkpoint), "against": [match_plan(checkpoint, plan) for plan in plans]}
        text = json.dumps(data, indent=2) if arguments.json else printable(format_report(data))
    print(text, flush=True)


def read_build_plan(path: Path) -> BuildPlan:
    plan = files.load(BuildPlan, path, "is missing")
    if plan.recipe_version not in (None, RECIPE_VERSION):
        raise InputError(
            str(path),
            f"requires recipe version {plan.recipe_version}, but this builder has {RECIPE_VERSION}",
            "install the host tools from the release that created the plan, "
            "or create the plan again",
        )
    return plan


def _fail(message: str, code: int) -> int:
    line = printable(" ".join(message.split()))
    if len(line) > _MAX_LINE_LENGTH:  # a hub may send long names
        line = f"{line[: _MAX_LINE_LENGTH // 2]} ... {line[-_MAX_LINE_LENGTH // 4 :]}"
    print(ERROR + line, file=sys.stderr, flush=True)
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError("arguments", message, f"see `python3 -m {self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=builder_api.BUILDER,
        description="Download, build and verify checkpoints.",
        epilog="exit codes: 0: ok; 2: invalid input; 3: sources or host do not match the plan; "
        "4: I/O or network error; 5: the checkpoint differs from the receipt",
    )
    parser.add_argument(
        "--version", action="version", version=f"{TOOL_VERSION} recipe {RECIPE_VERSION}"
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add_command(name: str, help_text: str, **paths: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text)
        for argument, metavar in paths.items():
            command.add_argument(argument, type=Path, metavar=metavar)
        return command

    add_command(builder_api.FETCH, "download a repository at a commit", plan="FETCH.json")
    layers_help = "download the blobs and manifests of an image"
    add_command(builder_api.LAYERS, layers_help, plan="LAYERS.json", manifests="DIR")
    add_command(builder_api.RANK, "list the most frequent tokens in a text", plan="RANK.json")
    build = add_command(
        builder_api.BUILD, "build the checkpoint that a plan describes", plan="PLAN.json"
    )
    requantize_help = "quantize a 16-bit repository with AutoRound"
    requantize = add_command(builder_api.REQUANTIZE, requantize_help, plan="REQUANTIZE.json")
    for command in (build, requantize):
        command.add_argument(
            builder_api.OR_COPY,
            type=Path,
            metavar="COPY.json",
            help="copy the result from peers if possible",
        )
    verify = add_command(builder_api.VERIFY, "check a checkpoint against its receipt", dir="DIR")
    depth = verify.add_mutually_exclusive_group()
    depth.add_argument(
        "--quick",
        action="store_true",
        help="check all sizes, headers and the index; hash only modified files (default)",
    )
    depth.add_argument("--full", action="store_true", help="hash every file")
    discard_help = "verify a full-layout checkpoint, then remove its base"
    add_command(builder_api.DISCARD, discard_help, base="BASE_DIR").add_argument(
        builder_api.TREE,
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoint built from this base",
    )
    check = add_command(
        builder_api.CHECK_SOURCES,
        "check the headers of the base and the FP8 source",
        plan="PLAN.json",
    )
    describe = add_command(
        builder_api.DESCRIBE, "print config.json and the tensors that an engine loads"
    )
    parser.set_defaults(leave_out=[], all_documents=False)
    describe.add_argument(builder_api.LEAVE_OUT, action="append", default=[], metavar="PATTERN")
    describe.add_argument(
        builder_api.ALL_DOCUMENTS,
        action="store_true",
        help="also print the tokenizer and generation config",
    )
    inspect = add_command(builder_api.INSPECT, "print the contents of a checkpoint or repository")
    for command in (check, describe, inspect):
        command.add_argument("source", metavar="DIR|ORG/NAME[@REVISION]")
        command.add_argument(
            builder_api.ENDPOINT, help="hub address (default: HF_ENDPOINT or the public hub)"
        )
        command.add_argument(builder_api.TOKEN_FILE, help="file with a hub token")
    inspect.add_argument(
        builder_api.AGAINST, type=Path, action="append", default=[], metavar="PLAN.json",
        help="print whether the checkpoint matches this plan; repeatable",
    )  # fmt: skip
    inspect.add_argument(builder_api.JSON, action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
