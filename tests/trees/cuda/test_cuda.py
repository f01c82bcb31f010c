"""Trees of `device="cuda"` are those of the CPU, to the bit: under Triton's interpreter, and (`gpu`) on a card."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bitplan.trees import (
    BoostedTreesClassifier,
    BoostedTreesRanker,
    BoostedTreesRegressor,
    TreesError,
    estimator_base,
    tables,
)
from bitplan.trees.gradients import GradientPrecision, GradientsI16
from bitplan.trees.objectives import Binary, Multiclass, SquaredError
from tests.trees.samples import rules, table

pytest.importorskip("triton")
import triton
import triton.language as tl

from bitplan.trees.cuda import binning, compiling, kernels, limits, score_kernels
from bitplan.trees.cuda.scores import CudaScores
from bitplan.trees.cuda.tables import CudaTable


def trees_of(model):
    """All numbers of all trees."""
    fields = [vars(tree) for tree in model.booster_.trees]
    return [{name: getattr(value, "tolist", lambda: None)() for name, value in each.items()} for each in fields]


def check_same_trees(kind, x, y, weights=None, **settings):
    here, there = (kind(**settings, device=device).fit(x, y, weights) for device in ("cpu", "cuda"))
    assert trees_of(here) == trees_of(there)
    return there


SMALL = {"min_child_samples": 5, "max_leaves": 4}
LONG = [
    (BoostedTreesRegressor, {"gradient_precision": "i16", "growth": "depth", "max_depth": 2, "l1": 0.3}),
    (BoostedTreesRegressor, {"gradient_precision": "i8", "interaction_constraints": [[0, 1], [2]], "l2": 1.0}),
    (BoostedTreesRegressor, {"gradient_precision": "i16", "objective": "absolute_error"}),
    (BoostedTreesClassifier, {"gradient_precision": "i16", "subsample": 0.6, "renew_leaves": True, "max_leaves": 7}),
    (BoostedTreesRegressor, {"gradient_precision": "f32", "objective": "poisson", "subsample": 0.8}),
    (BoostedTreesClassifier, {"gradient_precision": "f32", "monotone_constraints": [0, 1, -1], "max_leaves": 9}),
    (BoostedTreesRegressor, {"gradient_precision": "f32", "interaction_constraints": [[0, 1], [2]], "l1": 0.3}),
]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (BoostedTreesClassifier, {"gradient_precision": "i16", "max_leaves": 5}),
        (BoostedTreesRegressor, {"gradient_precision": "i8", "n_estimators": 2, "max_leaves": 3, "subsample": 0.7}),
        (BoostedTreesRegressor, {"gradient_precision": "f32", "n_estimators": 2, "subsample": 0.8}),
        (BoostedTreesRegressor, {"gradient_precision": "i16", "monotone_constraints": [1, -1, 0], "l1": 0.1}),
        *(pytest.param(*given, marks=pytest.mark.long) for given in LONG),
    ],
    ids=str,
)
def test_trees_are_those_of_the_cpu(kind, settings):
    x, y = table(rows=200, features=3, missing=0.1)
    weights = np.random.default_rng(1).random(200)
    target = y > 0 if kind is BoostedTreesClassifier else np.exp(y) if "objective" in settings else y
    check_same_trees(kind, x, target, weights, **(SMALL | {"n_estimators": 1} | settings))


@pytest.mark.parametrize("precision", ["i16", pytest.param("f32", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "more", [{}, pytest.param({"monotone_constraints": [1, 0, 0]}, marks=pytest.mark.long)], ids=["free", "monotone"]
)
def test_categories_are_divided_as_on_the_cpu(precision, more):
    """Sets of categories, of both ends of their order; some are missing, some lie in a second column of bins."""
    rng = np.random.default_rng(0)
    many = 9 if precision == "i16" else 300
    x = np.column_stack([rng.standard_normal(400), rng.integers(0, 9, 400), rng.integers(0, many, 400)])
    y = np.sin(x[:, 1] * 2) * 3 + (x[:, 2] % 7) + x[:, 0]
    x[rng.random(x.shape) < 0.05] = np.nan
    settings = SMALL | {"n_estimators": 1, "max_leaves": 6, "gradient_precision": precision} | more
    model = check_same_trees(BoostedTreesRegressor, x, y, categorical_features=[1, 2], **settings)
    assert {1, 2} & set(model.booster_.trees[0].feature.tolist())


def test_queries_are_ranked_as_on_the_cpu():
    x, y = table(rows=80, features=2)
    settings = SMALL | {"n_estimators": 1, "max_leaves": 3, "gradient_precision": "i16"}
    here, there = (
        BoostedTreesRanker(**settings, device=device).fit(x, np.digitize(y, [-0.5, 0.5]), [20] * 4)
        for device in ("cpu", "cuda")
    )
    assert trees_of(here) == trees_of(there)


@pytest.fixture
def tensors_as_on_gpu(monkeypatch):
    """Torch's tensors are taken from where they are, as those on a GPU are."""
    monkeypatch.setattr(tables, "is_on_gpu", lambda given: isinstance(given, torch.Tensor))
    monkeypatch.setattr(estimator_base, "is_on_gpu", tables.is_on_gpu)


