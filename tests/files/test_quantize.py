"""Quantizing files: what is chosen and why, shards, bounded memory, and nothing half-written."""

from __future__ import annotations

import importlib
import json
import math
import re
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

from bitplan.base.errors import FileFormatError, FormatError, NonFiniteError, PlanError, StoreError
from bitplan.cli import run
from bitplan.files.compare import compare_files
from bitplan.files.headers import plan_for_file
from bitplan.files.models.save_load import load_model
from bitplan.files.open_files import open_tensors, write_tensors
from bitplan.files.packed_folder import packed_shapes, transposed_by_names
from bitplan.files.quantize_files import QuantizeOptions, quantize_file
from bitplan.files.safetensors import write_safetensors
from bitplan.files.tensor_file import TensorSpec, spec_of
from bitplan.formats import get_format
from bitplan.formats.codec import encode
from bitplan.plan import Choice, Manifest, Plan
from bitplan.plan.plan import Planned
from tests.crosses import few
from tests.formats.samples import SMALL_BLOCKS
from tests.processes import BITPLAN, Program

MB = 2**20


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "blocks.0.up.weight": torch.randn(8, 128, generator=generator).to(torch.bfloat16),
        "blocks.1.up.weight": torch.randn(8, 128, generator=generator),
        "conv.weight": torch.randn(4, 32, 2, 2, generator=generator),
        "norm.weight": torch.ones(128),
        "steps": torch.tensor(3),
    }


WRITTEN = (
    *("config.json", "model.safetensors", "bitplan_plan.json", "bitplan_evidence.json"),
    *("README.md", "bitplan_plan.svg"),
)


def numbers_of(path):
    """The bytes of every tensor of a file: its certificate says what it was made of, and of that there are many."""
    held = safetensors.torch.load_file(path)
    return {
        name: (one.dtype, one.shape, one.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, one in held.items()
    }


@pytest.fixture
def source(tmp_path):
    safetensors.torch.save_file(tensors(), tmp_path / "in.safetensors", metadata={"format": "pt"})
    return tmp_path / "in.safetensors"


@pytest.mark.parametrize("fmt", few([fmt.name for fmt in SMALL_BLOCKS], 16))
def test_every_format(fmt, source, tmp_path):
    report = quantize_file(source, tmp_path / "out.safetensors", fmt)
    with open_tensors(tmp_path / "out.safetensors") as file:
        for name, tensor in tensors().items():
            if tensor.dim() < 2 or (tensor.dim() == 4 and not get_format(fmt).is_cast):
                assert torch.equal(file.read(name), tensor)
            else:
                assert file.read(name).to_bytes() == encode(tensor, fmt).to_bytes()
    assert report.bytes_after == sum(row["bytes_after"] for row in report.rows)
    assert {row["name"]: row["reason"] for row in report.rows}["steps"] == "not floats"


def test_stacked_biases_of_experts_stay(tmp_path):
    numbers = {name: torch.randn(16, 64) for name in ("experts.down_proj_bias", "bias", "unbias")}
    safetensors.torch.save_file(numbers, tmp_path / "in.safetensors")
    report = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "mxfp4")
    assert {row["name"]: row["to"] for row in report.rows} == {
        "experts.down_proj_bias": "float32",
        "bias": "float32",
        "unbias": "mxfp4",
    }
    report = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "mxfp4", only=["*bias"])
    assert {row["to"] for row in report.rows} == {"mxfp4"}  # asked for by name


# ---- by a plan -------------------------------------------------------------------------------------------------------


