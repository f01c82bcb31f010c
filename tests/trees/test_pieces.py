"""A table in files gives the trees of the same table in memory, to the bit; what is wrong is said with its file."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError, binning, open_pieces
from tests.trees.samples import table

SETTINGS = {"n_estimators": 3, "max_leaves": 8, "gradient_precision": "i16"}


def save_npy(folder, x, *cuts):
    files = []
    for number, (start, stop) in enumerate(zip((0, *cuts), (*cuts, len(x)), strict=True)):
        files.append(folder / f"{number}.npy")
        np.save(files[-1], x[start:stop])
    return files


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_npy_files_give_the_trees_of_one_array(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(binning, "SAMPLE_ROWS", 200)  # of 600, so that the sample is one
    monkeypatch.setattr("bitplan.trees.pieces.ROWS_AT_ONCE", 64)
    x, y = table(600, missing=0.1, dtype=dtype)
    x[:, 1] = np.random.default_rng(4).integers(0, 9, 600)
    weights = np.random.default_rng(5).random(600)
    weights[::7] = 0
    settings = SETTINGS | {"categorical_features": [1], "early_stopping_rounds": 2, "subsample": 0.8}
    pieces = open_pieces(save_npy(tmp_path, x, 100, 100, 450))
    assert (pieces.shape, pieces.dtype) == ((600, 5), dtype)
    alone = BoostedTreesClassifier(**settings).fit(x, y > 0, weights)
    from_files = BoostedTreesClassifier(**settings).fit(pieces, y > 0, weights)
    assert from_files.to_lightgbm() == alone.to_lightgbm()
    assert from_files.booster_.losses == alone.booster_.losses
    np.testing.assert_array_equal(from_files.predict_proba(pieces), alone.predict_proba(x))


def test_parquet_files_bring_targets_weights_and_names(tmp_path):
    pandas, parquet = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    x, y = table(400, missing=0.1)
    weights = np.random.default_rng(5).random(400)
    frame = pandas.DataFrame(x, columns=list("abcde")).assign(c=np.arange(400) % 50, target=y, weight=weights)
    frame["d"] = frame["d"].astype(np.float32)
    files = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    for file, part in zip(files, (frame[:150], frame[150:]), strict=True):
        parquet.write_table(arrow.Table.from_pandas(part, preserve_index=False), file, row_group_size=60)
    pieces = open_pieces(files, target="target", weight="weight")
    features = frame[list("abcde")]
    alone = BoostedTreesRegressor(**SETTINGS).fit(features, y, weights)
    from_files = BoostedTreesRegressor(**SETTINGS).fit(pieces, pieces.y, pieces.weights)
    assert from_files.to_lightgbm() == alone.to_lightgbm()
    assert from_files.feature_names_in_.tolist() == list("abcde")
    np.testing.assert_array_equal(alone.predict(pieces), alone.predict(features))
    with pytest.raises(TreesError, match=r"1\.parquet: columns \['z'\] are missing|0\.parquet: columns \['z'\]"):
        open_pieces(files, target="z")
    parquet.write_table(arrow.table({"a": ["text"]}), tmp_path / "text.parquet")
    with pytest.raises(TreesError, match=r"text\.parquet: column 'a' has .*string, expected numbers"):
        open_pieces([tmp_path / "text.parquet"])


def test_what_is_wrong_is_said_with_its_file(tmp_path):
    x, y = table(60)
    x[40, 2] = np.inf
    pieces = open_pieces(save_npy(tmp_path, x, 30))
    with pytest.raises(TreesError, match=r"1\.npy: column 2 has infinity \(row 10"):
        BoostedTreesRegressor(**SETTINGS).fit(pieces, y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        BoostedTreesRegressor(**SETTINGS).fit(pieces, y[:50])
    model = BoostedTreesRegressor(**SETTINGS).fit(x[:30], y[:30])
    np.save(tmp_path / "narrow.npy", x[:, :3])
    with pytest.raises(TreesError, match=r"X: expected the 5 features of `fit`, in their order, got 3"):
        model.predict(open_pieces([tmp_path / "narrow.npy"]))
    with pytest.raises(TreesError, match=r"narrow\.npy: expected a table of numbers \(rows, 5\)"):
        open_pieces([tmp_path / "0.npy", tmp_path / "narrow.npy"])
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(TreesError, match=r"objects\.npy: expected an npy file of numbers: "):
        open_pieces([tmp_path / "objects.npy"])
    with pytest.raises(TreesError, match=r"absent\.npy: expected an npy file"):
        open_pieces([tmp_path / "absent.npy"])
    with pytest.raises(TreesError, match=r"files: expected names that end in \.parquet, or all in \.npy"):
        open_pieces(["a.csv"])


def test_one_file_need_not_be_in_a_list(tmp_path):
    np.save(tmp_path / "p0.npy", np.zeros((5, 2)))
    assert open_pieces(str(tmp_path / "p0.npy")).shape == open_pieces(tmp_path / "p0.npy").shape == (5, 2)
