"""The tensors of a gpt-oss checkpoint in each of its three layouts: names, shapes, and their contents.

| layout | file | q, k, v | gate and up | experts in MXFP4 | experts in floats |
|---|---|---|---|---|---|
| openai | safetensors | one tensor, one after another | one tensor, rows alternate | blocks, scales | not defined |
| hf | safetensors | three tensors | one tensor, rows alternate | OpenAI's bytes | [E, inputs, outputs] |
| gguf | GGUF | three tensors | two tensors | 17-byte blocks | [E, outputs, inputs] |

To describe all three, a model is cut into `parts`, the largest pieces that no layout cuts further (q, k, v, gate, up,
...). A `LayoutTensor` is one tensor of a file and the parts it holds. Sources: openai's checkpoint.py, transformers'
GptOssExperts (floats lie transposed there), llama.cpp's gpt-oss architecture in gguf-py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple, get_args

from bitplan.base.errors import StoreError, did_you_mean
from bitplan.plan.structure.model_view import TensorRecord

Layout = Literal["openai", "hf", "gguf"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
LAYOUT_TITLES = {"openai": "OpenAI's", "hf": "Hugging Face's", "gguf": "GGUF's"}
# plain: the rows of its parts, one part after another · woven: two parts that alternate along the last axis ·
# blocks, scales: MXFP4, gate and up alternating by rows · transposed: floats [E, inputs, outputs] ·
# matrix: [E, outputs, inputs], floats or GGUF's MXFP4
Kind = Literal["plain", "woven", "blocks", "scales", "transposed", "matrix"]
BLOCK = 32


@dataclass(frozen=True)
class GptOssShape:
    """The sizes that fix every tensor's shape; the defaults are gpt-oss-20b's."""

    layers: int = 24
    experts: int = 32
    hidden: int = 2880
    intermediate: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 201088

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if type(size) is not int or not 0 < size < 2**31:
                raise StoreError(f"gpt-oss: `{name}` must be an integer above 0 and below {2**31}, got {size!r}")
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % BLOCK:
                raise StoreError(
                    f"gpt-oss: `{name}` must be a multiple of {BLOCK}, MXFP4's block, got {getattr(self, name)}"
                )
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise StoreError(
                f"gpt-oss: `heads` must be a multiple of `kv_heads` and `head_dim` even, "
                f"got {self.heads}, {self.kv_heads} and {self.head_dim}"
            )

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    def matrix(self, parts: tuple[str, ...]) -> tuple[int, int]:
        """Count the outputs and inputs of one expert's matrix."""
        if parts == ("down",):
            return self.hidden, self.intermediate
        return self.intermediate * len(parts), self.hidden


PRESETS = {
    "20b": GptOssShape(),
    "120b": GptOssShape(layers=36, experts=128),
    "tiny": GptOssShape(2, 4, 64, 96, 4, 2, 16, 128),
}


def make_shape(preset: str, **sizes: int | None) -> GptOssShape:
    """The sizes of a published model, or of a tiny one, with some of them (those not None) replaced."""
    if preset not in PRESETS:
        raise StoreError(f"no size {preset!r}; there are {', '.join(PRESETS)}{did_you_mean(preset, PRESETS)}")
    return replace(PRESETS[preset], **{name: size for name, size in sizes.items() if size is not None})


@dataclass(frozen=True)
class LayoutTensor(TensorRecord):
    """One tensor of a file, which holds some parts of a layer (None: of the whole model); its type is the file's."""

    dtype: str = ""
    _: KW_ONLY
    kind: Kind
    parts: tuple[str, ...]
    layer: int | None = None

    @property
    def is_expert(self) -> bool:
        return self.kind in ("blocks", "scales", "transposed", "matrix")

    @property
    def weaves(self) -> bool:
        """Whether gate and up alternate in the tensor."""
        return len(self.parts) == 2


_ExpertNames = dict[str, tuple[str, ...]]