def plan_of(formats, shapes=None):
    shapes = shapes or {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    return Plan({name: Planned(Choice(fmt, f"because {name}"), shapes.get(name)) for name, fmt in formats.items()})


MIXED = {
    "blocks.0.up.weight": "mxfp4",
    "blocks.1.up.weight": "int8_row",
    "conv.weight": "bfloat16",
    "norm.weight": "bfloat16",
    "steps": "float32",
}


def test_a_plan_decides_for_each_tensor_and_gives_its_reason(source, tmp_path):
    report = quantize_file(source, tmp_path / "out.safetensors", plan_of(MIXED), keep=["conv.*"])
    rows = {row["name"]: (row["to"], row["reason"]) for row in report.rows}
    assert rows == {
        "blocks.0.up.weight": ("mxfp4", "because blocks.0.up.weight"),
        "blocks.1.up.weight": ("int8_row", "because blocks.1.up.weight"),
        "conv.weight": ("float32", "kept by 'conv.*'"),
        "norm.weight": ("bfloat16", "because norm.weight"),
        "steps": ("int64", "not floats"),
    }
    with open_tensors(tmp_path / "out.safetensors") as file:
        expected = encode(tensors()["blocks.0.up.weight"], "mxfp4")
        assert file.read("blocks.0.up.weight").to_bytes() == expected.to_bytes()


def test_a_manifest_resolved_for_the_file_is_a_plan_for_it(source, tmp_path):
    rules = [{"regex": r"blocks\..*", "format": "mxfp4"}, {"regex": ".*", "format": "BF16"}]
    with open_tensors(source) as file:
        shapes = {name: spec.shape for name, spec in file.specs.items()}
    manifest = Manifest.from_document({"version": 1, "patterns": rules})
    plan = manifest.resolve(shapes)
    plan.save(tmp_path / "plan.json")
    quantize_file(source, tmp_path / "a.safetensors", plan)
    quantize_file(source, tmp_path / "b.safetensors", Plan.load(tmp_path / "plan.json"))
    quantize_file(source, tmp_path / "c.safetensors", manifest)
    quantize_file(source, tmp_path / "d.safetensors", {name: choice.format for name, choice in plan.items()})
    first, *others = (numbers_of(tmp_path / f"{letter}.safetensors") for letter in "abcd")
    assert all(numbers == first for numbers in others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, "for other tensors: it lacks 1: 'norm.weight'; `bitplan plan` makes one"),
        ({"other.weight": "mxfp4"}, "for other tensors: it has beyond them 1: 'other.weight'"),
    ],
)
def test_a_plan_for_another_file_is_refused(change, message, source, tmp_path):
    formats = {name: fmt for name, fmt in {**MIXED, **change}.items() if fmt is not None}
    with pytest.raises(PlanError, match=message):
        quantize_file(source, tmp_path / "out.safetensors", plan_of(formats))
    assert not (tmp_path / "out.safetensors").exists()


def test_a_plan_for_another_shape_or_for_packed_parts_is_refused(source, tmp_path):
    shapes = {"conv.weight": (4, 32, 3, 3)}
    with pytest.raises(
        PlanError, match=r"conv.weight: the plan is for shape \(4, 32, 3, 3\), here it is \(4, 32, 2, 2\)"
    ):
        quantize_file(source, tmp_path / "out.safetensors", plan_of(MIXED, shapes))
    packed = Plan({**plan_of(MIXED).entries, "conv.weight": Planned(Choice("mxfp4", "why"), part="scales")})
    with pytest.raises(
        PlanError, match=r"conv.weight: the plan has it as the scales of a packed tensor.*bitplan gpt-oss convert"
    ):
        quantize_file(source, tmp_path / "out.safetensors", packed)


def test_metadata_of_the_source_is_kept(source, tmp_path):
    quantize_file(source, tmp_path / "out.safetensors", "int8")
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_keep_and_only_choose_by_name(source, tmp_path):
    stored = quantize_file(source, tmp_path / "a.safetensors", "int8_row", keep=["blocks.0.*"])
    only = quantize_file(source, tmp_path / "b.safetensors", "int8_row", only=["blocks.0.*"])
    assert {row["name"]: row["to"] for row in stored.rows}["blocks.0.up.weight"] == "bfloat16"
    assert [row["name"] for row in only.rows if row["to"] == "int8_row"] == ["blocks.0.up.weight"]
    with pytest.raises(PlanError, match=r"'blokcs.\*' matches no tensor"):
        quantize_file(source, tmp_path / "c.safetensors", "int8_row", keep=["blokcs.*"])


def write_as_gguf(weights, path):
    with write_tensors(path, [spec_of(name, tensor) for name, tensor in weights.items()]) as writer:
        for name, tensor in weights.items():
            writer.write(name, tensor)


