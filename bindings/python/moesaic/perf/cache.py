"""The store of evaluator answers: one append-only file, shared by all processes that name its folder.

A record is one line with an empty line behind it, so that what is damaged ends where the next record begins::

    <CRC-32 of the rest, 8 digits> <kind> <key> <value as JSON>

Kinds are ``e`` (an answer), ``u`` (uses of a key by one process since its last such record) and ``g`` (a file written
anew). A writer takes a lock on the file and appends its records with one write; a reader needs no lock. A record that
was cut short or changed fails its checksum and is passed over, every other one counts. Compaction writes a new file
and renames it, under the same lock. docs/EVALUATOR.md says why not SQLite.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import secrets
import stat
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

log = logging.getLogger("moesaic.perf")

FILE = "gemm.log"
_COMPACT_RECORDS = 2000
"""Records that say nothing any more before the file is written anew."""
_GENERATION_BYTES = 60
_MOST_BYTES = 8 << 20
"""Beyond this, compaction keeps only what was used most."""


def cache_folder() -> Path:
    """MOESAIC_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get("MOESAIC_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moesaic"


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """What a cache holds, and how this process used it."""

    path: str
    entries: int
    uses: int
    """Of all processes."""
    bytes: int
    damaged: int
    """Records passed over when it was read."""
    hits: int
    """Of this process."""
    misses: int
    writable: bool


class Cache:
    """Answers by key. Thread safe; any number of processes may share a folder.

    Whatever fails (no permission, a full disk) only disables keeping: `writable` turns false, a warning is logged
    once (none where the folder may not be written at all), and answers are kept in memory.

    Args:
        folder: where the file lies; None: MOESAIC_CACHE_DIR, else the user's cache folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder) if folder is not None else cache_folder()
        self.path = self.folder / FILE
        self.writable = True
        self.hits = 0
        self.misses = 0
        self.damaged = 0
        self._lock = threading.RLock()
        self._values: dict[str, bytes] = {}
        self._uses: dict[str, int] = {}
        self._new_uses: dict[str, int] = {}
        self._file = b""  # how the file begins that was read
        self._seen = (0, 0, 0)
        self._read = 0  # bytes
        self._useless = 0
        self._load()
        _open_caches.add(self)

    def __del__(self) -> None:
        # Not written here: garbage may be collected while this very thread holds the lock of the file.
        if getattr(self, "_new_uses", None) and self.writable:
            _left_behind.append((self.folder, self._new_uses))

    # ---- answers ----

    def get(self, key: str, count: bool = True) -> Any | None:
        """The value of a key; None where there is none. Either way it is a use, unless `count` is false."""
        with self._lock:
            found = self._values.get(key)
            if found is None and self._changed():
                self._load()
                found = self._values.get(key)
            value = _json_or_none(found)
            if count:
                self._new_uses[key] = self._new_uses.get(key, 0) + 1
                self.hits += value is not None
                self.misses += value is None
            return value

    def has(self, key: str) -> bool:
        """Whether the key has a value; counts as no use."""
        with self._lock:
            self.refresh()
            return key in self._values

    def count(self, key: str, uses: int = 1) -> None:
        """Counts uses of an entry that were served elsewhere: a hit each."""
        self.hits += uses
        self._new_uses[key] = self._new_uses.get(key, 0) + uses

    def put(self, entries: Mapping[str, Any]) -> None:
        """Keeps values by key, replacing what is there. Keys hold no spaces and no control characters; values are
        JSON."""
        with self._lock:
            lines = []
            for key, value in entries.items():
                text = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
                self._values[key] = text
                lines.append(_record(b"e", key.encode(), text))
            self._append(lines)

    def flush(self) -> None:
        """Writes the counts of uses. Happens by itself when the process ends, also for caches that are gone by then."""
        with self._lock:
            if not self._new_uses:
                return
            if self.writable:
                counted, self._new_uses = self._new_uses, {}  # counts from here on when they are read again
                self._append([_record(b"u", key.encode(), b"%d" % uses) for key, uses in counted.items()])

    # ---- the whole ----

    def keys(self) -> list[str]:
        """Keys with a value."""
        with self._lock:
            return list(self._values)

    def uses(self) -> dict[str, int]:
        """Uses of each key by all processes so far, also of keys without a value."""
        with self._lock:
            self.refresh()
            return {
                key: self._uses.get(key, 0) + self._new_uses.get(key, 0) for key in {**self._uses, **self._new_uses}
            }

    def missed(self) -> dict[str, int]:
        """Keys that were asked for and have no value, with their uses."""
        return {key: uses for key, uses in self.uses().items() if key not in self._values}

    def stats(self) -> CacheStats:
        """Numbers of it all."""
        with self._lock:
            uses = sum(self.uses().values())
            try:
                size = self.path.stat().st_size
            except OSError:
                size = 0
            return CacheStats(
                str(self.path), len(self._values), uses, size, self.damaged, self.hits, self.misses, self.writable
            )

    def refresh(self) -> None:
        """Reads what other processes have added."""
        with self._lock:
            if self._changed():
                self._load()

    def clear(self) -> int:
        """Drops all entries and counts; returns how many entries there were."""
        with self._lock:
            self.refresh()
            count = len(self._values)
            self._new_uses.clear()
            self._rewrite(drop=True)
            return count

    def export(self) -> dict[str, Any]:
        """Entries and counts as a JSON document."""
        with self._lock:
            uses = self.uses()
            entries = {key: _json_or_none(value) for key, value in sorted(self._values.items())}
            return {"schema": 1, "entries": entries, "uses": {key: uses[key] for key in sorted(uses)}}

    def import_(self, document: Any) -> int:
        """Adds what `export` gave; entries that are there stay. Returns how many are new.

        Raises:
            ValueError: it is no such document.
        """
        if not isinstance(document, dict) or document.get("schema") != 1:
            raise ValueError("import: schema is missing or unknown, expected a document of --export")
        entries, uses = document.get("entries"), document.get("uses", {})
        if not isinstance(entries, dict) or not all(_is_key(key) for key in entries):
            raise ValueError("import: entries is missing or holds a key that is none")
        if not isinstance(uses, dict) or not all(_is_key(k) and isinstance(n, int) and n >= 0 for k, n in uses.items()):
            raise ValueError("import: uses holds something else than counts by key")
        with self._lock:
            self.refresh()
            new = {key: value for key, value in entries.items() if key not in self._values}
            self.put(new)
            for key, count in uses.items():
                self._new_uses[key] = self._new_uses.get(key, 0) + count
            self.flush()
            return len(new)

    # ---- the file ----

    def _changed(self) -> bool:
        try:
            return _stamp(self.path.stat()) != self._seen
        except OSError:
            return False

    def _load(self) -> None:
        """Reads the file, or what is new in it."""
        try:
            with open(self.path, "rb") as file:
                self._read_from(file)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.debug("cache %s cannot be read: %s", self.path, error)

    def _read_from(self, file: IO[bytes]) -> None:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return
        self._seen = _stamp(status)
        # A file written anew begins otherwise; its number may be that of the one before.
        begin = file.read(_GENERATION_BYTES)
        if begin != self._file or status.st_size < self._read:
            self._values.clear()
            self._uses.clear()
            self._file, self._read, self._useless, self.damaged = begin, 0, 0, 0
        file.seek(self._read)
        data = file.read()
        # A last line that another process is still writing comes with the next look.
        whole = data.rfind(b"\n\n") + 2
        if whole < 2:
            return
        self._read += whole
        for line in data[:whole].split(b"\n"):
            if line:
                self._take(line)

    def _take(self, line: bytes) -> None:
        record = _parse_record(line)
        if record is None:
            self.damaged += 1
            self._useless += 1
            return
        kind, key, value = record
        if kind == b"e":
            self._useless += key in self._values
            self._values[key] = value
        elif kind == b"u":
            self._useless += key in self._uses
            self._uses[key] = self._uses.get(key, 0) + int(value)

    def _append(self, lines: list[bytes]) -> None:
        if not lines or not self.writable:
            return
        try:
            with self._locked() as file:
                # An empty line first: whatever a writer before left unfinished ends there.
                data = b"\n\n" + b"".join(lines)
                view = memoryview(data)
                while view:
                    view = view[os.write(file.fileno(), view) :]
                size = os.fstat(file.fileno()).st_size
            if self._useless > _COMPACT_RECORDS or size > _MOST_BYTES:
                self._rewrite()
        except OSError as error:
            self._disable(error)

    def _disable(self, error: OSError) -> None:
        self.writable = False
        level = logging.DEBUG if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else logging.WARNING
        log.log(level, "answers are not kept: cache %s: %s", self.path, error)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """The file, open for appending and locked, and not one that was renamed away meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            with open(self.path, "ab", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a kill
                try:
                    same = os.stat(self.path).st_ino == os.fstat(file.fileno()).st_ino
                except FileNotFoundError:
                    same = False
                if same:
                    yield file
                    return

    def _rewrite(self, drop: bool = False) -> None:
        """Writes only what counts to a new file and puts it in the place of the old one."""
        if not self.writable:
            self._values.clear()
            return
        try:
            with self._locked():
                self._file = b""  # all of it
                with open(self.path, "rb") as file:
                    self._read_from(file)
                if drop:
                    self._values.clear()
                    self._uses.clear()
                # What is used least goes first where there is too much.
                by_use = sorted({**self._values, **self._uses}, key=lambda key: self._uses.get(key, 0), reverse=True)
                kept, size = [], 0
                for key in by_use:
                    record = _record(b"u", key.encode(), b"%d" % self._uses[key]) if key in self._uses else b""
                    if key in self._values:
                        record += _record(b"e", key.encode(), self._values[key])
                    size += len(record)
                    if size > _MOST_BYTES // 2:
                        break
                    kept.append(record)
                temporary = self.path.with_name(f".{FILE}.new")  # one at a time, under the lock
                with open(temporary, "wb") as file:
                    file.write(b"\n\n" + _record(b"g", b"generation", secrets.token_hex(16).encode()) + b"".join(kept))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
            self._load()
        except OSError as error:
            self._disable(error)


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _record(kind: bytes, key: bytes, value: bytes) -> bytes:
    rest = kind + b" " + key + b" " + value
    return b"%08x " % zlib.crc32(rest) + rest + b"\n\n"


def _parse_record(line: bytes) -> tuple[bytes, str, bytes] | None:
    """Kind, key and value of a line; None where it is not what was written."""
    try:
        if line[8:9] != b" " or int(line[:8], 16) != zlib.crc32(line[9:]):
            return None
        kind, key, value = line[9:].split(b" ", 2)
        return kind, key.decode(), value
    except ValueError:
        return None


def _json_or_none(text: bytes | None) -> Any | None:
    try:
        return None if text is None else json.loads(text)
    except ValueError:  # of a foreign program: computed anew
        return None


def _is_key(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isprintable() and " " not in key and key != ""


_open_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
_left_behind: list[tuple[Path, dict[str, int]]] = []
"""Uses that caches counted which are gone."""


@atexit.register
def _flush_all() -> None:
    caches = {cache.folder: cache for cache in _open_caches}
    while _left_behind:
        folder, uses = _left_behind.pop()
        if folder not in caches:
            caches[folder] = Cache(folder)
        for key, count in uses.items():
            caches[folder].count(key, count)
    for cache in list(_open_caches):
        cache.flush()


def _forget_in_child() -> None:
    """The parent writes what it counted; its other threads may have held the lock."""
    _left_behind.clear()
    for cache in list(_open_caches):
        cache._lock = threading.RLock()
        cache._new_uses.clear()


os.register_at_fork(after_in_child=_forget_in_child)
