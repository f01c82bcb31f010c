"""Compiles the package's loops: `bitplan/data/loops-*.zip`.

    python tools/prepare_loops.py           # on x86-64 Linux; again after every edit of a loop

Each file whose sources' code was edited is made anew, in a process of its own: half a minute to two minutes of CPU time
for each; an edit of their comments is written into its index. Of trees small fits, predictions and so on are run, and
every loop that numba compiles for them is kept as an object for any x86-64 processor with AVX2; those in WIDE as one
for AVX-512, too. Encoding and rounding likewise. Products are compiled for each kind of processor
(`prepared_code.PROCESSORS`), and are not run.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parents[1]))

from bitplan.base.loops import prepared_code

# Trees are predicted in two thirds of the time; fits gain nothing.
WIDE = "bitplan.trees.loops.predict.", "bitplan.formats.", "bitplan.rounding."
FIRST_NUMBER = 1_000_000  # numba numbers functions from 1 on; names of a wing must not be those of others
DATE = (2026, 1, 1, 0, 0, 0)  # of files in the archive: equal loops give equal archives


def compile_trees() -> None:
    """Everything that compiles a loop of trees, on tables that are as small as it goes."""
    import numpy as np

    from bitplan.base.loops import helper_threads, row_pieces
    from bitplan.trees import BoostedTreesClassifier, BoostedTreesRanker, BoostedTreesRegressor, grow, histogram

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


def compile_packed() -> None:
    """The loops of all products on a CPU, and those of a token between them."""
    from bitplan.packed.language import token_loops
    from bitplan.packed.products import cpu_blocks, cpu_fused, cpu_integers, cpu_rows

    for order in ("pairs", "halves", "bytes", "blocks"):
        cpu_rows.panels_of(order)
    cpu_rows.panel_products()
    for name in cpu_fused.FORMATS:
        of_format = cpu_blocks if name in cpu_fused.BLOCKS else cpu_rows
        of_format.products_of(name), of_format.decoder_of(name)
    for name in set(cpu_fused.BLOCKS) & set(cpu_fused.OF_INTEGERS):
        for padded in (32, 4096):
            cpu_blocks.integers_of(name, padded)
        cpu_blocks.many_inputs(name)
    for name in set(cpu_fused.OF_INTEGERS) - set(cpu_fused.BLOCKS):
        cpu_integers.few_inputs(name), cpu_integers.many_inputs(name)
    cpu_integers.rounded_rows()
    token_loops.functions()


def compile_formats() -> None:
    """What encodes and decodes on a CPU, long rows too."""
    import torch

    from bitplan.formats import cpu_codec
    from bitplan.formats.dispatch import decode, encode, parts_of

    with parts_of(2**24):
        for name in dict.fromkeys((*cpu_codec.ENCODERS, *cpu_codec.DECODERS, "iq2_xxs_gguf")):
            for kind in (torch.float32, torch.bfloat16):
                decode(encode(torch.randn(4, 1024).to(kind), name), kind)
        for name in ("int8_row", "fp8_e4m3_row"):
            decode(encode(torch.randn(1, 2**20), name))


def compile_rounding() -> None:
    """Rounding by statistics, for one format of each kind."""
    import torch

    from bitplan.formats.dispatch import parts_of
    from bitplan.rounding.weights import round_weight

    weight, inputs, outputs = torch.randn(24, 256), torch.randn(512, 256), torch.randn(100, 24)
    hessian = inputs.T @ inputs
    ways: list[Any] = [{}, {"hessian": hessian}, {"hessian": hessian, "outputs": outputs.T @ outputs}]
    with parts_of(2**24):
        for name in ("int4_g32", "int4", "iq4_nl_gguf", "q4_1_gguf", "q2_k_gguf", "iq3_s_gguf"):
            for way in ways if name == "int4_g32" else ways[:2]:
                round_weight(weight, name, **way)


COMPILE = {
    "trees": compile_trees,
    "packed": compile_packed,
    "formats": compile_formats,
    "rounding": compile_rounding,
}


def names_of(library: Any) -> Iterator[Any]:
    """Functions and numbers that have names."""
    yield from library._final_module.functions
    yield from library._final_module.global_variables


def wide_object(bitcode: bytes) -> bytes:
    """An object for AVX-512, otherwise as numba makes them."""
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine("x86-64-v4", "", 3, "static", "jitdefault", jit=True)
    made: bytes = machine.emit_object(llvm.parse_bitcode(bitcode))
    return made


def prepare(wing: str, into: Path) -> None:
    """Write a wing's loops for the processor that this process compiles for."""
    from numba.core import bytecode
    from numba.core.codegen import CPUCodeLibrary

    made: dict[str, Any] = {}
    bitcode: dict[Any, bytes] = {}
    keep, finalize = prepared_code.PreparedCache.save_overload, CPUCodeLibrary._finalize_final_module

    def before_code(library: Any) -> None:
        bitcode[library] = library._final_module.as_bitcode()  # afterwards it is changed for this processor
        finalize(library)

    def save(self: Any, sig: Any, result: Any) -> None:
        name = prepared_code.name_of(self._py_func, sig)
        if name and self._py_func.__module__.startswith("bitplan.") and prepared_code.wing_of(self._py_func) == wing:
            made[name] = result
        keep(self, sig, result)

    prepared_code.PreparedCache.save_overload = save  # type: ignore[method-assign]
    CPUCodeLibrary._finalize_final_module = before_code
    prepared_code.FOLDER = Path(os.devnull)
    bytecode.FunctionIdentity._unique_ids = itertools.count(FIRST_NUMBER * (1 + list(COMPILE).index(wing)))
    COMPILE[wing]()
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
            "defined": sorted({part.name for part in names_of(result.library) if not part.is_declaration} & set(names)),
        }
        code += object_
        if name.startswith(WIDE):
            object_ = wide_object(bitcode[result.library])
            loops[name]["wide"] = len(code), len(code) + len(object_)
            code += object_
    write({**prepared_code.made_with(wing), "sha256": prepared_code.digest_of(loops, code), "loops": loops}, code, into)
    print(f"{into.name}: {len(loops)} loops, {into.stat().st_size:,} bytes")


