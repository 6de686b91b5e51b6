"""``spark-deploy ask``: send a question to servers and print answer and speed."""

from typing import Any

import click

from spark_deploy.bench.protocols import measure_answer
from spark_deploy.bench.result import Answer
from spark_deploy.cli.connect import hosts_for_clients, make_connection, open_endpoint
from spark_deploy.cli.console import (
    Options,
    next_command,
    note,
    print_result,
    service_option,
    shared_options,
)
from spark_deploy.cli.hosts import Target, select_hosts
from spark_deploy.config.errors import SparkError, printable


@click.command
@click.argument("question")
@service_option("Use this service instead of the main one.")
@click.option(
    "--tokens",
    default=2048,
    type=click.IntRange(min=1),
    help="Maximum number of tokens to generate.",
)
@shared_options()
def ask(options: Options, question: str, service: str | None, tokens: int) -> int:
    hosts = hosts_for_clients(select_hosts(options, must_serve=False), options, service)
    results = []
    for target in hosts:
        if (task := make_connection(target, service=service).task) != "chat":
            command = next_command(options, "connect", target.name)
            fix = f"run `{command}` and send the request that it prints"
            raise SparkError.one(target.name, f"the model is for {task}, not for chat", fix)
        if len(hosts) > 1 and not options.json:
            print(f"{target.name}:")
        results.append(ask_host(target, question, service, tokens, print_answer=not options.json))
    if options.json:
        print_result(options, results, ())
    return 0


def ask_host(
    target: Target, question: str, service: str | None, tokens: int, *, print_answer: bool
) -> dict[str, Any]:
    """Ask a host through its gateway; print the answer as it arrives if ``print_answer``.

    Raises SparkError if there is no connection or no complete answer.
    """
    pieces: list[str] = []
    reasoning_seen = False

    def show(piece: str, is_reasoning: bool) -> None:
        nonlocal reasoning_seen
        if is_reasoning:
            if print_answer and not reasoning_seen:
                note("the model reasons before it answers ...")
            reasoning_seen = True
            return
        # Models put empty lines between reasoning and answer.
        piece = piece if pieces else piece.lstrip()
        if not piece:
            return
        pieces.append(piece)
        if print_answer:
            print(printable(piece), end="", flush=True)

    with open_endpoint(target, service) as endpoint:
        answer = measure_answer(endpoint, question, tokens, temperature=None, show=show)
    text = "".join(pieces)
    if print_answer:
        print()
        if not text:
            note(f"reasoning reached the limit of {tokens} tokens; add `--tokens {tokens * 4}`")
        note(speed_text(answer))
    return {
        "host": target.name, "model": endpoint.model, "answer": text,
        "completion_tokens": answer.completion_tokens, "first_token_s": answer.first_token_s,
        "tokens_per_s": round(answer.tokens_per_s, 1),
    }  # fmt: skip


def speed_text(answer: Answer) -> str:
    return (
        f"{answer.completion_tokens} tokens, {answer.tokens_per_s:.1f} tok/s, "
        f"first token after {answer.first_token_s:.2f} s"
    )