def test_gguf_is_written_from_gguf_alone(source, tmp_path):
    """Other files have neither llama.cpp's names nor its metadata."""
    with pytest.raises(StoreError, match=r"out.gguf: GGUF is written from GGUF alone: .*, or give .* `bitplan export`"):
        quantize_file(source, tmp_path / "out.gguf", "q8_0_gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_gguf_in_and_out(source, tmp_path):
    write_as_gguf(tensors(), tmp_path / "in.gguf")
    quantize_file(tmp_path / "in.gguf", tmp_path / "a.gguf", "q8_0_gguf", keep=["conv.*"])
    quantize_file(tmp_path / "a.gguf", tmp_path / "b.gguf", "q4_0_gguf", keep=["conv.*"])
    quantize_file(tmp_path / "b.gguf", tmp_path / "c.safetensors", "mxfp4")
    with open_tensors(tmp_path / "b.gguf") as file:
        assert file.spec("blocks.0.up.weight").format == "q4_0_gguf"
    result = compare_files(source, tmp_path / "c.safetensors")
    assert not result.findings
    assert 12 < result.overall.sqnr_db < 20


def test_quantizing_again_to_the_same_format_copies_the_bytes(source, tmp_path):
    quantize_file(source, tmp_path / "a.safetensors", "mxfp4")
    quantize_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "mxfp4")
    assert numbers_of(tmp_path / "a.safetensors") == numbers_of(tmp_path / "b.safetensors")


def write_shards(folder):
    folder.mkdir()
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors().items()):
        shard = f"model-{number}.safetensors"
        safetensors.torch.save_file({name: tensor}, folder / shard)
        weight_map[name] = shard
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_become_shards_with_an_index(tmp_path):
    write_shards(tmp_path / "in")
    report = quantize_file(tmp_path / "in", tmp_path / "out", "int8_g128")
    assert len(report.rows) == len(tensors())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.bytes_after
    assert index["weight_map"]["blocks.1.up.weight.scales"] == "model-1.safetensors"
    assert compare_files(tmp_path / "in", tmp_path / "out").overall.sqnr_db > 40
    assert not compare_files(tmp_path / "in", tmp_path / "out").findings


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_8_bit_floats_are_numbers(dtype, tmp_path):
    numbers = torch.tensor([[1.0, 2.0, 0.5, 4.0] * 8] * 4)
    safetensors.torch.save_file({"w": numbers.to(dtype), "norm": torch.ones(4).to(dtype)}, tmp_path / "in.safetensors")
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "bfloat16")
    with open_tensors(tmp_path / "out.safetensors") as file:
        assert torch.equal(file.read_float("w"), numbers)
        assert torch.equal(file.read_float("norm"), torch.ones(4))
    assert compare_files(tmp_path / "in.safetensors", tmp_path / "out.safetensors").overall.sqnr_db == math.inf
    model = torch.nn.ParameterDict({"w": torch.zeros(4, 32), "norm": torch.zeros(4)})
    assert torch.equal(load_model(tmp_path / "in.safetensors", model)["w"], numbers)


def test_codes_in_8_and_4_bit_floats_are_refused_in_one_line(tmp_path):
    codes = torch.ones(128, 128).to(torch.float8_e4m3fn)
    safetensors.torch.save_file(
        {"a.weight": codes, "a.weight_scale_inv": torch.ones(1, 1)}, tmp_path / "fp8.safetensors"
    )
    pairs = torch.zeros(4, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with write_safetensors(tmp_path / "fp4.safetensors", [("a.weight", pairs.dtype, (4, 16))]) as writer:
        writer.write("a.weight", pairs)
    for name, message in (("fp8", "codes with scales beside them .'a.weight_scale_inv'."), ("fp4", "two to a byte")):
        source = tmp_path / f"{name}.safetensors"
        with pytest.raises(StoreError, match=f"'a.weight' is float{name[2:]}_.*: {message}"):
            quantize_file(source, tmp_path / "out.safetensors", "bfloat16")
        with pytest.raises(StoreError, match=message):
            compare_files(source, source)


def test_shards_of_one_name_in_two_folders_stay_two(tmp_path):
    numbers = {"one": torch.randn(4, 32), "two": torch.randn(4, 32)}
    for name, tensor in numbers.items():
        (tmp_path / "in" / name).mkdir(parents=True)
        safetensors.torch.save_file({name: tensor}, tmp_path / "in" / name / "model.safetensors")
    weight_map = {name: f"{name}/model.safetensors" for name in numbers}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    quantize_file(tmp_path / "in", tmp_path / "out", "bfloat16")
    with open_tensors(tmp_path / "out") as file:
        assert {name: file.read_float(name).bfloat16().tolist() for name in file.specs} == {
            name: tensor.bfloat16().tolist() for name, tensor in numbers.items()
        }


def test_a_tied_name_is_written_out_where_the_container_cannot_tie(tmp_path):
    with write_tensors(tmp_path / "in.safetensors", [TensorSpec.of("a", (2, 32))], tied={"b": "a"}) as writer:
        writer.write("a", torch.randn(2, 32))
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "int8")
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.json", "int8")
    with open_tensors(tmp_path / "out.safetensors") as one, open_tensors(tmp_path / "out.json") as two:
        assert (list(one.specs), one.tied) == (["a"], {"b": "a"})
        assert list(two.specs) == ["a", "b"]
        assert torch.equal(two.read_float("a"), two.read_float("b"))
        assert torch.equal(one.read_float("b"), two.read_float("b"))


