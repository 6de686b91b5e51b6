"""Entry of ``python3 -m spark_checkpoint``."""

import sys

from spark_checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
