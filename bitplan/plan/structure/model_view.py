"""What a model computes, as data: its tensors, the parts that read them, and who feeds whom.

A `ModelView` is made once (`bitplan.describe`) and asked by everybody: which projections read the same input, which
norm comes before them and who else reads it, what joins gate and up, what is tied, which blocks repeat. Values of the
run are numbers: two parts read the same tensor if they name the same value.

    LinearUse        a product with a weight, however it is written; of rank 3 it is the experts of a layer
    NormUse          RMSNorm, LayerNorm and others, as one function or spelled out
    EmbeddingUse     rows of a table, picked by indices
    ConvolutionUse   a convolution of any rank
    GatedMlpUse      down(act(gate(x)) * up(x))
    ExpertsUse       the same for many experts, whose weights one module holds
    PlainMlpUse      down(act(up(x)))
    AttentionUse     which projections queries, keys and values come from, and which read its result
    Residual         a sum of a value and something computed from it
    Stack            blocks that follow one another

Nothing here is decided by the name of a class or of an attribute. What was not seen is in `unknown`, with the reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from bitplan.formats import get_format
from bitplan.formats.elements import ITEM_BYTES, dtype_name, torch_dtype
from bitplan.formats.format import Format
from bitplan.plan.names import number_ranges

if TYPE_CHECKING:
    import torch

TRACED, TABLE = "traced", "table"
UNKNOWN, UNUSED = "unknown", "unused"


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a model, of a file or of a module: the record that all parts of bitplan share.

    role      what it is for: query, key, value, qkv, attention_output, gate, up, gate_up, down, router, head, linear,
              embedding, position_embedding, norm, bias, scale, convolution, other; unknown where that was not seen,
              unused where a run without numbers did not read it
    format    of a file's tensor, or of a packed one; None for a module's plain parameter
    module    the path of the module that holds it
    tied_to   its other names
    experts   how many matrices it holds, one for each expert; 0 where it is one tensor
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str = UNKNOWN
    module: str = ""
    format: str | None = None
    tied_to: tuple[str, ...] = ()
    experts: int = 0


def transposed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix's transpose, or of a stack of such."""
    return (*shape[:-2], shape[-1], shape[-2])


@dataclass(frozen=True)
class TensorSpec(TensorRecord):
    """A tensor of a file, or one that is to be written: the record of it, and where its bytes lie.

    dtype     the type of its numbers; float32 for a packed tensor
    format    one of ours, or the dtype, or `gguf:TYPE`, `gptq:TYPE` and so on for types that come decoded
    encoded   it comes as an Encoded
    start     an offset from the beginning of its file, where it lies in one piece
    transposed  packed as the transpose of the model's tensor, along the inputs of its product
    """

    format: str = ""
    nbytes: int = 0
    encoded: bool = False
    start: int = 0
    transposed: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        shape: tuple[int, ...],
        fmt: Format | str | None = None,
        dtype: torch.dtype | str = "float32",
        **more: Any,
    ) -> Self:
        """A tensor in a format, or plain (without one) with numbers of this type; the bytes follow from the shape."""
        facts: dict[str, Any]
        if fmt is not None:
            fmt, kind = get_format(fmt), "float32"
            facts = {"format": fmt.name, "nbytes": fmt.nbytes(shape), "encoded": True}
        else:
            kind = dtype if isinstance(dtype, str) else dtype_name(dtype)
            facts = {"format": kind, "nbytes": math.prod(shape) * ITEM_BYTES.get(kind, 0)}
        return cls(name, shape, kind, **facts | more)

    @property
    def shape_in_model(self) -> tuple[int, ...]:
        return transposed_shape(self.shape) if self.transposed else self.shape

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    @property
    def fmt(self) -> Format | None:
        """The format of a tensor that comes as an Encoded; None for plain numbers."""
        return get_format(self.format) if self.encoded else None

    @property
    def held(self) -> str:
        """What a plan calls the bytes: the format of a packed tensor, else the type of its numbers."""
        return self.format if self.encoded else self.dtype

    @property
    def accepts(self) -> dict[torch.dtype, tuple[int, ...]]:
        """The types in which a writer takes the tensor, and the shape that it must then have."""
        return {self.torch_dtype: self.shape}