def test_shards_can_become_one_file(tmp_path):
    write_shards(tmp_path / "in")
    quantize_file(tmp_path / "in", tmp_path / "one.safetensors", "int8_g128")
    assert not compare_files(tmp_path / "in", tmp_path / "one.safetensors").findings


def test_only_a_models_folder_is_replaced_and_a_failure_leaves_none(tmp_path):
    write_shards(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    with pytest.raises(StoreError, match=r"out: exists already; .*replace it \(force=True\)"):
        quantize_file(tmp_path / "in", tmp_path / "out", "int8")
    with pytest.raises(StoreError, match=r"out: is not empty and has no config.json.* is not replaced"):
        quantize_file(tmp_path / "in", tmp_path / "out", "int8", force=True)
    bad = tensors()["blocks.0.up.weight"]
    bad[0, 0] = torch.nan
    safetensors.torch.save_file({"blocks.0.up.weight": bad}, tmp_path / "in" / "model-0.safetensors")
    with pytest.raises(NonFiniteError):
        quantize_file(tmp_path / "in", tmp_path / "other", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("fmt", ["int8_row", "bfloat16", "mxfp4", "nvfp4"])
def test_nan_and_infinity_are_named_and_counted(fmt, tmp_path):
    bad = tensors()
    bad["blocks.1.up.weight"][0, :3] = torch.nan
    bad["blocks.1.up.weight"][1, 0] = -torch.inf
    safetensors.torch.save_file(bad, tmp_path / "in.safetensors")
    (tmp_path / "out.safetensors").write_bytes(b"old")
    with pytest.raises(NonFiniteError, match=r"blocks.1.up.weight: 3 NaN and 1 infinite of 1024 numbers"):
        quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", fmt)
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", fmt, nonfinite="replace")
    with open_tensors(tmp_path / "out.safetensors") as file:
        decoded = file.read_float("blocks.1.up.weight")
    assert torch.equal(decoded[0, :3].float(), torch.zeros(3))
    assert decoded.isfinite().all()


def test_an_indivisible_shape_gets_the_nearest_format_unless_it_is_asked_for_by_name(tmp_path):
    safetensors.torch.save_file({"w": torch.randn(32, 33)}, tmp_path / "in.safetensors")
    with pytest.raises(FormatError, match=r"w: mxfp4 has blocks of 32, and 33 .*\(pad='zero', keep='w'\)"):
        quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "mxfp4", only=["w"])
    report = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "mxfp4")
    assert report.rows[0]["to"] == "int8_row"
    assert "rows of 33 are not whole blocks of 32 (mxfp4)" in report.rows[0]["reason"]
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "mxfp4", pad="zero")
    with open_tensors(tmp_path / "out.safetensors") as file:
        assert file.specs["w"].format == "mxfp4"
        assert file.read_float("w").shape == (32, 33)


def test_a_plan_with_padding_fills(tmp_path):
    safetensors.torch.save_file({"w": torch.randn(32, 33)}, tmp_path / "in.safetensors")
    plan = Plan({"w": Planned(Choice("mxfp4", "why"), (32, 33))}, padding="zero")
    report = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", plan)
    assert report.bytes_after == plan.nbytes


