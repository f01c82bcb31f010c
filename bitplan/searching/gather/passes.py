"""Gathers statistics of a text, a few windows at a time: forward through all blocks, then back from the last one.

Forward, each block's inputs are summed up and go to a file. For the first windows what every block got goes to another,
and on the way back each block runs again, alone, with gradients: of the whole model no graph is ever in memory. How
much the loss minds outputs is taken from fewer tokens than how inputs vary together: a pass back costs twice a pass
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.files.input_statistics import TOKENS_PER_OUTPUT, weight_digest
from bitplan.plan.names import listed
from bitplan.searching.gather.blocks import BACK, BATCH, LOGITS_AT_ONCE, TokenStates, equal_lengths
from bitplan.searching.gather.expert_products import (
    ExpertSlice,
    RoutedTokens,
    WatchedProducts,
    one_by_one,
    unseen_name,
)
from bitplan.searching.gather.searched_model import SearchSubject
from bitplan.searching.gather.statistics import (
    BETWEEN,
    COUNTS,
    GRADIENT,
    INPUTS,
    LOOKUP,
    WEIGHED,
    InputStatistics,
    ScratchWriter,
    StoredTensor,
)
from bitplan.searching.goal import SearchError

AT_ONCE = 16384  # tokens between two saves: statistics are as large as the model, and a save writes them all
GRADIENT_TOKENS = 16384  # gradients are of the first so many
MOST_OUTPUTS = GRADIENT_TOKENS // TOKENS_PER_OUTPUT  # of a layer whose outputs' gradients are taken together
SEED = 0
MOST_STRIPS, FEWEST_COLUMNS = 6, 192  # of a symmetric product, which strip by strip is little more than half the work
RUN = 256  # tokens of the vocabulary whose probabilities are added up first, to draw one
_MATRICES = (f".{INPUTS}", f".{BETWEEN}")


def add_windows(
    subject: SearchSubject,
    windows: Sequence[Tensor],
    into: InputStatistics,
    scratch: Path,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Add the next few windows that `into` has not seen; files of their sums go to `scratch`.

    `into` changes when all is done: an interrupted call leaves no trace.
    """
    first = into.windows
    chosen = windows[first : first + _count(windows[first:], AT_ONCE)]
    _Passes(subject, chosen, first, into, scratch, on_step or (lambda _count: None)).run()


def steps_of(subject: SearchSubject, windows: Sequence[Tensor], done: int) -> int:
    """What `on_step` is called with in all, for the windows that are left."""
    steps, first = 0, done
    while first < len(windows):
        steps += (len(subject.runner.blocks) + 1) * (1 + BACK if first == 0 else 1)
        first += _count(windows[first:], AT_ONCE)
    return steps


def _count(windows: Sequence[Tensor], most: int) -> int:
    """How many of the windows have up to so many tokens; one at least."""
    total = list(accumulate(map(len, windows)))
    return max(1, sum(tokens <= most for tokens in total))


