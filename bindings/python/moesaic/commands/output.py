"""What the commands share: how they fail and how they print."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any


class UsageError(Exception):
    """The command line asks for something that makes no sense; one line, exit code 2."""


class CommandError(Exception):
    """The command could not do what it was asked; one line, exit code 1."""


@contextlib.contextmanager
def stdout_for_json(enabled: bool) -> Iterator[None]:
    """Sends what anybody prints inside to stderr, so that stdout holds the JSON document alone."""
    if not enabled:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(document: dict[str, Any]) -> None:
    """Writes the document to stdout. A NaN would not be JSON: ValueError."""
    print(json.dumps(document, indent=2, allow_nan=False))


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
