import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from lab import demo, faults, guest, lifecycle, network, record, servers, variant
from lab.errors import LabError
from lab.guest import Guest
from lab.hub import server as hub_server
from lab.paths import APT_PORT, CDN_PORT, HOST_IP, HUB_PORT, USER, LabPaths, guest_names, lab_paths
from lab.room import used_bytes
from lab.webserver import serve_files


def _up(paths: LabPaths, options: argparse.Namespace) -> int:
    started = time.monotonic()
    bootstrap = frozenset(guest_names(options.bootstrap_guest or []))
    names = guest_names(options.guests)
    guests = lifecycle.up(
        paths, names, fresh=options.fresh, bootstrap=bootstrap, engine=options.engine,
        variant=options.variant,
    )  # fmt: skip
    _print_guests(guests)
    print(f"lab up in {time.monotonic() - started:.1f} s; state in {paths.state}")
    return 0


def _print_guests(guests: Sequence[Guest]) -> None:
    for member in guests:
        how = "new Spark: password in lab.json" if member.spec().bootstrap else "key"
        print(f"{member.name}  {member.ip}  ssh as {USER} ({how})")


def _prepare(paths: LabPaths, options: argparse.Namespace) -> int:
    started = time.monotonic()
    lifecycle.up(
        paths, [], fresh=False, bootstrap=frozenset(), engine=options.engine,
        engine_trees=options.engine_trees, variant=options.variant,
    )  # fmt: skip
    print(f"lab prepared in {time.monotonic() - started:.1f} s; state in {paths.state}")
    return 0


def _down(paths: LabPaths, options: argparse.Namespace) -> int:
    with lifecycle.lab_lock(paths):
        names = guest_names(options.guests)
        if names and options.purge:
            raise LabError("lab down", "--purge removes the whole lab", "omit the guest names")
        freed = used_bytes([paths.state]) if options.purge else 0  # before the disks are deleted
        lifecycle.down(paths, names, delete=options.delete or options.purge)
        leftovers = [] if names else lifecycle.leftovers(paths)
    for line in leftovers:
        print(f"left over: {line}", file=sys.stderr)
    if options.purge and not leftovers:
        shutil.rmtree(paths.state)
        print(f"{freed / 1e9:.1f} GB freed: deleted {paths.state}")
        print("kept: .venv of this checkout, pip's cache, and Debian packages for the lab")
    return 1 if leftovers else 0


def _status(paths: LabPaths, options: argparse.Namespace) -> int:
    for member in record.all_guests(paths):
        kind = "bootstrap" if member.spec().bootstrap else "normal"
        kind += f" {member.variant}" if member.variant else ""
        full = "  disk-full" if (member.disk / "balloon").exists() else ""
        print(f"{member.name}  {member.ip}  {guest.state(member)}  {kind}{full}")
    for name, server in servers.SERVERS.items():
        running = "running" if servers.running_pid(paths, name) else "stopped"
        print(f"{name}  {server.ip}:{server.port}  {running}")
    return 0


def _ssh(paths: LabPaths, options: argparse.Namespace) -> int:
    target = Guest(paths, guest_names([options.guest])[0])
    if options.root or target.spec().bootstrap:
        command = ["sh", "-c", " ".join(options.command)] if options.command else ["bash", "-l"]
        argv = guest.enter_argv(target, command)
    else:
        argv = [
            "ssh", "-i", str(paths.ssh_key), "-o", f"UserKnownHostsFile={paths.known_hosts}",
            "-o", "IdentitiesOnly=yes", f"{USER}@{target.ip}", *options.command,
        ]  # fmt: skip
    return subprocess.run(argv, check=False).returncode


def _break(paths: LabPaths, options: argparse.Namespace) -> int:
    fault = faults.FAULTS[options.fault]
    target = Guest(paths, guest_names([options.guest])[0])
    with lifecycle.lab_lock(paths):
        if not options.heal:
            fault.inject(target, options.value)
        elif fault.heal is not None:
            fault.heal(target)
        else:
            raise LabError(options.fault, "--heal cannot remove it", f"run `lab up {target.name}`")
    return 0


def _cable(paths: LabPaths, options: argparse.Namespace) -> int:
    first, second = guest_names([options.first, options.second])
    network.connect_ports(first, second, options.ports)
    return 0


