"""What this machine offers bitplan: processors, fast paths, libraries, caches; what is missing and what to do about it.

Nothing is guessed: a fast path is active if the dispatcher would pick it now, an optional library is present if its
metadata is installed, a required one only if it can be imported. bitplan's own metadata says which extra brings a
library. Without `deep` nothing is imported: libraries count by their metadata alone, and `active` is null for a path
that would have to be tried. The document, version 1, is also a record that a report shows:

    {"document": "bitplan-machine", "version": 1, "machine": {"cpu": C, "cores": N, ...}, "versions": {...},
     "paths": [{"name": N, "active": true, "detail": D}], "libraries": [{"name": N, "wanted": ">=1.6", "extras": [...],
     "installed": "1.9.1", "problem": null}], "caches": [{"name": N, "path": P, "detail": D}],
     "bandwidth": {"h2d_gb_per_s": X, "device_gb_per_s": Y} or null,
     "lacks": [{"what": W, "costs": C, "next": N or null}], "problems": [...], "next": [...]}

What a machine lacks and what that costs (`find_lacks`) is decided without torch, by facts that the caller gives.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base import __version__
from bitplan.base.folders import cache_dir
from bitplan.base.hardware import describe_gpu, hardware, version_of

if TYPE_CHECKING:
    import torch

# ---- missing features ------------------------------------------------------------------------------------------------


CPU_TORCH = "install torch's CPU build as pytorch.org's selector shows; bitplan leaves an installed torch alone"
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
_FOR_LIBRARY = {
    "scikit-learn": "no boosted trees",
    "transformers": "no perplexity of language models, no gpt-oss models, no Trainer callback",
    "accelerate": "language models in GGUF files are not read",
    "lightning": "no Lightning callback",
    "tensorboard": "no TensorBoard scalars",
    "lightgbm": "the benchmarks of trees have nothing to compare with",
}


@dataclass(frozen=True)
class Lack:
    """Something that this machine lacks, what that costs, and what to do, if anything can be done."""

    what: str
    costs: str
    next: str | None = None


def find_lacks(
    *,
    has_gpu: bool,
    has_triton: bool,
    has_cuda_libraries: bool,
    packed_refused: str | None,
    missing: Collection[tuple[str, str]],
    cpu_flags: Collection[str] | None,
) -> list[Lack]:
    """What this machine lacks: hardware first, then libraries.

    has_cuda_libraries  gigabytes that torch's CUDA build brings along
    packed_refused    why the CPU's products with packed weights do not run here
    missing             (library, extra that brings it)
    cpu_flags           None where the machine does not say
    """
    lacks = []
    if not has_gpu:
        costs = "no Triton kernels; FP8 is emulated (the same numbers, no speed); streaming is simulated"
        lacks.append(Lack("a GPU", costs, CPU_TORCH if has_cuda_libraries else None))
    elif not has_triton:
        costs = "packed layers decode whole matrices on the GPU, and FP8 layers are refused"
        lacks.append(Lack("Triton", costs, "pip install triton"))
    if cpu_flags is not None and not _BF16_FLAGS & set(cpu_flags):
        lacks.append(Lack("bfloat16 products in this CPU", "models in bfloat16 run slowly on it; load them as float32"))
    if packed_refused is not None:
        costs = f"packed layers decode their matrices on this CPU ({packed_refused})"
        lacks.append(Lack("products with packed weights on this CPU", costs))
    for library, extra in missing:
        costs = _FOR_LIBRARY.get(library, f"what bitplan[{extra}] is for")
        lacks.append(Lack(library, costs, f"pip install 'bitplan[{extra}]'"))
    return lacks


def cpu_flags() -> set[str] | None:
    """The processor's features, as Linux names them; None on other systems."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return None
    lines = (line.partition(":") for line in file.read_text().splitlines())
    return next((set(words.split()) for key, _, words in lines if key.strip().lower() in ("flags", "features")), None)


# ---- machine ---------------------------------------------------------------------------------------------------------


