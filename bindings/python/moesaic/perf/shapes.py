"""GEMM shapes: one of them, and all of a transformer."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from moesaic.perf.fields import whole
from moesaic.perf.layer_plan import cut_jobs, round_up
from moesaic.perf.model_config import TransformerConfig
from moesaic.perf.routing import RoutingLaw

TYPES = {"bf16": 2, "fp32": 4}
WEIGHTS = {"bf16": 2.0}
FORMS = ("direct", "unpack", "gradient")
_CACHED = "_l3"
"""Behind the format of cached weights, in a key."""


@dataclasses.dataclass(frozen=True)
class GemmShape:
    """A grouped GEMM: ``C_g [m, n] = X_g [m, k] W_g``, each of `groups` groups with weights of its own.

    Args:
        groups: number of products.
        m: rows of each of them; with `rows` the most.
        k: the contraction.
        n: columns.
        input: type of X, "bf16" or "fp32" (rounded to bf16 when it is packed).
        output: type of C, "bf16" or "fp32".
        weights: format of W: "bf16".
        rows: rows of each group, where they differ; 0: left out.
        form: the kernel: "direct" (result transposed), "unpack" (result row-major), "gradient" (both factors are
            activations, the contraction runs along their rows); None: whichever of the first two is faster.
        packed: X lies in tiles already, as between two products of an experts layer: packing costs nothing.
        cached: W lies in the last-level cache, from its use before; else it comes from memory.
        name: what it is for; no part of the shape.

    Raises:
        ValueError: a size or a name that makes no sense.
    """

    groups: int = 1
    m: int = 1
    k: int = 1
    n: int = 1
    input: str = "bf16"
    output: str = "bf16"
    weights: str = "bf16"
    rows: tuple[int, ...] | None = None
    form: str | None = None
    packed: bool = False
    cached: bool = False
    name: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        for field, least in (("groups", 1), ("m", 0), ("k", 1), ("n", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or value < least or value > 2**40:
                raise ValueError(f"{field} is {value!r}, expected a whole number from {least} on")
        for field, known in (("input", TYPES), ("output", TYPES), ("weights", WEIGHTS)):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} is {getattr(self, field)!r}, expected one of {', '.join(known)}")
        if self.form is not None and self.form not in FORMS:
            raise ValueError(f"form is {self.form!r}, expected one of {', '.join(FORMS)} or None")
        if self.form == "gradient" and self.output != "fp32":
            raise ValueError(f"output is {self.output!r}, expected 'fp32' with form 'gradient': sums stay exact")
        if self.rows is not None:
            object.__setattr__(self, "rows", tuple(self.rows))  # a list has no hash
            if len(self.rows) != self.groups or min(self.rows) < 0:
                raise ValueError(
                    f"rows has {len(self.rows)} entries, expected {self.groups}, one a group, none negative"
                )
            if max(self.rows) != self.m:
                raise ValueError(f"m is {self.m}, expected {max(self.rows)}, the most of rows")

    @classmethod
    def skewed(cls, rows: Sequence[int], **sizes: object) -> GemmShape:
        """The shape of groups with these rows; equal ones become plain `m`, and groups without rows are left out."""
        found = tuple(sorted((r for r in rows if r > 0), reverse=True)) or (0,)
        same = found[0] == found[-1]
        return cls(groups=len(found), m=found[0], rows=None if same else found, **sizes)  # type: ignore[arg-type]

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Rows of each group."""
        return self.rows if self.rows is not None else (self.m,) * self.groups

    @property
    def key(self) -> str:
        """The shape as a part of a cache's key."""
        rows, weights = "even", self.weights + (_CACHED if self.cached else "")
        if self.rows is not None:
            counts = collections.Counter(self.rows)
            rows = "_".join(f"{r}x{counts[r]}" for r in sorted(counts, reverse=True))
        return (
            f"g{self.groups}.m{self.m}.k{self.k}.n{self.n}.{self.input}.{self.output}.{weights}."
            f"{self.form or 'any'}.{'tiles' if self.packed else 'rows'}.{rows}"
        )

    @classmethod
    def from_key(cls, key: str) -> GemmShape:
        """The shape of a `key`; the order of its groups is lost.

        Raises:
            ValueError: it is none.
        """
        try:
            groups, m, k, n, input_, output, weights, form, packed, rows = key.split(".")
            if (groups[0], m[0], k[0], n[0]) != ("g", "m", "k", "n") or packed not in ("tiles", "rows"):
                raise ValueError
            some = [tuple(map(int, part.split("x"))) for part in rows.split("_")] if rows != "even" else None
            return cls(
                groups=int(groups[1:]),
                m=int(m[1:]),
                k=int(k[1:]),
                n=int(n[1:]),
                input=input_,
                output=output,
                weights=weights.removesuffix(_CACHED),
                rows=None if some is None else tuple(r for r, count in some for _ in range(count)),
                form=None if form == "any" else form,
                packed=packed == "tiles",
                cached=weights.endswith(_CACHED),
            )
        except (ValueError, IndexError):
            raise ValueError(f"key is {key!r}, expected that of a GEMM shape") from None