def _demo(paths: LabPaths, options: argparse.Namespace) -> int:
    if not options.skip_requirements:
        demo.print_requirements(paths, options.engine)
    if options.requirements:
        return 0
    names = list(demo.HOSTS)
    demo.run(
        paths.state,
        lambda: _print_guests(
            lifecycle.up(
                paths, names, fresh=True, bootstrap=frozenset(names[1:]), engine=options.engine
            )
        ),
        options.engine,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab", description="Stand-in Spark hosts on this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start guests (a number, or names such as lab-3)")
    up.add_argument("guests", nargs="+", metavar="N|NAME")
    up.add_argument("--fresh", action="store_true", help="recreate the named guests")
    up.add_argument("--bootstrap-guest", action="append", metavar="NAME",
                    help="start this guest like a new Spark, with only a password")  # fmt: skip
    up.add_argument("--engine", choices=["none", "stub", "cpu"], default="stub",
                    help="engine image to publish")  # fmt: skip
    up.add_argument("--variant", choices=variant.names(), default="", metavar="NAME",
                    help="image of the hosts: " + ", ".join(variant.names()))  # fmt: skip
    up.set_defaults(run=_up)

    ready = commands.add_parser("prepare", help="prepare everything except the guests")
    ready.add_argument("--engine", choices=["none", "stub", "cpu"], default="cpu")
    ready.add_argument("--engine-trees", action="store_true",
                       help="unpack the real engine, without an image")  # fmt: skip
    ready.add_argument("--variant", choices=variant.names(), default="", metavar="NAME",
                       help="also prepare the base of this variant")  # fmt: skip
    ready.set_defaults(run=_prepare)

    down = commands.add_parser("down", help="power guests off; without names the whole lab")
    down.add_argument("guests", nargs="*", metavar="NAME")
    down.add_argument("--delete", action="store_true", help="also delete their disks")
    down.add_argument("--purge", action="store_true",
                      help="delete the whole lab with disks and caches")  # fmt: skip
    down.set_defaults(run=_down)

    commands.add_parser("status", help="show guests, servers and faults").set_defaults(run=_status)

    ssh = commands.add_parser("ssh", help="open a shell or run a command in a guest")
    ssh.add_argument("--root", action="store_true", help="log in as root, without SSH")
    ssh.add_argument("guest", metavar="NAME")
    ssh.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD")
    ssh.set_defaults(run=_ssh)

    listed = "; ".join(f"{name}: {fault.summary}" for name, fault in faults.FAULTS.items())
    fault = commands.add_parser("break", help="inject a fault into a guest", description=listed)
    fault.add_argument("fault", choices=faults.FAULTS, metavar="FAULT")
    fault.add_argument("guest", metavar="NAME")
    fault.add_argument("--heal", action="store_true", help="remove the fault")
    fault.add_argument("--value", type=int, default=0, help="bytes to leave free on the disk")
    fault.set_defaults(run=_break)

    cable = commands.add_parser("cable", help="connect ports of two running guests")
    cable.add_argument("first", metavar="NAME")
    cable.add_argument("second", metavar="NAME")
    cable.add_argument("ports", nargs="+", metavar="PORT")
    cable.set_defaults(run=_cable)

    show = commands.add_parser("demo", help="deploy two new hosts and switch models")
    show.add_argument("--engine", choices=["stub", "cpu"], default="cpu")
    show.add_argument("--requirements", action="store_true", help="print only the requirements")
    show.add_argument("--skip-requirements", action="store_true", help="do not print them")
    show.set_defaults(run=_demo)
    return parser


_INNER: dict[str, Callable[..., int | None]] = {
    "_supervise": lambda paths, name: guest.supervise(Guest(paths, name)),
    "_boot": lambda paths, name: guest.boot(Guest(paths, name)),
    "_packages": lambda paths: serve_files(paths.apt, HOST_IP, APT_PORT),
    "_hub": lambda paths: hub_server.serve(paths.hub, paths.run, HOST_IP, HUB_PORT, CDN_PORT),
}
"""Commands that the lab starts."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    command, arguments = _INNER.get(words[0]) if words else None, list[Any](words[1:])
    if command is None:
        options = _parser().parse_args(words)
        command, arguments = options.run, [options]
    try:
        if os.geteuid() != 0:
            raise LabError("lab", "needs root (namespaces, mounts, cgroups)", "run it with `sudo`")
        return command(lab_paths(), *arguments) or 0
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
