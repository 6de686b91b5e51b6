"""Run the command line without installing the project."""

import sys

from spark_deploy.cli import main

sys.exit(main())
