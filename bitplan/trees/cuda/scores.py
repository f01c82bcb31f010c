"""Scores on the GPU, with the gradients that follow from them: those of the CPU, to the bit."""

from __future__ import annotations

import numpy as np
import torch
import triton
from torch import Tensor

from bitplan.base.loops.launch import PreparedLaunch
from bitplan.trees.cuda import score_kernels as kernels
from bitplan.trees.cuda.grower import CudaTreeGrower
from bitplan.trees.cuda.limits import Sent, check_memory
from bitplan.trees.cuda.score_kernels import BLOCK, CudaGradients, EntryWriter
from bitplan.trees.gradients import FAR_SUMS, QUANTIZED, Array, GradientPrecision, far_scale, few_of, largest, units
from bitplan.trees.grow import Grown, GrowthRules, newton_steps
from bitplan.trees.objectives import Binary, Multiclass, Objective, SquaredError
from bitplan.trees.tree import Tree

LOOKERS = 528  # programs that look for the largest gradient
# Another objective's gradients are the host's.
_KNOWN = (SquaredError, Binary, Multiclass)


def has_gradients(objective: Objective) -> bool:
    """Whether the GPU computes gradients of this objective."""
    return type(objective) in _KNOWN


class _Magnitudes:
    """Magnitudes of numbers that lie on the GPU: how many are beyond a bound, and which."""

    def __init__(self, numbers: Tensor) -> None:
        self._sizes = numbers.abs()

    def count(self, bound: float) -> int:
        return int((self._sizes > np.float32(bound).item()).sum())

    def beyond(self, bound: float) -> Array:
        beyond: Array = self._sizes[self._sizes > np.float32(bound).item()].cpu().numpy()
        return beyond


