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
from numba.core import types
from numba.core.registry import cpu_target

from bitplan.base import hardware
from bitplan.base.loops import prepared_code
from bitplan.packed.language import token_loops
from bitplan.packed.products import cpu_blocks, cpu_integers, cpu_rows
from bitplan.trees.loops import histogram


def index_of(wing: str, kind: str = "x86-64-v3") -> dict[str, Any]:
    with zipfile.ZipFile(prepared_code.file_of(wing, kind)) as file:
        index: dict[str, Any] = json.loads(file.read(prepared_code.INDEX))
    return index


@pytest.mark.parametrize("wing", prepared_code.WINGS)
def test_the_packages_loops_are_made_of_its_sources(wing) -> None:
    for kind in prepared_code.PROCESSORS:
        index = index_of(wing, kind)
        assert index["sources"] == prepared_code.sources(wing), "loops were edited: run python tools/prepare_loops.py"
        assert index["loops"].keys() == index_of(wing)["loops"].keys()


def test_comments_and_docstrings_are_no_part_of_the_code(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(prepared_code, "PACKAGE", tmp_path)
    monkeypatch.setattr(prepared_code, "WINGS", {"one": ("loop.py",)})

    def made_of(code: str) -> dict[str, str]:
        tmp_path.joinpath("loop.py").write_text(code)
        return prepared_code.made_with("one")

    first = made_of("def loop(x):\n    return x + 1 if x else None\n")
    assert first["sources"].startswith("20e47d8900c6"), "in every version of Python"
    assert prepared_code.is_current("one", first | {"sources": "not looked at where the files are the same"})
    same = made_of('"""Loops."""\ndef loop(x):  # one\n    """More."""\n    return (x + 1 if x\n        else None)\n')
    assert same["sources"] == first["sources"]
    assert same["files"] != first["files"]
    assert prepared_code.is_current("one", first)
    for other in ("2 if x else None", "1 if x else 0", "1 if x else ''"):
        assert made_of(f"def loop(x):\n    return x + {other}\n")["sources"] != first["sources"]
        assert not prepared_code.is_current("one", first)
    assert not prepared_code.is_current("one", made_of("") | {"numba": "0.1"})


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


@pytest.mark.parametrize(
    ("more", "suits"),
    [
        ({"avx512vnni", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avxvnni"}, "x86-64-v4-vnni"),
        ({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avxvnni"}, "x86-64-v4"),
        ({"avxvnni"}, "x86-64-v3-vnni"),
        (set(), "x86-64-v3"),
        ({"avx512f", "avx512cd", "avxvnni"}, None),  # Knights Landing: sixteen lanes, and no bytes in them
    ],
)
def test_a_processor_takes_what_was_made_for_its_kind(monkeypatch, more, suits) -> None:
    least = {"avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "sse4.2"}
    monkeypatch.setattr(hardware, "cpu_features", lambda: frozenset(least | more))
    assert prepared_code.processor() == suits
    for missing in least - {"sse4.2"}:
        monkeypatch.setattr(hardware, "cpu_features", lambda missing=missing: frozenset(least | more) - {missing})
        assert prepared_code.processor() is None
        assert prepared_code._loops.__wrapped__("trees") == ({}, b"")


def test_predictions_have_loops_for_wide_registers() -> None:
    loops = index_of("trees")["loops"]
    assert {name.split("(")[0].split("[")[0] for name, entry in loops.items() if "wide" in entry} >= {
        "bitplan.trees.loops.predict.add_trees"
    }


def test_every_product_of_the_package_has_a_loop_for_each_kind_of_processor() -> None:
    functions = [function for group in cpu_rows._FUNCTIONS.values() for function in group]
    functions += [function for group in cpu_blocks._FUNCTIONS.values() for function in group]
    functions += [function for group in cpu_integers._FUNCTIONS.values() for function in group]
    functions += [*cpu_integers._OF_BLOCKS.values(), *cpu_rows._ARRANGED.values(), cpu_rows._products]
    functions += [cpu_integers._rounded_rows, token_loops._norm, token_loops._attention]
    names = {prepared_code.name_of(function, (types.int64,)) for function in functions}
    assert index_of("packed")["loops"].keys() == names


@pytest.mark.parametrize("damage", ["empty", "code", "index"])
def test_a_damaged_file_is_named_and_loops_are_compiled(tmp_path, monkeypatch, damage) -> None:
    path = tmp_path / "loops-trees.zip"
    with zipfile.ZipFile(prepared_code.file_of("trees", "")) as file, zipfile.ZipFile(path, "w") as made:
        index = json.loads(file.read(prepared_code.INDEX)) | prepared_code.made_with("trees")
        first = next(iter(index["loops"].values()))
        first["mangled_name"] += "x" if damage == "index" else ""
        made.writestr(prepared_code.INDEX, json.dumps(index))
        made.writestr(prepared_code.CODE, file.read(prepared_code.CODE) + (b"x" if damage == "code" else b""))
    if damage == "empty":
        path.write_bytes(b"")
    monkeypatch.setattr(prepared_code, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(prepared_code, "processor", lambda: "x86-64-v3")
    with pytest.warns(RuntimeWarning, match="is damaged .*install bitplan again"):
        assert prepared_code._loops.__wrapped__("trees") == ({}, b"")


SAME_TREES = """
import hashlib, sys
import numpy as np
from bitplan.base.loops import prepared_code
from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor
if sys.argv[1] == "source":
    prepared_code._loops = lambda wing: ({}, b"")
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


SAME_PRODUCTS = """
import hashlib, sys
import torch, bitplan
from bitplan.base.loops import prepared_code
from bitplan.packed.products import cpu_fused
if sys.argv[1] == "source":
    prepared_code._loops = lambda wing: ({}, b"")
digest = hashlib.sha256()
for name in cpu_fused.FORMATS:
    torch.manual_seed(0)
    weight, x = bitplan.encode(torch.randn(70, 512), name), torch.randn(37, 512)
    ways = [cpu_fused.FusedOnCpu()]
    if name in cpu_fused.OF_INTEGERS:
        ways += [cpu_fused.IntegersOnCpu(inputs) for inputs in cpu_fused.INTEGER_INPUTS]
    for way in ways:
        for rows in (1, 3, 9, 37):
            made = way.run(x[:rows], weight, way.prepare(weight), None, None)
            digest.update(made.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.long
@pytest.mark.parametrize("script", [SAME_TREES, SAME_PRODUCTS], ids=["trees", "products"])
def test_results_are_those_of_loops_that_numba_compiles(tmp_path, script) -> None:
    made = [
        subprocess.run(
            [sys.executable, "-c", script, kind],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / kind)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for kind in ("package", "source")
    ]
    assert made[0] == made[1]
