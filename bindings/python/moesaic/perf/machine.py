"""What a machine can do: ceilings, bandwidths, latencies and the kernels' own figures, measured or read from a file."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from moesaic import _core

SCHEMA = 10
ByThreads = Mapping[int, float]
"""A figure for some numbers of threads, all threads together; between them it is interpolated."""


_NANOSECONDS = ("cell_ns", "again_ns", "call_ns", "unpack_tile_ns")


@dataclasses.dataclass(frozen=True)
class PerThread:
    """What kernels take of one thread while some number of threads do the same, but for weights from memory; see
    ``KernelFigures`` in ``cpu_kernels/tile_evaluator/machine_model.h``."""

    step_ns: tuple[tuple[float, ...], ...]
    """One step (32 of the contraction) of a cell of i + 1 left by j + 1 right panels, operands in L1."""
    few_tile_ns: tuple[tuple[float, ...], ...]
    """A tile of weights in L2 by the forms for few rows, direct and unpack, with 1, 2, ... rows; empty where the tier
    has none."""
    cell_ns: float
    again_ns: float
    call_ns: float
    unpack_tile_ns: float
    pack_gbps: float
    overlap: float
    unpack_overlap: float
    few_overlap: float
    """Exponents with which times of arithmetic and of each level of memory combine: 1 one after the other. Of cells in
    the direct form, of those in the unpack form, and of the forms for few rows where they pass a tile once."""

    def slower(self, factor: float) -> PerThread:
        """The same on a core that takes so many times as long."""
        return dataclasses.replace(
            self,
            step_ns=tuple(tuple(x * factor for x in row) for row in self.step_ns),
            few_tile_ns=tuple(tuple(x * factor for x in row) for row in self.few_tile_ns),
            pack_gbps=self.pack_gbps / factor,
            **{name: getattr(self, name) * factor for name in _NANOSECONDS},
        )

    def no_slower_than(self, other: PerThread) -> PerThread:
        """Of each figure but how well things overlap the better one."""

        def least(
            some: tuple[tuple[float, ...], ...], others: tuple[tuple[float, ...], ...]
        ) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(map(min, *rows)) for rows in zip(some, others, strict=True))

        return dataclasses.replace(
            self,
            step_ns=least(self.step_ns, other.step_ns),
            few_tile_ns=least(self.few_tile_ns, other.few_tile_ns),
            pack_gbps=max(self.pack_gbps, other.pack_gbps),
            **{name: min(getattr(self, name), getattr(other, name)) for name in _NANOSECONDS},
        )


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of one instruction-set tier; see ``KernelFigures`` in
    ``cpu_kernels/tile_evaluator/machine_model.h``."""

    left_panels: int
    right_panels: int
    most_few_rows: int
    """Rows that the direct form takes in parts of lines, at most; 0 where a tier has cells alone."""
    most_stored_rows: int
    """Rows that it takes but as cells, at most; whole panels from 64 rows on are cells."""
    per_thread: Mapping[int, PerThread]
    """By threads: of one, and of as many as the machine has, which may share cores and what computes there."""
    unpack_overlaps: bool
    sentinel_ns: float
    """The least that `_core.measure_cell` took."""
    compute_gflops: ByThreads
    """Multiply-adds on registers."""
    direct_gbps: ByThreads
    """Rate at which the direct form takes weights from memory."""
    unpack_gbps: ByThreads
    few_direct_gbps: ByThreads
    """The same of the forms for few rows, where a tier has them; of those above where it has none. All rows are few to
    the unpack form."""
    few_unpack_gbps: ByThreads

    @property
    def undisturbed_ns(self) -> float:
        """What `_core.measure_cell` takes at most where nobody else uses the core. (A matrix unit's: 219 to 250 ns, on
        two cores that nobody else used.)"""
        return (1.2 if self.unpack_overlaps else 1.06) * self.sentinel_ns

    def of_each(self, threads: int) -> PerThread:
        """What kernels take of each of so many threads: as measured with so many, or with the next smaller number and
        slowed down as multiply-adds on registers are."""
        measured = max(n for n in self.per_thread if n <= threads)
        if measured == threads:
            return self.per_thread[threads]
        alone, together = (at_threads(self.compute_gflops, n) / n for n in (measured, threads))
        return self.per_thread[measured].slower(max(1.0, alone / together))

    def undisturbed(self, isa: str) -> bool:
        """Whether others leave this core alone just now, in some 0.2 ms: whether a cell of the kernels takes no longer
        than here. On a host that others use, a core whose sibling is busy is a third slower for a while, and what runs
        meanwhile says nothing about a description of the host."""
        return _core.measure_cell(isa) <= self.undisturbed_ns


