"""What a machine offers: libraries by their metadata, fast paths by the dispatcher, caches where they are."""

from __future__ import annotations

import pytest
import torch

from bitplan.formats import dispatch
from bitplan.packed import machine
from bitplan.packed.machine import CPU_TORCH, examine_machine, find_lacks, find_libraries, measure_bandwidth, meets
from bitplan.packed.products import cpu_fused
from tests.processes import Program


def paths():
    return {each["name"]: each for each in examine_machine(measure=False)["paths"]}


@pytest.mark.parametrize(
    ("installed", "wanted", "holds"),
    [
        ("2.11.0", ">=2.11", True),
        ("2.11", ">=2.11.0", True),
        ("2.9.1", ">=2.11", False),
        ("2.13.0+cpu", ">=2.11", True),
        ("1.0", ">=1", True),
        ("0.9.9", ">=1", False),
        ("3.0rc1", ">=3", True),
        ("1.2", "", True),
        ("2.13.0+cpu", "<2.14,>=2.11", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("1.2", "==9", True),  # pip's affair
    ],
)
def test_meets(installed, wanted, holds):
    assert meets(installed, wanted) is holds


def test_libraries_and_the_extras_that_bring_them():
    result = find_libraries(
        [
            "torch>=2.11",
            "no-such-thing>=1; extra == 'trees'",
            'no-such-thing>=1; python_version > "3" and extra == "bench"',
            "pytest>=8; extra == 'dev'",  # for those who work on bitplan
            "numpy>=1; extra == 'bench'",
            "numpy>=1",  # needed, whatever an extra says
        ]
    )
    message = {library.name: (library.extras, library.problem) for library in result}
    assert message == {"torch": ((), None), "numpy": ((), None), "no-such-thing": (("bench", "trees"), None)}
    assert [library.name for library in result] == ["numpy", "torch", "no-such-thing"]
    assert result[-1].installed is None


def test_a_needed_library_that_cannot_be_imported_is_told(monkeypatch):
    def broken(_):
        raise ImportError("libfoo.so: no such file\nmore")

    monkeypatch.setattr(machine.importlib, "import_module", broken)
    (library,) = find_libraries(["numpy>=1"])
    assert library.problem == "is installed and cannot be imported: ImportError: libfoo.so: no such file"


def test_missing_extras_have_a_command(monkeypatch):
    wanted = ["no-such-thing>=1; extra == 'trees'"]
    monkeypatch.setattr(machine.importlib.metadata, "requires", lambda _: wanted)
    result = examine_machine(measure=False)
    assert result["problems"] == []
    assert result["next"][0] == "pip install 'bitplan[trees]' for no-such-thing"
    wanted += ["no-such-thing>=1; extra == 'bench'", "nor-this>=1; extra == 'bench'"]  # the smaller extra is named
    assert examine_machine(measure=False)["next"][:2] == [
        "pip install 'bitplan[bench]' for nor-this",
        "pip install 'bitplan[trees]' for no-such-thing",
    ]


def test_from_a_checkout_that_is_not_installed(monkeypatch):
    def missing(_):
        raise machine.importlib.metadata.PackageNotFoundError("bitplan")

    monkeypatch.setattr(machine.importlib.metadata, "requires", missing)
    result = examine_machine(measure=False)
    assert (result["libraries"], result["problems"]) == ([], [])
    assert result["next"][0] == machine.NOT_INSTALLED


def test_a_full_gpu_is_told_and_not_fatal(monkeypatch):
    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256 MiB\nmore")

    monkeypatch.setattr(machine, "measure_bandwidth", full)
    assert machine._bandwidth(True) == (
        None,
        ["free memory of the GPU to measure its bandwidth: CUDA out of memory. Tried to allocate 256 MiB"],
    )
    assert machine._bandwidth(False) == (None, [])


def test_fast_paths_are_what_the_dispatcher_picks(monkeypatch):
    result = paths()["CPU encode and decode (numba)"]
    assert result["active"]
    assert "mxfp4" in result["detail"].split(", ")
    monkeypatch.setattr(dispatch, "_is_installed", lambda _: False)
    result = paths()["CPU encode and decode (numba)"]
    assert (result["active"], result["detail"]) == (False, "numba is not installed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_fp8_is_said_to_be_emulated():
    result = paths()
    assert not result["GPU kernels (Triton)"]["active"]
    assert "emulated" in result["FP8 tensor cores"]["detail"]


FACTS = {
    "has_gpu": True,
    "has_triton": True,
    "has_cuda_libraries": True,
    "packed_refused": None,
    "missing": [],
    "cpu_flags": {"bf16"},
}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, []),
        ({"cpu_flags": None}, []),  # nothing is claimed of a machine that does not say
        ({"cpu_flags": {"avx2"}}, [("bfloat16 products in this CPU", "as float32", None)]),
        ({"has_triton": False}, [("Triton", "FP8 layers are refused", "pip install triton")]),
        ({"has_gpu": False}, [("a GPU", "FP8 is emulated", CPU_TORCH)]),
        ({"has_gpu": False, "has_cuda_libraries": False, "has_triton": False}, [("a GPU", "FP8 is emulated", None)]),
        ({"packed_refused": "why"}, [("products with packed weights on this CPU", "decode their matrices", None)]),
        ({"missing": [("scikit-learn", "trees")]}, [("scikit-learn", "no boosted", "pip install 'bitplan[trees]'")]),
    ],
)
def test_what_a_machine_lacks_and_what_that_costs(facts, message):
    result = find_lacks(**FACTS | facts)
    assert [(each.what, each.next) for each in result] == [(what, step) for what, _, step in message]
    assert all(costs in each.costs for each, (_, costs, _) in zip(result, message, strict=True))


