"""Trees of `device="cuda"` are those of the CPU, to the bit: under Triton's interpreter, and (`gpu`) on a card."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRanker, BoostedTreesRegressor, TreesError
from bitplan.trees.gradients import GradientPrecision, GradientsI16
from bitplan.trees.objectives import Binary, Multiclass, SquaredError
from tests.trees.samples import rules, table

pytest.importorskip("triton")
import triton
import triton.language as tl

from bitplan.trees.cuda import limits, score_kernels
from bitplan.trees.cuda.scores import CudaScores


def trees_of(model):
    """All numbers of all trees."""
    fields = [vars(tree) for tree in model.booster_.trees]
    return [{name: getattr(value, "tolist", lambda: None)() for name, value in each.items()} for each in fields]


def check_same_trees(kind, x, y, weights=None, **settings):
    here, there = (kind(**settings, device=device).fit(x, y, weights) for device in ("cpu", "cuda"))
    assert trees_of(here) == trees_of(there)
    return there


FEW = {"n_estimators": 2}
SMALL = {"min_child_samples": 5, "max_leaves": 4}
LONG = [
    (BoostedTreesRegressor, {"gradient_precision": "i16", "growth": "depth", "max_depth": 2, "l1": 0.3}),
    (BoostedTreesRegressor, {"gradient_precision": "i8", "interaction_constraints": [[0, 1], [2]], "l2": 1.0}),
    (BoostedTreesRegressor, {"gradient_precision": "i16", "objective": "absolute_error"}),
    (BoostedTreesClassifier, {"gradient_precision": "i16", "subsample": 0.6, "renew_leaves": True, "max_leaves": 7}),
]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (BoostedTreesClassifier, {"gradient_precision": "i16", "max_leaves": 5}),
        (BoostedTreesRegressor, {"gradient_precision": "i8", "n_estimators": 2, "max_leaves": 3, "subsample": 0.7}),
        *(pytest.param(*given, marks=pytest.mark.long) for given in LONG),
    ],
    ids=str,
)
def test_trees_are_those_of_the_cpu(kind, settings):
    x, y = table(rows=200, features=3, missing=0.1)
    weights = np.random.default_rng(1).random(200)
    target = y > 0 if kind is BoostedTreesClassifier else y
    check_same_trees(kind, x, target, weights, **(SMALL | {"n_estimators": 1} | settings))


def with_categories(rows, features, missing=0.1):
    """A table whose second feature is a category, on which the target depends."""
    x, y = table(rows=rows, features=features, missing=missing)
    x[:, 1] = np.random.default_rng(2).integers(0, 9, rows)
    x[::17, 1] = np.nan
    return x, y + 3 * np.sin(5 * np.nan_to_num(x[:, 1]))


BOUNDED = {"monotone_constraints": [1, 0, -1], "max_leaves": 6}
SETS = {"categorical_features": [1]}


@pytest.mark.parametrize(
    "settings",
    [
        SETS | {"subsample": 0.7, "max_leaves": 5},
        BOUNDED,
        *(pytest.param(BOUNDED | SETS | more, marks=pytest.mark.long) for more in ({}, {"l1": 0.3, "growth": "depth"})),
    ],
    ids=str,
)
def test_categories_and_monotone_constraints_are_those_of_the_cpu(settings):
    x, y = with_categories(200, 3)
    model = check_same_trees(BoostedTreesRegressor, x, y, gradient_precision="i16", **(SMALL | settings | FEW))
    if "categorical_features" in settings:
        assert any(numbers is not None for tree in model.booster_.trees for numbers in tree.categories)


def test_a_ranker_and_scores_to_begin_with_are_those_of_the_cpu():
    x, y = table(rows=120, features=2)
    settings = SMALL | {"n_estimators": 1, "gradient_precision": "i16"}
    relevance = np.digitize(y, [-0.5, 0.5])
    here, there = (
        BoostedTreesRanker(**settings, device=device).fit(x, relevance, [40] * 3, np.arange(1.0, 121.0), init_score=y)
        for device in ("cpu", "cuda")
    )
    assert trees_of(here) == trees_of(there)


def test_three_classes_and_the_saved_file(tmp_path):
    x, y = table(rows=120, features=2)
    settings = SMALL | {"n_estimators": 1, "max_leaves": 2, "gradient_precision": "i16"}
    model = check_same_trees(BoostedTreesClassifier, x, np.digitize(y, [-0.5, 0.5]), **settings)
    model.save(tmp_path / "cuda.json")
    model.set_params(device="cpu").save(tmp_path / "cpu.json")
    assert (tmp_path / "cuda.json").read_bytes() == (tmp_path / "cpu.json").read_bytes()


@pytest.mark.parametrize("doubt", [2.0**-49, 2.0**-20], ids=["few doubtful rows", "many"])
@pytest.mark.parametrize("objective", [SquaredError(), Binary(), Multiclass(3)], ids=lambda each: each.name)
def test_gradients_are_those_of_the_cpu(objective, doubt, monkeypatch):
    """Rows whose float32 could depend on the last bits of `exp` are computed by the host."""
    if not torch.cuda.is_available():  # compiled kernels have their constants
        monkeypatch.setattr(score_kernels, "LESS", tl.constexpr(1 - doubt))
        monkeypatch.setattr(score_kernels, "MORE", tl.constexpr(1 + doubt))
    rng = np.random.default_rng(0)
    y, weights = rng.integers(0, objective.outputs or 2, 500).astype(np.float32), rng.random(500)
    scores = rng.standard_normal((500, objective.outputs)) * 8
    wanted = np.empty((2, objective.outputs, 500), np.float32)
    objective.gradients(y, scores, weights, *wanted)
    grower = SimpleNamespace(device=limits.find_device(), features=1, most_leaves=1)
    held = CudaScores(objective, y, weights, scores, grower, GradientPrecision.I16, False, rules())
    held.find_gradients()
    made = np.stack([held._grads.cpu().numpy(), held._hess.cpu().numpy()])
    assert np.array_equal(made.view(np.int32), wanted.view(np.int32))
    made, wanted = held.prepare(0, None), GradientsI16.quantize(*wanted[:, 0])
    assert (made.grad_scale, made.hess_scale) == (wanted.grad_scale, wanted.hess_scale)


def test_gradients_without_a_scale_are_refused_by_row():
    scores = np.zeros((50, 1))
    scores[7] = np.inf
    grower = SimpleNamespace(device=limits.find_device(), features=1, most_leaves=1)
    held = CudaScores(SquaredError(), np.zeros(50), np.empty(0), scores, grower, GradientPrecision.I16, False, rules())
    with pytest.raises(TreesError, match="row 7 has gradient inf"):
        held.find_gradients()


@pytest.mark.parametrize(("weights", "bytes_a_row"), [(0, 8 + 4 + 4 + 8), (50, 8 + 4 + 4 + 8 + 8)])
def test_scores_are_refused_where_their_tensors_do_not_fit(weights, bytes_a_row, monkeypatch):
    given = SquaredError(), np.zeros(50), np.ones(weights), np.zeros((50, 1))
    grower = SimpleNamespace(device=limits.find_device(), features=1, most_leaves=1)
    monkeypatch.setattr(limits, "free_bytes", lambda _: 50 * bytes_a_row)
    CudaScores(*given, grower, GradientPrecision.I16, False, rules())
    monkeypatch.setattr(limits, "free_bytes", lambda _: 50 * bytes_a_row - 1)
    with pytest.raises(TreesError, match=f"need {50 * bytes_a_row} bytes of GPU memory"):
        CudaScores(*given, grower, GradientPrecision.I16, False, rules())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_precision": "f32"}, "device='cuda': gradient_precision='f32' .* set gradient_precision='i16'"),
        ({"sampling": "gradient", "subsample": 0.3}, "sampling: rows are drawn by gradient on the CPU"),
        ({"device": "gpu"}, "device: expected one of 'cpu', 'cuda', got 'gpu'"),
    ],
    ids=str,
)
def test_what_the_gpu_does_not_do_is_refused_by_name(settings, message):
    x, y = table(rows=50, features=3)
    with pytest.raises(TreesError, match=message):
        BoostedTreesRegressor(**({"device": "cuda", "gradient_precision": "i16"} | settings)).fit(np.abs(x).round(), y)


def test_no_gpu_and_no_memory_are_one_line(monkeypatch):
    x, y = table(rows=50, features=3)
    model = BoostedTreesRegressor(device="cuda", gradient_precision="i16")
    monkeypatch.setattr(limits, "free_bytes", lambda _: 1000)
    with pytest.raises(TreesError, match=r"50 rows x 3 features need [0-9]+ bytes of GPU memory, and 1000 are free"):
        model.fit(x, y)
    monkeypatch.setattr(limits, "INTERPRETED", tl.constexpr(False))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TreesError, match="finds no CUDA GPU; use device='cpu'"):
        model.fit(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["i16", "i8"])
@pytest.mark.parametrize("task", ["binary", "numbers", "classes"])
def test_trees_of_a_card_are_those_of_the_cpu(precision, task):
    x, y = table(rows=100_000, features=28, missing=0.05)
    x[:, 1] += np.random.default_rng(0).standard_normal(100_000)
    x[:, 5], x[:, 6] = x[:, 5] > 0, np.round(x[:, 6])  # few bins
    kind = BoostedTreesRegressor if task == "numbers" else BoostedTreesClassifier
    target = {"binary": y > 0, "numbers": y, "classes": np.digitize(y, [-0.5, 0.5])}[task]
    weights = np.random.default_rng(1).random(100_000)
    check_same_trees(kind, x, target, weights, n_estimators=4, max_leaves=63, gradient_precision=precision)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [7, 40])
def test_any_number_of_features_on_a_card(features):
    x, y = table(rows=300_000, features=features)
    settings = {"n_estimators": 2, "max_leaves": 31, "gradient_precision": "i16", "subsample": 0.8}
    check_same_trees(BoostedTreesRegressor, x, y, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"categorical_features": [1], "subsample": 0.8},
        {"monotone_constraints": [1, 0, -1, *[0] * 17], "l2": 1.0},
        {"categorical_features": [1], "monotone_constraints": [1, 0, -1, *[0] * 17], "l1": 0.3, "growth": "depth"},
        {"categorical_features": [1], "objective": "absolute_error"},
    ],
    ids=str,
)
def test_categories_and_constraints_of_a_card_are_those_of_the_cpu(settings):
    x, y = with_categories(100_000, 20)
    check_same_trees(BoostedTreesRegressor, x, y, n_estimators=3, max_leaves=63, gradient_precision="i16", **settings)


@pytest.mark.gpu
def test_a_second_fit_of_another_width_compiles_the_histograms_alone():
    """What is not told apart by widths and rows is compiled once; kernels that were compiled ahead are found."""
    seen: list[str] = []

    def note(*_given, fn, **_more):
        seen.append(fn.name.rpartition(".")[2])

    settings = {"n_estimators": 2, "max_leaves": 31, "gradient_precision": "i16", "device": "cuda"}
    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        for rows, features in ((50_000, 12), (50_003, 14)):
            seen.clear()
            x, y = table(rows=rows, features=features)
            BoostedTreesClassifier(**settings).fit(x, y > 0)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    by_rows = {"binary", "find_largest", "enter_floats"}  # of a number of rows that 16 divides, and of others
    assert {name for name in seen if name not in by_rows} <= {"add_rows"}
    assert len(seen) == len(set(seen)), "compiled ahead, and again"


@pytest.mark.gpu
def test_tables_on_a_card_are_taken_from_there():
    x, y = table(rows=2000, features=5, missing=0.1)
    here = BoostedTreesClassifier(**SMALL, n_estimators=3).fit(x, y > 0, np.abs(y))
    there = [torch.from_numpy(each).cuda() for each in (x, y > 0, np.abs(y))]
    model = BoostedTreesClassifier(**SMALL, n_estimators=3).fit(*there)
    assert trees_of(model) == trees_of(here)
    assert np.array_equal(model.predict_proba(there[0]), here.predict_proba(x))
