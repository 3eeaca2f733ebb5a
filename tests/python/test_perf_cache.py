"""The cache of evaluator answers: shared by processes, and never worse than absent."""

import json
import os
import random
import subprocess
import sys
import textwrap

import pytest

from moesaic.perf import Cache, cache
from moesaic.perf.cache import FILE

VALUE = [1.25, [0.5] * 9, "dram", ["direct", 96, 128, 96, 32, 2048, "columns"], 99, "analytic"]


def alone(tmp_path, program):
    """Runs a program on the cache's file in an interpreter without PyTorch, whose forks are quick; returns what it
    prints. `cache` and `folder` are there."""
    source = f"""
import importlib.util, os, random, signal, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("cache", {cache.__file__!r})
cache = sys.modules["cache"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
folder, VALUE = Path({str(tmp_path)!r}), {VALUE!r}
"""
    done = subprocess.run(
        [sys.executable, "-c", source + textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_keeps_values_and_uses_across_instances(tmp_path):
    first = Cache(tmp_path)
    assert first.get("a") is None
    first.put({"a": VALUE, "b": [2]})
    assert first.get("a") == VALUE and first.get("missing") is None
    first.flush()
    second = Cache(tmp_path)
    assert second.get("a") == VALUE and second.get("b") == [2]
    assert second.uses() == {"a": 3, "b": 1, "missing": 1} and second.missed() == {"missing": 1}
    first.put({"c": [3], "a": [4]})
    assert second.get("c") == [3] and Cache(tmp_path).get("a") == [4]
    stats = second.stats()
    assert (stats.entries, stats.hits, stats.misses, stats.damaged, stats.writable) == (3, 3, 0, 0, True)
    assert stats.bytes == (tmp_path / FILE).stat().st_size


def test_64_writers_at_once_lose_nothing(tmp_path):
    alone(
        tmp_path,
        """
        cache._COMPACT_RECORDS = 20  # so that they also write the file anew under each other
        children = []
        for i in range(64):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    own = cache.Cache(folder)
                    for j in range(5):
                        own.put({f"key.{i}.{j}": [i, j]})
                        own.get(f"key.{i}.{j}")
                        own.get("shared")
                        own.flush()
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 64
        """,
    )
    found = Cache(tmp_path)
    assert found.damaged == 0
    assert {key: found.get(key, count=False) for key in found.keys()} == {  # noqa: SIM118 not a dict
        f"key.{i}.{j}": [i, j] for i in range(64) for j in range(5)
    }
    uses = found.uses()
    assert all(uses[f"key.{i}.{j}"] == 1 for i in range(64) for j in range(5))
    assert uses["shared"] == 320


def test_kills_at_100_random_moments_leave_it_readable(tmp_path):
    printed = alone(
        tmp_path,
        """
        cache._COMPACT_RECORDS = 40  # so that some hit a rewrite
        draw, acknowledged, inodes = random.Random(3), set(), set()
        for turn in range(100):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                own = cache.Cache(folder)
                for i in range(100_000):
                    own.put({f"{turn}.{i}": VALUE, "again": [turn, i]})
                    os.write(write, f"{turn}.{i}\\n".encode())
                os._exit(0)
            os.close(write)
            time.sleep(0.001 + draw.random() * 0.01)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with os.fdopen(read) as acks:
                acknowledged |= {line.strip() for line in acks if line.endswith("\\n")}
            found = cache.Cache(folder)
            assert acknowledged <= set(found.keys()), turn
            assert found.damaged <= 1, found.damaged
            found.put({"after": [turn]})
            assert cache.Cache(folder).get("after") == [turn]
            inodes.add((folder / cache.FILE).stat().st_ino)
        print(len(acknowledged), len(inodes))
        """,
    )
    acknowledged, files = map(int, printed.split())
    assert acknowledged > 100 and files > 1


def test_a_changed_byte_anywhere_loses_at_most_its_entry(tmp_path):
    own = Cache(tmp_path)
    entries = {f"key.{i}": [i, 0.5] for i in range(6)}
    own.put(dict(list(entries.items())[:3]))
    own.put(dict(list(entries.items())[3:]))
    data = (tmp_path / FILE).read_bytes()
    draw = random.Random(5)
    path = tmp_path / "other" / FILE
    path.parent.mkdir()
    for at in range(len(data)):
        for new in (data[at] ^ 1 << draw.randrange(8), ord("\n"), 0):
            if new == data[at]:
                continue
            path.write_bytes(data[:at] + bytes([new]) + data[at + 1 :])
            found = Cache(path.parent)
            kept = {key: found.get(key, count=False) for key in found.keys()}  # noqa: SIM118
            assert len(kept) >= len(entries) - 1 and kept.items() <= entries.items(), at
            if at % 50 == 0:  # and it goes on from there
                found.put(entries)
                assert Cache(path.parent).export()["entries"] == entries


@pytest.mark.parametrize("garbage", [b"\0" * 5000, b"SQLite format 3\0" * 100, b"\n" * 99, os.urandom(3000)])
def test_a_foreign_file_is_passed_over(tmp_path, garbage):
    (tmp_path / FILE).write_bytes(garbage)
    own = Cache(tmp_path)
    assert own.keys() == []
    own.put({"a": VALUE})
    assert Cache(tmp_path).get("a") == VALUE


def test_a_foreign_value_is_computed_anew(tmp_path):
    text = b"{not json"
    (tmp_path / FILE).write_bytes(cache._record(b"e", b"a", text))
    own = Cache(tmp_path)
    assert own.get("a") is None and own.stats().misses == 1


def test_a_full_disk_only_stops_keeping(tmp_path):
    (tmp_path / FILE).symlink_to("/dev/full")
    own = Cache(tmp_path)
    own.put({"a": VALUE})
    own.flush()
    assert own.get("a") == VALUE and not own.stats().writable


def test_a_folder_that_cannot_be_written_only_stops_keeping(tmp_path):
    (tmp_path / "file").write_text("in the way")
    own = Cache(tmp_path / "file" / "folder")
    own.put({"a": VALUE})
    assert own.get("a") == VALUE and not own.writable
    own.clear()
    assert own.get("a") is None


def test_compaction_keeps_what_is_used_most_and_bounds_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_MOST_BYTES", 20_000)
    own = Cache(tmp_path)
    for i in range(300):
        own.put({f"key.{i}": VALUE})
        own.get("key.7")
        own.flush()
    assert (tmp_path / FILE).stat().st_size < 25_000
    found = Cache(tmp_path)
    assert found.get("key.7") == VALUE and found.uses()["key.7"] == 301
    assert 10 < len(found.keys()) < 300


def test_counts_of_a_cache_that_is_gone_are_written_when_the_process_ends(tmp_path):
    program = """
import gc, os, sys
from moesaic.perf import Cache

def use():
    cache = Cache(sys.argv[1])
    cache.put({"a": 1})
    cache.get("a")
    cache.get("missing")

use()
use()
gc.collect()
if os.fork() == 0:
    sys.exit(0)  # counts nothing again
os.wait()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert Cache(tmp_path).uses() == {"a": 2, "missing": 2}


def test_a_forked_child_does_not_count_its_parent_s_uses_again(tmp_path):
    own = Cache(tmp_path)
    own.put({"a": VALUE})
    own.get("a")
    child = os.fork()
    if child == 0:
        own.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    own.flush()
    assert Cache(tmp_path).uses() == {"a": 1}


def test_export_import_and_clear(tmp_path):
    own = Cache(tmp_path / "one")
    own.put({"a": VALUE, "b": [1]})
    own.get("a")
    own.get("never")
    document = json.loads(json.dumps(own.export()))
    other = Cache(tmp_path / "two")
    other.put({"b": [2]})
    assert other.import_(document) == 1
    found = Cache(tmp_path / "two")
    assert found.get("a") == VALUE and found.get("b") == [2] and found.missed() == {"never": 1}
    assert found.clear() == 2
    assert Cache(tmp_path / "two").keys() == []
    other.refresh()  # what it has in memory, another process cannot take away
    assert other.get("a") is None


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], "schema"),
        ({"schema": 2}, "schema"),
        ({"schema": 1}, "entries"),
        ({"schema": 1, "entries": {"with space": 1}}, "entries"),
        ({"schema": 1, "entries": {}, "uses": {"a": -1}}, "uses"),
    ],
)
def test_import_names_what_is_wrong(tmp_path, document, field):
    with pytest.raises(ValueError, match=field):
        Cache(tmp_path).import_(document)
