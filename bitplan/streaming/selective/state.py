"""The policy's state, and the file that carries it across a restart.

Decisions are functions of (state, statistics, config), so a resumed run takes the same decisions if and only if the
state is restored bit for bit. The document holds all of it: precisions, cooldowns, back-offs, the window of statistics,
an open trial. Floats are written with enough digits to read back as the same float.

The document, version 1:

    {"document": "bitplan-selective-state", "version": 1,
     "layout": {BLOCK: FINGERPRINT},        of each block; a changed model is refused, block by block
     "config": {...},                       another config would decide otherwise, and is refused, key by key
     "state": {"last_step": S, "steps_collected": N, "last_update_step": S,
               "units": {...}, "history": [...], "trial": T}}

A fingerprint is any text that changes when the block does; `layout_of` makes one from shapes and types.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bitplan.base.documents import (
    LIST,
    NAME,
    OBJECT,
    SIZE,
    TEXT,
    Kind,
    Reader,
    document_key,
    is_number,
    keys_of,
    list_of,
    load_document,
    one_of,
    or_null,
    show,
)
from bitplan.base.records import write_json
from bitplan.plan.names import listed, natural_order
from bitplan.streaming.selective.config import (
    PRECISIONS,
    TURNED_DOWN,
    Precision,
    SelectiveError,
    SelectiveFileError,
    SelectivePrecisionConfig,
)
from bitplan.streaming.selective.score import EXCLUSIONS, BlockGradStats, StepStats

DOCUMENT = "bitplan-selective-state"
VERSION = 1
# Settings of printing and logging decide nothing, and may differ between a run and its continuation.
NOT_DECIDING = ("log_decisions", "telemetry_enabled", "telemetry_file", "run_calibration", "calibration_samples")
_FLOAT = Kind("a number", is_number)
_NAMES = list_of(NAME, "a list of names")


@dataclass(frozen=True)
class UnitState:
    """One block or layer. `precision` None: never assigned, which runs as bf16.

    score      the last score: a sensitivity, or a damage in units of loss
    excluded   reason -> number of steps
    """

    precision: Precision | None = document_key(or_null(one_of(*PRECISIONS)), None)
    reason: str = document_key(TEXT, "no assignment yet: bf16")
    score: float | None = document_key(or_null(_FLOAT), None)
    last_switch_step: int | None = document_key(or_null(SIZE), None)
    rollbacks: int = document_key(SIZE, 0)
    backoff_until: int | None = document_key(or_null(SIZE), None)
    excluded: Mapping[str, int] = document_key(OBJECT, factory=dict)

    @property
    def running(self) -> Precision:
        return self.precision or "bf16"


@dataclass(frozen=True)
class Trial:
    """A switch whose effect on the loss is being measured: see `training_policy`.

    switched   the precisions on trial
    suspects   units of which one raised the loss; empty until a probe has shown a rise
    probing    the suspects that are low in the present probe; the others are bf16
    raised     the last probe that was above the tolerance, in words; every suspect was low in it
    """

    step: int = document_key(SIZE)
    loss_before: float = document_key(_FLOAT)
    switched: Mapping[str, Precision] = document_key(OBJECT)
    suspects: tuple[str, ...] = document_key(_NAMES)
    probing: tuple[str, ...] = document_key(_NAMES)
    raised: str = document_key(TEXT, "")


@dataclass(frozen=True)
class PolicyState:
    """Everything that a decision depends on besides the config and this step's statistics. Units in natural order."""

    units: Mapping[str, UnitState]
    last_step: int | None = None
    steps_collected: int = 0
    last_update_step: int | None = None
    history: tuple[StepStats, ...] = ()
    trial: Trial | None = None

    @classmethod
    def start(cls, names: Iterable[str]) -> PolicyState:
        """The state before the first step."""
        units = list(names)
        if not units or len(set(units)) != len(units):
            raise SelectiveError(f"a policy needs blocks with different names, got {listed(units)}")
        return cls({name: UnitState() for name in natural_order(units)})

    def with_units(self, changed: Mapping[str, UnitState]) -> PolicyState:
        return replace(self, units={name: changed.get(name, unit) for name, unit in self.units.items()})