def test_gguf_gets_formats_that_it_holds(tmp_path):
    numbers = {
        "token_embd.weight": torch.randn(32, 64),
        "blk.0.ffn_up.weight": torch.randn(32, 64),
        "w": torch.randn(64, 40),
    }
    write_as_gguf(numbers, tmp_path / "in.gguf")
    report = quantize_file(tmp_path / "in.gguf", tmp_path / "out.gguf", "mxfp4")
    assert {row["name"]: row["to"] for row in report.rows} == {
        "token_embd.weight": "q8_0_gguf",
        "blk.0.ffn_up.weight": "mxfp4",
        "w": "float32",  # rows of 40 are no whole blocks of 32, and GGUF has no others
    }


@pytest.mark.parametrize(
    ("output", "message"),
    [("in.safetensors", "the input .* itself"), ("out.pt", "got '.pt'"), ("out", "the suffix says what to write")],
)
def test_outputs_that_cannot_be(output, message, source):
    before = source.read_bytes()
    with pytest.raises(StoreError, match=message):
        quantize_file(source, source.parent / output, "int8")
    assert source.read_bytes() == before


NAMES = ["in.safetensors", "out.safetensors"]


# ---- real processes --------------------------------------------------------------------------------------------------


def large_file(path, count):
    """`count` tensors of 32 MB."""
    rows = 4096
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    names = [f"layer.{number}.weight" for number in range(count)]
    with write_safetensors(path, [(name, torch.bfloat16, (rows, 4096)) for name in names]) as writer:
        for name in names:
            for _ in range(rows // 64):
                writer.write_chunk(name, weight)


# Not ru_maxrss: across fork and exec it keeps the parent's peak.
PEAK = """
import re, sys
from bitplan.cli import run
from tests.formats.samples import SMALL_BLOCKS
import torch, bitplan.files.quantize_files, bitplan.formats.cpu_codec  # what they take is none of the file's
def memory(word):
    return 1024 * int(re.search(word + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = memory("VmRSS")
code = run(sys.argv[1:])
print(memory("VmHWM") - before)
sys.exit(code)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its peak memory from Linux's /proc")
@pytest.mark.parametrize("fmt", ["int8_row", pytest.param("mxfp4", marks=pytest.mark.long)])
def test_peak_memory_is_bounded_by_the_largest_tensor(fmt, tmp_path):
    large_file(tmp_path / "in.safetensors", 8)
    program = Program(PEAK, "quantize", "in.safetensors", "out.safetensors", "-f", fmt, "--json", folder=tmp_path)
    assert program.wait() == 0, program.errors
    peak = int(program.output.splitlines()[-1])
    print(peak / MB)
    assert (tmp_path / "in.safetensors").stat().st_size > 250 * MB
    assert peak < 3 * 32 * MB + 110 * MB


def is_writing(folder):
    """Whether an output that is not whole yet has bytes."""
    return any(path.stat().st_blocks for path in folder.glob(".*.partial"))


def test_a_kill_in_mid_write_leaves_the_old_file(tmp_path):
    large_file(tmp_path / "in.safetensors", 3)
    (tmp_path / "out.safetensors").write_bytes(b"old")
    arguments = ("quantize", "in.safetensors", "out.safetensors", "-f", "int8", "--force")
    program = Program(BITPLAN, *arguments, folder=tmp_path)
    program.wait_until(lambda: is_writing(tmp_path))
    assert program.signal(signal.SIGKILL) == -signal.SIGKILL
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"


def test_a_full_disk_is_one_line_and_leaves_the_old_file(source):
    (source.parent / "out.safetensors").write_bytes(b"old")
    limit = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "sys.dont_write_bytecode = True; "  # a module's compiled file would be cut off, and stay
    limit += f"resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); {BITPLAN}"
    arguments = ("quantize", "in.safetensors", "out.safetensors", "-f", "int8_row", "--force")
    program = Program(limit, *arguments, folder=source.parent)
    assert program.wait() == 2
    assert program.errors.count("\n") == 1
    assert "File too large" in program.errors
    assert sorted(path.name for path in source.parent.iterdir()) == ["in.safetensors", "out.safetensors"]
    assert (source.parent / "out.safetensors").read_bytes() == b"old"


def test_a_filled_tensor_that_stays_packed_is_copied(tmp_path):
    safetensors.torch.save_file({"w": torch.randn(32, 33), "v": torch.randn(32, 64)}, tmp_path / "in.safetensors")
    quantize_file(tmp_path / "in.safetensors", tmp_path / "a.safetensors", "mxfp4", pad="zero")
    quantize_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "mxfp4")
    assert numbers_of(tmp_path / "a.safetensors") == numbers_of(tmp_path / "b.safetensors")
    report = quantize_file(tmp_path / "a.safetensors", tmp_path / "c.safetensors", "q8_0_gguf", keep=["w"])
    assert {row["name"]: row["to"] for row in report.rows} == {"v": "q8_0_gguf", "w": "mxfp4"}


# ---- found by a reader who did not write it --------------------------------------------------------------------------


def test_a_cast_never_makes_infinities(tmp_path):
    safetensors.torch.save_file({"w": torch.full((2, 32), 1e6)}, tmp_path / "in.safetensors")
    with pytest.raises(FormatError, match=r"w: 64 of 64 numbers are beyond the range of float16; choose bfloat16"):
        quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "float16")


def test_a_name_with_brackets_can_be_kept(tmp_path):
    safetensors.torch.save_file({"a[0].weight": torch.randn(2, 33)}, tmp_path / "in.safetensors")
    report = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "mxfp4", keep=["a[0].weight"])
    assert report.rows[0]["to"] == "float32"


def test_gguf_says_that_it_never_fills_a_block(tmp_path):
    write_as_gguf({"w": torch.randn(32, 33)}, tmp_path / "in.gguf")
    with pytest.raises(StoreError, match=r"never filled, and 'w' has 33 there; .*leave it as it is \(keep='w'\)"):
        quantize_file(tmp_path / "in.gguf", tmp_path / "out.gguf", "q4_0_gguf", pad="zero")


def test_files_with_nothing_in_common_do_not_agree(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({"b": torch.ones(2)}, tmp_path / "b.safetensors")
    result = compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert result.to_dict()["overall"]["cosine"] is None
    assert "no tensor in common" in result.findings[-1]


def test_nan_is_a_finding_of_a_comparison(tmp_path):
    safetensors.torch.save_file({"a": torch.tensor([1.0, torch.nan])}, tmp_path / "a.safetensors")
    assert compare_files(tmp_path / "a.safetensors", tmp_path / "a.safetensors").findings == (
        "a: NaN or infinity on one side, so its figures say nothing",
    )


def test_a_missing_folder_is_named(source, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder") as caught:
        quantize_file(source, tmp_path / "nope" / "out.safetensors", "int8")
    assert caught.value.filename.endswith("nope")


def test_ctrl_c_says_so_and_leaves_the_old_file(tmp_path):
    large_file(tmp_path / "in.safetensors", 3)
    (tmp_path / "out.safetensors").write_bytes(b"old")
    arguments = ("quantize", "in.safetensors", "out.safetensors", "-f", "nvfp4", "--force")
    program = Program(BITPLAN, *arguments, folder=tmp_path)
    program.wait_until(lambda: is_writing(tmp_path))
    assert program.signal(signal.SIGINT) == 130
    assert (
        program.errors
        == "bitplan: interrupted; what was being written is as it was before, or new where it was complete\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"


def test_what_each_tensor_lost_is_counted_and_a_tensor_that_saturates_is_warned_of(tmp_path):
    """Every 7.9 is beyond 6 scales of mxfp4, whose scale is 1: the floor rule of OCP."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "high.weight": torch.full((64, 64), 7.9),
        "gauss.weight": torch.randn(64, 64, generator=generator),
        "sparse.weight": torch.eye(64) * 6 + 0.1,
        "norm.weight": torch.ones(64),
    }
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    report = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "mxfp4")
    rows = {row["name"]: row for row in report.rows}
    assert rows["high.weight"]["saturated_share"] == 1.0
    assert rows["high.weight"]["sqnr_db"] == pytest.approx(20 * math.log10(7.9 / 1.9), abs=1e-3)
    assert rows["high.weight"]["counted"] == 64 * 64
    assert 15 < rows["gauss.weight"]["sqnr_db"] < 25
    assert rows["gauss.weight"]["saturated_share"] < 0.02
    assert rows["sparse.weight"]["underflowed_share"] == pytest.approx(0.5, abs=0.02)
    assert rows["norm.weight"].keys() == rows["high.weight"].keys()
    assert (rows["norm.weight"]["sqnr_db"], rows["norm.weight"]["saturated_share"]) == (None, None)
    (warning,) = report.warnings
    assert warning.startswith("mxfp4: 1 of 3 tensors lost much: high.weight (100.0% saturated, 0.0% to zero, SQNR ")
    assert "(keep)" in warning
    assert report.to_dict()["warnings"] == [warning]


