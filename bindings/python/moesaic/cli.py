"""The command `moesaic`.

Every command exits 0 when what it says holds, 1 when a check failed or something could not be had, 2 on wrong usage, a
variable of the environment among it. With `--json` stdout carries one JSON document and nothing else; what else is to
be said goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from moesaic.commands import bench, doctor, predict, profile, tune
from moesaic.commands.output import CommandError, UsageError


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the whole usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command sets `run`, a function of the parsed arguments."""
    parser = _Parser(prog="moesaic", description="Train the experts of mixture-of-experts models on CPUs.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    doctor.add_parser(commands)
    bench.add_parser(commands)
    profile.add_parser(commands)
    predict.add_parser(commands)
    tune.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: arguments without the program's name; None: those of the process.
    """
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read stdout has read enough
        # The interpreter flushes stdout once more when it ends (Python's documentation of the signal module, SIGPIPE).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse's way of ending after --help and on wrong usage
        return stop.code if isinstance(stop.code, int) else 2

    import moesaic

    try:
        code: int = args.run(args)
        return code
    except UsageError as error:
        print(f"moesaic: {error}", file=sys.stderr)
        return 2
    except moesaic.UnsupportedHostError as error:  # MOESAIC_ISA
        print(f"moesaic: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"moesaic: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:  # a file that cannot be read or written
        print(f"moesaic: {f'{error.filename}: {error.strerror}' if error.filename else error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"moesaic: not enough memory: {error or 'an allocation failed'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
