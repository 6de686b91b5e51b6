"""Entry point of ``python3 -m lab``."""

import sys

from lab.cli import main

sys.exit(main())