@pytest.mark.usefixtures("tensors_as_on_gpu")
def test_a_table_on_the_gpu_stays_there(monkeypatch):
    x, y = table(rows=150, features=3, missing=0.1)
    x[:, 2] = np.abs(x[:, 2]).round()
    settings = SMALL | {"n_estimators": 2, "gradient_precision": "i16", "categorical_features": [2]}
    here = BoostedTreesRegressor(**settings).fit(x, y)
    there = torch.from_numpy(x)
    given = there, torch.from_numpy(y), torch.ones(150)
    on_gpu = BoostedTreesRegressor(**settings, device="cuda").fit(*given)
    assert trees_of(here) == trees_of(on_gpu)
    monkeypatch.setattr(CudaTable, "__array__", None)  # no copy on the host
    strange = there.clone()
    strange[:6, 2] = torch.tensor([-0.5, -3.0, 1.7, 40.0, 1e9, float("nan")], dtype=torch.float64)
    assert np.array_equal(on_gpu.predict(strange), here.predict(strange.numpy()))
    assert np.array_equal(on_gpu.predict(there.T.contiguous().T), here.predict(x))


@pytest.mark.usefixtures("tensors_as_on_gpu")
def test_a_table_on_the_gpu_is_checked_there():
    x, y = table(rows=60, features=2)
    model = BoostedTreesRegressor(device="cuda", gradient_precision="i16")
    for wrong, message in (
        (torch.zeros(60, 2, dtype=torch.int32), "expected float32 or float64 .* got torch.int32"),
        (torch.full((60, 2), torch.inf), "got infinity"),
        (torch.zeros(60), r"shape \(60,\)"),
    ):
        with pytest.raises(TreesError, match=message):
            model.fit(wrong, y)
    with pytest.raises(TreesError, match=r"it lies on a GPU, .* set device='cuda'"):
        BoostedTreesRegressor().fit(torch.from_numpy(x), y)
    fitted = BoostedTreesRegressor(n_estimators=1).fit(x, y)
    with pytest.raises(TreesError, match="expected the 2 features of `fit`"):
        fitted.predict(torch.zeros(3, 4))


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
    grower = SimpleNamespace(device=limits.find_device(), features=1)
    held = CudaScores(objective, y, weights, scores, grower, GradientPrecision.I16, False, rules())
    held.find_gradients()
    made = np.stack([held._grads.cpu().numpy(), held._hess.cpu().numpy()])
    assert np.array_equal(made.view(np.int32), wanted.view(np.int32))
    made, wanted = held.prepare(0, None), GradientsI16.quantize(*wanted[:, 0])
    assert (made.grad_scale, made.hess_scale) == (wanted.grad_scale, wanted.hess_scale)


def test_gradients_without_a_scale_are_refused_by_row():
    scores = np.zeros((50, 1))
    scores[7] = np.inf
    grower = SimpleNamespace(device=limits.find_device(), features=1)
    held = CudaScores(SquaredError(), np.zeros(50), np.empty(0), scores, grower, GradientPrecision.I16, False, rules())
    with pytest.raises(TreesError, match="row 7 has gradient inf"):
        held.find_gradients()


