"""Real processes over gloo: the trees of 1, 2 and 4 of them are those of a plain fit, and none is left waiting."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bitplan import trees
from bitplan.trees.distributed.fit import fit_distributed
from bitplan.trees.distributed.histogram_exchange import wire_form
from bitplan.trees.gradients import GradientPrecision, TreesError
from tests.trees.distributed.workers import Pool, half_squared_error, run_together
from tests.trees.samples import table

ROOT = Path(__file__).parent.parent.parent.parent
CUTS = {1: [0, 600], 2: [0, 137, 600], 4: [0, 90, 90, 400, 600]}  # uneven; of four processes one has no rows
EVAL_CUTS = {1: [0, 100], 2: [0, 30, 100], 4: [0, 0, 40, 100, 100]}
SMALL = {"n_estimators": 3, "max_leaves": 12, "min_child_samples": 10}


@pytest.fixture(scope="module")
def fitted_alone():
    """A function of case and precision: what one process fits to all rows. Those of OFTEN are fitted at once."""

    @functools.cache
    def fit(case, precision):
        kind, changes, data = case()
        eval_set = (data["eval_x"], data["eval_y"]) if "eval_x" in data else None
        model = getattr(trees, kind)(**settings_of(changes, precision))
        return model.fit(data["x"], data["y"], data.get("weights"), eval_set)

    for pair in OFTEN:
        fit(*pair)
    return fit


@pytest.fixture(scope="module")
def pool(tmp_path_factory, fitted_alone):  # noqa: ARG001
    """Processes that find compiled what `fitted_alone` needed: else each of them would compile it."""
    workers = Pool(tmp_path_factory.mktemp("stores"))
    yield workers
    workers.close()


def binary_text_labels():
    x, y = table(600, missing=0.1)
    return "BoostedTreesClassifier", {"subsample": 0.6, "colsample": 0.7}, {"x": x, "y": np.where(y > 0, "yes", "no")}


def three_classes_with_weights_and_early_stopping():
    x, y = table(600)
    weights = np.random.default_rng(3).random(600) * 3
    weights[::7] = 0
    data = {"x": x, "y": np.digitize(y, [-0.7, 0.7]), "weights": weights}
    return "BoostedTreesClassifier", {"early_stopping_rounds": 2, "learning_rate": 1.0, "n_estimators": 6}, data


def float32_with_categories_constraints_and_eval_set():
    x, y = table(600, dtype=np.float32)
    x[:, 1] = np.random.default_rng(4).integers(0, 9, 600)
    settings = {"categorical_features": [1], "monotone_constraints": [1, 0, 0, 0, 0], "early_stopping_rounds": 1}
    data = {"x": x, "y": y + x[:, 1] % 3, "eval_x": x[:100] + 0.5, "eval_y": y[:100]}
    return "BoostedTreesRegressor", settings | {"learning_rate": 0.9, "renew_leaves": True, "l1": 0.1}, data


def medians():
    x, y = table(600)
    return "BoostedTreesRegressor", {"objective": "absolute_error", "growth": "depth"}, {"x": x, "y": y}


def medians_with_weights():
    kind, settings, data = medians()
    return kind, settings | {"subsample": 0.5}, data | {"weights": np.random.default_rng(5).random(600)}


def counts():
    x, y = table(600)
    return "BoostedTreesRegressor", {"objective": "poisson", "max_depth": 3}, {"x": x, "y": np.floor(np.exp(y))}


def own_objective():
    x, y = table(600)
    return "BoostedTreesRegressor", {"objective": half_squared_error}, {"x": x, "y": y * 1e6}


CASES = [
    binary_text_labels,
    three_classes_with_weights_and_early_stopping,
    float32_with_categories_constraints_and_eval_set,
    medians,
    medians_with_weights,
    counts,
    own_objective,
]


PAIRS = [(case, precision) for case in CASES for precision in ("i16", "i8")]
PAIRS += [(case, "f32") for case in CASES[:3]]  # fixed point too, so the same holds
OFTEN = [*zip(CASES, ("i16", "f32", "i8", "i16", "i8", "i16", "i8"), strict=True)]  # each case
SOME = OFTEN[1:3]
RUNS = {1: SOME, 2: OFTEN, 4: SOME}
APART = [
    pytest.param(count, *pair, marks=[] if pair in often else pytest.mark.long)
    for count, often in RUNS.items()
    for pair in PAIRS
]


def settings_of(changes, precision):
    return SMALL | {"gradient_precision": precision} | changes


@pytest.fixture(scope="module")
def fitted_apart(pool):
    """A function of the number of processes, case and precision: what each of them fitted.

    One process fits first: what only a fit in several compiles, it compiles alone.
    """

    @functools.cache
    def fit_all(count, pairs):
        fits = []
        for case, precision in pairs:
            kind, changes, data = case()
            fits.append((kind, settings_of(changes, precision), data, CUTS[count], EVAL_CUTS[count]))
        answers = pool.run(count, "fit_each", fits)
        assert [answer.get("message") for answer in answers] == [None] * count
        return {pair: [answer["fits"][place] for answer in answers] for place, pair in enumerate(pairs)}

    def of(count, case, precision):
        fit_all(1, tuple(SOME))
        pair = case, precision
        return fit_all(count, tuple(RUNS[count]) if pair in RUNS[count] else (pair,))[pair]

    return of


@pytest.mark.parametrize(("count", "case", "precision"), APART, ids=lambda part: getattr(part, "__name__", part))
def test_trees_are_those_of_one_process(fitted_apart, fitted_alone, count, case, precision):
    alone = fitted_alone(case, precision)
    assert any(tree.leaves > 2 for tree in alone.booster_.trees)
    for answer in fitted_apart(count, case, precision):
        assert answer["text"] == alone.to_lightgbm()
        assert answer["losses"] == alone.booster_.losses
        assert answer["classes"] == (alone.classes_.tolist() if hasattr(alone, "classes_") else None)


@pytest.mark.parametrize("precision", ["i16", "i8"])
def test_more_rows_than_narrow_cells_and_the_sample_hold(pool, precision):
    x, y = table(70_000, 3)
    x += np.random.default_rng(6).random(x.shape)  # more distinct numbers than bins
    settings = SMALL | {"gradient_precision": precision, "n_estimators": 2}
    cuts = [0, 1000, 70_000]  # one process needs wide cells, the other does not
    answers = pool.run(2, "fit_with_small_sample", settings, x, y, cuts, 5000)
    (alone,) = pool.run(1, "fit_with_small_sample", settings, x, y, [0, 70_000], 5000)
    assert [answer["text"] for answer in answers] == [alone["text"]] * 2
    (whole,) = pool.run(1, "fit_with_small_sample", settings, x, y, [0, 70_000], 200_000)
    assert whole["text"] != alone["text"]  # the sample was one


def test_bytes_of_a_tree_are_counted(pool):
    x, y = table(600)
    settings = SMALL | {"gradient_precision": "i16", "max_leaves": 2, "n_estimators": 3}
    answers = pool.run(2, "fit", "BoostedTreesRegressor", settings, {"x": x, "y": y}, CUTS[2])
    bins = sum(len(np.unique(x[:, feature])) + 1 for feature in range(5))
    model = trees.BoostedTreesRegressor(**settings).fit(x, y)
    for place, tree in enumerate(model.booster_.trees):
        smaller = wire_form(GradientPrecision.I16, int(tree.leaf_rows.min())).bytes_per_cell
        # Largest numbers, rows near them, row count, root, smaller child, sums of two leaves.
        expected = 2 * 8 + 2 * 8 + 8 + bins * (8 + smaller) + 2 * 2 * 8
        expected += 5 * 16  # the sizes of what is sent in each step
        assert [answer["fit"].bytes_by_tree[place] for answer in answers] == [expected] * 2
    assert "3 trees" in str(answers[0]["fit"])


def test_random_state_none_is_drawn_once(pool):
    x, y = table(600)
    settings = SMALL | {"gradient_precision": "i8", "random_state": None}
    first, second = pool.run(2, "fit", "BoostedTreesRegressor", settings, {"x": x, "y": y}, CUTS[2])
    assert first["text"] == second["text"]


# ---- processes that do not fit together ------------------------------------------------------------------------------

X, Y = table(100)
ONES = np.ones(100)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (({}, X[:, :3], Y), "the number of features"),
        (({}, X.astype(np.float32), Y), "the type of X"),
        (({}, X, Y.astype(np.int64)), "the type of y"),
        (({"max_leaves": 7}, X, Y), "parameter max_leaves"),
        (({"random_state": 1}, X, Y), "parameter random_state"),
        (({}, X, Y, ONES), "sample_weight"),
        (({}, X, Y, None, (X, Y)), "eval_set"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_processes_that_differ_are_refused_by_name(pool, other, name):
    for answer in pool.run(3, "fit_apart", "BoostedTreesRegressor", [({}, X, Y), ({}, X, Y), other]):
        assert answer["error"] == "TreesError"
        assert name in answer["message"]
        assert "rank 0 has" in answer["message"]
        assert "rank 2 has" in answer["message"]


def test_names_of_features_must_agree(pool):
    pandas = pytest.importorskip("pandas")
    frames = [pandas.DataFrame(X, columns=list(names)) for names in ("abcde", "abcdf")]
    for answer in pool.run(2, "fit_apart", "BoostedTreesRegressor", [({}, frame, Y) for frame in frames]):
        assert "the names of features" in answer["message"]


def test_bad_rows_on_one_process_stop_all(pool):
    bad = X.copy()
    bad[3, 2] = np.inf
    first, second = pool.run(2, "fit_apart", "BoostedTreesRegressor", [({}, X, Y), ({}, bad, Y)])
    assert second["error"] == "TreesError"
    assert first["error"] == "ProcessLostError"
    assert "rank 1 ended with TreesError: Input X contains infinity" in first["message"]
    assert "is inf in row 3, column 2" in first["message"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(X[:0], Y[:0]), (X[:0], Y[:0])], "no process has any rows"),
        ([(X, Y, ONES * 0), (X, Y, ONES * 0)], "every weight of every process is zero"),
    ],
)
def test_nothing_to_fit_anywhere(pool, rows, message):
    for answer in pool.run(2, "fit_apart", "BoostedTreesRegressor", [({}, *part) for part in rows]):
        assert message in answer["message"]


def test_one_class_in_all_processes(pool):
    same = np.zeros(100, np.int64)
    for answer in pool.run(2, "fit_apart", "BoostedTreesClassifier", [({}, X, same), ({}, X, same)]):
        assert "at least two classes" in answer["message"]


def test_a_class_that_only_one_process_has(pool):
    zeros, ones = np.zeros(100, np.int64), np.ones(100, np.int64)
    answers = pool.run(2, "fit_apart", "BoostedTreesClassifier", [({}, X, zeros), ({}, X, ones)])
    assert [answer.get("message") for answer in answers] == [None, None]


def test_without_a_process_group():
    with pytest.raises(TreesError, match="torchrun"):
        fit_distributed(trees.BoostedTreesRegressor(), X, Y)


def test_only_our_estimators():
    with pytest.raises(TreesError, match="expected a BoostedTreesClassifier"):
        fit_distributed(object(), X, Y)


# ---- processes that stop ---------------------------------------------------------------------------------------------


def assert_lost(answer, message, within_s, step="largest gradient and hessian"):
    assert answer["error"] == "ProcessLostError"
    assert message in answer["message"]
    assert f"in step '{step}'" in answer["message"]
    assert answer["seconds"] < within_s


def test_an_error_in_one_process_is_told_by_all(pool):
    answers = pool.run(3, "fit_and_stop", "raises", 2, 50.0)
    assert answers[2]["message"] == "broken on purpose"
    for answer in answers[:2]:
        assert_lost(answer, "rank 2 ended with ValueError: broken on purpose", within_s=45)


LIES = [
    ("length of its array", "number of rows", "expected from rank 1 the size of an array"),
    ("another step", "number of rows", "the size of an array for this step, got 8 bytes for another one"),
    ("another size", "histograms of nodes", " bytes from rank 1, as rank 0 has, got "),
    ("another size", "rows of a tree", "expected 8 bytes from rank 1, as rank 0 has, got 0; run the same version"),
    ("two numbers", "number of rows", "expected one number from rank 1, got 2"),
    ("fewer than no rows", "number of rows", "expected a number of rows from every process"),
    ("a document", "settings and features", "rank 1 sent"),
]


@pytest.mark.parametrize(("lie", "step", "message"), LIES)
def test_a_process_that_lies_about_sizes_is_named_by_all(lie, step, message, pool):
    answers = pool.run(2, "fit_and_lie", lie, step)
    for answer in answers:
        assert answer["error"] in ("TreesError", "BitplanError", "ProcessLostError")
        assert message in answer["message"]
        assert answer["seconds"] < 45


def test_a_process_that_hangs_is_waited_for_no_longer_than_the_limit(pool):
    answers = pool.run(3, "fit_and_stop", "hangs", 0, 2.0)
    for answer in answers[1:]:
        assert_lost(answer, "no answer from rank 0: it died, or hangs", within_s=45)
    assert_lost(answers[0], "the others stopped waiting", within_s=45)


def test_a_process_that_never_comes(pool):
    answer, _ = pool.run(2, "fit_and_stop", "never comes", 1, 2.0)
    assert_lost(answer, "no answer from rank 1", within_s=45, step="meeting of all processes")


def test_fitting_again_after_an_error(pool):
    answers = pool.run(2, "fit_after_error", X, Y)
    assert answers[0]["text"] == answers[1]["text"]


def test_a_killed_process_stops_the_others_at_once(pool):
    *others, killed = pool.run(3, "fit_and_stop", "killed", 2, 50.0)
    assert killed is None
    for answer in others:
        assert_lost(answer, "no answer from rank 2: it died", within_s=45)


def test_a_killed_process_that_hosts_the_store(pool):
    killed, other = pool.run(2, "fit_and_stop", "killed", 0, 50.0, store="tcp")
    assert killed is None
    assert_lost(other, "the store of the process group is gone", within_s=45)


# ---- torchrun --------------------------------------------------------------------------------------------------------


EXAMPLE = ["examples/trees_distributed.py", "--rows", "2000", "--trees", "3", "--check"]


@pytest.mark.usefixtures("fitted_alone")  # what it needs is compiled
def test_example_in_two_processes(tmp_path):
    """With the variables that torchrun sets, in processes that have torch already."""
    first, _ = run_together(2, EXAMPLE, tmp_path)
    assert "the same as one process: yes" in first


@pytest.mark.long
def test_example_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command + EXAMPLE, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the same as one process: yes" in done.stdout
