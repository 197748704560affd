"""The command `raypp`, and `python -m raypp` for environments whose scripts are not on the PATH."""

import sys


def main() -> None:
    """Runs the command line. Ctrl-C while it is imported ends it as at any other time."""
    try:
        from raypp.cli.main import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