@dataclass(frozen=True)
class WeightUse:
    """One use of weights: where the weights are, which value goes in and which comes out."""

    path: str  # of the module that holds the weight
    module: str  # of the module whose forward computes it; another where weights are shared or read from outside
    input: int
    output: int
    step: int

    @property
    def what(self) -> str:
        """The role or kind of the use, in a word."""
        word = getattr(self, "role", None) or getattr(self, "kind", None) or getattr(self, "function", None)
        return str(word or "embedding")

    @property
    def shown_path(self) -> str:
        """The path of its module, with the weight's name where the module holds several, such as stacked experts."""
        weight = str(getattr(self, "weight", None) or "")
        return weight if weight and not weight.endswith("weight") else self.path


@dataclass(frozen=True)
class LinearUse(WeightUse):
    """A product of an input's last dimension with a weight.

    shape       outputs and inputs, whichever way the weight lies
    is_columns  the weight is [inputs, outputs], as in GPT-2's Conv1D
    source      the input without views and copies of it: what "reads the same input" compares
    experts     matrices in a weight of rank 3; 0 for a plain one. `item` is the one matrix that was read, if one
    computed    names of parameters from which the weight is computed, where it is none itself (parametrizations)
    is_whole    False where only some rows or columns of the weight were read
    """

    weight: str = ""
    bias: str | None = None
    shape: tuple[int, int] = (0, 0)
    is_columns: bool = False
    source: int = -1
    experts: int = 0
    item: int | None = None
    role: str = "linear"
    function: str = "linear"
    computed: tuple[str, ...] = ()
    is_whole: bool = True


@dataclass(frozen=True)
class NormUse(WeightUse):
    """A norm over the last dimensions.

    kind               rms_norm, layer_norm, group_norm, batch_norm or instance_norm
    plus_one           the factor is 1 + weight
    is_spelled         written as a chain of small steps, not as one function
    computes_in        the type of the chain where it differs from the input's ("float32"); "" where it does not
    casts_before_weight  the normed numbers are cast back before they are multiplied by the weight
    readers            weights of the projections that read its output
    others             what else reads it, as "function in module"; empty: nothing but those projections
    """

    kind: str = "rms_norm"
    weight: str | None = None
    bias: str | None = None
    eps: float | None = None
    size: tuple[int, ...] = ()
    plus_one: bool = False
    is_spelled: bool = False
    computes_in: str = ""
    casts_before_weight: bool = False
    readers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def only_projections(self) -> bool:
        return bool(self.readers) and not self.others


@dataclass(frozen=True)
class EmbeddingUse(WeightUse):
    """Rows of a table. `by` says what picks them: the model's input, or positions that the forward makes."""

    weight: str = ""
    shape: tuple[int, ...] = ()
    by: str = "input"


@dataclass(frozen=True)
class ConvolutionUse(WeightUse):
    weight: str = ""
    bias: str | None = None
    shape: tuple[int, ...] = ()
    function: str = "conv2d"


@dataclass(frozen=True)
class InputGroup:
    """Projections that read one input, in the order of their calls. `others` reads it too, and is no projection."""

    input: int
    producer: str
    linears: tuple[LinearUse, ...]
    others: tuple[str, ...] = ()
    is_one_tensor: bool = True  # False where some read a view or a copy of it

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(linear.weight for linear in self.linears)


@dataclass(frozen=True)
class GatedMlpUse:
    """down(act(gate(x)) * up(x)). In a fused one `gate` and `up` are the same projection.

    gate_part, up_part  which share of a fused projection's output is gate and which is up
    activation          silu, gelu, gelu_tanh, relu, ...; "gpt_oss" for its clamped gating, which is no product
                        act(gate) * up; "other" where the function is none that is known
    only_down           gate, up and their product are read by nothing else
    has_casts           numbers change their type between the projections
    has_dropout         numbers are dropped between them, since the model is training
    """

    gate: LinearUse
    up: LinearUse
    down: LinearUse
    activation: str
    gate_part: int = 0
    up_part: int = 0
    only_down: bool = True
    is_interleaved: bool = False
    has_casts: bool = False
    has_dropout: bool = False

    @property
    def is_fused(self) -> bool:
        return self.gate.weight == self.up.weight


@dataclass(frozen=True)
class ExpertsUse:
    """A module that holds the matrices of many experts: a sum over a token's experts of down(act(gate(x)) * up(x)).

    gate_up, down   names of its weights of rank 3; biases likewise. `is_columns`: they are [experts, inputs, outputs]
    fault           why it is not known to be that sum and nothing else; empty where it is
    """

    gate_up: str = ""
    down: str = ""
    gate_up_bias: str | None = None
    down_bias: str | None = None
    activation: str = "other"
    is_columns: bool = False
    is_interleaved: bool = False
    fault: str = ""

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(name for name in (self.gate_up, self.down) if name)