def test_an_exact_tensor_and_usual_weights_are_not_warned_of(tmp_path):
    """Absmax saturates nothing, and the floor rule of mxfp4 below one in a hundred of Gaussian numbers."""
    generator = torch.Generator().manual_seed(0)
    safetensors.torch.save_file({"w.weight": torch.randn(128, 256, generator=generator)}, tmp_path / "in.safetensors")
    for fmt in ("int8_row", "mxfp4", "nvfp4", "q4_0_gguf", "fp8_e4m3_row", "bfloat16", "int4_g32"):
        report = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", fmt)
        assert report.warnings == []


def test_a_run_that_changed_nothing_says_so(tmp_path):
    safetensors.torch.save_file({"w": torch.randn(32, 64)}, tmp_path / "in.safetensors")
    report = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "mxfp4", keep=["w"])
    assert report.warnings == [
        "every tensor is as it was: none was put into another format; `bitplan inspect` shows them"
    ]


def test_a_plan_counts_the_bytes_of_experts_as_a_packed_folder_has_them(tmp_path):
    """gpt-oss's float experts lie transposed: a format with a scale for each row has other bytes in a packed folder."""
    names = [f"model.layers.0.mlp.experts.{local}" for local in ("gate_up_proj", "down_proj")]
    tensors = {names[0]: torch.randn(2, 64, 96), names[1]: torch.randn(2, 48, 64)}
    model = tmp_path / "model"
    model.mkdir()
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "architectures": ["APart"]}))
    with open_tensors(model) as file:
        shapes = packed_shapes(file, transposed_by_names(file))
        packed = plan_for_file(file, "int8_row", packed_shapes=shapes)
        kept = plan_for_file(file, "int8_row", keep=[names[1]], packed_shapes=shapes)
        as_they_lie = plan_for_file(file, "int8_row")
        again = plan_for_file(file, kept, packed_shapes=shapes)
    assert [packed.entries[name].shape for name in names] == [(2, 96, 64), (2, 64, 48)]
    assert [kept.entries[name].shape for name in names] == [(2, 96, 64), (2, 48, 64)]
    assert [as_they_lie.entries[name].shape for name in names] == [(2, 64, 96), (2, 48, 64)]
    assert [again.entries[name].shape for name in names] == [(2, 96, 64), (2, 48, 64)]
    assert packed.nbytes == quantize_file(model, tmp_path / "packed", "int8_row").bytes_after != as_they_lie.nbytes


