"""Entry of ``python3 -m spark_checkpoint``."""

import sys

if __name__ == "__main__":
    try:
        from spark_checkpoint.cli import main

        sys.exit(main())
    except ModuleNotFoundError as error:
        fix = "put the packages of requirements.txt on PYTHONPATH (a deploy has them in `site`)"
        print(f"error: {error.name}: not found; fix: {fix}", file=sys.stderr)
        sys.exit(2)