class _Passes:
    def __init__(
        self,
        subject: SearchSubject,
        windows: Sequence[Tensor],
        first: int,
        into: InputStatistics,
        scratch: Path,
        on_step: Callable[[int], None],
    ) -> None:
        self._subject, self._runner, self._into = subject, subject.runner, into
        self._windows, self._first, self._scratch, self._on_step = windows, first, scratch, on_step
        self._watched = _count(windows, GRADIENT_TOKENS) if first == 0 else 0  # windows whose gradients count
        self._row_ordered = _in_the_order_of_the_file(subject) if self._watched else set()
        self._sums: dict[str, Tensor] = {}
        self._files: dict[str, StoredTensor] = {}
        self._states: dict[int, list[StoredTensor]] = {}
        self._writer = ScratchWriter()
        self._shared: dict[str, str] = {}
        self._routed = RoutedTokens()
        self._experts_of = _experts_by_block(subject)
        self._last: tuple[Tensor, str] | None = None

    def run(self) -> None:
        size = max(1, BATCH // len(self._windows[0]))
        with_gradients = equal_lengths(self._windows[: self._watched], size)
        batches = with_gradients + equal_lengths(self._windows[self._watched :], size)
        runner = self._runner
        with _frozen(runner.model), closing(self._writer), runner.fewer_threads():
            with torch.no_grad(), runner.outside(), self._hooks(None, counts=True):
                states = [runner.enter(ids) for ids in batches]
            for index in range(len(runner.blocks)):
                self._write_states(index, states[: len(with_gradients)])
                with torch.no_grad(), runner.block_weights(index), self._hooks(index, inputs=True):
                    states = [runner.run_block(index, each) for each in states]
                self._complete_experts(self._slices(index))
                self._routed.clear()
                self._flush()
                self._on_step(1)
            gradients = self._leave(states)
            self._flush()
            self._on_step(1)
            if self._watched:
                self._back(with_gradients, states, gradients)
        tokens = sum(map(len, self._windows))
        self._into.sums.add(self._sums, self._files)
        self._into.share(self._shared)
        self._into.tokens += tokens
        self._into.gradient_tokens += sum(map(len, self._windows[: self._watched]))
        self._into.windows += len(self._windows)

    def _leave(self, states: Sequence[TokenStates]) -> list[Tensor]:
        """Norm and head, and the gradients of the loss by the last states."""
        found, at = [], self._first
        whole = not self._runner.blocks
        for each in states:
            gradients = []
            for row in range(len(each.ids)):  # a window or less at a time: logits of a large vocabulary are large
                hidden, watched = None, at - self._first < self._watched
                if each.hidden is not None:
                    hidden = each.hidden[row : row + 1].detach().requires_grad_(watched)
                window = TokenStates(each.ids[row : row + 1], hidden)
                hooks = {"inputs": True, "gradients": watched, "counts": whole, "lookups": whole and watched}
                draws = torch.Generator(self._runner.device).manual_seed(SEED + at)
                with self._runner.outside(), torch.set_grad_enabled(watched), self._hooks(None, **hooks):
                    for piece in window.pieces(max(1, LOGITS_AT_ONCE // self._runner.vocabulary)):
                        logits = self._runner.leave(piece)
                        self._require_finite(logits, at)
                        if watched:
                            torch.autograd.backward(logits, self._gradient(logits, draws))
                at += 1
                if hidden is not None and hidden.grad is not None:
                    gradients.append(hidden.grad)
            if gradients:
                found.append(torch.cat(gradients))
        return found

    def _back(self, batches: Sequence[Tensor], states: Sequence[TokenStates], gradients: list[Tensor]) -> None:
        """Each block once more, from the last to the first, with the gradient of what it gave."""
        runner = self._runner
        for index in reversed(range(len(runner.blocks))):
            with torch.enable_grad(), runner.block_weights(index), self._hooks(index, gradients=True):
                for at, hidden in enumerate(self._read_states(index)):
                    hidden.requires_grad_()
                    given = runner.run_block(index, replace(states[at], hidden=hidden)).hidden
                    assert given is not None
                    torch.autograd.backward(given, gradients[at])
                    assert hidden.grad is not None
                    gradients[at] = hidden.grad
            tokens = sum(map(len, self._windows[: self._watched]))
            self._routed.complete_gradients(self._slices(index), self._sums, GRADIENT, tokens)
            self._routed.clear()
            self._flush()
            self._on_step(BACK)
        if runner.blocks:
            with torch.enable_grad(), runner.outside(), self._hooks(None, lookups=True):
                for at, ids in enumerate(batches):
                    entered = runner.enter(ids).hidden
                    if entered is not None and entered.requires_grad:
                        torch.autograd.backward(entered, gradients[at])
        self._on_step(BACK)

    def _write_states(self, block: int, states: Sequence[TokenStates]) -> None:
        """What a block got, to a file: of all blocks together it is far more than one block."""
        if states:
            hidden = {str(at): _hidden(each) for at, each in enumerate(states)}
            self._states[block] = list(self._writer.write(self._scratch / f"states-{block}", hidden).values())

    def _read_states(self, block: int) -> Iterator[Tensor]:
        stored = self._states.pop(block)
        for each in stored:
            yield each.read().to(self._runner.device)
        stored[0].path.unlink()

    def _gradient(self, logits: Tensor, draws: torch.Generator) -> Tensor:
        """Of the loss for tokens drawn from the model itself, by the logits: probabilities, less one for the token."""
        gradient = torch.softmax(logits.detach()[0].float(), -1)
        drawn = draw_tokens(gradient, draws)
        gradient.scatter_add_(-1, drawn, torch.full_like(drawn, -1, dtype=gradient.dtype))
        return gradient[None].to(logits.dtype)

    def _require_finite(self, logits: Tensor, window: int) -> None:
        if not bool(torch.stack(torch.aminmax(logits)).isfinite().all()):  # of NaN it gives NaN
            broken = self._subject.not_finite()
            found = (
                f"its weights have some in {listed(broken, 4)}" if broken else "its weights are finite, it overflows"
            )
            raise SearchError(
                f"{self._subject.where}: the model gives NaN or infinity in window {window} of the text: {found}; "
                "give a model that gives finite numbers"
            )

    # ---- hooks and sums ----------------------------------------------------------------------------------------------

    @contextmanager
    def _hooks(
        self,
        block: int | None,
        *,
        inputs: bool = False,
        gradients: bool = False,
        counts: bool = False,
        lookups: bool = False,
    ) -> Iterator[None]:
        """Watch the layers of one block, or with None those outside of all blocks."""
        inside = {id(module): at for at, each in enumerate(self._runner.blocks) for module in each.modules()}
        handles = []
        try:
            if lookups:
                for module in self._runner.model.modules():
                    if isinstance(module, nn.Embedding):  # where the graph of activations begins
                        handles.append(module.register_forward_hook(_require_gradient))
            for site in self._subject.sites.values():
                for linear in site.linears:
                    if inside.get(id(linear)) == block and (inputs or gradients):
                        handles.append(linear.register_forward_hook(self._linear(site.name, inputs, gradients)))
                for embedding in site.embeddings:
                    if inside.get(id(embedding)) == block and (counts or lookups):
                        handles.append(embedding.register_forward_hook(self._embedding(site.name, counts, lookups)))
            with self._experts(block, inputs, gradients):
                yield
        finally:
            self._last = None
            for handle in handles:
                handle.remove()

    def _slices(self, block: int | None) -> list[ExpertSlice]:
        """Experts of a block whose layer keeps them as one tensor."""
        return [] if block is None else self._experts_of.get(block, [])

    @contextmanager
    def _experts(self, block: int | None, inputs: bool, gradients: bool) -> Iterator[None]:
        slices = self._slices(block) if inputs or gradients else []
        if not slices:
            yield
            return
        model = self._runner.model
        modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in {each.stack for each in slices}}
        stacks = {name: module.get_parameter(name.rpartition(".")[2]) for name, module in modules.items()}

        by_expert = _by_expert(slices)

        def on_product(stack: str, expert: int, x: Tensor, output: Tensor) -> None:
            own = by_expert.get((stack, expert), [])
            self._routed.add(stack, expert, len(x))
            if inputs and own:
                self._add_squares(f"{own[0].name}.{INPUTS}", x)
            if gradients and output.requires_grad:
                output.register_hook(lambda gradient: self._add_gradients(own, gradient))

        with one_by_one(list(modules.values())), WatchedProducts(stacks, on_product):
            yield

    def _complete_experts(self, slices: Sequence[ExpertSlice]) -> None:
        """Whose inputs each expert of a block has: its own, which gate and up share, or those of all that got none."""
        experts = _by_expert(slices).values()
        owners = [own[0] for own in experts]
        self._require_products(owners)
        self._routed.complete_inputs(owners, self._sums, INPUTS)
        for first, *others in experts:
            inputs = f"{first.name}.{INPUTS}"
            is_seen = inputs in self._sums or inputs in self._into.sums
            owner = first.name if is_seen else unseen_name(first.stack)
            self._shared |= {each.name: owner for each in ([] if is_seen else [first]) + others}

    def _require_products(self, owners: Sequence[ExpertSlice]) -> None:
        """Experts that are multiplied in a way that nobody watches would be taken to do no damage."""
        seen = {each.stack for each in owners if f"{each.name}.{INPUTS}" in self._sums}
        unseen = [each for each in owners if each.stack not in seen]
        if unseen:
            raise SearchError(
                f"{self._subject.where}: {unseen[0].stack}: no product with an expert of it was seen, so nothing is "
                "known of its inputs; leave it as it is",
                settings={"keep": unseen[0].stack},
            )

    def _add_gradients(self, slices: Sequence[ExpertSlice], gradient: Tensor) -> None:
        squares = gradient.detach().float().square().sum(0)
        for each in slices:
            self._add(f"{each.name}.{GRADIENT}", squares[each.rows].clone())

    def _linear(self, name: str, inputs: bool, gradients: bool) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_module: nn.Module, args: Any, output: Tensor) -> None:
            if inputs and self._last is not None and self._last[0] is args[0]:
                self._shared[name] = self._last[1]
            elif inputs:
                self._last = (args[0], name)
                self._add_squares(f"{name}.{INPUTS}", args[0])
            if gradients:
                self._watch(output, f"{name}.{GRADIENT}", args[0])
                if name in self._row_ordered and output.shape[-1] <= MOST_OUTPUTS:
                    self._watch(output, f"{name}.{BETWEEN}")

        return hook

    def _embedding(self, name: str, counts: bool, lookups: bool) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            if counts:
                seen = torch.bincount(args[0].reshape(-1), minlength=module.num_embeddings)
                self._add(f"{name}.{COUNTS}", seen.float())
            if lookups:
                self._watch(output, f"{name}.{LOOKUP}")

        return hook

    def _watch(self, output: Tensor, key: str, inputs: Tensor | None = None) -> None:
        """Sums of squared gradients; with a layer's inputs their squares, too, each token's by its gradient's."""

        def hook(gradient: Tensor) -> None:
            if key.endswith(f".{BETWEEN}"):
                self._add_squares(key, gradient)
                return
            squares = gradient.detach().reshape(-1, gradient.shape[-1]).float().square()
            self._add(key, squares.sum(0))
            if inputs is not None:
                own = inputs.detach().reshape(-1, inputs.shape[-1]).float()
                self._add(f"{key.rpartition('.')[0]}.{WEIGHED}", squares.sum(1) @ own.square())

        if output.requires_grad:
            output.register_hook(hook)

    def _add(self, key: str, part: Tensor) -> None:
        self._sums[key] = self._sums[key].add_(part) if key in self._sums else part

    def _add_squares(self, key: str, vectors: Tensor) -> None:
        """Sums of products of all pairs of columns; where they are, for they may be the largest thing in memory."""
        rows = vectors.detach().reshape(-1, vectors.shape[-1]).float()
        if key not in self._sums:
            self._sums[key] = rows.new_zeros(rows.shape[1], rows.shape[1])
        add_upper_products(self._sums[key], rows)

    def _flush(self) -> None:
        """Matrices to a file: together they are as large as the model. The rest are vectors."""
        large = {key: mirror(self._sums.pop(key)) for key in list(self._sums) if key.endswith(_MATRICES)}
        if not large:
            return
        path = self._scratch / f"sums-{self._first}-{len(self._files)}"
        self._files |= self._writer.write(path, large)


def draw_tokens(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One token for each row of [T, V], [T, 1]: first a run of the vocabulary, then a token of it.

    torch's `multinomial` draws a random number for each probability, a tenth of the time of all statistics.
    """
    count = probabilities.shape[-1]
    runs = torch.nn.functional.pad(probabilities, (0, -count % RUN)).reshape(len(probabilities), -1, RUN)
    sums = runs.sum(-1).double().cumsum(-1)
    drawn = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device, generator=generator) * sums[:, -1:]
    run = torch.searchsorted(sums, drawn, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, run)
    inside = runs.gather(1, run.unsqueeze(-1).expand(-1, -1, RUN)).squeeze(1).double().cumsum(-1)
    place = torch.searchsorted(inside, drawn - before, right=True).clamp(max=RUN - 1)
    return (run * RUN + place).clamp(max=count - 1)


def add_upper_products(into: Tensor, rows: Tensor) -> None:
    """Add rows^T rows strip by strip, each from the diagonal to the right: the rest is the same again."""
    for strip in _strips(into):
        into[strip, strip.start :].addmm_(rows[:, strip].T, rows[:, strip.start :])


def mirror(upper: Tensor) -> Tensor:
    """Below the strips' diagonal, what is above it; where it is."""
    for strip in _strips(upper):
        upper[strip.stop :, strip] = upper[strip, strip.stop :].T
    return upper


def _strips(square: Tensor) -> list[slice]:
    count = max(1, min(MOST_STRIPS, len(square) // FEWEST_COLUMNS))
    step = -(-len(square) // count)
    return [slice(first, min(first + step, len(square))) for first in range(0, len(square), step)]


def _experts_by_block(subject: SearchSubject) -> dict[int, list[ExpertSlice]]:
    slices = [site.slice for site in subject.sites.values() if site.slice is not None]
    block = {stack: subject.runner.first_block([stack]) for stack in {each.stack for each in slices}}
    found: dict[int, list[ExpertSlice]] = {}
    for each in slices:
        found.setdefault(block[each.stack], []).append(each)
    return found


def _by_expert(slices: Sequence[ExpertSlice]) -> dict[tuple[str, int], list[ExpertSlice]]:
    """The weights of each expert that read one input."""
    found: dict[tuple[str, int], list[ExpertSlice]] = {}
    for each in slices:
        found.setdefault((each.stack, each.expert), []).append(each)
    return found


def _hidden(states: TokenStates) -> Tensor:
    assert states.hidden is not None
    return states.hidden.detach()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients by weights."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def _require_gradient(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_() if not output.requires_grad else output


def _in_the_order_of_the_file(subject: SearchSubject) -> set[str]:
    """Weights of layers alone whose rows are outputs in the file's order: loading a GGUF moves those of some."""
    layers = {name for name, site in subject.sites.items() if site.linears and not site.embeddings}
    if subject.path is None or subject.path.is_dir():
        return layers
    digests = subject.digests()
    return {name for name in layers if weight_digest(subject.weight(name)) == digests[name]}