# ---- inputs that change, folders that hold more than a model ---------------------------------------------------------


@pytest.mark.parametrize("output", ["out.safetensors", "out"])
@pytest.mark.parametrize("way", ["in place", "by another file"])
def test_an_input_that_is_written_to_meanwhile_is_refused(tmp_path, output, way):
    folder = tmp_path / "in"
    folder.mkdir()
    safetensors.torch.save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")

    def rewrite(_):
        data = (folder / "model.safetensors").read_bytes()
        if way == "by another file":
            (folder / "new").write_bytes(data)
            (folder / "new").rename(folder / "model.safetensors")
        else:
            (folder / "model.safetensors").write_bytes(data)

    with pytest.raises(StoreError, match=r"in/model.safetensors: was changed while it was read.* nothing was written"):
        quantize_file(folder, tmp_path / output, "int8", options=QuantizeOptions(on_tensor=rewrite))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def model_folder(folder):
    folder.mkdir(parents=True)
    safetensors.torch.save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_force_replaces_the_model_and_keeps_all_else(tmp_path):
    source, out = model_folder(tmp_path / "in"), model_folder(tmp_path / "out")
    (source / "tokenizer.json").write_text("{}")
    theirs = ("tokenizer.model", "vocab.json", "added_tokens.json")  # beside another tokenizer they would make a mix
    for name in ("notes.md", "trainer_state.json", "model-00001-of-00002.safetensors", "tokens.txt", *theirs):
        (out / name).write_text("kept")
    (out / "checkpoint-500").mkdir()
    (out / "checkpoint-500" / "config.json").write_text("kept")
    (out / "additional_chat_templates").mkdir()
    quantize_file(source, out, "int8", force=True)
    assert {path.name for path in out.iterdir()} == {
        *(*WRITTEN, "tokenizer.json"),
        *("notes.md", "trainer_state.json", "tokens.txt", "checkpoint-500", "replaced"),
    }
    assert {path.name for path in (out / "replaced").iterdir()} == {*theirs, "additional_chat_templates"}
    assert (out / "replaced" / "vocab.json").read_text() == "kept"
    assert (out / "checkpoint-500" / "config.json").read_text() == (out / "notes.md").read_text() == "kept"
    open_tensors(out).close()


