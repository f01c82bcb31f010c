"""The state file: bit for bit, at every step; and refused by name where it is of something else."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.streaming.selective.config import SelectiveError, SelectivePrecisionConfig
from bitplan.streaming.selective.decide import Evidence, TransferFacts, compute_hints
from bitplan.streaming.selective.score import RawGradStats, compare_blocks
from bitplan.streaming.selective.state import (
    PolicyState,
    layout_of,
    load_state,
    observe,
    save_state,
    state_from_document,
    state_to_document,
)
from bitplan.streaming.selective.training_policy import advance_trial, begin_trial

NAMES = [f"b.{index}" for index in range(11)]
LAYOUT = layout_of({name: [("w", (4, 4), "bfloat16"), ("norm", (4,), "float32")] for name in NAMES})
CONFIG = SelectivePrecisionConfig(
    warmup_steps=1,
    update_interval_steps=2,
    history_window=3,
    min_steps_between_switches=3,
    loss_feedback=True,
    backoff_steps=4,
)
EVIDENCE = Evidence(
    quant_errors={name: {"int8": 0.01} for name in NAMES},
    unit_bytes={name: {"bf16": 1000, "int8": 520} for name in NAMES},
    transfer=TransferFacts(5.0, 1000.0, 1),
)


def advance(state, number, numbers, config):
    """One step of a run that uses everything: statistics, exclusions, impacts, a decision, one probe of a trial."""
    raw = {}
    for name, value in zip(NAMES, numbers, strict=False):
        raw[name] = None if value is None else RawGradStats(value, value, value * value)
    impacts = {name: {"int8": value} for name, value in zip(NAMES, numbers, strict=False) if value}
    step = compare_blocks(number, raw, impacts)
    state = observe(state, step, config)
    state, hints = compute_hints(state, number, config, EVIDENCE)
    if state.trial is None:
        state = begin_trial(state, hints, 1.0, number)
    if state.trial is not None:
        state, _ = advance_trial(state, 1.0 + 0.02 * (number % 3), config)
    return state, hints


def through_json(state, config):
    text = json.dumps(state_to_document(state, LAYOUT, config), allow_nan=False)
    return state_from_document(json.loads(text), LAYOUT, config)


numbers = st.lists(
    st.one_of(st.none(), st.floats(0, 1e30), st.just(float("nan"))), min_size=len(NAMES), max_size=len(NAMES)
)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(numbers, min_size=1, max_size=12),
    st.sampled_from(["gradient", "impact"]),
    st.booleans(),
)
def test_a_run_restored_at_every_step_is_the_unbroken_run(steps, scoring, bandwidth_aware):
    config = replace(CONFIG, scoring=scoring, bandwidth_aware=bandwidth_aware)
    unbroken = resumed = PolicyState.start(NAMES)
    for number, row in enumerate(steps, 1):
        resumed = through_json(resumed, config)
        assert resumed == unbroken
        unbroken, expected = advance(unbroken, number, row, config)
        resumed, result = advance(resumed, number, row, config)
        assert result == expected
    document = state_to_document(unbroken, LAYOUT, config)
    again = state_to_document(through_json(unbroken, config), LAYOUT, config)
    assert json.dumps(again) == json.dumps(document)


def some_state():
    state = PolicyState.start(NAMES)
    for number in range(1, 8):
        state, _ = advance(state, number, [0.1 * (at % 5) + 0.1 for at in range(len(NAMES))], CONFIG)
    return state


def test_a_file_keeps_the_state_and_its_bytes(tmp_path):
    state, path = some_state(), tmp_path / "policy.json"
    save_state(path, state, LAYOUT, CONFIG)
    first = path.read_bytes()
    restored = load_state(path, LAYOUT, CONFIG)
    assert restored == state
    save_state(path, restored, LAYOUT, CONFIG)
    assert path.read_bytes() == first


def test_units_are_in_natural_order():
    assert list(PolicyState.start(reversed(NAMES)).units) == NAMES


def refused(document, layout=LAYOUT, config=CONFIG):
    with pytest.raises(SelectiveError) as caught:
        state_from_document(document, layout, config, where="policy.json")
    assert str(caught.value).startswith("policy.json: ")
    return str(caught.value)


def test_a_changed_model_is_refused_by_name():
    document = state_to_document(some_state(), LAYOUT, CONFIG)
    smaller = {name: text for name, text in LAYOUT.items() if name != "b.3"}
    larger = {**LAYOUT, "b.11": "x"}
    other = {**LAYOUT, **layout_of({"b.2": [("w", (4, 8), "bfloat16"), ("norm", (4,), "float32")]})}
    assert "the model no longer has 'b.3'" in refused(document, smaller)
    assert "the model now has 'b.11'" in refused(document, larger)
    message = refused(document, other)
    assert "changed 'b.2'" in message
    assert "2 parameters, 20 numbers" in message
    assert "2 parameters, 36 numbers" in message
    assert "start the policy anew" in message


def test_the_layout_sees_shapes_types_and_names_but_not_order():
    def of(*rows):
        return layout_of({"b": rows})["b"]

    one, two = ("w", (2, 3), "bfloat16"), ("v", (3,), "float32")
    assert of(one, two) == of(two, one)
    assert of(one) == of(("w", [2, 3], "bfloat16"))
    assert len({of(one), of(two), of(("w", (3, 2), "bfloat16")), of(("w", (2, 3), "float32")), of(one, two)}) == 5


def test_a_changed_config_is_refused_by_key_unless_accepted():
    document = state_to_document(some_state(), LAYOUT, CONFIG)
    changed = replace(CONFIG, bf16_threshold=0.7, history_window=4)
    message = refused(document, config=changed)
    assert "bf16_threshold was 0.6, is 0.7; history_window was 3, is 4" in message
    assert state_from_document(document, LAYOUT, changed, accept_config_change=True) == some_state()
    state_from_document(document, LAYOUT, replace(CONFIG, telemetry_file="elsewhere.jsonl"))  # decides nothing


def edited(edit):
    document = json.loads(json.dumps(state_to_document(some_state(), LAYOUT, CONFIG)))
    edit(document)
    return document


WRONG = [
    (lambda d: d.update(version=2), "version must be 1, which is what this bitplan reads, got 2"),
    (lambda d: d.update(document="bitplan-plan"), "document must be one of 'bitplan-selective-state'"),
    (lambda d: d.pop("state"), "state is missing"),
    (lambda d: d.update(extra=1), "unknown key 'extra'"),
    (lambda d: d["state"].update(last_step=-1), "state: last_step must be an integer from 0"),
    (lambda d: d["state"].pop("history"), "state: history is missing"),
    (lambda d: d["state"]["units"].pop("b.4"), "state.units must be the blocks of the layout"),
    (lambda d: d["state"]["units"]["b.4"].update(precision="int2"), "precision must be one of 'bf16', 'int8'"),
    (lambda d: d["state"]["units"]["b.4"].update(excluded={"odd": 1}), "excluded: unknown key 'odd'"),
    (lambda d: d["state"]["units"]["b.4"].pop("rollbacks"), "state.units['b.4']: rollbacks is missing"),
    (
        lambda d: d["state"]["history"][0]["stats"]["b.0"].update(l2_norm=-1.0),
        "l2_norm must be a finite number from 0, got -1.0",
    ),
    (lambda d: d["state"]["history"][0]["stats"].update(z={}), "state.history[0].stats: unknown key 'z'"),
    (lambda d: d["state"]["history"][0].update(excluded={"b.1": "why"}), "excluded: b.1 must be one of 'missing'"),
    (lambda d: d["state"]["history"][0].update(impacts={"b.1": {"int8": "x"}}), "int8 must be a number"),
    (
        lambda d: d["state"].update(
            trial={"step": 1, "loss_before": 1.0, "switched": {}, "suspects": ["b.1"], "probing": []}
        ),
        "state.trial.suspects names 'b.1', which is not on trial",
    ),
    (
        lambda d: d["state"].update(
            trial={"step": 1, "loss_before": 1.0, "switched": {"b.1": "int8"}, "suspects": [], "probing": []}
        ),
        "state.trial.probing must be all that is on trial, or some of the suspects, got []",
    ),
    (
        lambda d: d["state"].update(
            trial={"step": 1, "loss_before": 1.0, "switched": {"b.1": "bf16"}, "suspects": [], "probing": []}
        ),
        "state.trial.switched: b.1 must be one of 'int8'",
    ),
]


@pytest.mark.parametrize(("edit", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_document_that_was_edited(edit, message):
    assert re.search(re.escape(message), refused(edited(edit)))


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)  # the default tries every letter: seconds
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.just("b.1"), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=40)
@given(st.data(), json_values)
def test_whatever_is_in_the_file_the_answer_is_a_state_or_one_clear_error(data, value):
    """Some part of a good document replaced by anything: refused in one line, or read and fit to go on with."""
    document = json.loads(json.dumps(state_to_document(some_state(), LAYOUT, CONFIG)))
    place, key = None, None
    node = document
    while isinstance(node, dict | list) and node and (place is None or data.draw(st.integers(0, 4)) > 0):
        place, key = node, data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node = place[key]
    place[key] = value
    message = ""
    try:
        state = state_from_document(document, LAYOUT, CONFIG, where="policy.json")
    except SelectiveError as error:
        message = str(error)
    if message:
        assert message.startswith("policy.json: ")
        assert "\n" not in message
        return
    compute_hints(state, 2**64, CONFIG, EVIDENCE)
    if state.trial is not None:
        advance_trial(state, 9.0, CONFIG)


@settings(deadline=None, max_examples=25)
@given(json_values)
def test_whatever_is_in_the_config_the_answer_is_a_config_or_one_clear_error(value):
    for document in (value, {"selective_precision": value}, {"memory": {"stagehand": {"selective_precision": value}}}):
        message = "c.json: "
        try:
            SelectivePrecisionConfig.from_document(document, where="c.json")
        except SelectiveError as error:
            message = str(error)
        assert message.startswith("c.json: ")


def test_not_json(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text('{"document": ')
    with pytest.raises(SelectiveError, match=r"policy\.json: not valid JSON"):
        load_state(path, LAYOUT, CONFIG)


def test_saving_under_a_layout_of_other_units():
    with pytest.raises(SelectiveError, match=r"only one of the two has 'b\.11'"):
        state_to_document(some_state(), {**LAYOUT, "b.11": "x"}, CONFIG)
