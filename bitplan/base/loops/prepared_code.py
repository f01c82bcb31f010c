"""Loops that come with the package compiled, as objects for x86-64 processors with AVX2, which take as long to load as
numba's own cache does, and need none of numba's compiler.

`data/loops-*.zip` are written by `tools/prepare_loops.py`, for Linux: one of each wing, or of each wing and kind of
processor where loops ask what the processor has; other loops that gain from AVX-512 are there twice. A file is used
where the processor has what the objects need, its code is that of the sources, and numba is of the release that wrote
it; elsewhere numba compiles. It is data, no pickle: an index in JSON, and objects.
"""

from __future__ import annotations

import ast
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
FOLDER = PACKAGE / "data"
INDEX, CODE = "index.json", "loops"  # all loops one after the other: they have much in common
# What processors of a kind have beyond every x86-64 processor, the best kind first.
_AVX2 = frozenset({"avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
PROCESSORS = {
    "x86-64-v4-vnni": _AVX512 | {"avx512vnni"},
    "x86-64-v4": _AVX512,
    "x86-64-v3-vnni": _AVX2 | {"avxvnni"},
    "x86-64-v3": _AVX2,
}
# The files that are compiled into loops, by wing.
_SHARED = "base/loops/addresses.py", "base/loops/jit.py", "base/loops/vectors.py"
WINGS = {
    "trees": ("trees/loops/*.py", "trees/cuda/waves.py", "base/loops/[ahjv]*.py"),
    "packed": (
        "packed/products/cpu_[bir]*.py",
        "packed/language/token_loops.py",
        "formats/cpu_codec.py",
        "formats/gguf/grids.py",
        "formats/gguf/layouts.py",
        *_SHARED,
    ),
    "formats": ("formats/cpu_codec.py", "formats/gguf/cpu_*.py", "formats/gguf/search.py", *_SHARED),
    "rounding": (
        "rounding/round_columns_cpu.py",
        "formats/gguf/cpu_*.py",
        "formats/gguf/grids.py",
        "formats/gguf/search.py",
        "formats/scale_rules.py",
        *_SHARED,
    ),
}
BY_PROCESSOR = ("packed",)
# What loops return; signatures are looked up by their text.
RESULTS: dict[str, Any] = {
    str(kind): kind
    for kind in (types.none, types.int64, types.uint32, types.uint64, types.UniTuple(types.int64, 2))  # type: ignore[attr-defined]
}


def file_of(wing: str, kind: str) -> Path:
    """The file with the compiled loops of a wing (part of the package); some have one for each kind of processor."""
    return FOLDER / (f"loops-{wing}-{kind}.zip" if wing in BY_PROCESSOR else f"loops-{wing}.zip")


def sources(wing: str) -> str:
    """A digest of the code that is compiled into loops: comments, docstrings and layout are not part of it."""
    parts = (file.name + "\n" + _code_of(ast.parse(file.read_bytes())) + "\n" for file in _files(wing))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def files(wing: str) -> str:
    """A digest of the same files as they lie there, a hundred times as fast: where it is equal, so is their code."""
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in _files(wing))).hexdigest()


def _files(wing: str) -> list[Path]:
    return [file for pattern in WINGS[wing] for file in sorted(PACKAGE.glob(pattern))]


def _code_of(node: Any) -> str:
    """A syntax tree without the strings that stand alone, the same in every version of Python: `ast.dump` is not."""
    if isinstance(node, ast.AST):
        given = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({','.join(f'{name}={_code_of(value)}' for name, value in given)})"
    if isinstance(node, list):
        return f"[{','.join(_code_of(part) for part in node if not _is_text(part))}]"
    return repr(node)


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def made_with(wing: str) -> dict[str, str]:
    """What a file of loops says of how it was made."""
    return {"sources": sources(wing), "files": files(wing)} | _machine()


def _machine() -> dict[str, str]:
    return {"numba": ".".join(numba.__version__.split(".")[:2]), "target": llvm.get_process_triple()}


def is_current(wing: str, index: dict[str, Any]) -> bool:
    """Whether loops were made of the package's code, by this release of numba, for this kind of machine."""
    return _machine().items() <= index.items() and (
        index.get("files") == files(wing) or index.get("sources") == sources(wing)
    )


def processor() -> str | None:
    """The best kind in PROCESSORS that this processor can run and numba would compile for; None if there is none."""
    from bitplan.base.hardware import cpu_features

    has = cpu_features()
    suits = (name for name, needs in PROCESSORS.items() if needs <= has and ("avx512f" in needs) == ("avx512f" in has))
    return next(suits, None)


def name_of(function: Callable[..., Any], sig: Any) -> str | None:
    """A loop's name: function, numbers that it closes over, types of arguments; None if it closes over others."""
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    if not all(isinstance(value, numbers.Number) for value in closed):
        return None
    kinds = sig.args if isinstance(sig, typing.Signature) else sig
    return f"{function.__module__}.{function.__qualname__}{[int(value) for value in closed]}{tuple(map(str, kinds))}"


def wing_of(function: Callable[..., Any]) -> str:
    """The wing (part of the package) in whose file a function's loop is; that of trees has those of `base`, too."""
    wing = function.__module__.removeprefix("bitplan.").partition(".")[0]
    return "trees" if wing == "base" else wing


@functools.cache
def _loops(wing: str) -> tuple[dict[str, Any], bytes]:
    """A wing's loops: index by name, and machine code; both empty where the file is damaged or for another machine."""
    kind = processor()
    path = file_of(wing, kind or "")
    if wing not in WINGS or not sys.platform.startswith("linux") or kind is None or not path.is_file():
        return {}, b""
    try:
        with zipfile.ZipFile(path) as file:
            index = json.loads(file.read(INDEX))
            loops = index.pop("loops")
            if not is_current(wing, index):
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
            f"{path} is damaged ({type(error).__name__}: {error}), so loops are compiled, which takes seconds; "
            "install bitplan again",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}, b""
    return loops, code


def digest_of(loops: dict[str, Any], code: bytes) -> str:
    return hashlib.sha256(json.dumps(loops, sort_keys=True).encode() + code).hexdigest()


def rebuilt(function: Callable[..., Any], sig: Any, context: Any) -> Any:
    """Rebuilds numba's result of compiling a function from the file; None if that does not have it."""
    loops, code_of_all = _loops(wing_of(function))
    entry = loops.get(name_of(function, sig) or "")
    if entry is None:
        return None
    first, end = entry["wide" if "wide" in entry and "avx512f" in PROCESSORS[processor() or ""] else "object"]
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
    """A cache for numba: the package's compiled loops, and numba's own files on disk for all other functions."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return rebuilt(self._py_func, sig, target_context) or super().load_overload(sig, target_context)


class PackageCache(NullCache):  # type: ignore[misc]
    """A cache for numba: the package's compiled loops alone, where numba has no folder that it can write to."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return rebuilt(self._function, sig, target_context)


def cache_of(function: Callable[..., Any]) -> Any:
    try:
        return PreparedCache(function)
    except RuntimeError:  # numba found no folder it may write to: compile in every process
        return PackageCache(function)
