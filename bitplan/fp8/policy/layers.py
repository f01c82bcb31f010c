"""The linear layers of a model as one GPU sees them: kind, name, local shape, and how many tokens reach them.

A model is one or two parts (an LLM, and for a vision-language model a ViT), each a stack of blocks of few distinct
shapes. The kinds follow Megatron's transformer blocks on TransformerEngine, where the names come from:

    attention     qkv: layernorm_column [(heads + 2 kv_heads) head_dim, hidden], divided over TP by rows
                  proj: row [hidden, heads head_dim], divided over TP by columns
    MLA           q_down_proj, kv_down_proj: duplicated, whole on every GPU
                  q_up_proj, kv_up_proj: layernorm_column, the norm between down and up fused (column without one)
                  q_proj: column, where there is no q_lora_rank; proj: row
    MLP           fc1: layernorm_column [ffn, hidden], gate and up together where it is gated; fc2: row [hidden, ffn]
    experts       fc1: column_grouped, fc2: row_grouped, divided over ETP; each GPU holds experts / EP of them
    shared        fc1: column (the router needs the norm too, so it is not fused), fc2: row; all tokens, divided over TP

Not here, because they stay out of FP8: embeddings, the router, the output layer, a VLM's projector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitplan.fp8.policy.vocabulary import (
    COUNT,
    GROUPED_KINDS,
    NORM_KIND,
    ModelConfigError,
    count_tokens,
    shape_obstacle,
)


@dataclass(frozen=True)
class Parallel:
    """Tensor, expert and expert-tensor parallel sizes."""

    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for key in ("tp", "ep", "etp"):
            if not COUNT.holds(getattr(self, key)):
                raise ModelConfigError(f"{key} must be {COUNT.text}, got {getattr(self, key)!r}")


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's MLA: queries, keys and values pass through a low rank; without `q_rank` queries do not."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_fused: bool = True


@dataclass(frozen=True)
class Experts:
    count: int
    ffn: int
    topk: int
    shared_ffn: int = 0


@dataclass(frozen=True)
class ModelPart:
    """One stack of blocks. `keys` maps our field names to the configuration's keys, for messages."""

    part: str
    hidden: int
    dense_blocks: int
    moe_blocks: int
    attention: Attention | LatentAttention
    ffn: int
    gated: bool
    experts: Experts | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    where: str = "model"


@dataclass(frozen=True)
class Layer:
    """One distinct linear layer on one GPU, and how many blocks have it. `shape` is out_features, in_features."""

    part: str
    kind: str
    name: str
    role: str  # attention, mlp, expert or shared expert
    shape: tuple[int, int]
    blocks: int
    parallel: Parallel
    num_gemms: int | None = None
    moe_router_topk: int | None = None

    def tokens(self, seq_length: int, micro_batch_size: int) -> int:
        """Logical tokens, as the policy counts them."""
        return count_tokens(seq_length, micro_batch_size, moe_router_topk=self.moe_router_topk or 1)

    def question(self) -> dict[str, Any]:
        """The arguments of `should_use_fp8`, and fields of a report's row, for this layer, without tokens."""
        size: dict[str, Any] = {"name": self.name, "tp": self.parallel.tp}
        if self.kind in GROUPED_KINDS:
            size = {"etp": self.parallel.etp, "num_gemms": self.num_gemms}
        return {"part": self.part, "kind": self.kind, "shape": self.shape} | size


@dataclass(frozen=True)
class Case:
    """One layer at one logical token count: what a benchmark times. `obstacle` says why the recipe cannot run it."""

    layer: Layer
    tokens: int
    obstacle: str | None = None


def local_layers(parts: Iterable[ModelPart], parallel: Parallel) -> list[Layer]:
    """The distinct layers of all parts on one GPU; a size that cannot be divided is an error that names its key."""
    parts = list(parts)
    if (parallel.ep > 1 or parallel.etp > 1) and parts and not any(part.experts for part in parts):
        sizes = f"ep {parallel.ep}, etp {parallel.etp}"
        raise ModelConfigError(f"{parts[0].where}: {sizes} were asked for, and the model has no experts; set both to 1")
    return [layer for part in parts for layer in _part_layers(part, parallel)]


def layers_of_shapes(text: str, part: str = "llm", tp: int = 1) -> list[Layer]:
    """`12288x4096:norm,4096x4096`: dense layers by outputs and inputs of one GPU, with a norm in front or without."""
    layers = []
    for item in dict.fromkeys(word.strip() for word in text.split(",")):
        size, _, norm = item.partition(":")
        outputs, _, inputs = size.lower().partition("x")
        is_shape = all(word.isascii() and word.isdigit() and 0 < len(word) <= 9 for word in (outputs, inputs))
        if not is_shape or norm not in ("", "norm") or "0" in (outputs, inputs):
            raise ModelConfigError(
                "shapes must be OUTxIN or OUTxIN:norm with commas between, such as 12288x4096:norm,4096x4096, "
                f"got {item!r}"
            )
        kind, shape = NORM_KIND if norm else "column", (int(outputs), int(inputs))
        layers.append(Layer(part, kind, f"{shape[0]}x{shape[1]}", "linear", shape, 1, Parallel(tp=tp)))
    return layers


