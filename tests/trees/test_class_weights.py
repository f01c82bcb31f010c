"""Weights of classes are weights of rows; importances are LightGBM's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_sample_weight

from bitplan.trees import BoostedTreesClassifier, TreesError, load_trees
from bitplan.trees.checks import weights_of
from tests.trees.samples import table

SETTINGS = {"n_estimators": 5, "max_leaves": 6}


def classes(count):
    x, y = table(400)
    return x, np.array(["no", "perhaps", "yes"])[np.digitize(y, [0.5, 1.2][: count - 1])]


@pytest.mark.parametrize("given", ["balanced", {"no": 2.0, "perhaps": 0.5}])
def test_class_weight_is_scikit_learns(given):
    x, y = classes(3)
    own = np.linspace(0.5, 1.5, len(y))
    model = BoostedTreesClassifier(class_weight=given, **SETTINGS).fit(x, y, sample_weight=own)
    weights = own * compute_sample_weight(given, y)
    plain = BoostedTreesClassifier(**SETTINGS).fit(x, y, sample_weight=weights)
    np.testing.assert_allclose(model.predict_proba(x), plain.predict_proba(x), rtol=1e-6)


def test_weights_and_groups_survive_a_file(tmp_path):
    x, y = table(60)
    weights = {False: 0.5, True: 2.0}
    model = BoostedTreesClassifier(class_weight=weights, interaction_constraints=[{0, 3}, range(1, 3)], **SETTINGS)
    model.fit(x, y > 0).save(tmp_path / "model.json")
    again = load_trees(tmp_path / "model.json")
    assert again.class_weight == weights
    assert again.interaction_constraints == [[0, 3], [1, 2]]
    assert again.fit(x, y > 0).to_lightgbm() == model.to_lightgbm()


def test_scale_pos_weight_weighs_the_second_class():
    x, y = classes(2)
    model = BoostedTreesClassifier(scale_pos_weight=3.0, **SETTINGS).fit(x, y)
    plain = BoostedTreesClassifier(**SETTINGS).fit(x, y, sample_weight=np.where(y == "perhaps", 3.0, 1.0))
    np.testing.assert_array_equal(model.predict_proba(x), plain.predict_proba(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale_pos_weight": 2}, "scale_pos_weight: expected None for 3 classes"),
        ({"class_weight": {"never": 2}}, "class_weight: 'never' is not among the classes of y"),
        ({"class_weight": "even"}, "class_weight: expected None, 'balanced' or a weight by class"),
    ],
)
def test_weights_of_classes_that_do_not_fit(settings, message):
    x, y = classes(3)
    with pytest.raises(TreesError, match=message):
        BoostedTreesClassifier(**settings).fit(x, y)


@pytest.mark.parametrize("kind", ["gain", "split"])
def test_importances_are_lightgbms(kind):
    lightgbm = pytest.importorskip("lightgbm")
    x, y = classes(3)
    model = BoostedTreesClassifier(importance_type=kind, **SETTINGS).fit(x, y)
    expected = lightgbm.Booster(model_str=model.to_lightgbm()).feature_importance(kind)
    # LightGBM has gains as float32.
    np.testing.assert_allclose(model.feature_importances_, expected / expected.sum(), rtol=1e-6)


def test_a_class_of_no_weight_is_refused():
    x, y = classes(2)
    with pytest.raises(TreesError, match="scale_pos_weight: expected a number above 0"):
        BoostedTreesClassifier(scale_pos_weight=0, **SETTINGS).fit(x, y)


def test_an_empty_list_of_weights_is_for_no_rows():
    assert len(weights_of([], np.empty((0, 2)))) == 0
    with pytest.raises(ValueError, match="a minimum of 1 is required"):
        weights_of([], np.ones((3, 2)))
