"""What C++ gives to the package. Users take the names of `moesaic` itself."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, overload

import torch

from moesaic.lora import Layout
from moesaic.runtime import MemoryStats

class UnsupportedHostError(RuntimeError):
    """MOESAIC_ISA forces an instruction set that this host, this process or this build does not have."""

class IsaTier(TypedDict):
    name: str
    supported: bool
    permitted: bool
    compiled: bool
    chosen: bool

class RangeStats(TypedDict):
    name: str
    category: str
    calls: int
    thread_ns: int
    min_thread_ns: int
    max_thread_ns: int
    span_ns: int
    threads: int
    flops: float
    bytes: float
    apportioned: bool

class PoolTotals(TypedDict):
    """Sums over runs of the pool; busy + stealing + waiting + parked = lane_ns."""

    runs: int
    tasks: int
    steals: int
    parks: int
    wall_ns: int
    lane_ns: int
    busy_ns: int
    stealing_ns: int
    waiting_ns: int
    parked_ns: int
    least_busy_ns: int
    most_busy_ns: int

class CallRecord(TypedDict):
    kind: str
    first: bool
    layer: int
    threads: int
    tokens: int
    jobs: int
    job_slots: int
    job_tasks: int
    begin_ns: int
    engine_begin_ns: int
    engine_end_ns: int
    end_ns: int
    pool: PoolTotals

class ThreadTrace(TypedDict):
    os_id: int
    lane: int
    name: str
    dropped: int
    events: list[tuple[int, int, int, int, int, int, float, float]]
    """(kind, begin_ns, end_ns, id, expert, rows, flops, bytes); see profiling/trace.h."""

class ForwardCall:
    """A forward that has read its arguments, holds them, and has memory for its results."""

    def run(self) -> None:
        """Computes, without the Python lock; once, on the thread that prepared it."""

class Layer:
    """Tensors are on the CPU. LoRA tensors come flat, ``(a, b, a, b, ...)``; the layout says what each pair is."""

    def __init__(
        self, weight_format: str, gate_up_proj: torch.Tensor, down_proj: torch.Tensor, activation: str
    ) -> None: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def shards(self) -> list[tuple[int, int, int]]:
        """(place of the NUMA node in the topology, first row of I, number of rows)."""

    def prepare_forward(
        self,
        hidden: torch.Tensor,
        top_k_ids: torch.Tensor,
        top_k_weights: torch.Tensor,
        lora_tensors: tuple[torch.Tensor, ...],
        lora_layout: Layout,
        save: bool,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, ForwardCall]:
        """Output (`into`, if given, else new memory) and, with `save`, the state: one uint8 tensor that holds
        everything forward saves. What is in them counts once the call has run."""

    def backward(
        self,
        saved_tensors: tuple[torch.Tensor, ...],
        lora_layout: Layout,
        d_out: torch.Tensor,
        needs: tuple[bool | torch.Tensor, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """One value for each of `needs`, whose last ones are for hidden, top_k_weights and each LoRA tensor: their
        gradients. None where it is False, and for those before; where it is a tensor, the gradient is written to it.

        Args:
            saved_tensors: the state, hidden, top_k_weights, and the LoRA tensors.
        """

    def unpack(self, gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> None:
        """Writes the weights back into tensors of the caller's."""

class PackedMatrix:
    """A weight [N, K], bf16 or fp32, packed once for `fused_linear`."""

    def __init__(self, weight: torch.Tensor) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def is_bf16(self) -> bool: ...
    def unpack(self, weight: torch.Tensor) -> None:
        """Writes it back into a tensor of the caller's."""

@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    scale: float,
    bias: torch.Tensor | None = None,
    key_heads: int = 0,
    causal: bool = False,
    save: Literal[False] = False,
    first_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T + bias) v of bf16 [B, rows, heads D], head by head: [B T, heads D]; key_heads 0: as many as
    heads; first_keys int64 [B, T]; cpu_kernels/fused/attention.h."""

@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    scale: float,
    bias: torch.Tensor | None = None,
    key_heads: int = 0,
    causal: bool = False,
    *,
    save: Literal[True],
    first_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """With what attention_backward needs, fp32 [2, B heads T]: of each query the largest score and 1 / the sum."""

def attention_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    heads: int,
    scale: float,
    bias: torch.Tensor | None = None,
    key_heads: int = 0,
    causal: bool = False,
    first_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, of [B T, heads D] and [B S, key_heads D]; out is [B, T, heads D], and so is d_out;
    cpu_kernels/fused/attention_grad.h."""

def few_queries_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: int,
    scale: float,
    bias: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """softmax(scale q k^T + bias) v of bf16 [B heads, T, D] with keys and values [B key heads, S, D]: [B T, heads D];
    cpu_kernels/fused/few_queries_attention.h."""