@pytest.mark.parametrize(("weights", "bytes_a_row"), [(0, 8 + 4 + 4 + 8), (50, 8 + 4 + 4 + 8 + 8)])
def test_scores_are_refused_where_their_tensors_do_not_fit(weights, bytes_a_row, monkeypatch):
    given = SquaredError(), np.zeros(50), np.ones(weights), np.zeros((50, 1))
    grower = SimpleNamespace(device=limits.find_device(), features=1)
    monkeypatch.setattr(limits, "free_bytes", lambda _: 50 * bytes_a_row)
    CudaScores(*given, grower, GradientPrecision.I16, False, rules())
    monkeypatch.setattr(limits, "free_bytes", lambda _: 50 * bytes_a_row - 1)
    with pytest.raises(TreesError, match=f"need {50 * bytes_a_row} bytes of GPU memory"):
        CudaScores(*given, grower, GradientPrecision.I16, False, rules())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
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
@pytest.mark.parametrize("precision", ["i16", "i8", "f32"])
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
@pytest.mark.parametrize("precision", ["i16", "f32"])
@pytest.mark.parametrize("more", [{}, {"monotone_constraints": [1, -1, 0, 0]}, {"l1": 0.5}], ids=str)
def test_categories_and_constraints_on_a_card(precision, more):
    rng = np.random.default_rng(0)
    numbers, few, many = rng.standard_normal((50_000, 2)), rng.integers(0, 20, 50_000), rng.integers(0, 900, 50_000)
    x = np.column_stack([numbers, few, many])
    y = np.sin(few) + np.cos(many) + numbers[:, 0] + rng.standard_normal(50_000)
    x[rng.random(x.shape) < 0.05] = np.nan
    settings = {"n_estimators": 3, "max_leaves": 31, "gradient_precision": precision, "categorical_features": [2, 3]}
    model = check_same_trees(BoostedTreesRegressor, x, y, **settings, **more)
    assert {2, 3} <= set(np.concatenate([tree.feature for tree in model.booster_.trees]).tolist())


@pytest.mark.gpu
def test_a_table_of_a_card_is_used_and_predicted_there():
    x, y = table(rows=100_000, features=11, missing=0.1)
    settings = {"n_estimators": 5, "max_leaves": 63, "gradient_precision": "i16"}
    here = BoostedTreesClassifier(**settings).fit(x, y > 0)
    there = torch.from_numpy(x).cuda()
    model = BoostedTreesClassifier(**settings, device="cuda").fit(there, torch.from_numpy(y > 0).cuda())
    assert trees_of(here) == trees_of(model)
    assert np.array_equal(model.decision_function(there), here.decision_function(x))
    assert np.array_equal(here.predict(there.float()), here.predict(x.astype(np.float32)))


@pytest.mark.gpu
def test_kernels_are_compiled_before_the_first_tree(monkeypatch):
    """And at another width not again: none in the process has been compiled for either."""
    compiled, hook = [], triton.knobs.runtime
    x, y = table(rows=20_000, features=5)
    settings = {"n_estimators": 2, "gradient_precision": "f32", "l1": 0.25, "renew_leaves": True}
    for cache in (kernel.device_caches for kernel in all_kernels()):
        cache.clear()
    monkeypatch.setattr(hook, "jit_post_compile_hook", lambda **given: compiled.append(given["fn"].name))
    ahead = compiling.compile_ahead
    monkeypatch.setattr(compiling, "compile_ahead", lambda *given: (ahead(*given)(), compiled.clear(), lambda: None)[2])
    BoostedTreesRegressor(**settings, device="cuda").fit(x, y)
    BoostedTreesRegressor(**settings, device="cuda").fit(np.tile(x, 7), y)
    assert compiled == []


def all_kernels():
    modules = kernels, score_kernels, binning
    return {one for module in modules for one in vars(module).values() if isinstance(one, triton.runtime.JITFunction)}
