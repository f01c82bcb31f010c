"""One answer: over random policies `explain` says what `apply_fp8` builds and shows, and the adapters agree."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bitplan.cli.verbs.fp8 import explain
from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.decide import Fp8Options
from bitplan.fp8.layers.linear import Fp8Linear
from bitplan.fp8.other_libraries import torchao_filter, transformer_engine_decision
from bitplan.fp8.policy.rules import Policy, load_policy
from bitplan.fp8.policy.vocabulary import GEMMS, PRODUCTS
from tests.fp8.policy.fp8_policies import LAYERS, POLICIES, TOKENS
from tests.fp8.test_other_libraries import MEGATRON, TE

RECIPES = st.sampled_from([None, "tensorwise", "blockwise"])


def model():
    def linear(name):
        return nn.Linear(LAYERS[name][1], LAYERS[name][0], bias=False)

    attention, mlp = nn.ModuleDict({"o_proj": linear("proj")}), nn.ModuleDict({"down_proj": linear("fc2")})
    return nn.ModuleList([nn.ModuleDict({"self_attn": attention, "mlp": mlp})])


def explained(path, name, tokens, **options):
    """What the verb prints as JSON, called as the shell calls it."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(typer.Exit) as ended:
        explain(path, kind="row", tokens=tokens, name=name, as_json=True, **options)
    document = json.loads(out.getvalue())
    assert ended.value.exit_code == (1 if not document["products"] and document["answer"] == "unmeasured" else 0)
    return document


def check(path, tokens, recipe, estimate, extrapolate):
    policy = load_policy(path)
    how = {"tokens": tokens, "estimate": estimate, "extrapolate": extrapolate}
    asked = Fp8Options(estimate=estimate, extrapolate=extrapolate)
    built = model()
    applied = apply_fp8(built, policy, tokens=tokens, recipe=recipe, emulate=True, options=asked)
    takes = torchao_filter(model(), policy, recipe=None, **how) if recipe is None else None
    engine = transformer_engine_decision(policy, **how)
    options = {"recipe": recipe, "estimate": estimate, "extrapolate": extrapolate}
    for row in applied.rows:
        known = options | {"shape": f"{row.shape[0]}x{row.shape[1]}"}
        document = explained(path, row.name, tokens, **known)
        for key in ("precision", "answer", "tokens", "speedup", "reason"):
            assert document[key] == getattr(row, key)
        layer = built.get_submodule(row.path)
        gemms = layer.gemms if isinstance(layer, Fp8Linear) else None
        for product in PRODUCTS:
            used = "bf16" if gemms is None else getattr(gemms, product)
            assert document["gemms"][product]["precision"] == ("bf16" if used == "bf16" else "fp8")
            assert used in ("bf16", document["recipe"])
            assert explained(path, row.name, tokens, gemm=product, **known)["precision"] == (
                "bf16" if used == "bf16" else "fp8"
            )
        check_adapters(policy, row, document, takes, engine)
        if row.name is not None and measured_under(policy, row.name):
            assert explained(path, row.name, tokens, **options) == document  # its only shape


@pytest.fixture(autouse=True)
def _megatron(monkeypatch):
    monkeypatch.setitem(sys.modules, MEGATRON, SimpleNamespace(**TE))


def check_adapters(policy, row, document, takes, engine):
    """Adapters have whole modules only: FP8 where all three products are, BF16 where none is."""
    if takes is None:
        return
    plain = nn.Linear(row.shape[1], row.shape[0], bias=False)
    answers = [takes(plain, row.path)]
    if row.name is not None and measured_under(policy, row.name):
        answers.append(bool(engine(TE["TERowParallelLinear"], row.name)))
    assert len(set(answers)) == 1
    if document["products"] in ([], list(PRODUCTS)):
        assert answers[0] is bool(document["products"])


def measured_under(policy, name):
    return policy.version == 2 and any(rule.name == name and rule.gemm in GEMMS for rule in policy.rules)


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.long)])
def test_explain_apply_and_adapters_agree(examples):
    @settings(max_examples=examples, deadline=None)
    @given(POLICIES, TOKENS, RECIPES, st.booleans(), st.booleans())
    def agree(policy, tokens, recipe, estimate, extrapolate):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "policy.json")
            policy.save(path)
            check(path, tokens, recipe, estimate, extrapolate)

    agree()


@settings(max_examples=10, deadline=None)
@given(POLICIES, TOKENS, RECIPES)
def test_they_agree_on_version_1(policy, tokens, recipe):
    rules = [rule for rule in policy.rules if rule.recipe == "tensorwise"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy.json")
        Policy(rules, policy.fingerprint, policy.speedup_threshold, policy.confidence).to_thresholds().save(path)
        check(path, tokens, recipe, True, False)
