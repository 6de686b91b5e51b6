"""The table of commands: what each does, what it takes, and which module runs it.

A new command is one entry here and a module with ``run(options) -> int``. The module is imported
when its command runs, so that help and completion load nothing else.
"""

from __future__ import annotations

import click

from spark_deploy.cli.clients import CLIENTS
from spark_deploy.cli.options import (
    BENCH,
    CHANGE,
    FILE,
    FOLDER,
    Entry,
    Several,
    always,
    file_option,
    flag,
    host_names,
    name_option,
    names_of,
    option,
    service_option,
)

FIRST, LOOK, SERVE, NAMES = "From nothing", "Look", "Change", "Names and files"

COMMANDS: dict[str, Entry] = {
    "init": Entry(
        FIRST,
        "Write a folder of your own: hosts.yml, settings, inventory, lock.",
        (
            click.Argument(["folder"], default=".", metavar="[DIR]", type=FOLDER),
            option("--host", "A Spark.", multiple=True, metavar="NAME[=ADDRESS]"),
            option("--user", "Login user of these hosts; else as ssh does.", metavar="NAME"),
            flag("--local", "Serve on the machine this runs on."),
            name_option("--model", "What to serve."),
            name_option("--profile", "How to serve it."),
        ),
        about_hosts=False,
    ),
    "up": Entry(
        FIRST,
        "Make hosts serve what the settings say, proven; asks once, and tells how it goes.",
        CHANGE,
        module="up",
        asks=always,
        plans=True,
    ),
    "use": Entry(
        SERVE,
        "Write another model or profile where your files choose it; then run up.",
        (
            click.Argument(
                ["choice"], metavar="MODEL|PROFILE|MODEL/PROFILE",
                shell_complete=names_of("models", "profiles"),
            ),
            flag("--dry", "Say what would be written."),
        ),
        module="use",
    ),
    "plan": Entry(
        LOOK,
        "Print what a deploy would make of each host; no host is changed.",
        (
            flag("--estimate", "Ask no hub: sizes from the architecture, identities left open."),
            flag("--on-host", "Ask hosts, too, what of it lies there already."),
            flag("--verbose", "Show files, unit and the engine's arguments as well.", "-v"),
        ),
        asks=lambda options: options.on_host,
        module="plan",
        plans=True,
    ),
    "status": Entry(
        LOOK,
        "Show releases, proofs and differences from the plan.",
        (
            flag("--files", "List every file, package and unit we manage, with sizes."),
            flag("--planned", "With --files: list what a deploy would create, offline."),
        ),
        asks=lambda options: not options.planned,
        module="status",
        plans=True,
    ),
    "doctor": Entry(
        LOOK,
        "Check what a deploy would refuse; change nothing.",
        (
            flag("--report", "Write a redacted JSON report for others instead."),
            file_option("--out", "The report's file; else spark-report-TIME.json here."),
        ),
        asks=always,
        module="doctor",
        plans=True,
    ),
    "connect": Entry(
        LOOK,
        "Show how to talk to each server: URL, model name, key.",
        (
            click.Option(
                ["--for", "client"], type=click.Choice(list(CLIENTS)),
                help="What one client needs, ready to use; the key is read, never printed.",
            ),
            service_option("To this one of its services; else the main one."),
            flag("--tunnel", "Hold the SSH tunnels of these hosts open until interrupted."),
        ),
        module="connect",
    ),
    "top": Entry(
        LOOK,
        "Show what each service is doing now: requests, tok/s, acceptance, cache, memory, heat.",
        (
            flag("--once", "One look, and no more."),
            service_option("Only this one of the services; else all."),
        ),
        module="top",
    ),
    "logs": Entry(
        LOOK,
        "Print what engines, gateways, watches and jobs print, merged.",
        (
            flag("--follow", "Go on as lines come.", "-f"),
            click.Option(
                ["-n", "--lines"], type=click.IntRange(min=0), default=100, metavar="N",
                help="How many of the last.",
            ),
        ),
        module="logs",
    ),
    "bench": Entry(
        LOOK,
        "Measure what hosts serve, through their gateways; compare results.",
        BENCH,
        plans=True,
    ),
    "stop": Entry(
        SERVE,
        "Take hosts out of service until someone starts them; reboots and deploys respect it.",
        (
            service_option("Only this one of its services; else all."),
            click.Option(
                ["--for", "period"], metavar="PERIOD",
                help="Come back after 30m, 1h or 2d by themselves.",
            ),
        ),
        asks=always,
        module="stop",
    ),
    "start": Entry(
        SERVE,
        "Put stopped hosts back into service with their last proven release.",
        (service_option("Only this one of its services; else all."),),
        module="stop",
        asks=always,
    ),
    "rollback": Entry(
        SERVE,
        "Go back to the release that served before, proven as in a deploy.",
        (option("--to", "Go back to this release instead.", metavar="RELEASE"), *CHANGE),
        module="run_pyinfra",
    ),
    "prune": Entry(
        SERVE,
        "Remove what no kept release needs; --dry shows each thing and its bytes.",
        CHANGE,
        module="run_pyinfra",
        plans=True,
    ),
    "rotate-key": Entry(
        SERVE,
        "Give services a new API key; the old one is refused at once.",
        CHANGE,
        module="run_pyinfra",
    ),
    "uninstall": Entry(
        SERVE,
        "Take this project off hosts; --dry shows what goes and what stays.",
        (
            flag("--models", "Remove models, too."),
            flag("--engine", "Remove Docker and CUDA, too, where a deploy put them."),
            flag("--access", "Revoke this machine's SSH key, sudo rule and account at the end."),
            *CHANGE,
        ),
        module="run_pyinfra",
    ),
    "fabric": Entry(
        SERVE,
        "Give the cabled ports between hosts their addresses, tried before they are kept.",
        (
            flag("--restore", "Take back what was set up."),
            flag("--measure", "Change nothing: send a little over each port, and judge it."),
            *CHANGE,
        ),
        module="run_pyinfra",
    ),
    "update": Entry(
        NAMES,
        "Lock the newest commits and digests of the names in use.",
        (
            Several("--only", metavar="NAME...", help="Only these repositories and images."),
            flag("--missing", "Keep what is locked; lock only what is missing."),
            flag("--check", "Write nothing; exit code 1 if something is missing."),
            flag("--counted", "Read KV-cache sizes measured by running engines from hosts."),
        ),
        asks=lambda options: options.counted,
        module="update",
        plans=True,
    ),
    "settings": Entry(
        NAMES,
        "Print every setting with its default and its meaning.",
        module="settings",
        about_hosts=False,
    ),
    "add": Entry(
        NAMES,
        "Add a model: a repository, a shared file or a recipe.",
        (
            click.Argument(["place"], metavar="ORG/NAME[@REVISION]|FILE|MODEL", type=FILE),
            name_option("--profile", "How to serve it; else plain."),
            flag("--use", "Choose it as well, where your files choose what is served."),
            flag("--force", "Overwrite existing files."),
            flag("--requantize", "Build an INT4 checkpoint of catalog model MODEL with AutoRound."),
            option(
                "--on", "Host that runs AutoRound.", multiple=True, metavar="NAME",
                shell_complete=host_names,
            ),
            *CHANGE,
        ),
        module="add",
    ),
    "share": Entry(
        NAMES,
        "Write one file with a model, its profile, what is locked and what is proven, for add.",
        (
            click.Argument(
                ["choice"], metavar="MODEL|MODEL/PROFILE", shell_complete=names_of("models")
            ),
            file_option("--out", "The file; else MODEL.spark.yml here."),
            flag("--unasked", "Ask no host: the file then tells no proof."),
        ),
        module="share",
        asks=lambda options: not options.unasked,
    ),
}  # fmt: skip
