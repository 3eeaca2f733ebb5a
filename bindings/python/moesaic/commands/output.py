"""What the commands share: how they fail and how they print."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any


class UsageError(Exception):
    """The command line asks for something that makes no sense; one line, exit code 2."""


class CommandError(Exception):
    """The command could not do what it was asked; one line, exit code 1."""


@contextlib.contextmanager
def stdout_for_json(enabled: bool) -> Iterator[None]:
    """Sends what anybody prints inside to stderr, and what libraries print below Python from here on, so that stdout
    holds the JSON document alone."""
    if not enabled:
        yield
        return
    if sys.stdout is sys.__stdout__:  # not one that a caller has put in its place
        _claim_stdout()
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _claim_stdout() -> None:
    """Gives sys.stdout a descriptor of its own, and 1, which C and C++ write to, at exit too, to stderr."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def print_json(document: dict[str, Any]) -> None:
    """Writes the document to stdout. JSON has no NaN and no infinity: they become null."""
    print(json.dumps(finite(document), indent=2, allow_nan=False))


def finite(value: Any) -> Any:
    """The same without NaN and infinities, which become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def first_line(error: Exception) -> str:
    """What an error says in its first line, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


class Tables:
    """Tables on stdout: rich's where it is installed, plain columns otherwise."""

    def __init__(self) -> None:
        try:
            from rich.console import Console
        except ImportError:
            self._console = None
        else:
            self._console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)

    def heading(self, text: str) -> None:
        """A line that stands out."""
        self.line(text, style="bold")

    def line(self, text: str, style: str | None = None) -> None:
        """One line; the style is rich's."""
        if self._console is None:
            print(text)
        else:
            self._console.print(text, style=style, markup=False)

    def table(self, title: str, header: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> None:
        """A titled table of text cells; without a header the first column names the rows."""
        if self._console is None:
            self._plain(title, header, rows)
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            show_header=header is not None,
            padding=(0, 1),
        )
        for i in range(len(header) if header is not None else 2):
            title = header[i] if header is not None else ""
            table.add_column(title, overflow="fold", style="cyan" if i == 0 else None)
        for row in rows:
            table.add_row(*(Text(cell, style=_CELL_STYLES.get(cell, "")) for cell in row))
        self._console.print(table)

    @staticmethod
    def _plain(title: str, header: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> None:
        print(f"\n{title}")
        lines = [list(row) for row in rows]
        if header is not None:
            lines.insert(0, list(header))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        for line in lines:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


_PIPED_WIDTH = 140
_CELL_STYLES = {"yes": "green", "no": "dim", "-": "dim"}
