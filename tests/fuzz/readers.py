"""Every reader of files that somebody else may have written, with a sound file of each: the table of the fuzzers.

`make` writes sound files into an empty folder and returns those to damage; `read` gets one of them, damaged. It does
with it what a user of that file does. A new reader gets a row in READERS.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.document_files import (
    example,
    make_configs,
    make_folder_for_gguf,
    make_fp8_log,
    make_fp8_policies,
    make_fp8_reports,
    make_layer_state,
    make_lightgbm,
    make_list_report,
    make_records,
    make_training_state,
    make_trees,
    make_yaml,
    read_calibration,
    read_crossovers,
    read_drift_log,
    read_evidence,
    read_folder_for_gguf,
    read_fp8_log,
    read_fp8_model,
    read_fp8_policy,
    read_fp8_report,
    read_layer_state,
    read_list_report,
    read_manifest,
    read_plan,
    read_raw_map,
    read_record,
    read_selective_config,
    read_selective_state,
    read_training_state,
    read_trees,
    reopen_training_log,
)
from tests.fuzz.folder_files import COMMANDS, load_folder, make_adapter, make_packed_folder, read_adapter
from tests.fuzz.weight_files import (
    make_gguf,
    make_gpt_oss,
    make_index,
    make_networks,
    make_packed,
    make_pairs,
    make_safetensors,
    make_schemes,
    make_split_gguf,
    make_statistics,
    read_all,
    read_gguf,
    read_gpt_oss,
    read_network,
    read_packed_file,
    read_pairs,
    read_safetensors,
    read_scheme,
    read_statistics,
)


class Reader(NamedTuple):
    name: str
    group: str  # readers of a group share a process
    make: Callable[[Path], list[Path]]
    read: Callable[[Path], None]
    share: float = 1.0  # of all inputs; less where one takes long


RECORDS = (
    "plan", "front", "search-progress", "findings", "calibration", "selective-telemetry", "run-log", "stream-telemetry",
    "drift",    "quality", "fp8-report", "fp8-policy", "crossover", "training-log", "machine", "benchmark-results",
)  # fmt: skip

PACKED = ("config.json", "generation_config.json", "bitplan_plan.json")

READERS = [
    Reader("safetensors", "containers", make_safetensors, read_safetensors),
    Reader("safetensors index", "containers", make_index, read_all),
    Reader("gguf", "containers", make_gguf, read_gguf),
    Reader("split gguf", "containers", make_split_gguf, read_all),
    Reader("network", "containers", make_networks, read_network, 0.5),
    Reader("packed model", "containers", make_packed, read_packed_file),
    Reader("codes and scales", "containers", make_pairs, read_pairs),
    Reader("gpt-oss config", "containers", make_gpt_oss("hf", "config.json"), read_gpt_oss, 0.2),
    Reader("gpt-oss openai config", "containers", make_gpt_oss("openai", "config.json"), read_gpt_oss, 0.2),
    Reader("gpt-oss safetensors", "containers", make_gpt_oss("hf", "model.safetensors"), read_gpt_oss),
    Reader("gpt-oss gguf", "containers", make_gpt_oss("gguf", "model.gguf"), read_gpt_oss),
    Reader("quantized folders", "containers", make_schemes("model.safetensors"), read_scheme),
    Reader("configs of quantized folders", "containers", make_schemes("config.json"), read_scheme, 0.5),
    Reader("statistics", "containers", make_statistics, read_statistics),
    Reader("plan", "documents", example("plan"), read_plan),
    Reader("evidence", "documents", example("evidence"), read_evidence),
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
    Reader("config on the way to GGUF", "documents", make_folder_for_gguf("config.json"), read_folder_for_gguf, 0.5),
    Reader(
        "tokenizer on the way to GGUF",
        "documents",
        make_folder_for_gguf("tokenizer.json", "tokenizer_config.json"),
        read_folder_for_gguf,
    ),
    Reader("trees", "documents", make_trees, read_trees),
    Reader("lightgbm text", "documents", make_lightgbm, read_trees),
    Reader("fp8 policy", "fp8", make_fp8_policies, read_fp8_policy),
    Reader("fp8 report", "fp8", make_fp8_reports, read_fp8_report),
    Reader("fp8 report log", "fp8", make_fp8_log, read_fp8_log),
    Reader("fp8 list report", "fp8", make_list_report, read_list_report),
    Reader("fp8 model config", "fp8", make_configs, read_fp8_model),
    Reader("fp8 model yaml", "fp8", make_yaml, read_fp8_model, 0.5),
    Reader("report: samples", "report", make_records, read_record, 0.2),
    *(Reader(f"report: {page}", "report", example(page), read_record, 0.4) for page in RECORDS),
    Reader("configs of packed folders", "folders", make_packed_folder(*PACKED), load_folder, 0.1),
    Reader("adapters", "folders", make_adapter, read_adapter, 0.1),
    *(Reader(f"bitplan {name}", "shell", make, read, share) for name, (make, read, share) in COMMANDS.items()),
]
