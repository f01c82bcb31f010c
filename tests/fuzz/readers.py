"""Every reader of files that somebody else may have written, with a sound file of each: the table of the fuzzers.

`make` writes sound files into an empty folder and returns those to damage; `read` gets one of them, damaged. It does
with it what a user of that file does. A new reader gets a row in READERS.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bitplan.plan import Manifest, Plan, check_headers, expand_raw_map
from bitplan.plan.check import Header
from bitplan.records import read_json

DOCUMENTS = Path(__file__).parents[2] / "docs" / "documents"


class Reader(NamedTuple):
    name: str
    group: str  # readers of a group share a process
    make: Callable[[Path], list[Path]]
    read: Callable[[Path], None]
    share: float = 1.0  # of all inputs; less where one takes long


def example(page: str, number: int = 0) -> Callable[[Path], list[Path]]:
    """The example of a page in docs/documents, which the real reader is known to read."""
    return lambda folder: [_write(folder / f"{page}.{_examples(page)[number][0]}", example_text(page, number))]


def example_text(page: str, number: int = 0) -> str:
    return _examples(page)[number][1]


@functools.cache
def _examples(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(jsonl?)\n(.*?)^```$", (DOCUMENTS / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)


def _write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# ---- files of weights ------------------------------------------------------------------------------------------------


def make_safetensors(folder: Path) -> list[Path]:
    import torch

    from bitplan.formats.dtypes import torch_dtype
    from bitplan.store.safetensors_io import DTYPES, write_safetensors

    paths = []
    for number, tags in enumerate((list(DTYPES), ["F32"], ["U8", "F4", "BF16"], [])):
        entries = [(f"layer.{tag}", torch_dtype(DTYPES[tag]), (2, 3)) for tag in tags]
        entries += [("scalar", torch.int64, ()), ("empty", torch.float16, (0, 4)), ("層", torch.uint8, (5,))]
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, dtype, shape in entries}
        path = folder / f"{number}.safetensors"
        with write_safetensors(path, entries, {"format": "pt", "note": "x"} if len(tags) < 4 else {}) as writer:
            for name in writer.order:
                writer.write(name, bytes(i % 2 for i in range(sizes[name])))
        paths.append(path)
    return paths


def read_safetensors(path: Path) -> None:
    import safetensors

    from bitplan.store.safetensors_io import SafetensorsFile

    with SafetensorsFile(path) as file:
        for name, entry in file.tensors.items():
            tensor = file.read(name)
            assert (tensor.dtype, tuple(tensor.shape), tensor.nbytes) == (entry.dtype, entry.shape, entry.nbytes)
            if entry.shape:
                assert file.read_rows(name, 0, entry.shape[0]).shape == tensor.shape
        if b"-0" in path.read_bytes():  # 0 to Python's json, a float to the library's
            return
        library = {name: len(info["data"]) for name, info in safetensors.deserialize(path.read_bytes())}
        assert library == {name: entry.nbytes for name, entry in file.tensors.items()}, "the library reads it otherwise"


def make_index(folder: Path) -> list[Path]:
    import torch

    from bitplan.store.safetensors_io import write_safetensors

    for name in "ab":
        with write_safetensors(folder / f"{name}.safetensors", [(name, torch.uint8, (1,))]) as writer:
            writer.write(name, b"1")
    document = {"metadata": {"total_size": 2}, "weight_map": {name: f"{name}.safetensors" for name in "ab"}}
    return [_write(folder / "model.safetensors.index.json", json.dumps(document))]


def read_all(path: Path) -> None:
    from bitplan.store import open_tensors

    with open_tensors(path) as file:
        for name in (*file.specs, *file.tied):
            assert file.read(name).shape == file.spec(name).shape


def make_gguf(folder: Path) -> list[Path]:
    import gguf
    import torch
    from gguf import GGMLQuantizationType as Type
    from gguf import GGUFValueType as V

    from bitplan.store.gguf_io import GGUFValue, write_gguf

    metadata = {
        "general.architecture": GGUFValue(V.STRING, "llama"),
        "k.u8": GGUFValue(V.UINT8, 7),
        "k.f32": GGUFValue(V.FLOAT32, 0.5),
        "k.bool": GGUFValue(V.BOOL, False),
        "k.i64": GGUFValue(V.INT64, -2),
        "k.words": GGUFValue(V.ARRAY, ("a", "層", ""), V.STRING),
        "k.ints": GGUFValue(V.ARRAY, (1, 2, 3), V.INT16),
        "k.nested": GGUFValue(V.ARRAY, (GGUFValue(V.ARRAY, (1.0,), V.FLOAT64),), V.ARRAY),
    }
    entries = [("a", Type.F32, (3,)), ("b", Type.Q8_0, (2, 64)), ("c", Type.Q4_K, (256,)), ("d", Type.I8, (2, 1, 2, 3))]
    aligned = metadata | {"general.alignment": GGUFValue(V.UINT32, 8)}
    paths = []
    for number, (some, keys) in enumerate(((entries, metadata), (entries[:2], aligned), ([], metadata), (entries, {}))):
        path = folder / f"{number}.gguf"
        with write_gguf(path, some, keys) as writer:
            for name, kind, shape in some:
                block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
                writer.write(name, bytes(torch.Size(shape).numel() // block * block_bytes))
        paths.append(path)
    return paths


def read_gguf(path: Path) -> None:
    """What is read can be written, and is then read the same."""
    from bitplan.store.gguf_io import GGUFFile, write_gguf

    with GGUFFile(path) as file:
        raw = {name: file.read_raw(name) for name in file.tensors}
        for name, tensor in file.tensors.items():
            assert (tuple(raw[name].shape), raw[name].numel()) == (tensor.raw_shape, tensor.nbytes)
        entries = [(tensor.name, tensor.type, tensor.shape) for tensor in file.tensors.values()]
        with write_gguf(path.with_suffix(".again"), entries, file.metadata) as writer:
            for name in writer.order:
                writer.write(name, raw[name])
        with GGUFFile(path.with_suffix(".again")) as again:
            assert repr(again.metadata) == repr(file.metadata)  # NaN equals itself here
            assert [again.read_raw(name).tolist() for name in again.tensors] == [one.tolist() for one in raw.values()]


def make_split_gguf(folder: Path) -> list[Path]:
    import gguf
    import numpy

    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=1)
    for name in "ab":
        writer.add_tensor(name, numpy.zeros((2, 32), numpy.float32))
    writer.write_header_to_file(folder / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def make_networks(folder: Path) -> list[Path]:
    import torch

    from bitplan.formats import DTYPE_NAMES, encode
    from bitplan.store.poly_json import PolyNetwork
    from tests.store.test_poly_json import AMBIGUOUS, EVERY_ORIGINAL, ORIGINAL, b64, network, pack, packed

    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    ours = PolyNetwork.from_tensors({fmt: encode(x, fmt) for fmt in DTYPE_NAMES}).document
    few = PolyNetwork.from_tensors({fmt: encode(x[0], fmt) for fmt in ("int4", "uint8", "float16", "ternary")}).document
    known = {tag: pack(tag, codes) for tag, (codes, _) in EVERY_ORIGINAL.items() if tag not in AMBIGUOUS}
    theirs = network(*(packed(dtype=tag, weights=b64(raw)) for tag, raw in known.items()))
    texts = (json.dumps(ours), json.dumps(few), json.dumps(theirs), ORIGINAL)
    return [_write(folder / f"{number}.json", text) for number, text in enumerate(texts)]


def read_network(path: Path) -> None:
    from bitplan.store.poly_json import read_poly_json, write_poly_json

    found = read_poly_json(path)
    write_poly_json(path.with_suffix(".again"), found)  # what can be read can be written, and is the same
    assert read_poly_json(path.with_suffix(".again")).document == found.document


def make_packed(folder: Path) -> list[Path]:
    import torch

    from bitplan.formats import encode
    from bitplan.store.tensor_writers import Promise, write_tensors

    x = torch.linspace(-1, 1, 4 * 128).reshape(4, 128)
    packed = {fmt: encode(x, fmt) for fmt in ("mxfp4", "nvfp4", "int8_g128", "q4_0_poly")}
    path = folder / "packed.safetensors"
    promises = [
        *(Promise(name, one.shape, one.fmt) for name, one in packed.items()),
        Promise("plain", (4, 128), dtype=x.dtype),
    ]
    with write_tensors(path, promises, tied={"alias": "mxfp4"}) as writer:
        for name, one in packed.items():
            writer.write(name, one)
        writer.write("plain", x)
    return [path]


def read_packed_file(path: Path) -> None:
    """What `check --deep` and `load` do."""
    from bitplan.runtime.packed_files import read_packed
    from bitplan.store import open_tensors
    from bitplan.store.deep_check import deep_check

    manifest = Manifest.from_document({"version": 1, "patterns": [{"regex": ".*", "format": "float32"}]})
    with open_tensors(path) as file:
        deep_check(manifest, file)
    read_packed(path)


PAIRS: dict[str, Any] = {
    "version": 1,
    "formats": {"FP4": {}, "UE8": {}},
    "patterns": [
        {"regex": ".*blocks", "format": "FP4"},
        {"regex": ".*scales", "format": "UE8"},
        {"regex": ".*", "format": "float32"},
    ],
    "block_size": 128,
    "scale_encoding": "linear_uint8",
    "scale_base": "tensor",
}


def make_pairs(folder: Path) -> list[Path]:
    import safetensors.torch
    import torch

    from bitplan.formats import encode

    encoded = encode(torch.linspace(-1, 1, 4 * 256).reshape(4, 256), "fp4_u8_g128")
    assert encoded.base is not None
    tensors = {
        "w.blocks": encoded.data,
        "w.scales": encoded.scales,
        "w.base": encoded.base.reshape(1),
        "n": torch.ones(2),
    }
    safetensors.torch.save_file(
        {name: one for name, one in tensors.items() if one is not None}, folder / "a.safetensors"
    )
    return [folder / "a.safetensors"]


def read_pairs(path: Path) -> None:
    from bitplan.runtime.packed_files import read_packed
    from bitplan.store import open_tensors
    from bitplan.store.deep_check import deep_check

    manifest = Manifest.from_document(PAIRS)
    with open_tensors(path) as file:
        deep_check(manifest, file)
    read_packed(path, manifest=manifest)


def make_gpt_oss(naming: str, damaged: str) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        from bitplan.store.gpt_oss import make_checkpoint

        sizes = {"layers": 1, "experts": 2, "hidden": 64, "intermediate": 64, "heads": 2, "kv_heads": 1, "vocab": 8}
        path = folder / damaged if naming == "gguf" else folder / "model"
        make_checkpoint(path, naming=naming, head_dim=32, **sizes)  # type: ignore[arg-type]
        return [path] if naming == "gguf" else [path / damaged]

    return make


def read_gpt_oss(path: Path) -> None:
    from bitplan.store.gpt_oss import GptOssFile
    from bitplan.store.gpt_oss_config import hf_config

    with GptOssFile(path if path.suffix == ".gguf" else path.parent) as file:
        json.dumps(hf_config(file.shape, file.settings, packed=True), allow_nan=False).encode()
        if file.config is not None:
            json.dumps(file.config, ensure_ascii=False, allow_nan=False).encode()


# ---- documents -------------------------------------------------------------------------------------------------------


def read_plan(path: Path) -> None:
    plan = Plan.load(path)
    assert Plan.from_document(json.loads(plan.to_json())) == plan
    assert "\n" in str(plan.to_json())


HEADERS = {
    "model.embed_tokens.weight": Header("bfloat16", (64, 32), 4096),
    "model.layers.0.mlp.up_proj.weight": Header("bfloat16", (64, 32), 4096),
    "model.norm.weight": Header("bfloat16", (32,), 64),
}


def read_manifest(path: Path) -> None:
    check_headers(Manifest.load(path), HEADERS)


def read_raw_map(path: Path) -> None:
    check_headers(Manifest.from_document(expand_raw_map(read_json(path), where=str(path)), where=str(path)), HEADERS)


def read_calibration(path: Path) -> None:
    from bitplan.measure.calibration import load_calibration

    load_calibration(path, json.loads(example_text("calibration"))["fingerprint"]).result()


def read_selective_config(path: Path) -> None:
    from bitplan.plan.selective_config import SelectivePrecisionConfig

    SelectivePrecisionConfig.load(path).to_document()


@functools.cache
def selective_policy() -> tuple[Any, Any]:
    """A policy that the example of the page fits."""
    from torch import nn

    from bitplan.plan.selective_config import SelectivePrecisionConfig
    from bitplan.runtime.selective_precision import SelectivePrecisionPolicy
    from bitplan.runtime.stream_blocks import stream_blocks

    saved = json.loads(example_text("selective-state"))["policy"]["config"]
    config = SelectivePrecisionConfig.from_document(saved | {"telemetry_enabled": False})
    blocks = [nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32)) for _ in range(2)]
    stream = stream_blocks(nn.Sequential(*blocks), "*", device="cpu", slots=2)
    return SelectivePrecisionPolicy(stream, config), stream  # the stream lives as long as the policy


def read_selective_state(path: Path) -> None:
    policy, _ = selective_policy()
    policy.load(path, accept_config_change=True)
    json.dumps(policy.state_dict(), allow_nan=False).encode()


@functools.cache
def streamed() -> Any:
    from torch import nn

    from bitplan.runtime.host_training import AdamWSettings
    from bitplan.runtime.stream_blocks import stream_blocks

    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    settings = AdamWSettings(lr=0.01)
    return stream_blocks(nn.Sequential(layer), "*", device="cpu", train="weights", optimizer=settings, slots=2)


def make_training_state(folder: Path) -> list[Path]:
    streamed().save(folder / "state.safetensors")
    return [folder / "state.safetensors"]


def read_training_state(path: Path) -> None:
    streamed().load(path)


def read_crossovers(path: Path) -> None:
    from bitplan.errors import FileFormatError
    from bitplan.measure import crossover_files
    from bitplan.measure.crossover import pick
    from bitplan.plan.documents import load_document

    fingerprint = json.loads(example_text("crossover"))["fingerprint"]
    document = load_document(path, FileFormatError)
    found = crossover_files.from_document(document, fingerprint, where=str(path))
    json.dumps(crossover_files.to_document(found, fingerprint), allow_nan=False).encode()
    for record in found.values():
        pick(record, 8, room=True)


def read_drift_log(path: Path) -> None:
    from bitplan.store.drift_log import read_drift

    read_drift(path)


def make_trees(folder: Path) -> list[Path]:
    from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor
    from tests.trees.test_model_file import fitted

    for kind in (BoostedTreesRegressor, BoostedTreesClassifier):
        fitted(kind, n_estimators=1)[0].save(folder / f"{kind.__name__}.json")
    return sorted(folder.iterdir())


def read_trees(path: Path) -> None:
    import numpy

    from bitplan.trees import load_trees

    model = load_trees(path)
    with numpy.errstate(all="ignore"):
        model.booster_.scores(numpy.zeros((2, model.n_features_in_)))


def reopen_training_log(path: Path) -> None:
    """A run that goes on appends to its log."""
    from bitplan.report import TrainingLog

    with TrainingLog(path, run="again") as log:
        log.write(10**6, 0.5)


def make_layer_state(folder: Path) -> list[Path]:
    return [_write(folder / "extra.json", '{"format": "mxfp4", "shape": [4, 128]}')]


def read_layer_state(path: Path) -> None:
    """What a packed layer saves beside its parts, as JSON in a tensor."""
    import torch

    from bitplan.runtime.packed_weight import _read_extra

    _read_extra(torch.tensor(list(path.read_bytes()), dtype=torch.uint8), "layer")


# ---- adaptive FP8 ----------------------------------------------------------------------------------------------------


def make_fp8_policies(folder: Path) -> list[Path]:
    from bitplan.plan.fp8_merge import merge_reports
    from tests.plan.fp8_samples import SEED_POLICY

    merge_reports([small_report()]).policy.save(folder / "v2.json")
    return [folder / "v2.json", _write(folder / "v1.json", SEED_POLICY)]


def small_report() -> Any:
    from tests.plan.fp8_samples import experts, pair, report, series

    return report([*series({512: 0.8, 4096: 1.2}), *pair(424, 1.1, **experts("row_grouped"))])


def read_fp8_policy(path: Path) -> None:
    from bitplan.plan.fp8_choice import choose_products
    from bitplan.plan.fp8_policy import Question, decide, load_policy, read_policy
    from bitplan.plan.fp8_terms import KINDS

    policy = load_policy(path)
    for kind in KINDS:
        question = Question(kind, 512, "fc2", num_gemms=64, moe_router_topk=8)
        assert decide(policy, question).reason
        assert choose_products(policy, question).reason
    assert read_policy(json.loads(policy.to_json())).to_json() == policy.to_json()


def make_fp8_reports(folder: Path) -> list[Path]:
    report = small_report()
    return [
        _write(folder / "whole.json", json.dumps(report.to_document())),
        _write(folder / "lines.jsonl", report.to_lines()),
    ]


def read_fp8_report(path: Path) -> None:
    from bitplan.plan.fp8_merge import merge_reports
    from bitplan.plan.fp8_report import Report

    merge_reports([Report.load(path)]).policy.to_json()


def make_fp8_log(folder: Path) -> list[Path]:
    return [_write(folder / "log.jsonl", "".join(small_report().to_lines().splitlines(keepends=True)[:-1]))]


def read_fp8_log(path: Path) -> None:
    from bitplan.measure.fp8_report_log import ReportLog

    report = small_report()
    with ReportLog(path, report.fingerprint, report.recipe, model=report.model, settings=report.settings) as log:
        log.finish()


def make_list_report(folder: Path) -> list[Path]:
    from tests.plan.test_fp8_list_report import case

    rows = [*case(4096, 1.2), *case(512, 0.9), *case(424, 1.1, kind="row_grouped", num_gemms=64)]
    return [_write(folder / "list.json", json.dumps(rows))]


def read_list_report(path: Path) -> None:
    from bitplan.plan.fp8_list_report import merge_lists

    found = merge_lists([path], 1.0)
    if found is not None:
        found[0].to_json()


def make_configs(folder: Path) -> list[Path]:
    from tests.plan.test_fp8_layers import DEEPSEEK_V3, QWEN3_30B, QWEN3_VL_235B

    configs = (DEEPSEEK_V3, QWEN3_30B, QWEN3_VL_235B)
    return [_write(folder / f"{number}.json", json.dumps(config)) for number, config in enumerate(configs)]


def make_yaml(folder: Path) -> list[Path]:
    from tests.plan.test_fp8_yaml import DEEPSEEK, QWEN, SELECTIVE

    _write(folder / "deepseek_v3.yaml", DEEPSEEK)
    return [_write(folder / f"{name}.yaml", text) for name, text in (("a", DEEPSEEK), ("b", QWEN), ("c", SELECTIVE))]


def read_fp8_model(path: Path) -> None:
    from bitplan.plan.fp8_layers import Parallel, local_layers
    from bitplan.runtime.fp8_config import open_model

    local_layers(open_model(path).parts, Parallel(tp=2))


# ---- the report ------------------------------------------------------------------------------------------------------


def read_record(path: Path) -> None:
    from bitplan.report.page import build_page, build_sections
    from bitplan.report.read import read_records

    build_page(build_sections(read_records([path])), title="t").encode()


def make_records(folder: Path) -> list[Path]:
    """What the writers write, cut to a few lines so that a change hits something, and results of benchmarks."""
    from tests.report import samples

    for path in samples.write_samples(folder):
        lines = path.read_text().splitlines(keepends=True)
        if path.suffix == ".jsonl":
            _write(folder / path.name, "".join(lines[:4]))
    results = [path for path in samples.RESULTS.glob("*.json") if path.stat().st_size < 20_000]
    return sorted(folder.glob("*.jsonl")) + [_write(folder / path.name, path.read_bytes()) for path in sorted(results)]


RECORDS = (
    "plan", "findings", "calibration", "selective-telemetry", "stream-telemetry", "drift", "quality", "fp8-report",
    "fp8-policy", "crossover", "training-log", "machine", "benchmark-results",
)  # fmt: skip

READERS = [
    Reader("safetensors", "containers", make_safetensors, read_safetensors),
    Reader("safetensors index", "containers", make_index, read_all),
    Reader("gguf", "containers", make_gguf, read_gguf),
    Reader("split gguf", "containers", make_split_gguf, read_all),
    Reader("network", "containers", make_networks, read_network),
    Reader("packed model", "containers", make_packed, read_packed_file),
    Reader("codes and scales", "containers", make_pairs, read_pairs),
    Reader("gpt-oss config", "containers", make_gpt_oss("hf", "config.json"), read_gpt_oss, 0.2),
    Reader("gpt-oss openai config", "containers", make_gpt_oss("openai", "config.json"), read_gpt_oss, 0.2),
    Reader("gpt-oss safetensors", "containers", make_gpt_oss("hf", "model.safetensors"), read_gpt_oss),
    Reader("gpt-oss gguf", "containers", make_gpt_oss("gguf", "model.gguf"), read_gpt_oss),
    Reader("plan", "documents", example("plan"), read_plan),
    Reader("manifest", "documents", example("manifest"), read_manifest),
    Reader("raw map", "documents", example("manifest", 1), read_raw_map),
    Reader("calibration", "documents", example("calibration"), read_calibration),
    Reader("selective config", "documents", example("selective-config"), read_selective_config),
    Reader("selective state", "documents", example("selective-state"), read_selective_state),
    Reader("training state", "documents", make_training_state, read_training_state),
    Reader("crossovers", "documents", example("crossover"), read_crossovers),
    Reader("drift log", "documents", example("drift"), read_drift_log),
    Reader("training log, opened again", "documents", example("training-log"), reopen_training_log),
    Reader("state of a packed layer", "documents", make_layer_state, read_layer_state),
    Reader("trees", "documents", make_trees, read_trees),
    Reader("fp8 policy", "fp8", make_fp8_policies, read_fp8_policy),
    Reader("fp8 report", "fp8", make_fp8_reports, read_fp8_report),
    Reader("fp8 report log", "fp8", make_fp8_log, read_fp8_log),
    Reader("fp8 list report", "fp8", make_list_report, read_list_report),
    Reader("fp8 model config", "fp8", make_configs, read_fp8_model),
    Reader("fp8 model yaml", "fp8", make_yaml, read_fp8_model, 0.5),
    Reader("report: samples", "report", make_records, read_record),
    *(Reader(f"report: {page}", "report", example(page), read_record) for page in RECORDS),
]
