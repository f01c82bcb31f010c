"""Runs a model block by block: all windows go through one block before the next one is read.

Memory holds what lies outside of blocks (embeddings, norm, head), one block, and the states of the tokens between
blocks; a block's weights are put in place while it runs, read from disk, brought from the host or decoded from a plan.
What stands before, between and after the blocks is the model's own code: it runs with blocks that hand on
what they get.

    states = [runner.enter(ids) for ids in batches]           # embeddings, and how the model calls its blocks
    for index in range(len(runner.blocks)):
        with runner.block_weights(index):
            states = [runner.run_block(index, state) for state in states]
    logits = [runner.leave(ids, state) for ...]               # norm and head

A model whose blocks do not follow one another in this way, or that has none, runs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.plan.structure.parameters import NamedParameter, named_parameters_of

BACK = 2  # what a block's pass back takes, in passes forward
BATCH = 2048  # tokens in one call of a block
SMALL_EXPERT = 2**18  # numbers of an expert's matrix
LOGITS_AT_ONCE = 2**25  # of a window; a vocabulary of 262,144 would else take 0.5 GB for each copy of them
# The numbers of a parameter, by its name in the model; None where it stays as it is.
Replaced = Callable[[str], Tensor | None]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """A context in which torch uses this many threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class BlockCall:
    """The arguments that a model passes to a block beside the hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class TokenStates:
    """Windows of token ids with the hidden states between two blocks; `hidden` None: the model runs as a whole."""

    ids: Tensor
    hidden: Tensor | None
    calls: Sequence[BlockCall] = ()

    def pieces(self, tokens: int) -> Iterator[TokenStates]:
        """Divide windows into pieces of so many tokens; a model that runs as a whole gets them undivided."""
        length = self.ids.shape[1]
        if self.hidden is None or length <= tokens:
            yield self
            return
        for first in range(0, length, tokens):
            some = slice(first, first + tokens)
            yield TokenStates(self.ids[:, some], self.hidden[:, some])


class _EnteredError(Exception):
    """Raised to stop a model's forward once the arguments of all its blocks were recorded."""


class _OutOfOrderError(Exception):
    """The model does something with the states between two blocks, or calls them in another order."""


