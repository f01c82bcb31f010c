"""Sound documents, of every kind that bitplan reads, and what their users do with a damaged one."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitplan.base.records import read_json
from bitplan.plan import Manifest, Plan, check_headers
from bitplan.plan.manifest import expand_raw_map
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.solver import front
from tests.fuzz.weight_files import written

DOCUMENTS = Path(__file__).parents[2] / "docs" / "documents"


def example(page: str, number: int = 0) -> Callable[[Path], list[Path]]:
    """The example of a page in docs/documents, which the real reader is known to read."""
    return lambda folder: [written(folder / f"{page}.{_examples(page)[number][0]}", example_text(page, number))]


def example_text(page: str, number: int = 0) -> str:
    return _examples(page)[number][1]


@functools.cache
def _examples(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(jsonl?)\n(.*?)^```$", (DOCUMENTS / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)


def read_evidence(path: Path) -> None:
    """What `plan --from` and `diff --evidence` do."""
    from bitplan.searching.explain import explain_plan
    from bitplan.searching.goal import Goal, SearchError
    from bitplan.searching.solver import solve

    evidence = SearchEvidence.load(path)
    assert front(evidence, points=3)
    for goal in (Goal(bits=6.0), Goal(nbytes=10**6), Goal(max_kl=0.1), Goal(faster=1.1, rows=1)):
        with contextlib.suppress(SearchError):
            plan = explain_plan(evidence, solve(evidence, goal).choice, rows=goal.rows)
            assert Plan.from_document(json.loads(plan.to_json())) == plan
    assert SearchEvidence.from_document(json.loads(json.dumps(evidence.to_document()))).to_document()


def read_plan(path: Path) -> None:
    plan = Plan.load(path)
    assert Plan.from_document(json.loads(plan.to_json())) == plan
    assert "\n" in str(plan.to_json())


HEADERS = {
    "model.embed_tokens.weight": ("bfloat16", (64, 32), 4096),
    "model.layers.0.mlp.up_proj.weight": ("bfloat16", (64, 32), 4096),
    "model.norm.weight": ("bfloat16", (32,), 64),
}


def read_manifest(path: Path) -> None:
    check_headers(Manifest.load(path), HEADERS)


def read_raw_map(path: Path) -> None:
    check_headers(Manifest.from_document(expand_raw_map(read_json(path), where=str(path)), where=str(path)), HEADERS)


def read_calibration(path: Path) -> None:
    from bitplan.streaming.selective.calibration import load_calibration

    load_calibration(path, json.loads(example_text("calibration"))["fingerprint"]).result()


def read_selective_config(path: Path) -> None:
    from bitplan.streaming.selective.config import SelectivePrecisionConfig

    SelectivePrecisionConfig.load(path).to_document()


@functools.cache
def selective_policy() -> tuple[Any, Any]:
    """A policy that the example of the page fits."""
    from torch import nn

    from bitplan.streaming.block_stream import stream_blocks
    from bitplan.streaming.selective.config import SelectivePrecisionConfig
    from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy

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

    from bitplan.streaming.block_stream import stream_blocks
    from bitplan.streaming.training.adamw import AdamWSettings

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
    from bitplan.base.documents import load_document
    from bitplan.base.errors import FileFormatError
    from bitplan.packed import crossover
    from bitplan.packed.crossover import pick

    fingerprint = json.loads(example_text("crossover"))["fingerprint"]
    document = load_document(path, FileFormatError)
    result = crossover.from_document(document, fingerprint, where=str(path))
    json.dumps(crossover.to_document(result, fingerprint), allow_nan=False).encode()
    for record in result.values():
        pick(record, 8, room=True)


def read_drift_log(path: Path) -> None:
    from bitplan.files.drift import DriftLog

    DriftLog.read(path)


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
    if model.n_features_in_ > 10_000:  # the rows of a user are that wide then; a file need not be
        return
    with numpy.errstate(all="ignore"):
        model.booster_.scores(numpy.zeros((2, model.n_features_in_)))


def make_lightgbm(folder: Path) -> list[Path]:
    """LightGBM's text, with the values of a categorical column of pandas as LightGBM writes them."""
    from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor
    from tests.trees.test_model_file import fitted

    plain = fitted(BoostedTreesRegressor, n_estimators=2)[0].to_lightgbm()
    several = fitted(BoostedTreesClassifier, n_estimators=1)[0].to_lightgbm()
    if "pandas_categorical:" not in plain:
        plain += 'pandas_categorical:[["a", "b"]]\n'
    return [written(folder / f"{number}.txt", text) for number, text in enumerate((plain, several))]