def test_force_leaves_no_tokenizer_of_another_model_beside_a_model_without_one_and_loses_none(tmp_path, caplog):
    source, out = model_folder(tmp_path / "in"), model_folder(tmp_path / "out")
    (out / "model.safetensors").rename(out / "part-a.safetensors")
    index = {"weight_map": dict.fromkeys(tensors(), "part-a.safetensors")}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    theirs = {"tokenizer.json": "{}", "chat_template.jinja": "hi", "generation_config.json": "{}"}
    for round_ in ("replaced", "replaced2"):
        for name, text in theirs.items():
            (out / name).write_text(text + round_)
        caplog.clear()
        quantize_file(source, out, "int8", force=True)
        assert f"those of the model before are in {round_} there now" in caplog.text
        assert {path.name: path.read_text() for path in (out / round_).iterdir()} == {
            name: text + round_ for name, text in theirs.items()
        }
    assert {path.name for path in out.iterdir()} == {*WRITTEN, "replaced", "replaced2"}


def test_a_verb_opens_its_source_once_and_plans_once(tmp_path, monkeypatch):
    source = model_folder(tmp_path / "in")
    opened, planned = [], []

    def count(home, name, calls):
        module = importlib.import_module(f"bitplan.files.{home}")
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **options: calls.append(args[0]) or plain(*args, **options))

    count("safetensors_tensors", "open_checkpoint", opened)
    count("headers", "choose_formats", planned)
    assert run(["quantize", str(source), str(tmp_path / "out"), "--format", "int8_row"]) == 0
    assert opened == [source]
    assert len(planned) == 1


def test_an_output_that_holds_the_source_is_refused(tmp_path):
    model_folder(tmp_path / "models")
    source = model_folder(tmp_path / "models" / "llama")
    for output in (source, tmp_path / "models"):
        with pytest.raises(StoreError, match="holds the input"):
            quantize_file(source, output, "int8", force=True)
    quantize_file(source, source / "packed", "int8")


def test_links_that_leave_the_source_are_not_followed_and_those_of_a_cache_are(tmp_path, caplog):
    snapshot = model_folder(tmp_path / "cache" / "snapshots" / "1")
    (tmp_path / "cache" / "blobs").mkdir()
    (tmp_path / "cache" / "blobs" / "ab12").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/ab12")
    (snapshot / "LICENSE").symlink_to("../../../secret")
    (snapshot / "NOTICE").symlink_to("tokenizer.json")
    quantize_file(snapshot, tmp_path / "out", "int8")
    assert not (tmp_path / "out" / "LICENSE").exists()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (tmp_path / "out" / "NOTICE").read_text() == "{}"
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert "links that lead out of the folder are not copied: 'LICENSE'" in caplog.text


def test_files_of_sentence_transformers_come_along(tmp_path):
    source = model_folder(tmp_path / "in")
    parts = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}, {"path": "../in"}]
    (source / "modules.json").write_text(json.dumps(parts))
    (source / "sentence_bert_config.json").write_text("{}")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (source / "2_Other").mkdir()
    quantize_file(source, tmp_path / "out", "int8")
    assert {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")} == {
        *(*WRITTEN, "modules.json", "sentence_bert_config.json"),
        *("1_Pooling", "1_Pooling/config.json"),
    }
    (source / "modules.json").write_text('{"path": 3}')
    with pytest.raises(FileFormatError, match=r'modules.json: must be a list of objects with a "path"'):
        quantize_file(source, tmp_path / "other", "int8")


def test_one_scale_for_a_tensor_warns_with_its_figures(tmp_path):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 12.0
    safetensors.torch.save_file({"up.weight": weight}, tmp_path / "in.safetensors")
    (warning,) = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "int4").warnings
    assert re.search(r"up.weight \(0.0% saturated, \d\d.\d% to zero, SQNR \d.\d dB\)", warning)
    assert "int4 has one scale for a whole tensor" in warning