DOCUMENT = "bitplan-machine"
VERSION = 1
FP8_CAPABILITY = (8, 9)
H2D_BYTES, DEVICE_BYTES, REPEATS = 256 * 2**20, 256 * 2**20, 5
NUMBA_PATH, PACKED_PATH = "CPU encode and decode (numba)", "CPU products with packed weights"
TRITON_PATH, FP8_PATH = "GPU kernels (Triton)", "FP8 tensor cores"
GO_DEEP = "bitplan doctor --deep to import every library and to try the fast paths"
NOT_INSTALLED = "pip install -e . in the checkout: bitplan runs from its source, so what it needs is not known here"
_CUDA_LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13")  # they come with torch's CUDA build
_UNUSED_EXTRAS = {"dev", "docs"}  # libraries for developers of bitplan itself
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?P<wanted>[^;\[]*)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(frozen=True)
class FastPath:
    """Something faster than plain torch: whether it would be used now (None: not tried), its formats, or why not."""

    name: str
    active: bool | None
    detail: str


@dataclass(frozen=True)
class Library:
    """A package that bitplan needs (no extras) or can use; `problem` says what is wrong with a needed one."""

    name: str
    wanted: str
    extras: tuple[str, ...]
    installed: str | None
    problem: str | None = None


@dataclass(frozen=True)
class Cache:
    name: str
    path: str
    detail: str


def examine_machine(*, measure: bool = True, deep: bool = True) -> dict[str, Any]:
    """Describe this machine as a document. `measure` also times copies to and on a GPU, which takes a second.

    `deep`: import every library that is needed, and try the fast paths; seconds. Without it torch is not imported.
    """
    has_gpu = deep and _has_cuda()
    requirements = _requirements()
    libraries = find_libraries(requirements or [], try_import=deep)
    paths = [*_cpu_paths(), *_gpu_paths(has_gpu)] if deep else _paths_not_tried()
    problems = [f"{library.name}: {library.problem}" for library in libraries if library.problem]
    bandwidth, too_full = _bandwidth(has_gpu and measure)
    return {
        "document": DOCUMENT,
        "version": VERSION,
        "machine": hardware() | (_torch_hardware(has_gpu) if deep else {}),
        "versions": _versions(libraries),
        "paths": [asdict(path) for path in paths],
        "libraries": [asdict(library) | {"extras": list(library.extras)} for library in libraries],
        "caches": [asdict(cache) for cache in (_numba_cache(), _crossover_cache())],
        "bandwidth": bandwidth,
        "lacks": _lacks(paths, libraries, has_gpu or (not deep and has_gpu_driver())),
        "problems": problems,
        "next": [
            *too_full,
            *([] if requirements is not None else [NOT_INSTALLED]),
            *([] if deep else [GO_DEEP]),
            *_next_steps(libraries, has_gpu),
        ],
    }


# ---- hardware --------------------------------------------------------------------------------------------------------


def has_gpu_driver() -> bool:
    """Whether NVIDIA's driver is installed, by its files: without torch."""
    return os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _torch_hardware(has_gpu: bool) -> dict[str, Any]:
    import torch

    hardware: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    if has_gpu:
        properties = torch.cuda.get_device_properties(0)
        hardware |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "driver": describe_gpu(properties.name)["driver"],
            "cuda": torch.version.cuda,
        }
    return hardware


def _bandwidth(measures: bool) -> tuple[dict[str, float] | None, list[str]]:
    """The bandwidths, and the next step if a full GPU has no memory left for measuring."""
    if not measures:
        return None, []
    import torch

    try:
        return measure_bandwidth(torch.device("cuda")), []
    except torch.OutOfMemoryError as error:
        return None, [f"free memory of the GPU to measure its bandwidth: {str(error).splitlines()[0][:200]}"]