class _Part(NamedTuple):
    name: str
    openai: str
    hf: str
    gguf: str
    sizes: str

    def shape(self, sizes: GptOssShape) -> tuple[int, ...]:
        return tuple(getattr(sizes, size) for size in self.sizes.split())


# A part, its names in OpenAI's, Hugging Face's and GGUF's layout, its sizes. Neighbours with the same name in a column
# are one tensor in that layout.
_BEFORE_LAYERS = "embed | embedding.weight | model.embed_tokens.weight | token_embd.weight | vocab hidden"
_OF_LAYER = """
attn_norm   | attn.norm.scale | input_layernorm.weight          | attn_norm.weight           | hidden
q           | attn.qkv.weight | self_attn.q_proj.weight         | attn_q.weight              | q_rows hidden
k           | attn.qkv.weight | self_attn.k_proj.weight         | attn_k.weight              | kv_rows hidden
v           | attn.qkv.weight | self_attn.v_proj.weight         | attn_v.weight              | kv_rows hidden
q_bias      | attn.qkv.bias   | self_attn.q_proj.bias           | attn_q.bias                | q_rows
k_bias      | attn.qkv.bias   | self_attn.k_proj.bias           | attn_k.bias                | kv_rows
v_bias      | attn.qkv.bias   | self_attn.v_proj.bias           | attn_v.bias                | kv_rows
sinks       | attn.sinks      | self_attn.sinks                 | attn_sinks.weight          | heads
out         | attn.out.weight | self_attn.o_proj.weight         | attn_output.weight         | hidden q_rows
out_bias    | attn.out.bias   | self_attn.o_proj.bias           | attn_output.bias           | hidden
mlp_norm    | mlp.norm.scale  | post_attention_layernorm.weight | post_attention_norm.weight | hidden
router      | mlp.gate.weight | mlp.router.weight               | ffn_gate_inp.weight        | experts hidden
router_bias | mlp.gate.bias   | mlp.router.bias                 | ffn_gate_inp.bias          | experts
gate_bias   | mlp.mlp1_bias   | mlp.experts.gate_up_proj_bias   | ffn_gate_exps.bias         | experts intermediate
up_bias     | mlp.mlp1_bias   | mlp.experts.gate_up_proj_bias   | ffn_up_exps.bias           | experts intermediate
down_bias   | mlp.mlp2_bias   | mlp.experts.down_proj_bias      | ffn_down_exps.bias         | experts hidden
"""
_AFTER_LAYERS = """
final_norm | norm.scale         | model.norm.weight | output_norm.weight | hidden
unembed    | unembedding.weight | lm_head.weight    | output.weight      | vocab hidden
"""
_FIRST, _LAYER, _LAST = (
    tuple(_Part(*map(str.strip, row.split("|"))) for row in table.strip().splitlines())
    for table in (_BEFORE_LAYERS, _OF_LAYER, _AFTER_LAYERS)
)
_GGUF_EXPERTS: _ExpertNames = {
    "ffn_gate_exps.weight": ("gate",),
    "ffn_up_exps.weight": ("up",),
    "ffn_down_exps.weight": ("down",),
}
_EXPERTS: dict[tuple[Layout, bool], _ExpertNames] = {
    ("openai", True): {"mlp.mlp1_weight.": ("gate", "up"), "mlp.mlp2_weight.": ("down",)},
    ("hf", True): {"mlp.experts.gate_up_proj_": ("gate", "up"), "mlp.experts.down_proj_": ("down",)},
    ("hf", False): {"mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",)},
    ("gguf", True): _GGUF_EXPERTS,
    ("gguf", False): _GGUF_EXPERTS,
}
LAYER_PREFIX = {"openai": "block.", "hf": "model.layers.", "gguf": "blk."}
# Parts that llama.cpp wants in float32: vectors, norms, biases and the router.
_GGUF_WIDE = {part.name for part in _LAYER if len(part.shape(GptOssShape())) == 1 or part.name.endswith("_bias")}
GGUF_WIDE = _GGUF_WIDE | {"router", "final_norm"}


