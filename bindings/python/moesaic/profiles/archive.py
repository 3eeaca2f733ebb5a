"""Archives of runs: ``profile_runs/<time>_<name>/`` with everything that a run found, for later comparison.

``result.json`` is the command's own document, ``profile.json`` the engine's profile of it, ``table.txt`` what people
read. ``moesaic profile diff`` takes two such folders.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["PROFILE", "RUNS", "check_archive", "write_archive"]

PROFILE = "profile.json"
#: The folders of all runs are here, in the current one.
RUNS = Path("profile_runs")


def check_archive(name: str) -> None:
    """Refuses before a run what `write_archive` would refuse after it; makes ``profile_runs``.

    Raises:
        ValueError: the name holds something else than letters, digits, ``.``, ``-`` and ``_``.
        OSError: the folder cannot be made or written.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ValueError(f"name is {name!r}; expected letters, digits, '.', '-' and '_'")
    RUNS.mkdir(exist_ok=True)
    if not os.access(RUNS, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(RUNS))


def write_archive(name: str, result: Mapping[str, Any], profile: Mapping[str, Any], table: str) -> Path:
    """Writes one run.

    Args:
        name: what was run; letters, digits, ``.``, ``-`` and ``_``.
        result: the command's document.
        profile: `moesaic.Profile.document`.
        table: the text that people read.

    Returns:
        The new folder; a number is put behind the name of a second one in the same second.

    Raises:
        ValueError: the name holds something else.
        OSError: the folder cannot be written.
    """
    check_archive(name)
    stem = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}_{name}"
    for number in range(1, 1000):
        folder = RUNS / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        break
    for file, document in (("result.json", result), (PROFILE, profile)):
        (folder / file).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "table.txt").write_text(table, encoding="utf-8")
    return folder