def observe(state: PolicyState, step: StepStats, config: SelectivePrecisionConfig) -> PolicyState:
    """Return the state after one more backward pass: the window moves on, and exclusions are counted."""
    if state.last_step is not None and step.step_id <= state.last_step:
        raise SelectiveError(
            f"step {step.step_id} comes after step {state.last_step}: steps must go up; "
            "after a restart, restore the state of the checkpoint that is resumed"
        )
    unknown = [name for name in (*step.stats, *step.excluded, *step.impacts) if name not in state.units]
    if unknown:
        raise SelectiveError(f"step {step.step_id}: statistics of {listed(unknown)}, which the policy does not know")
    changed = {}
    for name, why in step.excluded.items():
        unit = state.units[name]
        changed[name] = replace(unit, excluded={**unit.excluded, why: unit.excluded.get(why, 0) + 1})
    return replace(
        state.with_units(changed),
        last_step=step.step_id,
        steps_collected=state.steps_collected + 1,
        history=(*state.history, step)[-config.history_window :],
    )


def layout_of(blocks: Mapping[str, Sequence[tuple[str, Sequence[int], str]]]) -> dict[str, str]:
    """Compute fingerprints of blocks from their parameters: (name, shape, type), in any order."""
    layout = {}
    for block in natural_order(blocks):
        rows = sorted((name, tuple(shape), kind) for name, shape, kind in blocks[block])
        digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
        numbers = sum(math.prod(shape) for _, shape, _ in rows)
        layout[block] = f"{len(rows)} parameters, {numbers} numbers, {digest}"
    return layout


# ---- documents -------------------------------------------------------------------------------------------------------


def state_to_document(
    state: PolicyState, layout: Mapping[str, str], config: SelectivePrecisionConfig
) -> dict[str, Any]:
    """The document; `layout` has a fingerprint for every unit of the state."""
    if set(layout) != set(state.units):
        odd = natural_order(set(layout) ^ set(state.units))
        raise SelectiveError(f"the layout must have the units of the state; only one of the two has {listed(odd)}")
    return {
        "document": DOCUMENT,
        "version": VERSION,
        "layout": {name: layout[name] for name in natural_order(layout)},
        "config": config.to_document(),
        "state": {
            "last_step": state.last_step,
            "steps_collected": state.steps_collected,
            "last_update_step": state.last_update_step,
            "units": {name: {**asdict(unit), "excluded": dict(unit.excluded)} for name, unit in state.units.items()},
            "history": [_step_to_document(step) for step in state.history],
            "trial": None if state.trial is None else _trial_to_document(state.trial),
        },
    }


def save_state(
    path: str | Path, state: PolicyState, layout: Mapping[str, str], config: SelectivePrecisionConfig
) -> None:
    """Write the document, whole or not at all."""
    write_json(path, state_to_document(state, layout, config))


def load_state(
    path: str | Path,
    layout: Mapping[str, str],
    config: SelectivePrecisionConfig,
    *,
    accept_config_change: bool = False,
) -> PolicyState:
    document = load_document(path, SelectiveFileError)
    return state_from_document(document, layout, config, where=str(path), accept_config_change=accept_config_change)


def state_from_document(
    document: Any,
    layout: Mapping[str, str],
    config: SelectivePrecisionConfig,
    *,
    where: str = "the selective precision state",
    accept_config_change: bool = False,
) -> PolicyState:
    """Read a policy's saved state; refuses that of another model or config."""
    reader = Reader(where, SelectiveFileError)
    reader.version(document, VERSION)
    known = {"document": one_of(DOCUMENT), "version": SIZE, "layout": OBJECT, "config": OBJECT, "state": OBJECT}
    item = reader.keys("", document, known, tuple(known))
    _require_same_layout(reader, item["layout"], layout)
    if not accept_config_change:
        _require_same_config(reader, item["config"], config)
    return _read_state(reader, item["state"], natural_order(layout))


def read_history(reader: Reader, state: Any, units: Iterable[str]) -> tuple[StepStats, ...]:
    """The window of statistics of a saved state alone, for those who decide something else by it."""
    return _read_state(reader, state, natural_order(units)).history


def _require_same_layout(reader: Reader, saved: Mapping[str, Any], layout: Mapping[str, str]) -> None:
    gone = [name for name in natural_order(saved) if name not in layout]
    new = [name for name in natural_order(layout) if name not in saved]
    changed = [name for name in natural_order(layout) if name in saved and saved[name] != layout[name]]
    differences = [f"{what} {listed(names, 5)}" for what, names in (("no longer has", gone), ("now has", new)) if names]
    if changed:
        first = changed[0]
        differences.append(
            f"changed {listed(changed, 5)} ({first!r} was {show(saved[first])}, is {show(layout[first])})"
        )
    if differences:
        reader.stop(
            f"this state is of another model: the model {', '.join(differences)}; "
            "resume with the model it was saved for, or start the policy anew without the file"
        )


