"""What the units of work of an experts layer cost on one machine: derived from its description, or calibrated on it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from moesaic import _core
from moesaic.perf.cache import cache_folder
from moesaic.perf.fields import at_least
from moesaic.perf.machine import Machine, at_threads, host_key

__all__ = ["LayerRates", "rates_path"]

SCHEMA = 1
_MULTIPLES = ("direct", "unpack", "direct_stream", "unpack_stream", "cache", "cache_filled", "packing", "low")
_MICROSECONDS = ("task", "call", "call_backward", "python", "python_backward")


def rates_path(machine: Machine, threads: int) -> Path:
    """Where the calibrated rates of a machine are kept: of this host, whatever description it has just now."""
    here = machine.source == "measured" and (machine.name, machine.cpu) == (platform.node() or "here", _core.cpu_name())
    return cache_folder() / f"layer-{host_key() if here else machine.identity}-{threads}.json"


@dataclass(frozen=True)
class LayerRates:
    """Thread time of each unit of work.

    Attributes:
        direct, unpack: products with base weights, as multiples of what the tile evaluator says, but for
        direct_stream, unpack_stream: what it says that reading from memory takes of them, and
        cache: from the last-level cache, and
        cache_filled: so many times as much more, where the weights fill all that they may use of that cache, and
        packing: unpacking weights and storing results. A matrix unit's layers unpack while they wait for the next
            weights, and sums stay in the cache of their thread, so little of it is left there.
        low: products with adapters and of their gradients, as multiples of the time at the compute ceiling, and
        low_block: ns for 32 of H or I of a job besides.
        pack: ns for an element of a row that is gathered, rounded and laid out as tiles, and
        pack_job: for a job besides.
        swiglu_forward, swiglu_backward: ns for an element of Z, and
        forward_block, backward_block: for 32 rows of I of a job besides.
        transpose: ns for an element of dG, dU or Z that is also laid out for the gradients of adapters.
        merge: ns for an element of a row of Y or dX that is added to its token's.
        merge_token: ns for an element of a token's sum that is written.
        rank: ns for an element of a rank-wide intermediate, which is scaled, split in two and packed.
        lora_pack: ns for an element of an adapter that is packed.
        lora_write: ns for an element of a gradient that is written.
        sweep: ns for an element of an adapter that is read where it lies, or of its gradient that is written there,
        sweep_product: for each product with it, and
        sweep_row: for an element of H or I of a row that these are added to or multiplied with.
        partial: ns for an element of a sum of a further chunk that is added to its expert's.
        handed: ns for a tile of activations that a thread reads of a job which another one packed, and
        claimed: ns for one that is written where those that share a job have read the tile that lay there.
        result: ns for an element of a row of Y or dX that a product writes past the caches.
        slot: ns for a slot of a token, in which the caller alone sorts them by expert.
        task: us for a task besides its work.
        call, call_backward: us for a forward and for a backward besides its phases, whatever these take: Python,
            validation, the graph, waking the workers.
        python, python_backward: us of these that pass before the engine begins and after it ends.
        waiting, waiting_backward: share of all but call and call_backward that a call takes longer, as threads wait for
            each other more than the schedule says.
        in_model, in_model_backward: times as long as all but call and call_backward takes a layer that fits the
            last-level cache where calls of other layers and operators of PyTorch come between its own; measured in
            training steps.
    """

    direct: float
    unpack: float
    direct_stream: float
    unpack_stream: float
    cache: float
    cache_filled: float
    packing: float
    low: float
    low_block: float
    pack: float
    pack_job: float
    swiglu_forward: float
    swiglu_backward: float
    forward_block: float
    backward_block: float
    transpose: float
    merge: float
    merge_token: float
    rank: float
    lora_pack: float
    lora_write: float
    sweep: float
    sweep_product: float
    sweep_row: float
    partial: float
    handed: float
    claimed: float
    result: float
    slot: float
    task: float
    call: float
    call_backward: float
    python: float
    python_backward: float
    waiting: float
    waiting_backward: float
    in_model: float
    in_model_backward: float

    @staticmethod
    def derived(machine: Machine, threads: int) -> LayerRates:
        """From a machine's figures, for want of a calibration.

        Packing is a figure of the machine. What else computes on vectors in cache takes a multiple of it that depends
        on the code, not on the machine: so many more instructions an element. What goes past the caches takes its
        bytes at the memory's rate, results twice that. By how much products differ from the evaluator's answers,
        because a layer does other things around them, is taken from the hosts that were calibrated.
        """
        figures = machine.figures(threads)
        pack = 2.0 / figures["pack_gbps"]
        memory = threads / figures["gbps"][3]  # ns of a thread for a byte, while all of them read
        return LayerRates(
            # Divided by the factor that the evaluator's answers hold already; between what calibrations found on two
            # Zen 4 cores (1.0 and 1.04) and on 16 AMX threads (0.7 to 0.9 and 0.6 to 0.7).
            direct=0.85 / figures["direct_factor"],
            unpack=0.75 / figures["unpack_factor"],
            direct_stream=0.9,
            unpack_stream=1.0,
            cache=1.0,
            cache_filled=0.2,  # as pack_job: a 16-core AMX host (docs/predictions)
            # A matrix unit's layers unpack while they wait for weights: calibrations found 0 to 0.16 (16 AMX threads).
            packing=0.1 if figures["unpack_overlaps"] else 0.75 / figures["unpack_factor"],
            low=4.0,
            low_block=100.0,
            pack=max(1.5 * pack, 2 * memory),
            pack_job=2000.0,
            swiglu_forward=4.0 * pack,
            swiglu_backward=8.0 * pack,
            forward_block=100.0,
            backward_block=400.0,
            transpose=pack,
            merge=max(pack, 2 * memory),
            merge_token=max(2.0 * pack, 4 * memory),
            rank=20.0 * pack,
            lora_pack=max(2.0 * pack, 4 * memory),
            lora_write=max(2.0 * pack, 4 * memory),
            sweep=max(pack, 6 * memory),
            sweep_product=0.3 * pack,
            sweep_row=2.0 * pack,
            partial=2.0 * pack,
            # No less than a nanosecond, for a fit multiplies these. A job's tiles are claimed by one thread at a time,
            # and not by all at once as in a product: in about half of the time (16 AMX threads).
            handed=max(at_threads(machine.fetch_ns, threads), 1.0),
            claimed=max(at_threads(machine.claim_ns, threads) * 0.5, 1.0),
            # bf16. Calibrations found 0.11 ns where this is 0.24, and 0.2 to 0.4 where it is 0.4 to 0.5.
            result=4 * memory,
            slot=15.0,
            task=figures["task_us"],
            call=figures["job_us"] + 20.0,
            call_backward=figures["job_us"] + 20.0,
            python=15.0,
            python_backward=15.0,
            waiting=0.0,
            waiting_backward=0.0,
            in_model=1.0,
            in_model_backward=1.0,
        )

    @staticmethod
    def of(machine: Machine, threads: int) -> LayerRates:
        """The calibrated rates that are kept for the machine; else those that come with the package; else derived
        ones."""
        shipped = Path(__file__).parent / "layer_rates" / f"{machine.name}.json"
        for path in (rates_path(machine, threads), shipped):
            try:
                return LayerRates.load(path)
            except (OSError, ValueError):
                continue
        return LayerRates.derived(machine, threads)

    def __post_init__(self) -> None:
        for field in fields(self):
            at_least(f"rates.{field.name}", getattr(self, field.name), 0.0)

    def unit_ms(self, unit: str) -> float:
        """Milliseconds of one unit; of products, of a millisecond."""
        rate: float = getattr(self, unit)
        return rate if unit in _MULTIPLES else rate * 1e-3 if unit in _MICROSECONDS else rate * 1e-6

    def thread_ms(self, work: Mapping[str, float]) -> float:
        """Thread time of amounts by unit."""
        return sum(amount * self.unit_ms(unit) for unit, amount in work.items())

    @staticmethod
    def names() -> tuple[str, ...]:
        """The units."""
        return tuple(field.name for field in fields(LayerRates))

    def save(self, path: Path) -> None:
        """Writes the rates as JSON. OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schema": SCHEMA, "rates": asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> LayerRates:
        """Reads what save() wrote. ValueError where a field is missing, unknown or no number; OSError."""
        try:
            document: dict[str, Any] = json.loads(path.read_text())
            values = document["rates"]
            missing = [name for name in LayerRates.names() if name not in values]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a file of layer rates ({error})") from None
        if missing:
            raise ValueError(f"{path}: rates.{missing[0]} is missing")
        try:
            return LayerRates(**{name: values[name] for name in LayerRates.names()})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None
