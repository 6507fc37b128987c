"""`python -m penstock` is `penstock`. Ctrl-C while the command is still being imported ends it quietly too."""

import sys


def main() -> int:
    """Import the command and run it; returns its exit code."""
    try:
        from penstock.cli import main as run  # noqa: PLC0415 - so that an interrupted import is caught

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
