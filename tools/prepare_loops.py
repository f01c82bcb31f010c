"""Compiles the loops of boosted trees for the package: `bitplan/data/prepared_loops.zip`.

    python tools/prepare_loops.py           # a minute or two, on x86-64 Linux; again after every edit of a loop

Small fits, predictions and so on are run, and every loop that numba compiles for them is kept as an object for any
x86-64 processor with AVX2; those in WIDE as one for AVX-512, too.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": tempfile.mkdtemp()}
os.environ["TRITON_INTERPRET"] = "1"  # trees on a GPU need loops of the host
sys.path.insert(0, str(Path(__file__).parents[1]))

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from numba.core import bytecode
from numba.core.codegen import CPUCodeLibrary

from bitplan.base.loops import helper_threads, prepared_code, row_pieces
from bitplan.trees import (
    BoostedTreesClassifier,
    BoostedTreesRanker,
    BoostedTreesRegressor,
    grow,
    histogram,
)

WIDE = ("bitplan.trees.loops.predict.",)  # predicts in two thirds of the time; fits gain nothing
FIRST_NUMBER = 1_000_000  # numba numbers functions from 1 on; names of ours must not be those of others
DATE = (2026, 1, 1, 0, 0, 0)  # of files in the archive: equal loops give equal archives


def run_all() -> None:
    """Everything that compiles a loop, on tables that are as small as it goes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((600, 32))
    y = x[:, 0] + x[:, 1] * x[:, 2] + 0.1 * rng.standard_normal(600)
    coded = np.where(np.arange(32) == 1, rng.integers(0, 9, (600, 32)), x)
    small: dict[str, Any] = {"n_estimators": 2, "max_leaves": 6, "min_child_samples": 2, "n_jobs": 2}
    whole, by_team, with_others = (
        histogram.NARROW_ROWS,
        grow.TreeGrower._grow_by_team,
        grow.TreeGrower._grow_with_others,
    )
    grow.THREADS_FROM_ROWS = 100
    for precision, way in itertools.product(("i16", "f32", "i8"), (by_team, with_others)):
        grow.TreeGrower._grow_by_team = way  # type: ignore[method-assign]
        of = small | {"gradient_precision": precision}
        for width in range(4, 33, 4) if way is by_team and precision != "i8" else (8,):
            model = BoostedTreesClassifier(**of).fit(x[:, :width], y > 0)
        model.predict_proba(x[:, :width])
        histogram.NARROW_ROWS = 200  # larger nodes have cells of another form
        BoostedTreesRegressor(**of, subsample=0.7).fit(x[:, :8], y)
        histogram.NARROW_ROWS = whole
        BoostedTreesRegressor(**of, categorical_features=[1]).fit(coded[:, :8], y).predict(coded[:, :8])
        BoostedTreesRegressor(**of, monotone_constraints=[1] * 8, l1=0.1).fit(x[:, :8], y)
    grow.TreeGrower._grow_by_team = by_team  # type: ignore[method-assign]
    BoostedTreesRegressor(**small).fit(x[:, :8].astype(np.float32), y)
    for objective in ("absolute_error", "quantile", "huber", "poisson", "gamma", "tweedie"):
        BoostedTreesRegressor(**small, objective=objective).fit(x[:, :8], np.exp(y))
    few = BoostedTreesClassifier(**small).fit(x[:, :8], np.digitize(y, [-1, 1]))
    few.predict(x[:, :8], contributions=True)
    row_pieces.HELPER_NS = 1.0  # loops over rows in pieces
    BoostedTreesClassifier(**small).fit(np.tile(x[:, :8], (4, 1)), np.digitize(np.tile(y, 4), [-1.0, 1.0]))
    classes = BoostedTreesClassifier(**small).fit(x[:, :8], np.digitize(y, [-1.0, 1.0]))
    classes.predict(x[:, :8], contributions=True)
    BoostedTreesClassifier(**small, gradient_precision="i16", device="cuda").fit(x[:, :8], y > 0)
    helper_threads._server()
    BoostedTreesRanker(**small).fit(x[:, :8], np.digitize(y, [-1.0, 1.0]), [20] * 30)


def parts_of(library: Any) -> Iterator[Any]:
    """Functions and numbers that have names."""
    yield from library._final_module.functions
    yield from library._final_module.global_variables


def wide_object(bitcode: bytes) -> bytes:
    """An object for AVX-512, otherwise as numba makes them."""
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine("x86-64-v4", "", 3, "static", "jitdefault", jit=True)
    made: bytes = machine.emit_object(llvm.parse_bitcode(bitcode))
    return made


def main() -> None:
    made: dict[str, Any] = {}
    bitcode: dict[Any, bytes] = {}
    keep, finalize = prepared_code.PreparedCache.save_overload, CPUCodeLibrary._finalize_final_module

    def before_code(library: Any) -> None:
        bitcode[library] = library._final_module.as_bitcode()  # afterwards it is changed for this processor
        finalize(library)

    def save(self: Any, sig: Any, result: Any) -> None:
        name = prepared_code.name_of(self._py_func, sig)
        if name and self._py_func.__module__.startswith(("bitplan.trees.", "bitplan.base.loops.")):
            made[name] = result
        keep(self, sig, result)

    prepared_code.PreparedCache.save_overload = save  # type: ignore[method-assign]
    CPUCodeLibrary._finalize_final_module = before_code
    prepared_code.FILE, into = Path(os.devnull), prepared_code.FILE
    bytecode.FunctionIdentity._unique_ids = itertools.count(FIRST_NUMBER)
    run_all()
    loops: dict[str, Any] = {}
    code = b""
    for name in sorted(made):
        result = made[name]
        assert not result.environment.consts, f"{name} needs Python objects"
        assert not result.library.has_dynamic_globals, f"{name} holds addresses of this process"
        described, object_ = result.fndesc, result.library._get_compiled_object()
        names = described.llvm_func_name, described.llvm_cpython_wrapper_name, described.llvm_cfunc_wrapper_name
        names += (described.env_name,)
        loops[name] = {
            "object": (len(code), len(code) + len(object_)),
            "result": str(prepared_code.RESULTS[str(result.signature.return_type)]),
            "library": result.library.name,
            "unique_name": result.fndesc.unique_name,
            "mangled_name": result.fndesc.mangled_name,
            "env_name": result.fndesc.env_name,
            "defined": sorted({part.name for part in parts_of(result.library) if not part.is_declaration} & set(names)),
        }
        code += object_
        if name.startswith(WIDE):
            object_ = wide_object(bitcode[result.library])
            loops[name]["wide"] = len(code), len(code) + len(object_)
            code += object_
    found = {**prepared_code.made_with(), "sha256": prepared_code.digest_of(loops, code), "loops": loops}
    index = json.dumps(found, indent=0).encode()
    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        archive = Path(folder) / into.name
        with zipfile.ZipFile(archive, "w") as file:
            for path, content in ((prepared_code.INDEX, index), (prepared_code.CODE, code)):
                file.writestr(zipfile.ZipInfo(path, DATE), content, zipfile.ZIP_LZMA)
        archive.replace(into)
    print(f"{into}: {len(loops)} loops, {into.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
