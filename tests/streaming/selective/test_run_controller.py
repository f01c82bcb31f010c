"""A run's plan: what is timed, measured, lowered and raised, and that its log replays to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitplan import apply_fp8, read_plan, stream_blocks
from bitplan.base.errors import FormatError, PlanFileError
from bitplan.plan.from_records import read_run_log
from bitplan.streaming.block_stream import BlockStream
from bitplan.streaming.selective.config import SelectiveError, SelectiveFileError
from bitplan.streaming.selective.run_controller import (
    RunController,
    RunRow,
    RunSettings,
    choose_option,
    choose_rows,
    final_queue,
    option_key,
)
from bitplan.streaming.training.adamw import AdamWSettings
from tests.streaming.stream_samples import OPTIONS

WIDTH, COUNT, STEPS = 64, 3, 25
# Seven ways of two steps each are timed, then rows go low until the final part begins.
SETTINGS = RunSettings(total_steps=STEPS, final_share=0.3, timing_steps=1, settle_steps=1, noise_share=0.5, groups=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(COUNT))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.drop(x))


class Clock:
    """Seconds that depend on what is low: each part that is low saves what `saves` says."""

    def __init__(self, saves: dict[str, float]) -> None:
        self.saves, self.now = saves, 0.0

    def __call__(self) -> float:
        return self.now

    def step(self, control: RunController) -> None:
        parts = {name.rpartition(".")[2] for name in control.state.low}
        self.now += 1.0 - sum(self.saves.get(part, 0.0) for part in parts)


def batch(number: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(number)
    x = torch.randn(32, WIDTH, generator=random)
    return x, x[:, :8].argmax(1)


def loss_of(model: nn.Module, number: int) -> Tensor:
    x, target = batch(number)
    return nn.functional.cross_entropy(model(x), target)


class Run:
    """A model on a stream with an optimizer for the rest."""

    def __init__(self, train: str = "weights", fp8: bool = True) -> None:
        torch.manual_seed(0)
        self.model = Model()
        if fp8:
            apply_fp8(self.model, None, tokens=32, recipe="tensorwise", include=["layers.*"], emulate=True)
        if train == "adapters":
            for layer in self.model.layers:
                layer.down.requires_grad_(False)
        how: dict[str, Any] = {"optimizer": AdamWSettings(lr=3e-3)} if train == "weights" else {}
        self.stream: BlockStream = stream_blocks(
            self.model, "layers.*", device="cpu", slots=2, train=train, options=OPTIONS, **how
        )
        streamed = {id(one.parameter) for block in self.stream.blocks for one in block.parameters.values()}
        rest = [one for one in self.model.parameters() if id(one) not in streamed]
        self.optimizer = torch.optim.AdamW(rest, lr=3e-3)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stream.close()

    def probe(self, number: int) -> Tensor:
        return loss_of(self.model, 1000 + number)

    def train(self, control: RunController, steps: range, clock: Clock | None = None) -> list[float]:
        losses = []
        for step in steps:
            torch.manual_seed(step)
            control.begin_step(step)
            loss = loss_of(self.model, step)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            control.end_step()
            losses.append(loss.item())
            if clock is not None:
                clock.step(control)
        return losses


ALL_WIN = {"fprop": 0.1, "dgrad": 0.1, "wgrad": 0.1, "wire": 0.2}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path, RunController]:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    clock = Clock(ALL_WIN)
    with Run() as run, RunController(run.stream, SETTINGS, probe=run.probe, log=path, clock=clock) as control:
        return run.train(control, range(STEPS), clock), path, control


# ---- decisions -------------------------------------------------------------------------------------------------------

ALL = frozenset(ALL_WIN)


def timed_option(saves: dict[str, float], parts: frozenset[str] = ALL) -> tuple[set[str], list[str]]:
    """What is low at the end, and what was timed on the way, where each part saves so much."""
    times: dict[str, float] = {}
    while (chosen := choose_option(parts, times, 0.01)).wanted is not None:
        times[option_key(chosen.wanted)] = 1.0 - sum(saves[part] for part in chosen.wanted)
    assert set(chosen.gains) == chosen.option
    return set(chosen.option), list(times)


def test_what_saves_time_is_low_and_each_way_is_timed_once():
    assert timed_option(ALL_WIN)[0] == set(ALL)
    option, timed = timed_option({"fprop": 0.2, "dgrad": -0.05, "wgrad": 0.1, "wire": 0.0})
    assert option == {"fprop", "wgrad"}
    assert timed[:3] == ["high", "fprop+dgrad+wgrad", "fprop+dgrad+wgrad+wire"]
    assert len(timed) == len(set(timed)) == 6
    slower = {"fprop": -0.1, "dgrad": -0.1, "wgrad": 0.1, "wire": 0.005}  # less than least_gain
    assert timed_option(slower) == (set(), ["high", "fprop+dgrad+wgrad", "wire"])
    assert timed_option({"wire": 0.3}, frozenset({"wire"})) == ({"wire"}, ["high", "wire"])
    assert timed_option({}, frozenset()) == (set(), [])


def rows(*names: str) -> list[RunRow]:
    return [RunRow(*name.rsplit(".", 1), "bfloat16", "int8_row", "wire", "") for name in names]


def test_rows_go_low_by_impact_within_the_budget():
    given = rows("a.wire", "b.wire", "c.wire")
    impacts = {"a.wire": 0.5, "b.wire": 0.1, "c.wire": 0.2}
    decided = {one.name: one for one in choose_rows(given, frozenset(), {"wire": 3.0}, impacts, 0.4, frozenset())}
    assert {name for name, one in decided.items() if one.is_low} == {"b.wire", "c.wire"}
    assert decided["a.wire"].evidence == {"budget": 0.4, "impact": 0.5, "ms_saved": 1.0}
    locked = choose_rows(given, frozenset({"b.wire"}), {"wire": 3.0}, impacts, 0.4, frozenset({"b.wire"}))
    assert {one.name for one in locked if one.is_low} == {"c.wire"}
    assert [one.reason for one in locked if one.name == "b.wire"] == ["raised by loss feedback"]
    slow = choose_rows(given, frozenset({"a.wire"}), {}, impacts, 0.4, frozenset())
    assert [(one.name, one.is_low) for one in slow] == [("a.wire", False)]


def test_the_greatest_impact_is_raised_first_and_the_last_before_the_last_step():
    assert final_queue({"a": 0.1, "b": 0.3, "c": 0.2}, 90, 100) == [(90, "b"), (93, "c"), (96, "a")]
    assert final_queue({}, 90, 100) == []
    assert [step for step, _ in final_queue(dict.fromkeys("abcdef", 1.0), 97, 100)] == [97, 97, 97, 98, 98, 98]


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_ends_high_and_its_log_says_why(whole_run):
    losses, path, control = whole_run
    script = read_run_log(path)
    assert losses[-1] < losses[0]
    assert control.state.low == [] == [one.name for one in script.changes if one.to != one.before and one.step >= STEPS]
    reasons = [one.reason for one in script.changes]
    assert any(reason.startswith("timed: fprop+dgrad+wgrad+wire") for reason in reasons)
    assert any(reason.startswith("goes low: cost") for reason in reasons)
    final = [one for one in script.changes if one.reason.startswith("final part")]
    assert final
    assert final[0].step == SETTINGS.final_from
    assert final[-1].step < STEPS - 1
    impacts = [one.evidence["impact"] for one in final]
    assert impacts == sorted(impacts, reverse=True)
    assert all(one.evidence["noise"] > 0 for one in final)
    assert set(control.times) == {
        "high", "fprop+dgrad+wgrad", "fprop+dgrad+wgrad+wire", "dgrad+wgrad+wire", "fprop+wgrad+wire",
        "fprop+dgrad+wire", "high again",
    }  # fmt: skip
    assert control.times["high"] == 1000.0
    assert control.times["fprop+dgrad+wgrad"] == pytest.approx(700.0)


def test_the_plan_at_any_step_is_read_from_the_log(whole_run):
    _, path, control = whole_run
    first, last = read_plan(f"{path}@0"), read_plan(path)
    assert dict(last) == dict(control.plan)
    assert last == control.plan
    assert {choice.format for choice in first.values()} == {"bfloat16", "float32"}
    middle = read_plan(f"{path}@{SETTINGS.final_from - 1}")
    low = {choice.reason[:10] for choice in middle.values() if choice.format in ("int8_row", "fp8:tensorwise")}
    assert low == {"goes low: "}
    assert middle["layers.0.wire"].format == "int8_row"
    assert middle["layers.2.fprop"].format == "fp8:tensorwise"
    assert middle["layers.2.fprop"].cause == "policy"
    assert middle["layers.2.fprop"].evidence["ms"]["high"] == 1000.0
    assert first.diff(middle).changed.keys() >= {"layers.0.wire", "layers.2.fprop"}
    assert middle["layers.0.moments"].format == "float32"
    assert "when the stream was made" in middle["layers.0.moments"].reason


def test_a_replayed_log_gives_the_same_losses(whole_run):
    losses, path, _ = whole_run
    with Run() as run, RunController.replay(run.stream, path) as control:
        assert run.train(control, range(STEPS)) == losses
        assert control.plan == read_plan(path)
    with Run() as run:  # and another plan gives others
        script = replace(read_run_log(path), changes=[])
        assert run.train(RunController.replay(run.stream, script), range(6)) != losses[:6]
    with (
        Run(fp8=False) as run,
        pytest.raises(SelectiveFileError, match=r"layers\.0\.fprop began as bfloat16 and is no"),
    ):
        RunController.replay(run.stream, path)


def test_a_resumed_run_goes_on_as_the_first(whole_run, tmp_path):
    losses, whole, _ = whole_run
    clock, path = Clock(ALL_WIN), tmp_path / "run.jsonl"
    with Run() as run:
        control = RunController(run.stream, SETTINGS, probe=run.probe, log=path, clock=clock)
        at = SETTINGS.final_from - 2
        begun = run.train(control, range(at), clock)
        saved_at(run, control, tmp_path)
        run.train(control, range(at, SETTINGS.final_from + 2), clock)  # lost: nothing of it was saved but the log
        control.close()
    with Run() as run:
        control = RunController(run.stream, SETTINGS, probe=run.probe, log=path, clock=clock)
        with pytest.raises(SelectiveError, match="changes of an earlier run; call load"):
            control.begin_step(at)
        load_into(run, control, tmp_path)
        assert begun + run.train(control, range(at, STEPS), clock) == losses
        control.close()
    assert [one[:4] for one in read_run_log(path).changes] == [one[:4] for one in read_run_log(whole).changes]


def saved_at(run: Run, control: RunController, folder: Path) -> None:
    control.save(folder / "control.json")
    run.stream.save(folder / "stream.safetensors")
    torch.save([run.model.head.state_dict(), run.optimizer.state_dict()], folder / "rest.pt")


def load_into(run: Run, control: RunController, folder: Path) -> None:
    run.stream.load(folder / "stream.safetensors")
    head, optimizer = torch.load(folder / "rest.pt")
    run.model.head.load_state_dict(head)
    run.optimizer.load_state_dict(optimizer)
    control.load(folder / "control.json")


# Ways are timed for three steps, of which the first does not count: states without a time, and with that of one step.
@pytest.mark.parametrize(
    ("at", "is_known"),
    [pytest.param(4, False, marks=pytest.mark.long), (5, True), pytest.param(7, False, marks=pytest.mark.long)],
)
def test_a_run_resumed_while_it_times_its_options_repeats_its_losses(tmp_path, at, is_known):
    clock, slower = Clock(ALL_WIN), Clock(dict.fromkeys(ALL_WIN, -0.3))
    path, settings = tmp_path / "run.jsonl", replace(SETTINGS, total_steps=40, timing_steps=2)
    until = 7 * 3 + 3  # rows are low from the step on at which the last way has its time
    with Run() as run, RunController(run.stream, settings, probe=run.probe, log=path, clock=clock) as control:
        run.train(control, range(at), clock)
        saved_at(run, control, tmp_path)
        clock.now += 60.0  # saving took its time
        losses = run.train(control, range(at, until), clock)
        times = control.times
        assert any(one["reason"].startswith("goes low") for one in control.state.reasons.values())
    script = read_run_log(path)
    timing = json.loads((tmp_path / "control.json").read_text())["state"]["timing"]
    assert (timing["ms"] is not None) == is_known
    with Run() as run, RunController(run.stream, settings, probe=run.probe, log=path, clock=slower) as control:
        load_into(run, control, tmp_path)
        assert run.train(control, range(at, until), slower) == losses
        assert control.times == times
    assert read_run_log(path).changes == script.changes
    anew, same = tmp_path / "anew.jsonl", Clock(ALL_WIN)
    with Run() as run, RunController(run.stream, settings, probe=run.probe, log=anew, clock=same) as control:
        load_into(run, control, tmp_path)  # without its log it repeats them where it times the same
        assert read_plan(anew) == control.plan
        assert run.train(control, range(at, until), same) == losses
        assert read_plan(anew) == control.plan
    with Run() as run, RunController(run.stream, settings, probe=run.probe, clock=slower) as control:
        load_into(run, control, tmp_path)  # and not where it times other things, from the third way on
        assert run.train(control, range(at, 12), slower) != losses[: 12 - at]


def test_a_log_that_lost_lines_lets_a_run_go_on(tmp_path, caplog):
    path = tmp_path / "run.jsonl"
    with Run() as run, RunController(run.stream, SETTINGS, probe=run.probe, log=path) as control:
        run.train(control, range(3))
        control.save(tmp_path / "control.json")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))
    with Run() as run, RunController(run.stream, SETTINGS, probe=run.probe, log=path) as control:
        control.load(tmp_path / "control.json")
        run.train(control, range(3, 4))
    assert "is timed anew" in caplog.text
    with Run("adapters", fp8=False) as run, RunController(run.stream, SETTINGS, probe=run.probe) as control:
        document = json.loads((tmp_path / "control.json").read_text())
        document["rows"] = control.state_dict()["rows"]
        document["state"] |= {"low": [], "reasons": {}}
        with pytest.raises(SelectiveFileError, match=r"state.timing names \['dgrad'.*expected parts of \['wire'\]"):
            control.load_state_dict(document)


def test_adapters_and_a_clock_that_says_nothing_is_faster():
    clock = Clock({"wire": 0.0, "fprop": -0.1})
    with Run("adapters") as run, RunController(run.stream, SETTINGS, probe=run.probe, clock=clock) as control:
        run.train(control, range(STEPS), clock)
        assert not [one for one in control.state.reasons.values() if not one["reason"].startswith(("timed", "low"))]
        assert "layers.0.moments" not in control.plan
        assert all(choice.format in ("bfloat16", "float32") for choice in control.plan.values())


def test_a_rise_of_the_loss_raises_the_rows_for_good(monkeypatch):
    clock = Clock(ALL_WIN)
    settings = replace(SETTINGS, loss_tolerance=1e-3, feedback_every=3, noise_share=10.0)
    with Run() as run, RunController(run.stream, settings, probe=run.probe, clock=clock) as control:
        seen = control._probe_loss
        monkeypatch.setattr(
            control, "_probe_loss", lambda low, step: seen(low, step) + 0.1 * any("layers.2" in name for name in low)
        )
        run.train(control, range(settings.final_from - 1), clock)
        locked = set(control.state.locked)
        assert {name for name in locked if "layers.2" in name} == {f"layers.2.{part}" for part in ALL_WIN}
        assert not locked & set(control.state.low)
        assert control.plan["layers.2.wire"].reason.startswith("loss feedback: ")
        assert control.plan["layers.2.wire"].evidence["loss"] > control.plan["layers.2.wire"].evidence["loss_high"]


def test_slow_first_steps_make_nothing_low():
    clock = Clock({})
    with Run() as run, RunController(run.stream, SETTINGS, probe=run.probe, clock=clock) as control:
        for step in range(SETTINGS.final_from):
            run.train(control, range(step, step + 1), clock)
            clock.now += 5.0 if step < 3 else 0.0
        assert control.times["high again"] == control.times["high"] == 1000.0
        assert not control.state.low


def test_measuring_leaves_no_trace():
    with Run() as run:
        control = RunController(run.stream, SETTINGS, probe=run.probe)
        control.begin_step(0)
        loss_of(run.model, 0).backward()
        control.end_step()
        gradient = run.model.head.weight.grad.clone()
        state = torch.get_rng_state()
        rows, passes = {f"layers.{at}.{part}" for at in range(COUNT) for part in ALL_WIN}, []
        control.probe = lambda number: (passes.append(number), run.probe(number))[1]
        control._measure(1, rows)
        groups = min(SETTINGS.groups, COUNT)
        assert passes == [0, 1] + [0] * groups * len(ALL_WIN)
        assert torch.equal(run.model.head.weight.grad, gradient)
        assert torch.equal(torch.get_rng_state(), state)
        impacts = control.state.impacts
        assert set(impacts) == rows
        assert all(impact > 0 for impact in impacts.values())
        assert control.state.noise > 100 * impacts["layers.0.wire"]
        control._measure(1, {"layers.0.wire"})  # no pass for groups that have no row in question
        assert passes[2 + groups * len(ALL_WIN) :] == [0, 1, 0]
        assert set(control.state.impacts) == {"layers.0.wire"}


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_refused(whole_run, tmp_path):
    _, path, control = whole_run
    with Run() as run:
        with pytest.raises(SelectiveError, match="wire: "):
            RunSettings(total_steps=3, wire="int7")
        with pytest.raises(SelectiveError, match="total_steps"):
            RunSettings(total_steps=0)
        with pytest.raises(SelectiveError, match="give probe="):
            RunController(run.stream, SETTINGS, probe=None, times=control.times).begin_step(0)
        with pytest.raises(SelectiveError, match="expected the loss as a tensor"):
            RunController(run.stream, SETTINGS, probe=lambda _: 1.0, times=control.times).begin_step(0)
        with pytest.raises(FormatError, match="q4_k_gguf has blocks of 256"):
            RunController(run.stream, replace(SETTINGS, wire="q4_k_gguf"), probe=run.probe)
        document = control.state_dict()
        with pytest.raises(SelectiveFileError, match="settings: groups was 2, is 3"):
            RunController(run.stream, replace(SETTINGS, groups=3), probe=run.probe).load_state_dict(document)
        own = RunController(run.stream, SETTINGS, probe=run.probe)
        own.load_state_dict(document)
        with pytest.raises(SelectiveError, match="steps must go up"):
            own.begin_step(3)
    lines = path.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(lines[:3] + lines[4:]))
    with pytest.raises(PlanFileError, match="change 1 is missing, got 2"):
        read_run_log(cut)
    cut.write_text("".join(lines[:3]) + lines[3][:20])
    assert len(read_run_log(cut).changes) == 1
    head = json.loads(lines[0])
    cut.write_text(json.dumps(head | {"version": 9}) + "\n")
    with pytest.raises(PlanFileError, match="of version 1"):
        read_run_log(cut)


# ---- FP8 layers in streamed blocks -----------------------------------------------------------------------------------


def fp8_losses(slots: Any, device: str) -> list[float]:
    torch.manual_seed(0)
    model = Model().bfloat16().to(device)
    apply_fp8(model, None, tokens=32, recipe="tensorwise", include=["layers.*"], emulate=device == "cpu")
    layers = [module for module in model.modules() if hasattr(module, "reuse_weight_cast")]
    losses = []
    how: Any = {"slots": slots, "formats": "int8_row", "train": "weights", "optimizer": AdamWSettings(lr=3e-3)}
    with stream_blocks(model.cpu(), "layers.*", device=device, options=OPTIONS, **how) as stream:
        assert not any(layer.reuse_weight_cast for layer in layers)
        for step in range(6):
            torch.manual_seed(step)
            stream.begin_step(step)
            x, target = (one.to(device) for one in batch(step))
            loss = nn.functional.cross_entropy(model(x.bfloat16()), target)
            loss.backward()
            model.head.zero_grad()
            stream.end_step()
            losses.append(loss.item())
    assert len(layers) == 2 * COUNT
    assert all(layer.reuse_weight_cast for layer in layers)
    return losses


def test_fp8_layers_keep_no_casts_while_other_blocks_take_their_place():
    assert fp8_losses(2, "cpu") == fp8_losses(COUNT, "cpu")


@pytest.mark.gpu
def test_fp8_layers_keep_no_casts_while_other_blocks_take_their_place_on_a_gpu():
    # Casts of gradients begin with scales of other blocks, so the last bits differ; another block's weights would show.
    assert fp8_losses(2, "cuda") == pytest.approx(fp8_losses("auto", "cuda"), rel=0.02)
    assert fp8_losses(2, "cuda") == pytest.approx(fp8_losses(2, "cpu"), rel=0.05)
