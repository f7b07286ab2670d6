"""`python -m jax_pcie`: finds the command and hands over to it.

Each command is a module with `add_command`, which sets `run` in its parser's defaults.
Importing this touches no device: a command may still choose its platform.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax_pcie.demo import cli as demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the process's exit code, 2 for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_pcie", description="Compressed all-reduces over PCIe."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (demo,):
        command.add_command(commands)
    parsed = parser.parse_args(arguments)
    if "run" not in parsed:
        parser.print_help(sys.stderr)
        return 2
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