def expert_rows(tokens: int, top_k: int, experts: int, routing: str = "uniform") -> tuple[int, ...]:
    """Rows of each expert when `tokens` tokens choose `top_k` of `experts`, most first; the same for the same
    arguments.

    Args:
        tokens: T.
        top_k: k.
        experts: E.
        routing: as `RoutingLaw.parse` takes it. Uniform: as even as it goes.

    Raises:
        ValueError: an unknown routing, or a number that makes no sense.
    """
    shares = RoutingLaw.parse(routing).popularity(experts, top_k).tolist()
    slots = whole("tokens", tokens, 0) * top_k
    # An expert takes each token once at most; what is over goes to the next.
    rows = [0.0] * experts
    left = float(slots)
    free = list(range(experts))
    while left > 1e-9 and free:
        together = sum(shares[i] for i in free)
        if together <= 0:
            break
        for i in free:
            rows[i] += left * shares[i] / together
        left = sum(max(0.0, rows[i] - tokens) for i in free)
        for i in free:
            rows[i] = min(rows[i], float(tokens))
        free = [i for i in free if rows[i] < tokens and shares[i] > 0]
    counts = [int(r) for r in rows]
    rest = slots - sum(counts)
    for i in sorted(range(experts), key=lambda i: counts[i] - rows[i])[:rest]:
        counts[i] += 1
    return tuple(sorted(counts, reverse=True))


def generate_transformer_gemm_shapes(
    config: TransformerConfig | dict[str, object] | str,
    batch_sizes: Iterable[int] = (1,),
    sequence_lengths: Iterable[int] = (1,),
    *,
    tensor_parallel: Iterable[int] = (1,),
    training: bool = False,
    lora_rank: int = 0,
    routing: str = "uniform",
) -> list[GemmShape]:
    """Every GEMM shape of a model, each once: attention (or MLA's low-rank projections), dense FFN, router, experts,
    LoRA and the LM head.

    Args:
        config: a `TransformerConfig`, a config.json as a dict, or its file name.
        batch_sizes: sequences at a time; with `sequence_lengths`, each pair is one number of tokens.
        sequence_lengths: tokens of each sequence in one pass; 1: decoding.
        tensor_parallel: devices over which each matrix is split, each of these.
        training: also the products of backward: the gradient of each input, and LoRA's.
        lora_rank: of an adapter on every expert projection; 0: none.
        routing: of tokens to experts, see `expert_rows`.

    Returns:
        Shapes with `name` set, duplicates removed (the first name stays).

    Raises:
        ValueError: a field of the configuration is missing or makes no sense; a size is not positive.
    """
    model = config if isinstance(config, TransformerConfig) else TransformerConfig.load(config)
    batches, lengths, splits = list(batch_sizes), list(sequence_lengths), list(tensor_parallel)
    for name, values in (("batch_sizes", batches), ("sequence_lengths", lengths), ("tensor_parallel", splits)):
        if not values or any(not isinstance(v, int) or v < 1 for v in values):
            raise ValueError(f"{name} is {values}, expected positive whole numbers")
    found: dict[GemmShape, None] = {}
    for split in splits:
        for batch in batches:
            for length in lengths:
                for shape in layer_shapes(model, batch, length, split, training, lora_rank, routing):
                    found.setdefault(shape)
    return list(found)