def _require_same_config(reader: Reader, saved: Mapping[str, Any], config: SelectivePrecisionConfig) -> None:
    now = {**TURNED_DOWN, **config.to_document()}
    differences = [
        f"{name} was {show(saved.get(name))}, is {show(now.get(name))}"
        for name in dict.fromkeys((*now, *saved))
        if name not in NOT_DECIDING and saved.get(name, TURNED_DOWN.get(name)) != now.get(name)
    ]
    if differences:
        reader.stop(
            f"this state was saved under another config: {'; '.join(differences[:5])}; "
            "resume with the old values, or accept the change (accept_config_change=True)"
        )


# ---- parts of the document -------------------------------------------------------------------------------------------


_STATE_KEYS = {
    "last_step": or_null(SIZE),
    "steps_collected": SIZE,
    "last_update_step": or_null(SIZE),
    "units": OBJECT,
    "history": LIST,
    "trial": or_null(OBJECT),
}
_STAT_KEYS = dict.fromkeys(("l2_norm", "max_abs", "variance", "relative_magnitude"), _FLOAT)
_STEP_KEYS = {"step_id": SIZE, "stats": OBJECT, "excluded": OBJECT, "impacts": OBJECT}


def _step_to_document(step: StepStats) -> dict[str, Any]:
    stats = {name: {stat: getattr(row, stat) for stat in _STAT_KEYS} for name, row in step.stats.items()}
    impacts = {name: dict(row) for name, row in step.impacts.items()}
    return {"step_id": step.step_id, "stats": stats, "excluded": dict(step.excluded), "impacts": impacts}


def _trial_to_document(trial: Trial) -> dict[str, Any]:
    item = {name: getattr(trial, name) for name in keys_of(Trial)}
    return {**item, "switched": dict(trial.switched), "suspects": [*trial.suspects], "probing": [*trial.probing]}


def _read_state(reader: Reader, value: Any, names: list[str]) -> PolicyState:
    item = reader.keys("state", value, _STATE_KEYS, tuple(_STATE_KEYS))
    if list(item["units"]) != names:
        reader.stop(f"state.units must be the blocks of the layout, in order, got {listed(item['units'])}")
    units = {}
    for name, unit in item["units"].items():
        path = f"state.units[{name[:80]!r}]"
        values = reader.fields_of(UnitState, path, unit, every=True)
        reader.keys(f"{path}.excluded", values["excluded"], dict.fromkeys(EXCLUSIONS, SIZE), ())
        units[name] = UnitState(**values)
    history = tuple(_read_step(reader, f"state.history[{at}]", step, units) for at, step in enumerate(item["history"]))
    trial = None if item["trial"] is None else _read_trial(reader, item["trial"], units)
    return PolicyState(units, item["last_step"], item["steps_collected"], item["last_update_step"], history, trial)


def _read_step(reader: Reader, path: str, value: Any, units: Mapping[str, UnitState]) -> StepStats:
    item = reader.keys(path, value, _STEP_KEYS, tuple(_STEP_KEYS))
    by_name = dict.fromkeys(units, OBJECT)
    reader.keys(f"{path}.stats", item["stats"], by_name, ())
    reader.keys(f"{path}.excluded", item["excluded"], dict.fromkeys(units, one_of(*EXCLUSIONS)), ())
    reader.keys(f"{path}.impacts", item["impacts"], by_name, ())
    stats = {}
    for name, row in item["stats"].items():
        row = reader.keys(f"{path}.stats[{name!r}]", row, _STAT_KEYS, tuple(_STAT_KEYS))
        try:
            stats[name] = BlockGradStats(name, **row)
        except SelectiveError as error:
            reader.stop(f"{path}: {error}")
    for name, row in item["impacts"].items():
        reader.keys(f"{path}.impacts[{name!r}]", row, dict.fromkeys(PRECISIONS, _FLOAT), ())
    return StepStats(item["step_id"], stats, item["excluded"], item["impacts"])


def _read_trial(reader: Reader, value: Any, units: Mapping[str, UnitState]) -> Trial:
    item = reader.fields_of(Trial, "state.trial", value)
    switched = reader.keys("state.trial.switched", item["switched"], dict.fromkeys(units, one_of("int8")), ())
    suspects, probing = item["suspects"], item["probing"]
    for key in ("suspects", "probing"):
        for name in item[key]:
            if name not in switched:
                reader.stop(f"state.trial.{key} names {name!r}, which is not on trial")
    # Without suspects everything on trial is low in the probe; with suspects, some of these are.
    probes_all = not suspects and probing == list(switched)
    if not switched or not (probes_all or (set(probing) < set(suspects) and probing)):
        reader.fail("state.trial.probing", "all that is on trial, or some of the suspects", probing)
    return Trial(**{**item, "suspects": tuple(item["suspects"]), "probing": tuple(item["probing"])})