def measure_bandwidth(device: torch.device) -> dict[str, float]:
    """GB/s from pinned memory to the device, and of a copy on it (bytes read and written), the best of a few."""
    import torch

    host = torch.empty(H2D_BYTES, dtype=torch.uint8, pin_memory=True)
    source, target = (torch.empty(DEVICE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    arrived = torch.empty(H2D_BYTES, dtype=torch.uint8, device=device)
    h2d_ms = min(_copy_ms(arrived, host) for _ in range(REPEATS))
    device_ms = min(_copy_ms(target, source) for _ in range(REPEATS))
    return {
        "h2d_gb_per_s": round(H2D_BYTES / h2d_ms / 1e6, 1),
        "device_gb_per_s": round(2 * DEVICE_BYTES / device_ms / 1e6, 1),
    }


def _copy_ms(target: torch.Tensor, source: torch.Tensor) -> float:
    import torch

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    target.copy_(source, non_blocking=True)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


# ---- fast paths ------------------------------------------------------------------------------------------------------


def _paths_not_tried() -> list[FastPath]:
    """The fast paths without a test whether they run: for reports that import nothing."""
    numba = version_of("numba")
    why = "a GPU driver is here, and was not asked" if has_gpu_driver() else "no GPU driver is here"
    gpu = None if has_gpu_driver() else False
    return [
        FastPath(NUMBA_PATH, None if numba else False, f"numba {numba}" if numba else "numba is not installed"),
        FastPath(PACKED_PATH, None if numba else False, "not tried yet" if numba else "numba is not installed"),
        FastPath(TRITON_PATH, gpu, why),
        FastPath(FP8_PATH, gpu, why),
    ]


def _cpu_paths() -> list[FastPath]:
    import torch

    from bitplan.formats.codec import encode
    from bitplan.formats.dispatch import SMALLEST_FOR_CPU, explain_encode
    from bitplan.formats.registry import list_formats
    from bitplan.packed.products.cpu_fused import FORMATS as FUSED_ON_CPU
    from bitplan.packed.products.fused import fused_for

    side = 512
    assert side * side >= SMALLEST_FOR_CPU
    sample = torch.zeros(side, side)
    picked = {fmt.name: explain_encode(sample, fmt) for fmt in list_formats()}
    twins = [name for name, pick in picked.items() if pick.implementation == "numba"]
    numba = FastPath(NUMBA_PATH, bool(twins), ", ".join(twins) or picked["int8_row"].reason)
    fused = fused_for("cpu")
    refused = None if fused is None else fused.why_not(encode(torch.zeros(64, 128), "mxfp4"), torch.float32)
    return [numba, FastPath(PACKED_PATH, refused is None, refused or ", ".join(FUSED_ON_CPU))]


def _gpu_paths(has_gpu: bool) -> list[FastPath]:
    import torch

    if not has_gpu:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        return [
            FastPath(TRITON_PATH, False, why),
            FastPath(FP8_PATH, False, f"{why}; FP8 is emulated: the same numbers, no speed"),
        ]
    capability = torch.cuda.get_device_capability(0)
    triton = version_of("triton")
    fp8 = capability >= FP8_CAPABILITY
    capability_text = f"compute capability {capability[0]}.{capability[1]}" + ("" if fp8 else ", and FP8 needs 8.9")
    return [
        FastPath(TRITON_PATH, triton is not None, triton or "Triton is not installed"),
        FastPath(FP8_PATH, fp8, capability_text),
    ]


# ---- libraries -------------------------------------------------------------------------------------------------------


def find_libraries(requirements: Iterable[str], *, try_import: bool = True) -> list[Library]:
    """The libraries in bitplan's metadata: required ones first, which are imported, then those of extras, by name."""
    versions: dict[str, tuple[str, set[str]]] = {}
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        assert match is not None, requirement
        extras = set(_EXTRA.findall(requirement))
        if extras and extras <= _UNUSED_EXTRAS:
            continue
        version, known_extras = versions.get(match["name"], (match["wanted"].strip(), extras))
        versions[match["name"]] = (version, known_extras | extras if known_extras and extras else set())
    libraries = [
        _library(name, version, tuple(sorted(extras)), try_import) for name, (version, extras) in versions.items()
    ]
    return sorted(libraries, key=lambda library: (bool(library.extras), library.name))


def _requirements() -> list[str] | None:
    """The requirements of the installed package; None for a checkout that is not installed."""
    try:
        return importlib.metadata.requires("bitplan") or []
    except importlib.metadata.PackageNotFoundError:
        return None


def _library(name: str, needed: str, extras: tuple[str, ...], try_import: bool) -> Library:
    installed = version_of(name)
    problem = None
    if installed is None:
        problem = None if extras else f"not installed; pip install '{name}{needed}'"
    elif not meets(installed, needed):
        problem = f"{installed} is installed, {needed} is needed; pip install --upgrade '{name}{needed}'"
    elif try_import and not extras:
        problem = _import_problem(name)
    return Library(name, needed, extras, installed, problem)


def _import_problem(name: str) -> str | None:
    try:
        importlib.import_module(name.replace("-", "_"))
    except Exception as error:  # a broken library may raise anything; it is reported, not hidden
        return f"is installed and cannot be imported: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None


def meets(installed: str, needed: str) -> bool:
    """Whether a version is at least that of `>=` and below that of `<`; other clauses are left to pip."""
    version = _numbers(installed)
    least, beyond = re.search(r">=\s*([0-9][0-9.]*)", needed), re.search(r"<\s*([0-9][0-9.]*)", needed)
    return (least is None or version >= _numbers(least[1])) and (beyond is None or version < _numbers(beyond[1]))


def _numbers(version: str) -> list[int]:
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    parts = [int(part) for part in match[0].split(".")] if match else [0]
    while parts and parts[-1] == 0:  # 1.0 is 1
        parts.pop()
    return parts


def _versions(libraries: Iterable[Library]) -> dict[str, str]:
    versions = {"python": platform.python_version(), "bitplan": __version__}
    versions |= {library.name: library.installed for library in libraries if library.installed is not None}
    triton = version_of("triton")
    return versions | ({"triton": triton} if triton else {})


def _lacks(paths: Iterable[FastPath], libraries: Sequence[Library], has_gpu: bool) -> list[dict[str, Any]]:
    refused = {path.name: path.detail for path in paths if path.active is False}
    lacks = find_lacks(
        has_gpu=has_gpu,
        has_triton=version_of("triton") is not None,
        has_cuda_libraries=any(version_of(name) for name in _CUDA_LIBRARIES),
        packed_refused=refused.get(PACKED_PATH),
        missing=_missing(libraries),
        cpu_flags=cpu_flags(),
    )
    return [asdict(lack) for lack in lacks]


def _missing(libraries: Sequence[Library]) -> list[tuple[str, str]]:
    """Optional libraries that are not installed, each with the smallest extra that brings it."""
    sizes = Counter(extra for library in libraries for extra in library.extras)
    absent = [library for library in libraries if library.extras and library.installed is None]
    return [(library.name, min(library.extras, key=lambda extra: (sizes[extra], extra))) for library in absent]


# ---- caches and next steps -------------------------------------------------------------------------------------------


def _numba_cache() -> Cache:
    """The folder in which numba keeps compiled kernels, and how many are there."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(named) if named else Path(__file__).parents[1]  # numba writes beside each module of loops
    count = len(list(folder.rglob("*.nbc"))) if folder.is_dir() else 0
    writable = os.access(folder if folder.is_dir() else folder.parent, os.W_OK)
    detail = f"{count} compiled kernels" if count else "empty: a kernel that comes uncompiled takes seconds at first"
    if not writable:
        detail += "; not writable, so numba keeps them in the user's cache folder: set NUMBA_CACHE_DIR to choose"
    return Cache("compiled CPU kernels", str(folder), detail)


def _crossover_cache() -> Cache:
    folder = cache_dir()
    files = sorted(folder.glob("crossover/*.json"))
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    detail = f"{len(files)} measured GPU models" if files else "empty: crossovers are measured at first use on a GPU"
    if not os.access(existing, os.W_OK):
        detail += "; not writable: set BITPLAN_CACHE_DIR to a folder that is"
    return Cache("measured crossovers", str(folder), detail)


def _next_steps(libraries: Sequence[Library], has_gpu: bool) -> list[str]:
    """A command for each thing that is missing, most needed first; then what to try."""
    steps = [f"{library.name}: {library.problem}" for library in libraries if library.problem]
    missing: dict[str, list[str]] = {}
    for name, extra in _missing(libraries):
        missing.setdefault(extra, []).append(name)
    steps += [f"pip install 'bitplan[{extra}]' for {', '.join(names)}" for extra, names in sorted(missing.items())]
    if has_gpu and version_of("triton") is None:
        steps.append("pip install triton for the GPU kernels")
    return [*steps, "bitplan inspect to see the number formats; bitplan --help for the verbs"]