def layer_shapes(
    model: TransformerConfig,
    batch: int,
    length: int,
    tensor_parallel: int = 1,
    training: bool = False,
    lora_rank: int = 0,
    routing: str = "uniform",
) -> list[GemmShape]:
    """The shapes of one pass of `batch` x `length` tokens, in the order of the layer, with repetitions; see
    `generate_transformer_gemm_shapes`. The LM head sees all tokens in training, one a sequence otherwise."""
    tokens = batch * length
    shapes: list[GemmShape] = []

    def split(size: int) -> int:
        return -(-size // tensor_parallel)

    def dense(name: str, k: int, n: int, rows: int = tokens) -> None:
        shapes.append(GemmShape(m=rows, k=k, n=n, name=name))
        if training:
            shapes.append(GemmShape(m=rows, k=n, n=k, name=f"{name}.backward"))

    for name, k, n in model.attention_products(split):
        dense(name, k, n)
    if model.dense_layers > 0:
        dense("mlp.gate_up_proj", model.hidden_size, 2 * split(model.intermediate_size))
        dense("mlp.down_proj", split(model.intermediate_size), model.hidden_size)
    if model.experts > 0:
        dense("router", model.hidden_size, model.experts)
        if model.shared_intermediate_size > 0:
            dense("shared_expert.gate_up_proj", model.hidden_size, 2 * split(model.shared_intermediate_size))
            dense("shared_expert.down_proj", split(model.shared_intermediate_size), model.hidden_size)
        rows = expert_rows(tokens, model.experts_per_token, model.experts, routing)
        shapes += experts_shapes(rows, model.hidden_size, split(model.moe_intermediate_size), lora_rank, training)
    dense("lm_head", model.hidden_size, split(model.vocab_size), tokens if training else batch)
    return shapes


def experts_shapes(
    rows: Sequence[int], hidden: int, intermediate: int, lora_rank: int = 0, training: bool = False
) -> list[GemmShape]:
    """The products of an experts layer as the engine computes them: which form each takes, what is packed before, and
    what comes out as bf16. `rows`: of each expert."""

    def of(name: str, k: int, n: int, form: str, output: str, packed: bool) -> GemmShape:
        return GemmShape.skewed(rows, k=k, n=n, form=form, output=output, packed=packed, name=f"experts.{name}")

    low = round_up(whole("lora_rank", lora_rank, 0), 32)
    # B is a further part of a base product's contraction: of ranks up to 16 both bf16 parts of what it is multiplied
    # with share one step of it.
    parts = 1 if lora_rank <= 16 else 2
    found = [of("gate_up_proj", hidden + parts * low, 2 * intermediate, "direct", "bf16", False)]
    if lora_rank > 0:
        found += [of("gate_up_lora", hidden, low, "direct", "fp32", True)]
    found += [of("down_proj", intermediate + parts * low, hidden, "unpack", "bf16", True)]
    if lora_rank > 0:
        found += [of("down_lora", intermediate, low, "unpack", "fp32", True)]
    if training:
        found += [
            of("down_proj.backward", hidden + parts * low, intermediate, "direct", "fp32", False),
            of("gate_up_proj.backward", 2 * intermediate + parts * low, hidden, "unpack", "bf16", True),
        ]
    if training and lora_rank > 0:
        found += [
            of("down_lora.backward", hidden, low, "direct", "fp32", True),
            of("gate_up_lora.backward", 2 * intermediate, low, "unpack", "fp32", True),
            *_adapter_gradients(rows, hidden, intermediate, lora_rank),
        ]
    return found


def _adapter_gradients(rows: Sequence[int], hidden: int, intermediate: int, rank: int) -> list[GemmShape]:
    """dA and dB: sums over the rows of a job, which are rounded up to whole tiles; jobs of one length in a shape."""
    low, parts = round_up(rank, 32), 1 if rank <= 16 else 2
    lengths = collections.Counter(round_up(job.rows, 32) for job in cut_jobs(rows, hidden, intermediate))
    found = []
    for length, jobs in sorted(lengths.items(), reverse=True):
        # Name, rows and columns of the gradient as it is computed, parts of the contraction.
        for name, m, n, times in (
            ("down_lora.dA", intermediate, low, parts),
            ("down_lora.dB", hidden, low, 1),
            ("gate_up_lora.dA", rank, hidden, 2),
            ("gate_up_lora.dB", intermediate, low, 1),
        ):
            found.append(
                GemmShape(
                    groups=jobs,
                    m=m,
                    k=times * length,
                    n=n,
                    output="fp32",
                    form="gradient",
                    packed=True,
                    name=f"experts.{name}",
                )
            )
    return found