def reopen_training_log(path: Path) -> None:
    """A run that goes on appends to its log."""
    from bitplan.report import TrainingLog

    with TrainingLog(path, run="again") as log:
        log.write(10**6, 0.5)


def make_layer_state(folder: Path) -> list[Path]:
    return [written(folder / "extra.json", '{"format": "mxfp4", "shape": [4, 128]}')]


def read_layer_state(path: Path) -> None:
    """What a packed layer saves beside its parts, as JSON in a tensor."""
    import torch

    from bitplan.packed.packed_weight import _read_extra

    _read_extra(torch.tensor(list(path.read_bytes()), dtype=torch.uint8), "layer")


# ---- adaptive FP8 ----------------------------------------------------------------------------------------------------


def make_fp8_policies(folder: Path) -> list[Path]:
    from bitplan.fp8.policy.merge import merge_reports
    from tests.fp8.policy.fp8_samples import VERSION_1

    merge_reports([small_report()]).policy.save(folder / "v2.json")
    return [folder / "v2.json", written(folder / "v1.json", VERSION_1)]


def small_report() -> Any:
    from tests.fp8.policy.fp8_samples import experts, pair, report, series

    return report([*series({512: 0.8, 4096: 1.2}), *pair(424, 1.1, **experts("row_grouped"))])


def read_fp8_policy(path: Path) -> None:
    from bitplan.fp8.policy.choice import choose_products
    from bitplan.fp8.policy.policy import Question, decide
    from bitplan.fp8.policy.rules import load_policy, read_policy
    from bitplan.fp8.policy.vocabulary import KINDS

    policy = load_policy(path)
    for kind in KINDS:
        question = Question(kind, 512, "fc2", num_gemms=64, moe_router_topk=8)
        assert decide(policy, question).reason
        assert choose_products(policy, question).reason
    assert read_policy(json.loads(policy.to_json())).to_json() == policy.to_json()


def make_fp8_reports(folder: Path) -> list[Path]:
    report = small_report()
    return [
        written(folder / "whole.json", json.dumps(report.to_document())),
        written(folder / "lines.jsonl", report.to_lines()),
    ]


def read_fp8_report(path: Path) -> None:
    from bitplan.fp8.policy.merge import merge_reports
    from bitplan.fp8.policy.report import Report

    merge_reports([Report.load(path)]).policy.to_json()


def make_fp8_log(folder: Path) -> list[Path]:
    return [written(folder / "log.jsonl", "".join(small_report().to_lines().splitlines(keepends=True)[:-1]))]


def read_fp8_log(path: Path) -> None:
    from bitplan.fp8.policy.report import ReportLog

    report = small_report()
    with ReportLog(path, report.fingerprint, report.recipe, model=report.model, settings=report.settings) as log:
        log.finish()


def make_list_report(folder: Path) -> list[Path]:
    from tests.fp8.loongforge.test_times_report import case

    rows = [*case(4096, 1.2), *case(512, 0.9), *case(424, 1.1, kind="row_grouped", num_gemms=64)]
    return [written(folder / "list.json", json.dumps(rows))]


def read_list_report(path: Path) -> None:
    from bitplan.fp8.loongforge import merge_lists

    result = merge_lists([path], 1.0)
    if result is not None:
        result.policy.to_json()