@dataclass(frozen=True)
class PlainMlpUse:
    """An MLP without a gate: down(act(up(x)))."""

    up: LinearUse
    down: LinearUse
    activation: str
    only_down: bool = True
    has_casts: bool = False
    has_dropout: bool = False


@dataclass(frozen=True)
class AttentionUse:
    """Weights from which queries, keys and values come, and of the projections that read the result."""

    module: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    values: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class ModuleUse:
    """The one call of a module: the values that went in and came out, and the functions that were called between.

    functions  (step, name, path of the module that calls it), in order; a dropout of nothing is called "identity"
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    functions: tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class Residual:
    module: str
    kept: int  # the value that goes past
    added: int  # what was computed from it
    output: int


@dataclass(frozen=True)
class Stack:
    """Blocks in the order of their calls; those of one number in `kinds` compute the same, on weights of one shape."""

    path: str
    blocks: tuple[str, ...]
    kinds: tuple[int, ...]


@dataclass(frozen=True)
class ModelView:
    """What was seen of a model. `source` is "traced", or "table" where names alone were known.

    joined    weights that engines compute as one layer (q, k and v; gate and up), and which so need one format
    changed   by path: hooks, parametrizations and forwards that were put on a module or its class
    unknown   by path of a module: why what it computes was not seen
    notes     what the run assumed
    """

    source: str
    tensors: tuple[TensorRecord, ...]
    linears: tuple[LinearUse, ...] = ()
    norms: tuple[NormUse, ...] = ()
    embeddings: tuple[EmbeddingUse, ...] = ()
    convolutions: tuple[ConvolutionUse, ...] = ()
    attentions: tuple[AttentionUse, ...] = ()
    residuals: tuple[Residual, ...] = ()
    gated: tuple[GatedMlpUse, ...] = ()
    plain: tuple[PlainMlpUse, ...] = ()
    stacks: tuple[Stack, ...] = ()
    joined: tuple[tuple[str, ...], ...] = ()
    changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    producers: Mapping[int, str] = field(default_factory=dict)  # value -> who made it
    others: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # value -> readers that are no projection
    seen_by: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # value -> modules that take or give it
    calls: Mapping[str, ModuleUse] = field(default_factory=dict)  # modules that are called once, by path
    fed_by: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # a part's step -> steps of the parts before it

    @cached_property
    def parts(self) -> dict[str, tuple[WeightUse, ...]]:
        """All parts by the path of the module that holds their weights."""
        by_path: dict[str, list[WeightUse]] = {}
        every: Iterable[WeightUse] = (*self.linears, *self.norms, *self.embeddings, *self.convolutions)
        for part in sorted(every, key=lambda part: part.step):
            by_path.setdefault(part.path, []).append(part)
        return {path: tuple(parts) for path, parts in by_path.items()}

    @cached_property
    def _shown_blocks(self) -> dict[str, str]:
        """Names to show for blocks; of those that compute the same the first has one, for all: `layers.[0..7]`."""
        shown: dict[str, str] = {}
        for stack in self.stacks:
            for kind in dict.fromkeys(stack.kinds):
                alike = [block for block, number in zip(stack.blocks, stack.kinds, strict=True) if number == kind]
                numbers = [block[len(stack.path) + 1 :] for block in alike]
                together = number_ranges(numbers) if all(map(str.isdecimal, numbers)) else ",".join(numbers)
                shown[alike[0]] = f"{stack.path}.[{together}]".lstrip(".") if len(alike) > 1 else alike[0]
        return shown

    def _shown(self, name: str) -> str:
        """A module or weight under the name of the blocks that it stands for."""
        block = self.block_of(name)
        return self._shown_blocks.get(block, block) + name[len(block) :]

    def shown_parts(self) -> list[tuple[str, WeightUse]]:
        """Name the parts for a reader, in the order of the run; blocks that compute the same are shown once."""
        rows, shown = [], set()
        for part in sorted((part for parts in self.parts.values() for part in parts), key=lambda part: part.step):
            block, name = self.block_of(part.path), part.shown_path
            if (not block or block in self._shown_blocks) and (name, type(part)) not in shown:
                shown.add((name, type(part)))
                rows.append((self._shown(name), part))
        return rows

    @cached_property
    def by_name(self) -> dict[str, TensorRecord]:
        return {tensor.name: tensor for tensor in self.tensors}

    def linear(self, path: str) -> LinearUse | None:
        """The projection that a module holds; None where it holds none, several, or uses it several times."""
        products = [part for part in self.parts.get(path, ()) if isinstance(part, LinearUse)]
        return products[0] if len(products) == 1 else None

    def uses(self, weight: str) -> tuple[LinearUse, ...]:
        """All products with a weight: several where it is shared, or its module is called several times."""
        return tuple(linear for linear in self.linears if linear.weight == weight)

    def role(self, name: str) -> str:
        return self.by_name[name].role if name in self.by_name else UNKNOWN

    def input_groups(self) -> list[InputGroup]:
        """Projections by the input that they read, in the order of the run; a group may have one alone."""
        groups: dict[int, list[LinearUse]] = {}
        for linear in self.linears:
            groups.setdefault(linear.source, []).append(linear)
        return [
            InputGroup(
                source,
                self.producers.get(source, ""),
                tuple(linears),
                self.others.get(source, ()),
                len({linear.input for linear in linears}) == 1,
            )
            for source, linears in groups.items()
        ]

    def norm_before(self, path: str) -> NormUse | None:
        """The norm whose output a module's projection reads; None where something else comes between."""
        linear = self.linear(path)
        if linear is None:
            return None
        return next((norm for norm in self.norms if norm.output in (linear.source, linear.input)), None)

    def watchers(self, *values: int) -> tuple[str, ...]:
        """Modules with hooks or a forward of somebody else's that take or give one of these values."""
        paths = (path for value in values for path in self.seen_by.get(value, ()))
        return tuple(dict.fromkeys(path for path in paths if path in self.changed))

    def gated_mlps(self) -> tuple[GatedMlpUse, ...]:
        return self.gated

    def plain_mlps(self) -> tuple[PlainMlpUse, ...]:
        return self.plain

    def blocks(self) -> tuple[Stack, ...]:
        return self.stacks

    def block_of(self, path: str) -> str:
        """The block that a module is in; empty where it is in none."""
        return next((block for block in self._blocks if path == block or path.startswith(f"{block}.")), "")

    @cached_property
    def _blocks(self) -> tuple[str, ...]:
        return tuple(block for stack in self.stacks for block in stack.blocks)

    def table_rows(self) -> list[dict[str, str]]:
        """Give a row a part for people: what it is, what it reads and with whom, and what was put on it."""
        together = {linear: group for group in self.input_groups() for linear in group.linears}
        activation = {mlp.down: mlp.activation for mlp in self.gated}
        activation |= {mlp.down: mlp.activation for mlp in self.plain}
        rows = []
        for name, part in self.shown_parts():
            record = self.by_name.get(getattr(part, "weight", None) or "")
            group = together[part] if isinstance(part, LinearUse) else None
            beside = [other.path.rpartition(".")[2] for other in group.linears if other != part] if group else []
            words = [f"{activation[part]} before it"] if isinstance(part, LinearUse) and part in activation else []
            words += [f"read with {', '.join(dict.fromkeys(beside))}"] if beside else []
            words += self.changed.get(part.path, ())
            words += [f"also {', '.join(record.tied_to)}"] if record is not None and record.tied_to else []
            rows.append(
                {
                    "part": name,
                    "what": part.what,
                    "weight": "x".join(map(str, _weight_shape(part, record))),
                    "reads": " ".join(map(self._shown, group.producer.split(" "))) if group is not None else "",
                    "notes": "; ".join(words),
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Give for JSON everything but what the methods derive."""
        plain = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name in ("producers", "others", "seen_by", "calls", "fed_by"):
            del plain[name]
        return {
            name: [_as_dict(item) for item in value] if isinstance(value, tuple) else _as_dict(value)
            for name, value in plain.items()
        } | {
            "input_groups": [
                {"producer": group.producer, "weights": list(group.weights), "others": list(group.others)}
                for group in self.input_groups()
            ]
        }


def _weight_shape(part: WeightUse, record: TensorRecord | None) -> tuple[int, ...]:
    """Give a weight's shape as the file or the module has it; as the run has it where the file has another name."""
    if record is not None:
        return record.shape
    if isinstance(part, LinearUse):
        turned = part.shape[::-1] if part.is_columns else part.shape
        return (part.experts, *turned) if part.experts else turned
    return part.size if isinstance(part, NormUse) else getattr(part, "shape", ())


def _as_dict(item: Any) -> Any:
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return dataclasses.asdict(item)
    return dict(item) if isinstance(item, Mapping) else item
