import os
import signal
import sys
from types import FrameType


def start() -> int:
    """Run the command line; Ctrl-C prints one line, even while modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    from spark_deploy.cli import main

    return main()


def _stop(signum: int, frame: FrameType | None) -> None:
    # An exception would leave half-imported modules, which print more errors.
    os.write(2, b"\nstopped; no changes made\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(start())
