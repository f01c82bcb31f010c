"""The kinds that adaptive FP8 knows: of modules, GEMMs, recipes, answers, and how tokens are counted.

They are LoongForge's, and every module of adaptive FP8 uses them:

    kind      what a linear layer is: dense kinds are looked up by tensor-parallel size; grouped kinds, the
              experts of an MoE, by expert-tensor-parallel size and by the number of experts on a GPU
    name      the buffer name of a dense module, `ub_name` in LoongForge: qkv, proj, fc1, ...
    part      "llm" or "vit": the two parts of a vision-language model see different token counts and never mix
    gemm      "module" is a whole linear forward and backward, casts included; fprop, dgrad and wgrad are its products
    tokens    logical rows of the product: sequence length x micro batch, times moe_router_topk for
              experts. A kernel's padding is a cost that shows in the time; it is never part of a key
"""

from __future__ import annotations

from bitplan.base.documents import Kind, is_number, one_of
from bitplan.base.errors import BitplanError, FileFormatError, did_you_mean
from bitplan.fp8.recipes import RECIPES

NORM_KIND = "layernorm_column"
DENSE_KINDS = (NORM_KIND, "column", "row", "duplicated")
GROUPED_KINDS = ("column_grouped", "row_grouped")
KINDS = (*DENSE_KINDS, *GROUPED_KINDS)
PROMOTED = {"column": "column_grouped", "layernorm_column": "column_grouped", "row": "row_grouped"}
# LoongForge's order, in which policies are written; then MLA's names, which LoongForge leaves out.
UB_NAMES = ("qkv", "proj", "fc1", "fc2", "q_down_proj", "kv_down_proj", "q_proj", "q_up_proj", "kv_up_proj")
_NAME_OF_ROLE = dict.fromkeys(("query", "key", "value", "qkv", "key_value", "query_key", "query_value"), "qkv")
_NAME_OF_ROLE |= dict.fromkeys(("gate", "up", "gate_up"), "fc1") | {"attention_output": "proj", "down": "fc2"}
PARTS = ("llm", "vit")
MODULE = "module"
PRODUCTS = ("fprop", "dgrad", "wgrad")
GEMMS = (MODULE, *PRODUCTS)
PRECISIONS = ("bf16", "fp8")
DEFAULT_RECIPE = "blockwise"
DEFAULT_THRESHOLD = 1.0

WIN, LOSE, UNDECIDED, UNMEASURED = "win", "lose", "undecided", "unmeasured"
ANSWERS = (WIN, LOSE, UNDECIDED, UNMEASURED)


SPEEDUP = Kind("a number above 0", lambda value: is_number(value) and value > 0)
TIME_MS = Kind("a time from 1e-6 to 1e9 milliseconds", lambda value: is_number(value) and 1e-6 <= value <= 1e9)


class Fp8Error(BitplanError, ValueError):
    """Base of the errors of adaptive FP8: a bad question, option, layer or file."""


class PolicyError(Fp8Error, FileFormatError):
    """A policy that cannot be read."""


class PolicyVersionError(PolicyError):
    """A policy of a version that this bitplan does not read."""


class PolicyKindError(PolicyError):
    """A policy with a module kind that does not exist."""


class FingerprintError(Fp8Error):
    """Evidence from another machine or other software than the one it is used on or merged with."""


class BenchReportError(Fp8Error, FileFormatError):
    """A benchmark report that cannot be read, or was cut off."""


class MergeError(Fp8Error):
    """Reports that cannot become one policy."""


class ModelConfigError(Fp8Error, FileFormatError):
    """A model configuration that does not determine the layers, or cannot be divided as asked."""


def check_kind(kind: object, where: str, error: type[Fp8Error] = PolicyKindError) -> None:
    if kind not in KINDS:
        hint = did_you_mean(kind[:80], KINDS) if isinstance(kind, str) else ""
        raise error(f"{where}: unknown module kind {repr(kind)[:80]}; the kinds are {', '.join(KINDS)}{hint}")


def is_count(value: object) -> bool:
    return type(value) is int and 1 <= value < 2**48


COUNT = Kind("an integer from 1", is_count)
KIND = one_of(*KINDS)
LOCAL_SHAPE = Kind(
    "two sizes from 1, out_features and in_features of one GPU",
    lambda value: type(value) in (list, tuple) and len(value) == 2 and all(map(is_count, value)),
    write=list,
)


def promote(kind: str, is_expert: bool) -> str:
    """The kind under which a layer is looked up: the grouped kind for an expert's, else `kind` itself."""
    return PROMOTED.get(kind, kind) if is_expert else kind


def count_tokens(seq_length: int, micro_batch_size: int, *, moe_router_topk: int = 1) -> int:
    """Sequence length x micro batch size, times the experts that each token is sent to."""
    for what, value in (
        ("seq_length", seq_length),
        ("micro_batch_size", micro_batch_size),
        ("moe_router_topk", moe_router_topk),
    ):
        if not is_count(value):
            raise Fp8Error(f"{what} must be {COUNT.text}, got {value!r}")
    return seq_length * micro_batch_size * moe_router_topk


def shape_obstacle(recipe: str, shape: tuple[int, int]) -> str | None:
    """Why a weight of this local shape cannot be cast by the recipe, or None where it can."""
    multiple = RECIPES[recipe].multiple
    for what, size in zip(("out_features", "in_features"), shape, strict=True):
        if size % multiple:
            return f"{what} {size} is not a multiple of {multiple}, which {recipe} needs"
    return None


def name_of_role(role: str, projections: int = 1) -> str | None:
    """The name by which policies of version 1 know a layer that was seen to be this; None for a part of one."""
    name = _NAME_OF_ROLE.get(role)
    return None if name == "qkv" and projections < 3 and role != "qkv" else name


def kind_of(name: str | None, *, has_norm: bool) -> str:
    """The kind of a dense layer of this name, with a norm of its own in front or not."""
    return NORM_KIND if has_norm else "column" if name in ("qkv", "fc1") else "row"


def name_rank(name: str) -> tuple[int, str]:
    """The names of UB_NAMES in that order, then the others by letter."""
    return (UB_NAMES.index(name) if name in UB_NAMES else len(UB_NAMES), name)
