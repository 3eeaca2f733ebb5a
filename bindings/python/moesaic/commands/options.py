"""Options that several commands take, and what is done with them."""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from moesaic.commands.output import UsageError, finite
from moesaic.profiles import archive

MOST_THREADS = 4096  # what a pool takes


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive whole number")
    return int(text)


def non_negative(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number")
    return int(text)


def seconds(text: str) -> float:
    """A time above 0, a day at most."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0, 86400 at most")
    return value


def rank(text: str) -> int:
    """A LoRA rank; 0: without."""
    if not text.isdecimal() or int(text) > 256:
        raise argparse.ArgumentTypeError(f"'{text}' is not a rank from 0 to 256")
    return int(text)


def threads(text: str) -> int:
    """A number of threads."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of threads from 1 to {MOST_THREADS}")
    return int(text)


def several(of: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Values of one type with commas between them."""
    return lambda text: [of(part) for part in text.split(",")]


def names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Those of `known` that an option lists with commas between them; `all` for all of them.

    Raises:
        UsageError: one is none of them.
    """
    if text == "all":
        return list(known)
    found = [name for name in text.split(",") if name]
    for name in found:
        if name not in known:
            raise UsageError(f"argument --{option}: '{name}' is none of {', '.join(known)}, all")
    return found


def refuse(args: argparse.Namespace, given: Sequence[str], why: str) -> None:
    """Of options that would change nothing here none may be given, but for its default.

    Args:
        args: with the `parser` that made it.
        given: options, as --name.
        why: what the message ends with.

    Raises:
        UsageError: one of them has another value than its default.
    """
    for option in given:
        name = option.removeprefix("--").replace("-", "_")
        if getattr(args, name) != args.parser.get_default(name):
            raise UsageError(f"argument {option}: {why}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that every command has."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else there")


def add_archive(parser: argparse.ArgumentParser, name: str) -> None:
    """Where the run is kept, under `name` unless the option says another one."""
    parser.add_argument(
        "--archive",
        nargs="?",
        const=name,
        metavar="NAME",
        help=f"also keep the run in {archive.RUNS}/<time>_NAME, for `moesaic profile diff` (default name: {name})",
    )


def check_archive(args: argparse.Namespace) -> None:
    """Refuses before a run what cannot be kept after it.

    Raises:
        UsageError: the name of `add_archive` is none.
        OSError: the folder cannot be made or written.
    """
    if args.archive is None:
        return
    try:
        archive.check_archive(args.archive)
    except ValueError as error:
        raise UsageError(f"argument --archive: {error}") from None


def keep(
    args: argparse.Namespace,
    document: dict[str, Any],
    calls: Sequence[Callable[[], object]],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Writes the archive of a run, and says where it is.

    Args:
        args: with the name of `add_archive`, and --reps.
        document: what --json prints.
        calls: the engine's, of each case; they are profiled in steps of one call each, from which `profile diff` knows
            the noise.
        show: prints what people read.
    """
    import moesaic

    with moesaic.profile() as profile:
        for _ in range(max(4, args.reps)):
            for call in calls:
                call()
            profile.step()
    table = io.StringIO()
    with redirect_stdout(table):
        show(document)
    folder = archive.write_archive(args.archive, finite(document), profile.document(), table.getvalue())
    print(f"moesaic: written to {folder}", file=sys.stderr)


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Which time is measured."""
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: the CPU time of the calling thread, for hosts that others share; needs --threads 1 (default wall)",
    )


def clock(args: argparse.Namespace) -> Callable[[], float]:
    """Seconds by the clock that `add_clock` and --threads of `args` name.

    Raises:
        UsageError: --clock cpu with other threads.
    """
    if args.clock == "wall":
        return time.perf_counter
    if args.threads != 1:
        raise UsageError("--clock cpu counts one thread; it needs --threads 1")
    return time.thread_time


@contextmanager
def engine_clock(args: argparse.Namespace) -> Iterator[None]:
    """Inside, the engine runs on --threads of `args`, and its timers and probes measure by the clock of `add_clock`.

    Raises:
        UsageError: --clock cpu with other threads.
    """
    import moesaic
    from moesaic import _core

    clock(args)
    if args.threads is not None:
        moesaic.set_num_threads(args.threads)
    _core.count_thread_time(args.clock == "cpu")
    try:
        yield
    finally:
        _core.count_thread_time(False)


def progress() -> Callable[[str], None]:
    """One line on stderr that rewrites itself; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\033[K{text}\r", end="", file=sys.stderr, flush=True)