class CudaScores:
    """Scores (outputs, rows), gradients and hessians of all rows, on the GPU of the grower."""

    def __init__(
        self,
        objective: Objective,
        y: Array,
        weights: Array,
        scores: Array,
        grower: CudaTreeGrower,
        precision: GradientPrecision,
        renew_leaves: bool,
        rules: GrowthRules,
    ) -> None:
        self._objective, self._y, self._weights, self._grower = objective, y, weights, grower
        self._ends, self._renews, self._rules = QUANTIZED[precision].ends, renew_leaves, rules
        device = self._device = grower.device
        count, outputs = scores.shape
        check_memory(device, count, grower.features, count * (16 * outputs + (8 if len(weights) else 0) + 8))
        self._scores = torch.from_numpy(np.ascontiguousarray(scores.T)).to(device)
        self._y_there = self._to_device(y.astype(np.float64))
        self._weights_there = self._to_device(weights.astype(np.float64)) if len(weights) else self._y_there
        self._grads = torch.empty((outputs, count), dtype=torch.float32, device=device)
        self._hess = torch.empty_like(self._grads)
        self._doubtful_at = 2 * outputs  # behind the bits of the largest: their number, then the rows
        self._summary = torch.zeros(self._doubtful_at + 1 + kernels.DOUBTFUL, dtype=torch.int64, device=device)
        self._doubtful = self._summary[self._doubtful_at :]
        self._tops = np.zeros((outputs, 2))
        self._writer = EntryWriter(count, device)
        self._sent, self._values = Sent(2, device), Sent(grower.most_leaves, device)  # units of sums; leaf values
        self._gradients = self._gradient_launch()
        programs = min(triton.cdiv(max(count, 1), BLOCK), LOOKERS) if device.type == "cuda" else 1
        self._find_largest = PreparedLaunch(
            kernels.find_largest, (programs, outputs), (count,), {"BLOCK": BLOCK}, num_warps=4
        )

    def find_gradients(self) -> None:
        """Compute gradients of all outputs, and their largest; refuses what has no scale, as the CPU does."""
        self._summary[: self._doubtful_at + 1] = 0
        launch, pointers = self._gradients
        launch(*pointers)
        doubtful, tops = self._look()
        if doubtful:
            self._ask_host(doubtful)
            self._summary[: self._doubtful_at] = 0
            _, tops = self._look()
        for output, top in enumerate(tops):
            if not np.all(top < np.inf):
                largest(self._grads[output].cpu().numpy(), self._hess[output].cpu().numpy())  # names the row
        self._tops = tops

    def _gradient_launch(self) -> tuple[PreparedLaunch, tuple[Tensor, ...]]:
        """The launch that computes gradients, and what it gets."""
        objective, count, outputs = self._objective, len(self._y), len(self._grads)
        pointers: tuple[Tensor, ...] = (self._y_there, self._scores, self._weights_there, self._grads, self._hess)
        kernel, shape = kernels.squared_error, {"WEIGHTED": len(self._weights) > 0, "BLOCK": BLOCK}
        if isinstance(objective, Binary):
            kernel, pointers = kernels.binary, (*pointers, self._doubtful)
        elif not isinstance(objective, SquaredError):
            factor = torch.tensor([outputs / (outputs - 1.0)], dtype=torch.float64).to(self._device)
            kernel, pointers, shape = kernels.softmax, (*pointers, self._doubtful, factor), {"CLASSES": outputs} | shape
        grid = (triton.cdiv(max(count, 1), BLOCK),)
        return PreparedLaunch(kernel, grid, (count,), shape, num_warps=4, enable_fp_fusion=False), pointers

    def compile(self) -> None:
        """Begin to compile what rounds of all rows launch; see `base.loops.launch.compiling_together`."""
        launch, pointers = self._gradients
        launch.compile(*pointers)
        self._find_largest.compile(self._grads, self._hess, self._summary)
        self._writer.compile(self._grads)
        grads, values = self._grads, self._values.there.view(torch.float64)
        self._grower.compile_for_leaves(kernels.add_values, values, self._scores)
        if self._renews:
            self._grower.compile_for_leaves(kernels.sum_leaves, grads, grads, values, self._values.there)

    def _look(self) -> tuple[int, Array]:
        """How many rows are doubtful; for each output the largest gradient and hessian."""
        self._find_largest(self._grads, self._hess, self._summary)
        counts = self._summary[: self._doubtful_at + 1].cpu().numpy()
        bits = counts[:-1].astype(np.int32).reshape(-1, 2)
        return int(counts[-1]), bits.view(np.float32).astype(np.float64)

    def _ask_host(self, count: int) -> None:
        """Let the CPU compute the gradients of doubtful rows, for its `exp` decides."""
        listed = self._doubtful[1 : 1 + count].cpu().numpy() if count <= kernels.DOUBTFUL else np.arange(len(self._y))
        rows = torch.from_numpy(listed).to(self._device)
        scores = np.ascontiguousarray(self._scores[:, rows].T.cpu().numpy())
        weights = self._weights[listed] if len(self._weights) else self._weights
        grads = np.empty((len(self._grads), len(listed)), np.float32)
        hess = np.empty_like(grads)
        self._objective.gradients(self._y[listed], scores, weights, grads, hess)
        self._grads[:, rows] = torch.from_numpy(grads).to(self._device)
        self._hess[:, rows] = torch.from_numpy(hess).to(self._device)

    def prepare(self, output: int, key: int | None) -> CudaGradients:
        parts, few = (self._grads[output], self._hess[output]), few_of(len(self._y))
        scales = [
            far_scale(_Magnitudes(part), top, end, far, few)
            for part, top, end, far in zip(parts, self._tops[output].tolist(), self._ends, FAR_SUMS, strict=True)
        ]
        return CudaGradients(*parts, scales[0], scales[1], key, self._writer)

    def leaf_values(self, grown: Grown, output: int, _gradients: CudaGradients) -> Array:
        """Newton steps, of full-precision gradients where leaves are to be renewed."""
        if not self._renews:
            return self._objective.limit(grown.tree.leaf_value, 1.0, output)
        top_grad, top_hess = self._tops[output].tolist()
        of: Array = np.array(units(top_grad, top_hess, len(self._y)), np.float64)
        sums = torch.zeros((grown.tree.leaves, 2), dtype=torch.int64, device=self._device)
        numbers = _send_floats(self._sent, 1.0 / of)
        self._grower.launch_on_leaves(kernels.sum_leaves, self._grads[output], self._hess[output], numbers, sums)
        steps = newton_steps(sums.cpu().numpy(), (float(of[0]), float(of[1])), self._rules, grown.leaf_bounds)
        return self._objective.limit(steps, 1.0, output)  # of these objectives no limit depends on the rate

    def add(self, tree: Tree, grown: Grown, unused: Array, output: int) -> None:
        """Add the tree's values to the scores."""
        values, scores = _send_floats(self._values, tree.leaf_value), self._scores[output]
        self._grower.launch_on_leaves(kernels.add_values, values, scores)
        if not len(unused):
            return
        panels, width = self._grower.panels
        rows = self._to_device(unused.astype(np.int32))
        tables = [self._to_device(table) for table in (grown.columns, grown.left_bins, tree.left, tree.right)]
        kernels.walk_rows[(triton.cdiv(len(unused), BLOCK),)](
            rows,
            panels,
            *(tables if tree.leaves > 1 else (rows, panels, rows, rows)),
            values,
            scores,
            len(unused),
            len(self._y),
            self._grower.depth,
            width,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )

    def _to_device(self, numbers: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)


def _send_floats(sent: Sent, numbers: Array) -> Tensor:
    """The numbers on the card."""
    sent.host.numpy()[: len(numbers)].view(np.float64)[:] = numbers
    sent.send()
    return sent.there.view(torch.float64)
