"""What a recording of a forward without numbers holds."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitplan.plan.structure import describe, recorder
from bitplan.plan.structure.recorder import Recording, record
from bitplan.plan.structure.untouched import as_written, calls_through


class Repeated(nn.Module):
    """The same functions of the same shapes again: new tensors, one that is written to, and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x.mul(self.weight)
        second = first.mul(self.weight)
        second.mul_(self.weight)
        return second.view(2, 8).mul(2).view(4, 4) + second.mul(self.weight)


def test_a_layout_that_is_remembered_is_of_a_new_tensor_alone() -> None:
    recording = record(Repeated(), (torch.zeros(4, 4, device="meta"),), {})
    names = [step.name for step in recording.steps]
    assert names == ["mul", "mul", "mul", "view", "mul", "view", "mul", "add"]
    products = [step for step in recording.steps if step.name == "mul"]
    assert [bool(step.writes) for step in products] == [False, False, True, False, False]
    assert [recording.values[step.outputs[0]].shape for step in products] == [(4, 4)] * 3 + [(2, 8), (4, 4)]
    written = products[2].writes[0]
    assert products[4].inputs[0] == written  # the tensor as it is after it was written to
    assert recording.values[recording.outputs[0]].shape == (4, 4)


def test_types_of_numbers_are_no_other_types_of_the_same_value() -> None:
    class Promoted(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x * 1, x * 1.0, x * True

    recording = record(Promoted(), (torch.zeros(2, device="meta", dtype=torch.int64),), {})
    types = [recording.values[value].dtype for value in recording.outputs]
    assert types == [torch.int64, torch.float32, torch.int64]


class Experts(nn.Module):
    def __init__(self, limit: float = 0.0, experts: int = 2) -> None:
        super().__init__()
        self.limit = limit
        self.gate_up = nn.Parameter(torch.zeros(experts, 8, 16))
        self.down = nn.Parameter(torch.zeros(experts, 8, 8))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for expert in range(len(self.gate_up)):
            token, slot = torch.where(chosen == expert)
            gate, up = (hidden[token] @ self.gate_up[expert]).chunk(2, dim=-1)
            down = (nn.functional.silu(gate) * up) @ self.down[expert]
            output.index_add_(0, token, down * weights[token, slot, None])
        return output + 1 if self.limit else output


def test_experts_of_the_same_code_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: set[int] = set()

    def counted(module: nn.Module, *inputs: Any) -> Recording:
        runs.add(id(module))
        return record(module, *inputs)

    monkeypatch.setattr(recorder, "record", counted)
    layers = [Experts(), Experts(), Experts(1.0), Experts(experts=3)]
    uses = [describe.experts_of(layer) for layer in layers]
    assert len(runs) == 3
    assert [use.fault for use in uses if use is not None][:2] == ["", ""]
    assert uses[0] is uses[1]
    assert "more than its experts' sum: add" in str(uses[2] and uses[2].fault)
    patched = Experts()
    patched.forward = lambda *args: Experts.forward(patched, *args) + 1  # type: ignore[method-assign]
    assert "more than its experts' sum" in str(describe.experts_of(patched).fault)  # type: ignore[union-attr]


def test_a_class_that_is_patched_later_is_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before, plain = Experts(), Experts.forward
    assert describe.experts_of(before).fault == ""  # type: ignore[union-attr]

    def patched(self: Experts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return plain(self, hidden, chosen, weights) + 1

    monkeypatch.setattr(Experts, "forward", patched)
    for module in (Experts(), before):
        assert "more than its experts' sum: add" in describe.experts_of(module).fault  # type: ignore[union-attr]


def test_two_threads_that_overlap_see_their_own_calls_and_leave_torch_as_it_was() -> None:
    usual, layer = nn.Module.__call__, nn.Linear(2, 2)
    calls: list[str] = []
    entered, ended = threading.Event(), threading.Event()

    def beside() -> None:
        with calls_through(lambda *_: calls.append("beside")):
            entered.set()
            ended.wait(60)
            layer(torch.ones(1, 2))

    thread = threading.Thread(target=beside)
    with calls_through(lambda *_: calls.append("here")):
        thread.start()
        assert entered.wait(60)
        layer(torch.ones(1, 2))
    assert layer(torch.ones(1, 2)).shape == (1, 2)  # the other has not left
    ended.set()
    thread.join()
    assert calls == ["here", "beside"]
    assert nn.Module.__call__ is usual


def test_two_threads_that_overlap_leave_the_compiler_on() -> None:
    """Each that put back what it had found would leave the other's stance: nothing would be compiled any more."""
    import torch._dynamo.eval_frame as compiler

    usual = compiler._stance
    entered, ended = threading.Event(), threading.Event()

    def beside() -> None:
        with as_written():
            entered.set()
            ended.wait(60)

    thread = threading.Thread(target=beside)
    with as_written():
        thread.start()
        assert entered.wait(60)
        assert compiler._stance.stance == "force_eager"
    assert compiler._stance.stance == "force_eager"  # the other has not left
    ended.set()
    thread.join()
    assert compiler._stance is usual