@dataclasses.dataclass(frozen=True)
class Machine:
    """One host. Bandwidths in GB/s (1e9 bytes) are reads of all threads together."""

    name: str
    source: str
    """"measured", or where the figures come from."""
    cpu: str
    isa: str
    """The tier of kernels that it would use; a key of `kernels`."""
    sockets: int
    numa_nodes: int
    cores: int
    threads: int
    """Threads of the engine at most: what the figures reach to."""
    memory_bytes: int
    l1_bytes: int
    """Data cache of a core."""
    l2_bytes: int
    """Of a core."""
    l3_bytes: int
    """All last-level caches together."""
    l1_gbps: ByThreads
    l2_gbps: ByThreads
    l3_gbps: ByThreads
    dram_gbps: ByThreads
    l1_ns: float
    """A load that depends on the one before."""
    l2_ns: float
    l3_ns: float
    dram_ns: float
    job_us: ByThreads
    """A parallel loop of one empty task a thread: what a dispatch costs."""
    task_us: ByThreads
    """What each further task costs a thread."""
    uneven: ByThreads
    """Of so many equal tasks of a product, on all threads, the longest over the mean."""
    claim_ns: ByThreads
    """To pack a tile of 1 KB from bf16, where other threads have written both, more than packing takes in a thread's
    own caches and reading the rows from theirs; in products, on all threads."""
    fetch_ns: ByThreads
    """To read a tile that another thread has packed, more than one of a thread's own; and to read the rows that
    become one."""
    direct_factor: ByThreads
    """What computing takes in a product of cells in the direct form, over what its steps, L2 and L3 take by
    themselves."""
    unpack_factor: ByThreads
    """The same in the unpack form, and of unpacking, too."""
    kernels: Mapping[str, Kernels]

    @property
    def compute_gflops(self) -> ByThreads:
        """The compute ceiling of the tier in use, by threads."""
        return self.kernels[self.isa].compute_gflops

    @property
    def identity(self) -> str:
        """Names this description: two machines with the same one give the same answers. 16 hexadecimal digits."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # ---- files ----

    def to_json(self) -> dict[str, Any]:
        """The JSON document of `save`."""
        document: dict[str, Any] = {"schema": SCHEMA}
        for field in dataclasses.fields(self):
            document[field.name] = _plain(getattr(self, field.name))
        return document

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the description; a reader never sees half of it.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(json.dumps(self.to_json(), indent=1) + "\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """Reads a description.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no description, or a figure is missing or makes no sense; one line that names the field.
        """
        return cls.from_json(_parse(Path(path).read_text(), str(path)), str(path))

    @classmethod
    def from_json(cls, document: Any, where: str = "machine") -> Machine:
        """The machine of a document, as `load`; `where` begins the error message."""
        if not isinstance(document, dict):
            raise ValueError(f"{where}: expected a JSON object with the figures of a machine")
        if document.get("schema") != SCHEMA:
            raise ValueError(f"{where}: schema is {document.get('schema')!r}, expected {SCHEMA}")
        kernels = _take(document, "kernels", where)
        if not isinstance(kernels, dict) or not kernels:
            raise ValueError(f"{where}: kernels is {kernels!r}, expected an object with a tier at least")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name == "kernels":
                values["kernels"] = {isa: _kernels_of(row, f"{where}: kernels.{isa}") for isa, row in kernels.items()}
            else:
                values[field.name] = _read(document, field.name, str(field.type), where)
        machine = cls(**values)
        if machine.isa not in machine.kernels:
            raise ValueError(f"{where}: kernels.{machine.isa} is missing, the tier that isa names")
        return machine

    @classmethod
    def named(cls, name: str) -> Machine:
        """One of the descriptions that come with the package; `names()` lists them.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in cls.names():
            raise ValueError(f"machine is {name!r}, expected a file or one of {', '.join(cls.names())}, here")
        file = resources.files(__package__).joinpath("machines").joinpath(f"{name}.json")
        return cls.from_json(_parse(file.read_text(), name), name)

    @staticmethod
    def names() -> list[str]:
        """The descriptions that come with the package."""
        files = resources.files(__package__).joinpath("machines").iterdir()
        return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))

    @classmethod
    def find(cls, text: str) -> Machine:
        """What a user names: "here", a name of `names()`, or a file.

        Raises:
            ValueError: it is none of them, or not a description.
            OSError: the file cannot be read.
        """
        if text == "here":
            return cls.here()
        return cls.load(text) if os.path.exists(text) else cls.named(text)

    # ---- this host ----

    @classmethod
    def here(cls, progress: Callable[[str], None] | None = None) -> Machine:
        """This host: the description kept in the cache folder, measured when there is none that fits.

        It fits when host, number of threads, tier and version are the same. Where the folder cannot be written it is
        measured in each process.

        Args:
            progress: as of `measure`.
        """
        from moesaic.perf.cache import cache_folder

        path = cache_folder() / f"machine-{host_key()}.json"
        try:
            return cls.load(path)
        except (OSError, ValueError):
            machine = cls.measure(progress)
        with contextlib.suppress(OSError):
            machine.save(path)
        return machine

    @classmethod
    def measure(cls, progress: Callable[[str], None] | None = None) -> Machine:
        """Measures this host, in some seconds, on up to as many threads as the engine uses. Takes up to 1 GiB of
        memory for each number of threads that is tried: 1, 2, 4, ... and all; once more for products, and some tens or
        hundreds of MB for what they compute.

        Args:
            progress: is told what is being measured.
        """
        from moesaic.perf.measure import ROUNDS, Measurement

        measurement = Measurement(progress)
        measurement.rounds(ROUNDS)
        return measurement.machine()

    # ---- for the model ----

    def figures(self, threads: int, isa: str | None = None) -> dict[str, Any]:
        """What `_core.TileEvaluator` takes: the machine as so many threads see it.

        Raises:
            ValueError: more threads than the figures reach to, or a tier that they lack.
        """
        isa = isa or self.isa
        if isa not in self.kernels:
            raise ValueError(f"isa is {isa!r}, expected one of {', '.join(self.kernels)}")
        if not 1 <= threads <= self.threads:
            raise ValueError(f"threads is {threads}, expected 1 to {self.threads}, what machine {self.name} has")
        kernels = self.kernels[isa]
        per_thread = kernels.of_each(threads)
        return {
            "threads": threads,
            "compute_gflops": at_threads(kernels.compute_gflops, threads),
            "gbps": [at_threads(x, threads) for x in (self.l1_gbps, self.l2_gbps, self.l3_gbps, self.dram_gbps)],
            "latency_ns": [self.l1_ns, self.l2_ns, self.l3_ns, self.dram_ns],
            "cache_bytes": [self.l1_bytes, self.l2_bytes, max(self.l3_bytes // threads, self.l2_bytes)],
            "l3_bytes": self.l3_bytes,
            "job_us": at_threads(self.job_us, threads),
            "task_us": at_threads(self.task_us, threads),
            "uneven": [at_threads(self.uneven, n) for n in range(1, threads + 1)],
            "claim_ns": at_threads(self.claim_ns, threads),
            "fetch_ns": at_threads(self.fetch_ns, threads),
            "direct_factor": at_threads(self.direct_factor, threads),
            "unpack_factor": at_threads(self.unpack_factor, threads),
            "left_panels": kernels.left_panels,
            "right_panels": kernels.right_panels,
            "most_few_rows": kernels.most_few_rows,
            "most_stored_rows": kernels.most_stored_rows,
            "step_ns": [(*row, 0.0, 0.0, 0.0)[:3] for row in (*per_thread.step_ns, (), ())[:2]],
            "few_tile_ns": per_thread.few_tile_ns,
            "cell_ns": per_thread.cell_ns,
            "again_ns": per_thread.again_ns,
            "call_ns": per_thread.call_ns,
            "unpack_tile_ns": per_thread.unpack_tile_ns,
            "unpack_overlaps": kernels.unpack_overlaps,
            "overlap": per_thread.overlap,
            "unpack_overlap": per_thread.unpack_overlap,
            "few_overlap": per_thread.few_overlap,
            "pack_gbps": per_thread.pack_gbps,
            **{
                name: [at_threads(getattr(kernels, name), n) for n in range(1, threads + 1)]
                for name in ("direct_gbps", "unpack_gbps", "few_direct_gbps", "few_unpack_gbps")
            },
        }


def at_threads(figure: ByThreads, threads: int) -> float:
    """The figure for so many threads; between two that were measured it is interpolated, beyond them it stays."""
    if threads in figure:
        return figure[threads]
    below = max((n for n in figure if n < threads), default=None)
    above = min((n for n in figure if n > threads), default=None)
    if below is None or above is None:
        return figure[above if below is None else below]  # type: ignore[index]
    share = (threads - below) / (above - below)
    return figure[below] + share * (figure[above] - figure[below])


def host_key() -> str:
    """Names this host and how the engine runs on it; a description measured under another key does not fit."""
    topology = _core.topology()
    parts = [
        SCHEMA,
        _core.gemm_model_version,  # some figures are what makes the model say what was measured
        platform.node(),
        _core.cpu_name(),
        topology["cores"],
        topology["pus"],
        topology["l3"]["bytes"],
        _core.get_num_threads(),
        _core.isa(),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


# ---- reading ----


def _plain(value: Any) -> Any:
    """Mappings by number of threads, and dataclasses, as JSON objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None


def _take(document: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in document:
        raise ValueError(f"{where}: {name} is missing")
    return document[name]


def _read(document: Mapping[str, Any], name: str, kind: str, where: str) -> Any:
    value = _take(document, name, where)
    if kind == "str":
        if not isinstance(value, str):
            raise ValueError(f"{where}: {name} is {value!r}, expected text")
        return value
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {name} is {value!r}, expected true or false")
        return value
    if kind == "int":
        least = 0 if name in ("most_few_rows", "most_stored_rows") else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            expected = "a positive whole number" if least else "a whole number, 0 or more"
            raise ValueError(f"{where}: {name} is {value!r}, expected {expected}")
        return value
    if kind == "float":
        return _number(value, name, where, zero=name in ("cell_ns", "again_ns", "call_ns"))
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{where}: {name} is {value!r}, expected an object of figures by threads")
    figures = {}
    for key, figure in value.items():
        if not key.isdecimal() or int(key) < 1:
            raise ValueError(f"{where}: {name}.{key}: expected numbers of threads as keys")
        zero = name in ("task_us", "claim_ns", "fetch_ns")
        figures[int(key)] = _number(figure, f"{name}.{key}", where, zero=zero)
    return dict(sorted(figures.items()))


def _number(value: Any, name: str, where: str, zero: bool = False) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{where}: {name} is {value!r}, expected a number")
    if value < 0 or (value == 0 and not zero):
        raise ValueError(f"{where}: {name} is {value!r}, expected a positive number")
    return float(value)


def _kernels_of(document: Any, where: str) -> Kernels:
    if not isinstance(document, dict):
        raise ValueError(f"{where} is {document!r}, expected an object")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Kernels):
        if field.name != "per_thread":
            values[field.name] = _read(document, field.name, str(field.type), where)
    left, right = values["left_panels"], values["right_panels"]
    if left > 2 or not 2 <= right <= 3:
        raise ValueError(f"{where}: left_panels, right_panels are {left}, {right}, expected 1 or 2, and 2 or 3")
    by_threads = _take(document, "per_thread", where)
    if not isinstance(by_threads, dict) or "1" not in by_threads or not all(key.isdecimal() for key in by_threads):
        raise ValueError(f"{where}: per_thread is {by_threads!r}, expected an object by threads with 1 at least")
    values["per_thread"] = {
        int(key): _per_thread_of(row, left, right, f"{where}: per_thread.{key}") for key, row in by_threads.items()
    }
    return Kernels(**values)


def _per_thread_of(document: Any, left: int, right: int, where: str) -> PerThread:
    if not isinstance(document, dict):
        raise ValueError(f"{where} is {document!r}, expected an object")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(PerThread):
        if field.name not in ("step_ns", "few_tile_ns"):
            values[field.name] = _read(document, field.name, str(field.type), where)
    for name in ("overlap", "unpack_overlap", "few_overlap"):
        if values[name] < 1:
            raise ValueError(f"{where}: {name} is {values[name]}, expected 1 or more")
    rows = _take(document, "step_ns", where)
    if (
        not isinstance(rows, list)
        or len(rows) < left
        or any(not isinstance(row, list) or len(row) < right for row in rows)
    ):
        raise ValueError(f"{where}: step_ns is {rows!r}, expected {left} rows of {right} numbers")
    values["step_ns"] = tuple(
        tuple(_number(x, f"step_ns[{i}][{j}]", where) for j, x in enumerate(row[:right]))
        for i, row in enumerate(rows[:left])
    )
    few = _take(document, "few_tile_ns", where)
    if (
        not isinstance(few, list)
        or len(few) != 2
        or any(not isinstance(row, list) or len(row) > _core.most_measured_rows for row in few)
        or len(few[0]) != len(few[1])
    ):
        raise ValueError(
            f"{where}: few_tile_ns is {few!r}, "
            f"expected two rows of equally many numbers, at most {_core.most_measured_rows}"
        )
    values["few_tile_ns"] = tuple(
        tuple(_number(x, f"few_tile_ns[{i}][{j}]", where) for j, x in enumerate(row)) for i, row in enumerate(few)
    )
    return PerThread(**values)
