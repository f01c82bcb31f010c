"""BlockCalls: loads a streamed block before it computes and frees it afterwards.

Only the `forward` of each block is wrapped. During the call the block's parameters are the streamed ones, and autograd
saves places instead of weights (`runtime.streaming.blocks.saved_tensors`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bitplan.runtime.streaming.blocks.find import STREAMED, StreamedBlock, Train
from bitplan.runtime.streaming.blocks.saved_tensors import (
    in_backward,
    refuse_second_derivatives,
    save_weights_by_place,
)
from bitplan.runtime.streaming.blocks.tree import refuse_unmerging
from bitplan.runtime.streaming.errors import StreamError
from bitplan.runtime.streaming.training.host_training import HostTraining
from bitplan.runtime.streaming.transfer.activation_offload import Compute
from bitplan.runtime.streaming.transfer.finite_check import FiniteCheck
from bitplan.runtime.streaming.weight_loader import WeightLoader


class BlockCalls:
    """The wrapped blocks of one stream."""

    def __init__(
        self,
        loader: WeightLoader,
        training: HostTraining | None,
        finite: FiniteCheck | None,
        train: Train,
        before_outside: Callable[[StreamedBlock], None],
        ran_out: Callable[[], None],
    ) -> None:
        """before_outside: called before a block computes outside a step; ran_out: where one is out of memory."""
        self._loader, self._training, self._finite, self._train = loader, training, finite, train
        self._before_outside, self._ran_out = before_outside, ran_out
        self._wrapped: list[tuple[StreamedBlock, Callable[..., Any] | None]] = []

    def wrap(self, index: int, block: StreamedBlock, forward: Callable[..., Any]) -> None:
        """Put `forward`, wrapped, in the place of a block's own; outside of it, so that it may be compiled code."""

        @functools.wraps(block.module.forward)
        def streamed(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(self._compute, index, block, forward)
            try:
                return self._in_turn(compute, index, block, args, kwargs)
            except Exception as error:
                error.add_note(f"bitplan: in streamed block {self._loader.place(index)}")
                if isinstance(error, torch.OutOfMemoryError):
                    self._ran_out()
                raise

        self._wrapped.append((block, block.module.__dict__.get("forward")))
        block.module.forward = streamed
        # `model.to(...)`, which every trainer calls, must not move a streamed block: it would no longer be streamed.
        block.module._apply = lambda *_args, **_options: block.module  # type: ignore[method-assign]
        setattr(block.module, STREAMED, True)
        block.module.__reduce_ex__ = functools.partial(_refuse_copy, block.name)  # type: ignore[method-assign]

    def unwrap(self) -> None:
        for block, own_forward in self._wrapped:
            block.put_back()
            for name in (STREAMED, "_apply", "forward", "__reduce_ex__"):
                block.module.__dict__.pop(name, None)
            if own_forward is not None:
                block.module.forward = own_forward
        self._wrapped = []

    def _in_turn(
        self, compute: Compute, index: int, block: StreamedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if in_backward():  # a step's own thread waits for it
            return self._run(compute, index, block, args, kwargs)
        with self._loader.turns:
            if self._loader.step is not None:
                self._loader.turns.claim_step(self._loader.serial, self._loader.place(index))
            return self._run(compute, index, block, args, kwargs)

    def _run(
        self, compute: Compute, index: int, block: StreamedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        grad = torch.is_grad_enabled()
        refuse_unmerging(block)
        if self._loader.step is None:
            if grad:
                raise StreamError(
                    f"{block.name}: computed with gradients outside a step; call begin_step(step), or use "
                    "torch.no_grad()"
                )
            self._before_outside(block)
        if grad and self._train == "nothing" and any(_needs_grad(value) for value in (*args, *kwargs.values())):
            raise StreamError(
                f"{block.name}: train='nothing', but an input requires gradients; stream with train='adapters' or "
                "'weights', or run under torch.no_grad()"
            )
        if grad and self._loader.activations is not None:
            return self._loader.activations.run(index, compute, args, kwargs)
        return compute(args, kwargs)

    def _compute(
        self,
        index: int,
        block: StreamedBlock,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        grad = torch.is_grad_enabled()
        weights = self._loader.weights(index, wraps=not block.module.training or self._train == "nothing")
        if grad and self._training is not None:
            weights = {name: self._leaf(block, name, weight) for name, weight in weights.items()}
        try:
            _put_into_modules(block, weights)
            with save_weights_by_place(self._loader) if grad else nullcontext():
                output = forward(*args, **kwargs)
        finally:
            try:
                _put_into_modules(block, None)
            except BaseException:  # Ctrl-C
                block.put_back()
                raise
        if self._finite is not None and not in_backward():
            self._finite.look_at(index, output)
        return output

    def _leaf(self, block: StreamedBlock, name: str, weight: Tensor) -> Tensor:
        """A leaf of this call's graph, whose gradient goes to the host as soon as it is computed."""
        recorder, training = self._loader.recorder, self._training
        assert recorder is not None
        assert training is not None
        if not (training.trains(block.name, name) and block.parameters[name].parameter.requires_grad):
            return weight
        gradients, leaf = training.gradients, weight.detach().requires_grad_()

        def send(done: Tensor) -> None:
            gradient, done.grad = done.grad, None
            assert gradient is not None
            refuse_second_derivatives(f"{block.name}, step {gradients.step}")
            gradients.note_backward()
            training.receive(block.name, name, gradient, gradients, recorder)

        leaf.register_post_accumulate_grad_hook(send)
        return leaf


def _put_into_modules(block: StreamedBlock, weights: Mapping[str, Tensor] | None) -> None:
    """Make these tensors the block's parameters (None: its own again); in the modules' dicts any tensor may lie."""
    for name, one in block.parameters.items():
        held: Any = one.parameter if weights is None else weights[name]
        for module, local in one.places:
            module._parameters[local] = held


def _refuse_copy(name: str, _protocol: object) -> Any:
    raise StreamError(
        f"{name} is streamed: its host memory, slots and threads cannot be copied or pickled; copy the model before "
        "stream_blocks or after close(), or save its state_dict()"
    )


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
