"""Loops that come with the package: they are those of its sources, and do what numba's do."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zipfile
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.registry import cpu_target

from bitplan.base.loops import prepared_code
from bitplan.trees.loops import histogram


def test_the_packages_loops_are_made_of_its_sources() -> None:
    with zipfile.ZipFile(prepared_code.FILE) as file:
        index = json.loads(file.read(prepared_code.INDEX))
    assert index["sources"] == prepared_code.sources(), "loops were edited: run python tools/prepare_loops.py"


def test_a_prepared_loop_runs_and_other_functions_have_none() -> None:
    rows = np.array([2, 0], np.uint32)
    grads, hess, entries = np.array([1, 2, -3], np.float32), np.array([4, 5, 6], np.float32), np.zeros(2, np.uint64)
    given = rows, 0, grads, hess, 0, 1.0, 1.0, np.uint64(0), False, entries
    kinds: Any = tuple(map(numba.typeof, given))
    loop = histogram.enter_codes.py_func
    made = prepared_code.rebuilt(loop, kinds, cpu_target.target_context)
    if not (sys.platform == "linux" and platform.machine() == "x86_64" and numba.__version__.startswith("0.68.")):
        assert made is None
        pytest.skip("no loops were prepared for this machine")
    made.entry_point(*given)
    assert entries.view(np.int64).tolist() == [(-3 << 48) + (6 << 32) + 2, (1 << 48) + (4 << 32)]
    assert prepared_code.rebuilt(loop, kinds[:3], cpu_target.target_context) is None
    assert prepared_code.name_of(lambda: made, ()) is None, "it closes over more than numbers"


def test_a_processor_that_lacks_what_the_objects_need_has_none(monkeypatch) -> None:
    features = dict.fromkeys((*prepared_code.FEATURES, *prepared_code.WIDE_FEATURES), True)
    monkeypatch.setattr(prepared_code, "_has", lambda wanted: all(features[name] for name in wanted))
    with zipfile.ZipFile(prepared_code.FILE) as file:
        loops = json.loads(file.read(prepared_code.INDEX))["loops"]
    assert {name.split("(")[0].split("[")[0] for name, entry in loops.items() if "wide" in entry} >= {
        "bitplan.trees.loops.predict.add_trees"
    }
    features["avx2"] = False
    assert prepared_code._loops.__wrapped__() == ({}, b"")


@pytest.mark.parametrize("damage", ["empty", "code", "index"])
def test_a_damaged_file_is_named_and_loops_are_compiled(tmp_path, monkeypatch, damage) -> None:
    path = tmp_path / "loops.zip"
    with zipfile.ZipFile(prepared_code.FILE) as file, zipfile.ZipFile(path, "w") as made:
        index = json.loads(file.read(prepared_code.INDEX)) | prepared_code.made_with()
        first = next(iter(index["loops"].values()))
        first["mangled_name"] += "x" if damage == "index" else ""
        made.writestr(prepared_code.INDEX, json.dumps(index))
        made.writestr(prepared_code.CODE, file.read(prepared_code.CODE) + (b"x" if damage == "code" else b""))
    if damage == "empty":
        path.write_bytes(b"")
    monkeypatch.setattr(prepared_code, "FILE", path)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.warns(RuntimeWarning, match="is damaged .*install bitplan again"):
        assert prepared_code._loops.__wrapped__() == ({}, b"")


SAME_TREES = """
import hashlib, sys
import numpy as np
from bitplan.base.loops import prepared_code
from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor
if sys.argv[1] == "source":
    prepared_code._loops = lambda: ({}, b"")
rng = np.random.default_rng(0)
x = rng.standard_normal((3000, 8))
x[rng.random(x.shape) < 0.1] = np.nan
y = np.nan_to_num(x[:, 0]) + np.nan_to_num(x[:, 1] * x[:, 2])
digest = hashlib.sha256()
for precision in ("i16", "f32"):
    given = dict(n_estimators=3, max_leaves=20, gradient_precision=precision, n_jobs=2)
    classes = BoostedTreesClassifier(**given).fit(x, np.digitize(y, [-1, 1]))
    for model in (classes, BoostedTreesRegressor(**given).fit(x, y)):
        digest.update(np.ascontiguousarray(model.predict(x)).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.long
def test_trees_are_those_of_loops_that_numba_compiles(tmp_path) -> None:
    made = [
        subprocess.run(
            [sys.executable, "-c", SAME_TREES, kind],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / kind)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for kind in ("package", "source")
    ]
    assert made[0] == made[1]