def test_the_document_says_what_is_lacking(monkeypatch):
    monkeypatch.setattr(cpu_fused, "_why_not_here", lambda: "no kernel")
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx2"})
    lacks = {each["what"]: each["costs"] for each in examine_machine(measure=False)["lacks"]}
    assert "bfloat16 products in this CPU" in lacks
    assert lacks["products with packed weights on this CPU"].endswith("(no kernel)")
    assert ("a GPU" in lacks) == (not torch.cuda.is_available())


def test_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("BITPLAN_CACHE_DIR", str(tmp_path / "not" / "yet"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    numba, crossovers = examine_machine(measure=False)["caches"]
    assert numba["detail"].startswith("empty: a kernel that comes uncompiled")
    assert crossovers["detail"].startswith("empty: crossovers are measured")
    (tmp_path / "numba" / "deep").mkdir(parents=True)
    (tmp_path / "numba" / "deep" / "a.nbc").touch()
    (tmp_path / "not" / "yet" / "crossover").mkdir(parents=True)
    (tmp_path / "not" / "yet" / "crossover" / "nvidia_h200.json").touch()
    numba, crossovers = examine_machine(measure=False)["caches"]
    assert numba["detail"] == "1 compiled kernels"
    assert crossovers["detail"] == "1 measured GPU models"


def test_quick_and_starts_no_gpu(tmp_path):
    """In a process of its own: all but the imports takes a fraction of a second, and Triton is not loaded."""
    code = (
        "import time, sys, torch, numba; [sys.modules.pop(name) for name in list(sys.modules) if 'triton' in name];"
        "from bitplan.packed.machine import examine_machine;"
        "start = time.process_time(); examine_machine(measure=False);"
        "assert time.process_time() - start < 6, time.process_time() - start; assert 'triton' not in sys.modules"
    )
    program = Program(code, folder=tmp_path)
    assert program.wait() == 0, program.errors


@pytest.mark.gpu
def test_bandwidth_is_of_the_right_size():
    result = measure_bandwidth(torch.device("cuda"))
    assert 1 < result["h2d_gb_per_s"] < 2000
    assert result["h2d_gb_per_s"] < result["device_gb_per_s"] < 20_000
