"""One value of a good document replaced by any other: it is read, or refused with one line of ours; no crash."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.plan.fp8_choice import choose_products
from bitplan.plan.fp8_layers import Parallel, local_layers
from bitplan.plan.fp8_merge import merge_reports
from bitplan.plan.fp8_models import model_parts
from bitplan.plan.fp8_policy import Question, decide, read_policy
from bitplan.plan.fp8_report import parse_report
from bitplan.plan.fp8_terms import KINDS, Fp8Error
from bitplan.plan.fp8_yaml import read_yaml_model
from tests.plan.fp8_samples import SEED_POLICY, experts, pair, report, series
from tests.plan.test_fp8_layers import DEEPSEEK_V3, QWEN3_30B, QWEN3_VL_235B
from tests.plan.test_fp8_yaml import DEEPSEEK, QWEN

REPORT = report([*series({512: 0.8, 4096: 1.2}), *pair(424, 1.1, **experts("row_grouped"))])
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2**64), st.floats(), st.text(max_size=3), st.sampled_from(KINDS),
    st.lists(st.integers(0, 3), max_size=3), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(document, path, junk):
    if not path:
        return junk
    changed = copy.deepcopy(document)
    target = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = junk
    return changed


def ask_policy(document):
    policy = read_policy(document)
    for kind in KINDS:
        question = Question(kind, 512, "fc2", num_gemms=64, moe_router_topk=8)
        assert decide(policy, question).reason
        assert choose_products(policy, question).reason
    assert read_policy(json.loads(policy.to_json())).to_json() == policy.to_json()


def ask_report(document):
    merge_reports([parse_report(json.dumps(document).encode(), where="r")]).policy.to_json()


def ask_config(document):
    local_layers(model_parts(document), Parallel(tp=2, ep=2))


def read_or_refuse(ask, document):
    message = ""
    try:
        ask(document)
    except Fp8Error as error:
        message = str(error)
    assert "\n" not in message


DOCUMENTS = [
    (json.loads(SEED_POLICY), ask_policy),
    (merge_reports([REPORT]).policy.to_document(), ask_policy),
    (REPORT.to_document(), ask_report),
    (DEEPSEEK_V3, ask_config),
    (QWEN3_30B, ask_config),
    (QWEN3_VL_235B, ask_config),
]


@pytest.mark.parametrize(("document", "ask"), DOCUMENTS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_value_anywhere(document, ask, data):
    path = data.draw(st.sampled_from(list(places(document))))
    read_or_refuse(ask, replaced(document, path, data.draw(JUNK)))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([QWEN, DEEPSEEK]), st.integers(0, 10**6), st.text(max_size=4), st.sampled_from(["insert", "cut"])
)
def test_any_letters_in_a_yaml(text, at, letters, how):
    at %= len(text)
    changed = text[:at] + letters + (text[at:] if how == "insert" else text[at + 3 :])
    read_or_refuse(lambda yaml: local_layers(read_yaml_model(yaml).parts, Parallel()), changed)