class BlockRunner:
    """Runs a model block by block on a device; `read` gives the numbers of a parameter by its name."""

    def __init__(self, model: nn.Module, read: Callable[[str], Tensor], device: torch.device) -> None:
        self.model, self.read, self.device = model, read, device
        parameters = {named.key: named for named in named_parameters_of(model)}.values()
        self._prefix = prefix = _block_list(model)
        self.blocks = [] if prefix is None else list(model.get_submodule(prefix).children())
        heads = () if prefix is None else tuple(f"{prefix}.{index}." for index in range(len(self.blocks)))
        self._in_block: list[list[NamedParameter]] = [[] for _ in self.blocks]
        self._outside: list[NamedParameter] = []
        self._kept: dict[int, nn.Parameter] = {}  # what lies outside, on the device
        for named in parameters:
            at = next((index for index, head in enumerate(heads) if named.name.startswith(head)), None)
            (self._outside if at is None else self._in_block[at]).append(named)
        self._gives_tuples = False
        self.vocabulary = 1  # logits of a token, where they can be made a few tokens at a time
        stacks = [named.parameter for block in self._in_block for named in block if named.parameter.dim() == 3]
        self._small_experts = bool(stacks) and max(stack[0].numel() for stack in stacks) <= SMALL_EXPERT
        self._move_buffers()

    def check_order(self, ids: Tensor) -> None:
        """Run as a whole from now on where blocks do not follow one another; called once, with a few tokens."""
        if not self.blocks:
            return
        try:
            with torch.no_grad(), self.outside():
                first = self.enter(ids, calls=1)
                with self.block_weights(0):
                    self._gives_tuples = isinstance(self._call(0, first), tuple)
                self.vocabulary = self.leave(self.enter(ids, strict=True)).shape[-1]
        except _OutOfOrderError:
            self._outside += [named for block in self._in_block for named in block]
            self.blocks, self._in_block = [], []

    def parameters_outside(self) -> list[nn.Parameter]:
        """The parameters that are in no block, tied ones once."""
        return list({id(named.parameter): named.parameter for named in self._outside}.values())

    def is_in_block(self, name: str) -> bool:
        """Whether a parameter, by the model's name, is of a block."""
        return any(named.name == name for block in self._in_block for named in block)

    def name_in_block(self, index: int, name: str) -> str:
        """A parameter's name within a block; empty where it is of another."""
        if all(named.name != name for named in self._in_block[index]):
            return ""
        return name.removeprefix(f"{self._prefix}.{index}.")

    # ---- weights in place --------------------------------------------------------------------------------------------

    @contextmanager
    def outside(self, replaced: Replaced | None = None) -> Iterator[None]:
        """Context in which the parameters outside of blocks are loaded, with numbers from `replaced`.

        They stay in memory between uses.
        """
        with self._in_place(self._outside, replaced, keep=True):
            yield

    @contextmanager
    def block_weights(self, index: int, replaced: Replaced | None = None) -> Iterator[None]:
        with self._in_place(self._in_block[index], replaced, keep=False):
            yield

    @contextmanager
    def _in_place(
        self, parameters: Sequence[NamedParameter], replaced: Replaced | None, *, keep: bool
    ) -> Iterator[None]:
        in_place: dict[int, nn.Parameter] = {}
        before = [named.module._parameters[named.local] for named in parameters]  # contexts may be nested
        try:
            for named in parameters:
                key = id(named.parameter)
                if key not in in_place:
                    in_place[key] = self._parameter(named, replaced, keep=keep)
                named.module._parameters[named.local] = in_place[key]
            yield
        finally:
            for named, parameter in zip(parameters, before, strict=True):
                named.module._parameters[named.local] = parameter

    def _parameter(self, named: NamedParameter, replaced: Replaced | None, *, keep: bool) -> nn.Parameter:
        replacement = None if replaced is None else replaced(named.name)
        if replacement is not None:
            return nn.Parameter(replacement.to(self.device), requires_grad=False)
        key = id(named.parameter)
        if key in self._kept:
            return self._kept[key]
        numbers = self.read(named.name).to(self.device)
        result = nn.Parameter(numbers.float() if numbers.is_floating_point() else numbers, requires_grad=False)
        if keep:
            self._kept[key] = result
        return result

    def _move_buffers(self) -> None:
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self.device:
                    module._buffers[name] = buffer.to(self.device)

    def fewer_threads(self) -> AbstractContextManager[None]:
        """A context with one torch thread where experts are small: on products with each, several mostly wait."""
        return torch_threads(1) if self._small_experts and self.device.type == "cpu" else nullcontext()

    # ---- passes ------------------------------------------------------------------------------------------------------

    def enter(self, ids: Tensor, *, calls: int | None = None, strict: bool = False) -> TokenStates:
        """Run the model on `ids` up to its blocks; return the first block's input and the arguments of each call.

        Only the first `calls` calls are recorded if that is given. Call it within `outside`. `strict` also checks that
        each block gets the output of the one before.
        """
        ids = ids.to(self.device)
        if not self.blocks:
            return TokenStates(ids, None)
        expected_calls = len(self.blocks) if calls is None else calls
        calls_before: list[BlockCall] = []
        states: list[Tensor] = []  # what the first block got, and what each gave

        def watched(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                state, call = _parted(args, kwargs)
                if index != len(calls_before) or (strict and states and state is not states[-1]):
                    raise _OutOfOrderError
                states.append(state.clone() if strict else state)  # a copy: several may get the same state
                calls_before.append(call)
                if len(calls_before) == expected_calls:
                    raise _EnteredError
                return self._as_given(states[-1])

            return forward

        with self._stand_ins(watched):
            try:
                self._logits(ids)
            except _EnteredError:
                return TokenStates(ids, states[0], calls_before)
        raise _OutOfOrderError

    def run_block(self, index: int, states: TokenStates) -> TokenStates:
        """Run one block, whose weights are in place."""
        result = self._call(index, states)
        return replace(states, hidden=result[0] if isinstance(result, tuple) else result)

    def leave(self, states: TokenStates) -> Tensor:
        """Run norm and head on the last block's states; call it within `outside`. Returns the logits."""
        if not self.blocks:
            return self._logits(states.ids)

        def handed_on(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                return self._as_given(states.hidden if index == 0 else _parted(args, kwargs)[0])

            return forward

        with self._stand_ins(handed_on):
            return self._logits(states.ids)

    def through_blocks(self, batches: Sequence[Tensor], replaced: Replaced | None = None) -> list[TokenStates]:
        """Run all blocks on these windows, without gradients; returns the states after the last block."""
        with torch.no_grad(), self.outside(replaced):
            states = [self.enter(ids) for ids in batches]
        with torch.no_grad(), self.fewer_threads():
            for index in range(len(self.blocks)):
                with self.block_weights(index, replaced):
                    states = [self.run_block(index, state) for state in states]
        return [replace(state, calls=()) for state in states]

    def first_block(self, names: Iterable[str]) -> int:
        """The first block that has one of these parameters; 0 where one lies outside of blocks."""
        blocks = {named.name: index for index, block in enumerate(self._in_block) for named in block}
        return min((blocks.get(name, 0) for name in names), default=0)

    def _call(self, index: int, states: TokenStates) -> Any:
        call = states.calls[index]
        return self.blocks[index](states.hidden, *call.args, **call.kwargs)

    def _as_given(self, state: Tensor | None) -> Any:
        return (state,) if self._gives_tuples else state

    def _logits(self, ids: Tensor) -> Tensor:
        if hasattr(self.model, "config") and hasattr(self.model, "get_output_embeddings"):
            output: Any = self.model(input_ids=ids, use_cache=False)
        else:
            output = self.model(ids)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits

    @contextmanager
    def _stand_ins(self, forward_of: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        try:
            for index, block in enumerate(self.blocks):
                block.forward = forward_of(index)
            yield
        finally:
            for block in self.blocks:
                block.__dict__.pop("forward", None)


def _parted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, BlockCall]:
    """Divide the arguments of a block's call into the hidden state and all others."""
    if args:
        return args[0], BlockCall(args[1:], kwargs)
    rest = dict(kwargs)
    if "hidden_states" not in rest:
        raise _OutOfOrderError
    return rest.pop("hidden_states"), BlockCall((), rest)


def _block_list(model: nn.Module) -> str | None:
    """The list of modules that has the most parameters, however large the embeddings are; None where there is none.

    Whether its modules follow one another is for `check_order` to say.
    """
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList) and len(module) > 0
    }
    return max(sizes, key=lambda name: sizes[name], default=None)


def equal_lengths(windows: Sequence[Tensor], count: int) -> list[Tensor]:
    """Neighbouring windows of one length, up to `count` together: [windows, length]."""
    batches: list[list[Tensor]] = []
    for window in windows:
        if batches and len(batches[-1]) < count and len(batches[-1][0]) == len(window):
            batches[-1].append(window)
        else:
            batches.append([window])
    return [torch.stack(batch) for batch in batches]
