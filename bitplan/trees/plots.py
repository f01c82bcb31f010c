"""Pictures of a fitted model, by matplotlib, which is imported when one is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitplan.base.optional import require
from bitplan.trees.checks import one_of, whole_number
from bitplan.trees.fitted import IMPORTANCES, FittedTrees
from bitplan.trees.gradients import TreesError
from bitplan.trees.scikit import check_is_fitted
from bitplan.trees.tree import Tree

SHOWN_CATEGORIES = 4


def plot_importance(model: FittedTrees, ax: Any = None, *, kind: str | None = None, most: int = 20) -> Any:
    """Bars of the `most` important features, by total "gain" or number of "split"s; returns matplotlib's axes."""
    check_is_fitted(model)
    kind = one_of("kind", kind or model.importance_type, IMPORTANCES)
    totals = model.booster_.importances(kind)
    chosen = np.argsort(totals, kind="stable")[::-1][: whole_number("most", most, 1)]
    chosen = chosen[totals[chosen] > 0][::-1]  # the largest at the top
    axes = _axes(ax, "plot_importance", (6.0, 0.4 * len(chosen) + 1.0))
    axes.barh([_name(model, int(feature)) for feature in chosen], totals[chosen])
    axes.set_xlabel("gain of splits" if kind == "gain" else "number of splits")
    axes.set_title("Feature importance")
    return axes


def plot_tree(model: FittedTrees, number: int = 0, ax: Any = None) -> Any:
    """Tree `number` of the model: splits, and leaves with their values and rows; returns matplotlib's axes."""
    check_is_fitted(model)
    trees = model.booster_.trees
    if whole_number("number", number, 0) >= len(trees):
        raise TreesError(f"number: the model has trees 0 to {len(trees) - 1}, got {number}")
    tree = trees[number]
    positions = _positions(tree)
    deepest = max(depth for _, depth in positions.values())
    axes = _axes(ax, "plot_tree", (1.6 * tree.leaves + 1.0, 1.2 * deepest + 1.5))
    axes.set_axis_off()
    axes.set_title(f"Tree {number}")
    for node, (across, depth) in positions.items():
        if node >= 0 and tree.leaves > 1:
            for child, label in ((int(tree.left[node]), "yes"), (int(tree.right[node]), "no")):
                to = positions[child]
                axes.plot([across, to[0]], [-depth, -to[1]], color="gray", zorder=1)
                axes.text((across + to[0]) / 2, -(depth + to[1]) / 2, label, fontsize=7, color="gray", ha="center")
        leaf = f"{tree.leaf_value[~node]:.4g}\n{tree.leaf_rows[~node]} rows" if node < 0 else ""
        shown = leaf or _split_text(model, tree, node)
        axes.text(
            across, -depth, shown, fontsize=8, ha="center", va="center", bbox={"boxstyle": "round", "fc": "white"}
        )
    axes.set_xlim(-0.7, tree.leaves - 0.3)
    axes.set_ylim(-deepest - 0.5, 0.5)
    return axes


def _axes(ax: Any, purpose: str, size: tuple[float, float]) -> Any:
    if ax is not None:
        return ax
    return require("matplotlib.pyplot", purpose=purpose).subplots(figsize=size)[1]


def _positions(tree: Tree) -> dict[int, tuple[float, int]]:
    """Positions (across, depth) of nodes, and of leaves under ~leaf: leaves side by side, nodes between children."""
    if tree.leaves == 1:
        return {~0: (0.0, 0)}
    positions: dict[int, tuple[float, int]] = {}
    depths, order, open_ = {0: 0}, [], [0]
    while open_:
        node = open_.pop()
        order.append(node)
        if node >= 0:
            for child in (int(tree.right[node]), int(tree.left[node])):
                depths[child] = depths[node] + 1
                open_.append(child)
    leaves = [node for node in order if node < 0]
    positions |= {leaf: (float(across), depths[leaf]) for across, leaf in enumerate(leaves)}
    for node in sorted((node for node in order if node >= 0), reverse=True):  # children come after their parents
        sides = positions[int(tree.left[node])][0], positions[int(tree.right[node])][0]
        positions[node] = sum(sides) / 2, depths[node]
    return positions


def _split_text(model: FittedTrees, tree: Tree, node: int) -> str:
    feature, members = int(tree.feature[node]), tree.categories[node]
    name = _name(model, feature)
    if members is None:
        missing = " or missing" if tree.missing_left[node] else ""
        return f"{name} ≤ {tree.threshold[node]:.4g}{missing}\n{tree.node_rows[node]} rows"
    categories = model.categories_.get(feature)
    shown = [str(categories[int(member)]) if categories else f"{member:.0f}" for member in members[:SHOWN_CATEGORIES]]
    more = f", and {len(members) - len(shown)} more" if len(members) > len(shown) else ""
    return f"{name} in {', '.join(shown)}{more}\n{tree.node_rows[node]} rows"


def _name(model: FittedTrees, feature: int) -> str:
    names = getattr(model, "feature_names_in_", None)
    return f"feature {feature}" if names is None else str(names[feature])
