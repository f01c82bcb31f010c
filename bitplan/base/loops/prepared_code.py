"""Loops that come with the package compiled, as objects for x86-64 processors with AVX2, which take as long to load as
numba's own cache does, and need none of numba's compiler.

`data/prepared_loops.zip` is written by `tools/prepare_loops.py`, for Linux. It is used where the processor has what the
objects need, its sources are the package's, and numba is of the release that wrote it; elsewhere numba compiles. Loops
that gain from AVX-512 are there twice. It is data, no pickle: an index in JSON, and objects.
"""

from __future__ import annotations

import functools
import hashlib
import json
import numbers
import sys
import warnings
import zipfile
from collections.abc import Callable
from lzma import LZMAError
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
from numba.core import funcdesc, types, typing
from numba.core.caching import FunctionCache, NullCache
from numba.core.compiler import compile_result
from numba.core.lowering import Environment
from numba.core.runtime import rtsys

PACKAGE = Path(__file__).parents[2]
FILE = PACKAGE / "data" / "prepared_loops.zip"
INDEX, CODE = "index.json", "loops"  # all loops one after the other: they have much in common
# x86-64-v3, beyond what every x86-64 processor has; v4, beyond that
FEATURES = "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"
WIDE_FEATURES = "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"
# What loops return; signatures are looked up by their text.
RESULTS: dict[str, Any] = {
    str(kind): kind
    for kind in (types.none, types.int64, types.UniTuple(types.int64, 2))  # type: ignore[attr-defined]
}


def sources() -> str:
    """A digest of the files that are compiled into loops."""
    files = [*sorted((PACKAGE / "trees" / "loops").glob("*.py"))]
    files += [PACKAGE / "trees" / "cuda" / "waves.py"]
    names = "addresses", "atomics", "helper_threads", "jit", "vectors"
    files += [PACKAGE / "base" / "loops" / f"{name}.py" for name in names]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def made_with() -> dict[str, str]:
    """What must be the same where the code is used."""
    release = ".".join(numba.__version__.split(".")[:2])
    return {"sources": sources(), "numba": release, "target": llvm.get_process_triple()}


def name_of(function: Callable[..., Any], sig: Any) -> str | None:
    """A function with what it closes over and its arguments' types; None if it closes over more than numbers."""
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    if not all(isinstance(value, numbers.Number) for value in closed):
        return None
    kinds = sig.args if isinstance(sig, typing.Signature) else sig
    return f"{function.__module__}.{function.__qualname__}{[int(value) for value in closed]}{tuple(map(str, kinds))}"


@functools.cache
def _loops() -> tuple[dict[str, Any], bytes]:
    """Entries by name, and all code; none where the file is for something else, or damaged."""
    if not sys.platform.startswith("linux") or not FILE.is_file() or not _has(FEATURES):
        return {}, b""
    try:
        with zipfile.ZipFile(FILE) as file:
            index = json.loads(file.read(INDEX))
            loops = index.pop("loops")
            if {key: index.get(key) for key in made_with()} != made_with():
                return {}, b""
            code = file.read(CODE)
            digest = digest_of(loops, code)
            if digest != index.get("sha256"):
                raise ValueError(f"sha256 is {digest}, and {index.get('sha256')} in its index")
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        EOFError,
        zipfile.BadZipFile,
        LZMAError,
    ) as error:
        warnings.warn(
            f"{FILE} is damaged ({type(error).__name__}: {error}), so loops are compiled, which takes seconds; "
            "install bitplan again",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}, b""
    return loops, code


@functools.cache
def _has(features: tuple[str, ...]) -> bool:
    """Whether this processor has all of these features."""
    of_host = llvm.get_host_cpu_features()
    return all(of_host.get(feature) for feature in features)


def digest_of(loops: dict[str, Any], code: bytes) -> str:
    return hashlib.sha256(json.dumps(loops, sort_keys=True).encode() + code).hexdigest()


def rebuilt(function: Callable[..., Any], sig: Any, context: Any) -> Any:
    """Rebuilds numba's result of compiling a function from the file; None if that does not have it."""
    loops, code_of_all = _loops()
    entry = loops.get(name_of(function, sig) or "")
    if entry is None:
        return None
    first, end = entry["wide" if "wide" in entry and _has(WIDE_FEATURES) else "object"]
    kinds = sig.args if isinstance(sig, typing.Signature) else tuple(sig)
    result, code = RESULTS[entry["result"]], function.__code__
    described = funcdesc.PythonFunctionDescriptor(
        native=True,
        modname=function.__module__,
        qualname=function.__qualname__,
        unique_name=entry["unique_name"],
        doc=function.__doc__ or "",
        typemap=None,
        restype=result,
        calltypes=None,
        args=code.co_varnames[: code.co_argcount],
        kws=(),
        argtypes=kinds,
        env_name=entry["env_name"],
    )
    described.mangled_name = entry["mangled_name"]
    library = context.codegen().create_library(entry["library"])
    library.enable_object_caching()
    rtsys.initialize(context)  # what wrappers call
    library._set_compiled_object(code_of_all[first:end])
    library._finalize_final_module()
    library._codegen._engine._defined_symbols.update(entry["defined"])  # numba does not look into objects
    environment = Environment.from_fndesc(described)
    return compile_result(
        target_context=context,
        typing_context=context.typing_context,
        library=library,
        environment=environment,
        entry_point=context.get_executable(library, described, environment),
        fndesc=described,
        type_annotation="",
        signature=typing.signature(result, *kinds),
        objectmode=False,
        lifted=(),
        reload_init=(),
        referenced_envs=(),
    )


class PreparedCache(FunctionCache):  # type: ignore[misc]
    """Loops of the package, and numba's cache on disk for the others."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return rebuilt(self._py_func, sig, target_context) or super().load_overload(sig, target_context)


class PackageCache(NullCache):  # type: ignore[misc]
    """Loops of the package, where numba has no folder to write a cache to."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return rebuilt(self._function, sig, target_context)


def cache_of(function: Callable[..., Any]) -> Any:
    try:
        return PreparedCache(function)
    except RuntimeError:  # numba found no folder it may write to: compile in every process
        return PackageCache(function)