_SHAPES = {part.name: part.shape for part in (*_FIRST, *_LAYER, *_LAST)}


def part_shape(part: str, shape: GptOssShape) -> tuple[int, ...]:
    """The shape of a part that is not an expert's matrix."""
    return _SHAPES[part](shape)


def list_slots(layout: Layout, shape: GptOssShape, *, packed: bool = True) -> list[LayoutTensor]:
    """Every tensor of a checkpoint, in the model's order; `packed` says whether the experts are MXFP4."""
    if (layout, packed) not in _EXPERTS:
        raise StoreError(
            "OpenAI's layout holds experts in MXFP4 and in nothing else; 'hf' and 'gguf' take bfloat16 experts",
            settings={"to": "hf"},
        )
    slots = list(_plain_slots(layout, shape, _FIRST, None))
    for layer in range(shape.layers):
        slots += _plain_slots(layout, shape, _LAYER, layer)
        slots += _expert_slots(layout, shape, packed, layer)
    return [*slots, *_plain_slots(layout, shape, _LAST, None)]


def checkpoint_bytes(layout: Layout, shape: GptOssShape, *, packed: bool = True) -> int:
    """The bytes of all tensors; those that are not experts in bfloat16 (GGUF: some in float32)."""
    total = 0
    for slot in list_slots(layout, shape, packed=packed):
        numbers = math.prod(slot.shape)
        if slot.kind in ("blocks", "scales"):
            total += numbers
        elif slot.kind == "matrix" and packed:
            total += numbers * 17 // BLOCK
        else:
            total += numbers * (4 if layout == "gguf" and set(slot.parts) <= GGUF_WIDE else 2)
    return total


def slot_name(layout: Layout, part: str) -> str:
    """The tensor that holds a plain part, in layer 0 where there are layers."""
    for slot in list_slots(layout, GptOssShape(layers=1)):
        if part in slot.parts and not slot.is_expert:
            return slot.name
    raise KeyError(part)


def _plain_slots(
    layout: Layout, shape: GptOssShape, parts: tuple[_Part, ...], layer: int | None
) -> Iterator[LayoutTensor]:
    prefix = "" if layer is None else f"{LAYER_PREFIX[layout]}{layer}."
    for name, group in groupby(parts, key=lambda part: str(getattr(part, layout))):
        of_group = list(group)
        names, shapes = tuple(part.name for part in of_group), [part.shape(shape) for part in of_group]
        kind: Kind
        sizes: tuple[int, ...]
        if names == ("gate_bias", "up_bias"):
            sizes, kind = (shape.experts, 2 * shape.intermediate), "woven"
        else:
            sizes, kind = (sum(rows for rows, *_ in shapes), *shapes[0][1:]), "plain"
        yield LayoutTensor(prefix + name, sizes, kind=kind, parts=names, layer=layer)


def _expert_slots(layout: Layout, shape: GptOssShape, packed: bool, layer: int) -> Iterator[LayoutTensor]:
    for stem, parts in _EXPERTS[layout, packed].items():
        name = f"{LAYER_PREFIX[layout]}{layer}.{stem}"
        outputs, inputs = shape.matrix(parts)
        blocks = (shape.experts, outputs, inputs // BLOCK)
        tensors: dict[str, tuple[Kind, tuple[int, ...]]] = {name: ("transposed", (shape.experts, inputs, outputs))}
        if layout == "gguf":
            tensors = {name: ("matrix", (shape.experts, outputs, inputs))}
        elif packed:
            tensors = {f"{name}blocks": ("blocks", (*blocks, BLOCK // 2)), f"{name}scales": ("scales", blocks)}
        for tensor, (kind, sizes) in tensors.items():
            yield LayoutTensor(tensor, sizes, kind=kind, parts=parts, layer=layer)