def bench_cases(layers: Iterable[Layer], sweep: Sequence[tuple[int, int]], recipe: str) -> list[Case]:
    """Every layer at every token count of a sweep of (sequence length, micro batch size), each count once."""
    cases = []
    for layer in layers:
        counts = sorted({layer.tokens(length, batch) for length, batch in sweep})
        cases += [Case(layer, tokens, shape_obstacle(recipe, layer.shape)) for tokens in counts]
    return cases


def _part_layers(part: ModelPart, parallel: Parallel) -> list[Layer]:
    tp = _Divider(part, "tp", parallel.tp)
    blocks = part.dense_blocks + part.moe_blocks
    shapes: list[tuple[str, str, str, tuple[int, int], int]] = []
    attention = part.attention
    if isinstance(attention, LatentAttention):
        shapes += [
            (kind, name, "attention", shape, blocks) for kind, name, shape in _latent(part.hidden, attention, tp)
        ]
    else:
        heads, kv_heads = tp(attention.heads, "heads"), tp(attention.kv_heads, "kv_heads")
        qkv = ((heads + 2 * kv_heads) * attention.head_dim, part.hidden)
        shapes.append(("layernorm_column", "qkv", "attention", qkv, blocks))
        shapes.append(("row", "proj", "attention", (part.hidden, heads * attention.head_dim), blocks))
    if part.dense_blocks:
        ffn = tp(part.ffn, "ffn")
        shapes.append(("layernorm_column", "fc1", "mlp", (_fc1(part, ffn), part.hidden), part.dense_blocks))
        shapes.append(("row", "fc2", "mlp", (part.hidden, ffn), part.dense_blocks))
    if part.experts is not None and part.experts.shared_ffn:
        shared = tp(part.experts.shared_ffn, "shared_ffn")
        shapes.append(("column", "fc1", "shared expert", (_fc1(part, shared), part.hidden), part.moe_blocks))
        shapes.append(("row", "fc2", "shared expert", (part.hidden, shared), part.moe_blocks))
    layers = [Layer(part.part, *shape, parallel) for shape in shapes]
    return layers + (_expert_layers(part, part.experts, parallel) if part.experts is not None else [])


def _expert_layers(part: ModelPart, experts: Experts, parallel: Parallel) -> list[Layer]:
    ffn = _Divider(part, "etp", parallel.etp)(experts.ffn, "expert_ffn")
    gemms = _Divider(part, "ep", parallel.ep)(experts.count, "experts")
    shapes = (("column_grouped", "fc1", (_fc1(part, ffn), part.hidden)), ("row_grouped", "fc2", (part.hidden, ffn)))
    return [
        Layer(part.part, kind, name, "expert", shape, part.moe_blocks, parallel, gemms, experts.topk)
        for kind, name, shape in shapes
    ]


def _latent(hidden: int, mla: LatentAttention, tp: _Divider) -> list[tuple[str, str, tuple[int, int]]]:
    heads = tp(mla.heads, "heads")
    up = "layernorm_column" if mla.norm_fused else "column"
    q_out = heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_rank is None:
        queries = [("column", "q_proj", (q_out, hidden))]
    else:
        queries = [("duplicated", "q_down_proj", (mla.q_rank, hidden)), (up, "q_up_proj", (q_out, mla.q_rank))]
    return [
        *queries,
        ("duplicated", "kv_down_proj", (mla.kv_rank + mla.rope_dim, hidden)),
        (up, "kv_up_proj", (heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)),
        ("row", "proj", (hidden, heads * mla.v_dim)),
    ]


def _fc1(part: ModelPart, ffn: int) -> int:
    return 2 * ffn if part.gated else ffn


@dataclass(frozen=True)
class _Divider:
    """Divides a size of a part over GPUs, or says which key of the configuration cannot be divided."""

    part: ModelPart
    what: str
    over: int

    def __call__(self, size: int, word: str) -> int:
        if size % self.over:
            key = self.part.keys.get(word, word)
            fitting = [str(count) for count in (1, 2, 4, 8, 16, 32, 64) if size % count == 0]
            raise ModelConfigError(
                f"{self.part.where}: {key} is {size}, which {self.what} {self.over} does not divide; "
                f"choose {self.what} from {', '.join(fitting)}"
            )
        return size // self.over