def write(index: dict[str, Any], code: bytes, into: Path) -> None:
    with zipfile.ZipFile(into, "w") as file:
        for path, content in ((prepared_code.INDEX, json.dumps(index, indent=0).encode()), (prepared_code.CODE, code)):
            file.writestr(zipfile.ZipInfo(path, DATE), content, zipfile.ZIP_LZMA)


def is_current(wing: str, file: Path) -> bool:
    """Whether a file is of the sources' code; what it says of how it was made becomes true of their comments, too."""
    if not file.is_file():
        return False
    with zipfile.ZipFile(file) as archive:
        index, code = json.loads(archive.read(prepared_code.INDEX)), archive.read(prepared_code.CODE)
    if not prepared_code.is_current(wing, index):
        return False
    made_with = prepared_code.made_with(wing)
    if not made_with.items() <= index.items():
        write(index | made_with, code, file)
    return True


def main() -> None:
    for wing, kind in itertools.product(prepared_code.WINGS, prepared_code.PROCESSORS):
        file = prepared_code.file_of(wing, kind)
        if is_current(wing, file) or (wing not in prepared_code.BY_PROCESSOR and kind != "x86-64-v3"):
            continue
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            settings = {
                "NUMBA_CPU_NAME": kind.removesuffix("-vnni"),
                "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in sorted(prepared_code.PROCESSORS[kind])),
                "NUMBA_CACHE_DIR": str(Path(folder, "cache")),
                "TRITON_INTERPRET": "1",  # trees on a GPU need loops of the host
            }
            made = Path(folder, file.name)
            subprocess.run([sys.executable, __file__, wing, str(made)], env=os.environ | settings, check=True)
            made.replace(file)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        prepare(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