def make_configs(folder: Path) -> list[Path]:
    from tests.fp8.policy.test_layers import DEEPSEEK_V3, QWEN3_30B, QWEN3_VL_235B

    configs = (DEEPSEEK_V3, QWEN3_30B, QWEN3_VL_235B)
    return [written(folder / f"{number}.json", json.dumps(config)) for number, config in enumerate(configs)]


def make_yaml(folder: Path) -> list[Path]:
    from tests.fp8.loongforge.test_model_yaml import DEEPSEEK, QWEN, SELECTIVE

    written(folder / "deepseek_v3.yaml", DEEPSEEK)
    return [written(folder / f"{name}.yaml", text) for name, text in (("a", DEEPSEEK), ("b", QWEN), ("c", SELECTIVE))]


def read_fp8_model(path: Path) -> None:
    from bitplan.fp8.loongforge import open_model
    from bitplan.fp8.policy.layers import Parallel, local_layers

    local_layers(open_model(path).parts, Parallel(tp=2))


# ---- the report ------------------------------------------------------------------------------------------------------


def read_record(path: Path) -> None:
    from bitplan.report.page import build_page, build_sections
    from bitplan.report.read_records import read_records

    build_page(build_sections(read_records([path])), title="t").encode()


def make_records(folder: Path) -> list[Path]:
    """What the writers write, cut to a few lines so that a change hits something, and results of benchmarks."""
    from tests.report import samples

    for path in samples.write_samples(folder):
        lines = path.read_text().splitlines(keepends=True)
        if path.suffix == ".jsonl":
            written(folder / path.name, "".join(lines[:4]))
    results = [path for path in samples.RESULTS.glob("*.json") if path.stat().st_size < 20_000]
    return sorted(folder.glob("*.jsonl")) + [written(folder / path.name, path.read_bytes()) for path in sorted(results)]


# ---- folders on the way to GGUF ------------------------------------------------------------------------------------


def make_folder_for_gguf(*damaged: str) -> Callable[[Path], list[Path]]:
    """Config and tokenizer of a small model, byte-level BPE and SentencePiece; `damaged` are the files to damage."""

    def make(folder: Path) -> list[Path]:
        paths = []
        for kind, parts in _tokenizers().items():
            for name, document in {
                "config.json": GGUF_CONFIG,
                "tokenizer_config.json": TOKENIZER_CONFIG,
                **parts,
            }.items():
                (folder / kind).mkdir(exist_ok=True)
                path = written(folder / kind / name, json.dumps(document))
                paths += [path] if name in damaged else []
        return paths

    return make


GGUF_CONFIG = {
    "model_type": "gemma3_text", "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 64, "vocab_size": 12, "rms_norm_eps": 1e-6,
    "head_dim": 4, "query_pre_attn_scalar": 4, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"], "bos_token_id": 0, "eos_token_id": [1, 2],
    "rope_parameters": {"full_attention": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
}  # fmt: skip
TOKENIZER_CONFIG = {
    "bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "add_bos_token": True,
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}  # fmt: skip


def _tokenizers() -> dict[str, dict[str, Any]]:
    added = [{"id": number, "content": word, "special": True} for number, word in enumerate(("<s>", "</s>", "<unk>"))]
    model = {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4, "ab": 5}, "merges": [["a", "b"]]}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    split = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]}
    space = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}]}
    pieces = model | {"byte_fallback": True, "unk_token": "<unk>", "merges": ["a b"]}
    return {
        "bytes": {"tokenizer.json": {"added_tokens": added, "pre_tokenizer": split, "model": model}},
        "pieces": {"tokenizer.json": {"added_tokens": added, "normalizer": space, "model": pieces}},
    }


def read_folder_for_gguf(path: Path) -> None:
    import logging

    from bitplan.files.engines.gguf_metadata import ModelConfig, model_metadata, rope_factors
    from bitplan.files.engines.gguf_tokenizer import tokenizer_metadata

    logging.getLogger("gguf").setLevel(logging.ERROR)  # it warns of a chat template of another type
    config = ModelConfig(path.parent)
    assert model_metadata(config, "model")
    rope_factors(config)
    assert tokenizer_metadata(path.parent, config.vocabulary)
