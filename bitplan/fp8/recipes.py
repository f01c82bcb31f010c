"""The table of FP8 recipes: how each scales the operands of a product, which shapes it takes, and where it runs.

A recipe is one row here. Kernels and products of its own are chosen by the scaling's name in `bitplan.fp8.kernels`;
without them a recipe runs on a CPU only, by the definition in `bitplan.fp8.casts`. No torch is loaded here: plans and
documents know recipes by their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitplan.base.errors import FormatError, did_you_mean

BLOCK, MX_BLOCK = 128, 32
BF16 = "bf16"  # stands in place of a recipe for products that are not FP8


@dataclass(frozen=True)
class ScaleBlock:
    """The numbers of an operand that share one scale, and how scales are stored.

    rows, cols     of a block; None: all of them
    power_of_two   the scale is the smallest power of two at or above amax / limit, not amax / limit itself
    as_byte        scales are stored as E8M0; otherwise as float32
    layout         "rows": row by row, as the blocks lie; "columns": column by column; "fours": each row of scales is
                   padded to a multiple of four. The GPU's library asks for the last two
    """

    rows: int | None
    cols: int | None
    power_of_two: bool = False
    as_byte: bool = False
    layout: Literal["rows", "columns", "fours"] = "rows"


@dataclass(frozen=True)
class Recipe:
    """One row of the table.

    activations, weights   the scalings, by name; gradients are scaled as activations are
    multiple               tokens are padded to a multiple of this, and both sizes of a weight must be one:
                           16 bytes for the tensor cores, or the block
    experts                the scales of its grouped products, "vector" (of rows and columns) or "block"; None: it has
                           no such products
    capability             the least compute capability of a GPU; None: it has no kernels and runs on a CPU alone
    needs, instead         the capability in words, and the recipe to use where it is missing
    """

    name: str
    activations: str
    weights: str
    multiple: int
    experts: Literal["vector", "block"] | None = None
    capability: tuple[int, int] | None = None
    needs: str = "has no kernels for a GPU and runs on a CPU alone"
    instead: str = "tensorwise"

    @property
    def has_one_scale(self) -> bool:
        """Whether an activation has one scale: processes can agree on it, and it is much like that of the last step."""
        return self.activations == "tensor"

    @property
    def is_storable(self) -> bool:
        """Whether a weight's transposed codes are the cast of its transpose: one copy then serves fprop and dgrad."""
        block = SCALINGS[self.weights]
        return block.rows == block.cols


SCALINGS: dict[str, ScaleBlock] = {
    "tensor": ScaleBlock(None, None, power_of_two=True),
    "row": ScaleBlock(1, None),
    "1x128": ScaleBlock(1, BLOCK, layout="columns"),
    "128x128": ScaleBlock(BLOCK, BLOCK, layout="fours"),
    "1x32": ScaleBlock(1, MX_BLOCK, power_of_two=True, as_byte=True),
}
RECIPES: dict[str, Recipe] = {}
PRODUCT_PAIRS: set[tuple[str, str]] = set()  # scalings that are multiplied with each other


def register_recipe(recipe: Recipe, **scalings: ScaleBlock) -> None:
    """Add a row, and scalings that it is the first to use. Call it before a plan is read that names the recipe."""
    if recipe.name in (BF16, *RECIPES):
        raise FormatError(f"there is a recipe {recipe.name!r} already; give the new one another name")
    known = SCALINGS | scalings
    for name in (recipe.activations, recipe.weights):
        if name not in known:
            raise FormatError(f"recipe {recipe.name!r}: scaling must be one of {', '.join(known)}, got {name!r}")
        if recipe.multiple % (known[name].rows or 1) or recipe.multiple % (known[name].cols or 1):
            raise FormatError(f"recipe {recipe.name!r}: a multiple of {recipe.multiple} has no whole blocks of {name}")
    for name, block in scalings.items():
        if SCALINGS.get(name, block) != block:
            raise FormatError(f"there is another scaling {name!r} already; give the new one another name")
        if block.cols is None and block.rows not in (None, 1):
            raise FormatError(f"scaling {name!r}: of whole rows one or all share a scale, got {block.rows}")
    SCALINGS.update(scalings)
    RECIPES[recipe.name] = recipe
    PRODUCT_PAIRS.update({(recipe.activations, recipe.weights), (recipe.activations, recipe.activations)})


def recipe_fault(name: object, what: str = "recipe", also: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a name that stands for a recipe, or is one of `also`; None for one that is known."""
    known = (*also, *RECIPES)
    if name in known:
        return None
    return f"{what} must be one of {', '.join(known)}, got {name!r}{did_you_mean(str(name), known)}"


def find_recipe(name: str) -> Recipe:
    if fault := recipe_fault(name):
        raise FormatError(fault)
    return RECIPES[name]


def expert_recipes() -> tuple[str, ...]:
    """Recipes that have grouped products."""
    return tuple(name for name, recipe in RECIPES.items() if recipe.experts is not None)


_BLOCK_SCALES = "needs hardware with block scales (compute capability 10.0)"
for _row in (
    Recipe("tensorwise", "tensor", "tensor", 16, "vector", (8, 9)),
    Recipe("rowwise", "row", "row", 16, "vector", (8, 9)),
    Recipe("blockwise", "1x128", "128x128", BLOCK, "block", (9, 0), "was built for compute capability 9.0 and later"),
    Recipe("mxfp8", "1x32", "1x32", MX_BLOCK, None, (10, 0), _BLOCK_SCALES, "blockwise"),
):
    register_recipe(_row)