def fused_linear(
    x: torch.Tensor,
    weight: PackedMatrix | None,
    transposed: bool = False,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_scale: float = 1.0,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    norm: str = "none",
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    eps: float = 0.0,
    save: bool = False,
    low_only: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """norm(activation(x (W + s B A)^T + bias + addend) + residual); x (W + s B A) if `transposed`; norm(x) without a
    weight. A is `lora_a` [r, K], B `lora_b` [N, r], both bf16 or fp32 and rounded to bf16, s `lora_scale`; bf16 alone.

    `x` and `residual` have one to three dimensions, whose rows follow each other, and the first result has those of
    `x`; all others have two. Vectors are bf16 or fp32. With `save` also the activation's input, the norm's result
    before gamma and beta, and 1 / std [rows, 1], where there is an activation or a norm, and with A and B what they
    make of x: ``s A x^T``, or ``s B^T x^T`` if `transposed`, [r, rows] fp32; with `low_only` as well that alone, and no
    first result."""

def low_rank_backward(
    p: torch.Tensor, low: torch.Tensor, x: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of A, ``p x``, and of B, ``d^T low^T``, both fp32: of `x`, [rows, K] bf16, and `d`, the gradient of
    what the product gave, [rows, N] bf16; `low` and `p` are what `fused_linear` made of them, [r, rows]."""

def norm_backward(
    norm: str,
    d_out: torch.Tensor,
    normalized: torch.Tensor,
    inverse_std: torch.Tensor,
    gamma: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the norm's input, gamma and beta, the last two fp32 [1, columns]."""

def activation_backward(activation: str, d_out: torch.Tensor, pre: torch.Tensor) -> torch.Tensor: ...
def sample_of(tensor: torch.Tensor) -> bytes:
    """Up to 64 values of a CPU tensor of one to three dimensions, spread over them: tells of a write."""

def log_probs(
    x: torch.Tensor,
    weight: PackedMatrix | None,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """fp32 [6, rows]: log-probabilities, logs of the sums of e^z, entropies, logs of the sums of p^2, mean logits, and
    1 where the target is the first of the largest; cpu_kernels/fused/log_probs.h."""

def log_probs_backward(
    d_log_probs: torch.Tensor | None,
    d_entropies: torch.Tensor | None,
    x: torch.Tensor,
    weight: PackedMatrix | None,
    targets: torch.Tensor,
    log_sums: torch.Tensor,
    entropies: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """The gradient of x."""

def silu_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...
def silu_mul_backward(d_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False) -> torch.Tensor: ...
def sample(
    logits: torch.Tensor,
    filters: tuple[float, int, float, float, float],
    penalties: tuple[float, float, float],
    context: torch.Tensor | None,
    stream: tuple[int, int, torch.Tensor | None],
    ids: torch.Tensor | None,
    confidence: torch.Tensor | None,
    kind: str,
    kept: torch.Tensor | None,
    scores: torch.Tensor | None,
) -> None:
    """Writes to those of `ids`, `confidence`, `kept` (flat, uint8) and `scores` that are given; sampling/sampler.h.

    filters: temperature, top_k, top_p, min_p, typical_p; penalties: repetition, frequency, presence; stream: seed,
    offset, row_ids.
    """

def apply_environment() -> None: ...
def set_num_threads(n: int) -> None: ...
def get_num_threads() -> int: ...
def set_thread_source(source: str) -> None: ...
def get_thread_source() -> str: ...
def isa() -> str: ...
def isa_tiers() -> list[IsaTier]: ...
def verify_isa(name: str) -> bool: ...
def cpu_name() -> str: ...
def set_timers_enabled(enabled: bool) -> None: ...
def timers_enabled() -> bool: ...
def reset_timers() -> None: ...
def timers_snapshot() -> list[RangeStats]: ...
def layers_snapshot() -> list[tuple[int, bool, int, int, int, float, float]]:
    """(layer, in its first call of a kind, place in timers_snapshot, calls, thread_ns, flops, bytes)."""

def add_timed(name: str, category: str, begin_ns: int, ns: int, bytes: float) -> None:
    """Counts one range that something else timed, on the calling thread; nothing while timers are off."""

def pool_snapshot() -> PoolTotals: ...

class OuterRange:
    """A range around what Python does, in the category "run", until `close`; closed twice is closed once."""

    def __init__(self, name: str) -> None: ...
    def close(self) -> None: ...

def mute_nvtx(muted: bool) -> bool:
    """Hides an NVTX tool from the ranges that open from now on, or shows it again; whether there is one."""

def time_ranges(blocks: int, evicted_bytes: int = 0) -> float:
    """What a range takes in ns, of those of a block of a forward and a backward; `blocks` of them, and so many bytes
    read before each, so that the caches hold those."""

def time_clock(count: int) -> float:
    """What a reading of the clock takes in ns."""

def mark_entry() -> None: ...
def mark_exit() -> None: ...
def calls() -> tuple[list[CallRecord], int]: ...
def start_trace(capacity: int = 65536) -> None: ...
def stop_trace() -> None: ...
def read_trace() -> list[ThreadTrace]: ...
def clock_ns() -> int:
    """The clock of all timers; profiling/clock.h."""

def count_thread_time(on: bool) -> None:
    """Whether that clock is the calling thread's CPU time."""

def memory_stats() -> MemoryStats: ...
def trim_memory() -> int: ...

class Cache(TypedDict):
    bytes: int
    pus: int

class NumaNode(TypedDict):
    os_index: int
    package: int
    memory_bytes: int
    pus: int

class Topology(TypedDict):
    is_host: bool
    packages: int
    cores: int
    pus: int
    nodes: list[NumaNode]
    l1d: Cache
    l2: Cache
    l3: Cache
    affinity: list[int]
    cpu_quota: float
    usable_cores: int

class ComputeNode(TypedDict):
    os_index: int
    cores: int
    #: why memory cannot be bound to the node; None: it can
    bind_error: str | None
    #: the node on which a page that was meant for this one came to lie; None: the system does not say
    lies_on: int | None

class ComputeProbe(TypedDict):
    isa: str
    instruction: str
    available: bool

class ReadProbe:
    """Streaming reads of a buffer larger than the caches, on 1 thread or on all of the pool."""

    def __init__(self, threads: int, bytes: int = 0) -> None: ...
    def measure(self, seconds: float) -> float:
        """GB/s."""

    @property
    def bytes(self) -> int: ...
    @property
    def method(self) -> str: ...

def topology() -> Topology: ...
def numa() -> list[ComputeNode]: ...
def openmp_threads_are_bound() -> bool: ...
def last_level_cache_bytes() -> int: ...
def scratch_bytes() -> int: ...
def compute_probes() -> list[ComputeProbe]: ...
def measure_compute(isa: str, threads: int, seconds: float) -> float: ...

class PoolProbe:
    """A thread pool of its own and what it costs, in microseconds; `source` is "own" or "openmp"."""

    def __init__(self, threads: int, source: str) -> None: ...
    def empty_jobs(self, count: int) -> list[float]: ...
    def wakes(self, count: int, pause_seconds: float) -> list[float]: ...
    def edges(self, count: int, length: int) -> list[float]: ...
    def small_tasks(self, count: int, tasks: int, task_us: float) -> list[float]: ...
    def steals(self, count: int) -> list[float]: ...

def empty_openmp_regions(count: int, threads: int) -> list[float]: ...
def kernel_tiers() -> list[tuple[str, bool]]: ...

class GemmProbe:
    """One call of a GEMM kernel on the calling thread; `form` is "direct", "unpack" or "gradient"."""

    def __init__(
        self, tier: int, form: str, activations: torch.Tensor, weights: torch.Tensor, copies: int = 1
    ) -> None: ...
    def measure(self, count: int) -> list[float]:
        """Microseconds of each call."""

    def result(self, out: torch.Tensor) -> None:
        """Writes the result of the last call to an fp32 tensor [rows, columns]."""

class MachineProbe:
    """Probes on a pool of so many own threads; rates are those of all of them together, in the best windows."""

    def __init__(self, threads: int, far_bytes: int) -> None:
        """`far_bytes`: more than the caches hold."""

    def compute(self, isa: str, seconds: float) -> float:
        """GFLOP/s."""

    def read(self, bytes: int, seconds: float) -> float:
        """GB/s of reading a block of so many bytes a thread over and over."""

    def memory(self, seconds: float) -> float:
        """GB/s of streaming through `far_bytes`."""

    def stream(self, isa: str, direct: bool, rows: int, seconds: float) -> tuple[float, float]:
        """GB/s of weights that a GEMM form with so many rows takes from memory, matrices of 2,048 x 512: in the best
        two milliseconds, and on average."""

    def dispatch(self) -> tuple[float, float]:
        """Microseconds: a parallel loop of one task a thread, and each further task of a thread."""

    def fetch(self, isa: str) -> float:
        """Nanoseconds to read a tile of 1 KB that another thread has packed, more than one of a thread's own."""

    def kernels(self, isa: str) -> KernelProbe:
        """The tier's kernels on all threads at the same time."""

class KernelRow(TypedDict):
    most_few_rows: int
    most_stored_rows: int
    few_tile_ns: list[list[float]]
    left_panels: int
    right_panels: int
    step_ns: list[list[float]]
    cell_ns: float
    again_ns: float
    call_ns: float
    unpack_tile_ns: float
    unpack_overlaps: bool
    pack_gbps: float

class LatencyProbe:
    """Loads of which each one's address comes from the one before, in a block of so many bytes."""

    def __init__(self, bytes: int) -> None: ...
    def measure(self, seconds: float) -> float:
        """Nanoseconds of a load, in the best moment."""

class KernelProbe:
    """A tier's kernels with operands in L1, on the calling thread, or on those of a MachineProbe."""

    def __init__(self, isa: str) -> None: ...
    def turn(self) -> None:
        """Times each of their calls once more."""

    def figures(self, product_ns: float) -> KernelRow:
        """From the least time of each call on one thread, its median on several. No step is faster than the ceiling,
        which takes `product_ns` for a product of two tiles."""

def measure_cell(isa: str) -> float:
    """Nanoseconds of a call of the widest cell with six steps, on the calling thread."""

def chunk_rows(rows: int, hidden: int, intermediate: int) -> int:
    """Rows of each job of an expert with so many; cpu_kernels/tile_evaluator.h."""

def choose_blocking(jobs: int, hidden: int, intermediate: int, threads: int, slots: int) -> tuple[int, int, int, int]:
    """Units of 128 rows of I and tile columns of H of a task; the last jobs, cut finer, and how many times finer."""

def tokens_per_merge(tokens: int, threads: int) -> int:
    """Tokens that one task of a merge adds up; cpu_kernels/tile_evaluator.h."""

def are_stored_rows(rows: int, most_few: int, most_stored: int) -> bool:
    """Whether the direct form takes so many rows in another way than by cells; cpu_kernels/gemm/tiles.h."""

def unpack_slice(matrix_unit: bool, tiles: int, panels: int, l2_bytes: int) -> int:
    """Right tiles of a slice of the unpack form's contraction, 0: all; cpu_kernels/tile_evaluator.h."""

def units_of_part(units: int, parts: int) -> int:
    """Of so many units of I, those in a part where there are so many parts or more."""

def columns_of_part(columns: int, parts: int) -> int:
    """Likewise of so many tile columns of H."""

def parts_of_long_job(rows: int, all_rows: int, threads: int) -> int:
    """Parts into which the stages of a job with so many of all rows are cut at least."""

def sweeps_in_place(experts: int, features: int, ranks: int) -> int:
    """Tasks of a sweep over a matrix B, [features, ranks * experts], of one adapter that is used where it lies."""

def adapters_in_place(rows: Sequence[int], input_rank: int, down_rank: int) -> bool:
    """Whether adapters of experts with so many rows are used where they lie; moe/lora_in_place.h. The ranks: of all
    adapters of gate and up, and of down."""

gemm_parts: tuple[str, ...]
gemm_model_version: int
most_measured_rows: int

_Problem = tuple[Sequence[int], int, int, int, int, float, str, bool, bool]
_Configuration = tuple[int, int, int, int, int, str]
_Answer = tuple[_Configuration, float, list[float], int, int]

class TileEvaluator:
    """The GEMM model of one machine at one number of threads; see cpu_kernels/tile_evaluator/gemm_model.h."""

    def __init__(self, figures: dict[str, Any]) -> None: ...
    def choose(self, shapes: Sequence[_Problem], space: str) -> list[_Answer]: ...
    def rank(self, shape: _Problem, space: str, count: int) -> list[_Answer]: ...
    def estimate(self, shape: _Problem, configuration: _Configuration) -> _Answer: ...

class FarWeights:
    """So many bytes of weights, more than the caches hold, that GEMMs read on and on; see
    profiling/bench/grouped_gemm.h."""

    def __init__(self, bytes: int) -> None: ...

class GroupedGemm:
    """A grouped GEMM on the engine's threads, run as configurations say; `isa` must run here. Without far weights it
    has its own, which caches may hold."""

    def __init__(self, isa: str, shape: _Problem, far: FarWeights | None = None) -> None: ...
    def measure(self, configurations: Sequence[_Configuration], count: int) -> list[list[float]]:
        """Milliseconds of `count` passes of each, which take turns. Before each pass some thread, another one each
        time, writes each part of all operands but the weights, as operators before do in a model."""

    def measure_passes(self, configuration: _Configuration, count: int) -> list[tuple[float, float]]:
        """Of each of `count` passes: milliseconds of packing, and of its tasks the longest over the mean."""

    def digest(self) -> int:
        """Of the bits of the last result."""
