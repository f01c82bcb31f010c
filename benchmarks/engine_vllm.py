"""compressed-tensors folders in vLLM: log-probabilities of tokens beside bitplan's own decoding of the folder.

Cases are exported from tiny models with random weights, and with --model from a real one. vLLM runs them in an
environment of its own (`make test-vllm`; vllm_worker.py), in float16 (bfloat16 on a GPU): its int4 kernel has no
float32. It must give the log-probability of every token as bitplan gives it in float32, within three times what that
type changes in bitplan's own, and within one thousandth at least: kernels add in another order. Where vLLM is to
refuse a folder, `export` must refuse it for vllm-cpu, too; the row has both reasons.

python benchmarks/engine_vllm.py --vllm ENVIRONMENT/bin/python --model FOLDER --text TEXT

--device cuda runs the exports of --model that vLLM has kernels for there, and --speed FORMAT... times steps of a llama
of 8B's shape, 16 layers, after 512 tokens, at 1 and 64 sequences, with drawn weights: `benchmarks/decode.py` does the
same by ours (mode graph, head packed). FORMAT is bfloat16, one of ours, or WEIGHTS@INPUTS; vLLM's step includes
its sampler and scheduler. --graphs-alone spares torch.compile, which takes vLLM half a minute for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import ROOT, commit, machine, save, versions
from torch import Tensor

from bitplan import round_inputs
from bitplan.base.errors import BitplanError
from bitplan.files.engines.targets import export_model
from bitplan.files.transformers_names import silence_transformers
from bitplan.packed.checkpoints.causal_lm import load_causal_lm
from bitplan.packed.checkpoints.load import load_packed
from bitplan.plan import Plan

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "vocab_size": 64,
    "initializer_range": 0.05,
}
LEAST_BOUND, TIMES_ROUNDING = 1e-3, 3.0
LAYER = {"num_hidden_layers": 1}


@dataclass(frozen=True)
class Case:
    """An export; `inputs` where layers round them; `family` None is the model that --model names.

    refused   vLLM has no kernel for it, and export says so
    amx       vLLM has a kernel on CPUs with AMX alone, which export cannot know
    """

    name: str
    formats: Any
    family: str | None = "qwen3"
    inputs: str | None = None
    refused: bool = False
    amx: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)


# As a search makes them: one format for layers that are computed as one, others elsewhere, some layers kept.
MIXED = {
    "*.0.self_attn.[qkv]_proj*": "int4_g32",
    "*.0.self_attn.o_proj*": "int4_g128",
    "*.0.mlp.[gu]*_proj*": "int4_g64",
    "*.1.mlp.[gu]*_proj*": "int4_g128",
    "*.1.mlp.down_proj*": "int4_g32",
}
RUN = ("int4_g32", "int4_g64", "int4_g128")
REFUSED = ("int8_row", "int8_g64", "int8_g128", "fp8_e4m3_row", "fp8_e4m3_b128", "mxfp8_e4m3", "mxfp4", "nvfp4")
CASES = (
    Case("plain", None),
    *(Case(fmt, fmt) for fmt in RUN),
    Case("mixed", MIXED),
    Case("mixed, tied head", MIXED, "llama"),
    Case("int4_g32, tied head", "int4_g32", "llama"),
    Case("int4_g32, biases", "int4_g32", "qwen2"),
    Case("int4_g32, packed head", {"lm_head.weight": "int4_g32", "*self_attn*_proj*": "int4_g32"}),
    Case("W8A8", "int8_row", inputs="int8_row"),
    Case("W8A8, tied head", "int8_row", "llama", inputs="int8_row"),
    Case("int4_g32, experts kept", {"*self_attn*_proj*": "int4_g32"}, "mixtral", sizes=LAYER),
    Case("int4_g32, experts", "int4_g32", "mixtral", amx=True, sizes=LAYER),
    Case("int4_g32, Qwen's experts", "int4_g32", "qwen3_moe", amx=True, sizes=LAYER | {"moe_intermediate_size": 64}),
    *(Case(fmt, fmt, refused=True) for fmt in REFUSED),
)
OF_A_MODEL = (
    Case("plain", None, None),
    *(Case(fmt, fmt, None) for fmt in RUN),
    Case("mixed", MIXED, None),
    Case("W8A8", "int8_row", None, inputs="int8_row"),
)
MIXED_CUDA = MIXED | {"*.2.mlp*_proj*": "fp8_e4m3_row", "*.3.*_proj*": "int8_g128"}
OF_A_MODEL_ON_CUDA = (
    *(case for case in OF_A_MODEL if case.name != "mixed"),
    Case("W8A8, FP8", "fp8_e4m3_row", None, inputs="fp8_e4m3_row"),
    *(Case(fmt, fmt, None) for fmt in ("int8_row", "int8_g128", "fp8_e4m3_row", "mxfp4")),
    Case("mixed", MIXED_CUDA, None),
)
NARROW = {"cpu": "float16", "cuda": "bfloat16"}  # vLLM's CUDA kernels for int4 in float16 are compiled when they load
SEQUENCES, PROMPT = (1, 64), 512
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def own_log_probabilities(folder: Path, windows: Sequence[Sequence[int]], dtype: torch.dtype, case: Case) -> Tensor:
    """What bitplan gives: the folder's weights, kept packed and decoded by us."""
    if case.formats is None:
        with silence_transformers():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    else:
        model = load_packed(folder, dtype=dtype).model
        round_inputs(model, case.inputs)
    ids = torch.tensor(windows)
    with torch.no_grad():
        logits: Tensor = model(ids).logits.double()
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()


def export_case(case: Case, source: Path, folder: Path, engine: str) -> tuple[Path, dict[str, Any]]:
    """The folder for vLLM, and the row's beginning, with what export says of the engine if it refuses."""
    row: dict[str, Any] = {"case": case.name, "family": case.family or source.name}
    if case.formats is None:
        return source, row
    checked = folder.with_name(f"{folder.name}-checked")
    try:
        export_model(source, checked, "compressed-tensors", case.formats, inputs=case.inputs, engine=engine)
    except BitplanError as error:
        row["export"] = str(error).partition(": ")[2]
        export_model(source, folder, "compressed-tensors", case.formats, inputs=case.inputs)
        return folder, row
    return checked, row


def compare(
    case: Case,
    row: dict[str, Any],
    answer: dict[str, Any],
    folder: Path,
    windows: list[list[int]],
    amx: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    is_refused = case.refused or (case.amx and not amx)
    if "refused" in answer:
        row["refused"] = answer["refused"].replace(f"{folder.parent}/", "")[:300]
        return {**row, "passed": is_refused and ("export" in row) == case.refused}
    theirs = torch.tensor(answer["log_probabilities"], dtype=torch.float64)
    wide = own_log_probabilities(folder, windows, torch.float32, case)
    narrow = own_log_probabilities(folder, windows, dtype, case)
    bound = max(LEAST_BOUND, TIMES_ROUNDING * float((narrow - wide).abs().max()))
    difference = float((theirs - wide).abs().max())
    row |= {
        "tokens": len(wide),
        "vllm": round(float(theirs.mean()), 6),
        "bitplan": round(float(wide.mean()), 6),
        "largest_difference": round(difference, 6),
        "bound": round(bound, 6),
    }
    return {**row, "passed": not is_refused and "export" not in row and difference <= bound}


def ask_vllm(python: str, jobs: list[dict[str, Any]], folder: Path, seconds: float | None = None) -> dict[str, Any]:
    """The answers of one process of vLLM; all, or those before a job that ended it or before its time was up."""
    questions, replies = folder / "jobs.json", folder / "answers.json"
    questions.write_text(json.dumps(jobs), encoding="utf-8")
    command = [python, str(ROOT / "benchmarks" / "vllm_worker.py"), str(questions), str(replies)]
    try:
        how = f"ended with {subprocess.run(command, cwd=folder, timeout=seconds).returncode}"
    except subprocess.TimeoutExpired:
        how = f"was ended after {seconds:g} s"
    if not replies.is_file():
        sys.exit(f"vLLM's process {how} before its first answer")
    answers: dict[str, Any] = json.loads(replies.read_text(encoding="utf-8"))
    ended = {"refused": f"the process {how}"}
    answers["answers"] += [ended] * (len(jobs) - len(answers["answers"]))
    return answers


def time_steps(given: argparse.Namespace) -> dict[str, Any]:
    """Steps of a llama of 8B's shape: the config is that of a tiny model's export, with the sizes of a large one."""
    sys.path.insert(0, str(ROOT))
    from tests.files.engines.tiny_models import save_tiny

    compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if given.graphs_alone else {}
    with tempfile.TemporaryDirectory() as name:
        folder, jobs = Path(name), []
        sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 16, "tie_word_embeddings": False}
        save_tiny(folder / "tiny", "llama", **sizes)
        for number, way in enumerate(given.speed):
            exported, (fmt, _, inputs) = folder / f"{number}", way.partition("@")
            if fmt == "bfloat16":
                export_model(folder / "tiny", exported, "hf", fmt)
            else:
                formats = {"*_proj*": fmt, "lm_head.weight": fmt}
                export_model(
                    folder / "tiny", exported, "compressed-tensors", formats, inputs=inputs or None, engine="vllm-cuda"
                )
            config = json.loads((exported / "config.json").read_text(encoding="utf-8")) | LLAMA_8B
            (exported / "config.json").write_text(json.dumps(config), encoding="utf-8")
            jobs.append({"folder": str(exported), "sequences": SEQUENCES, "prompt": PROMPT, "dtype": "bfloat16"})
            jobs[-1]["compilation"] = compilation
        answers = ask_vllm(given.vllm, jobs, folder, given.limit)
    rows = []
    for way, answer in zip(given.speed, answers["answers"], strict=True):
        rows.append({"format": way, "layers": 16, "graphs_alone": given.graphs_alone, **answer})
        for sequences, samples in answer.get("ms_a_token", {}).items():
            ms = statistics.median(samples)
            rows[-1].setdefault("tokens_a_second", {})[sequences] = round(1e3 * int(sequences) / ms, 1)
        print(json.dumps(rows[-1]), flush=True)
    return {"vllm": answers["versions"], "speed": rows}


def run_cases(cases: Sequence[Case], given: argparse.Namespace) -> dict[str, Any]:
    """Export all, let vLLM answer for all in one process, and compare each."""
    sys.path.insert(0, str(ROOT))
    from tests.files.engines.tiny_models import save_tiny

    narrow = NARROW[given.device]
    tiny_windows = [[3 + (7 * start + 5 * step) % 60 for step in range(32)] for start in range(2)]
    if given.model:
        ids = load_causal_lm(given.model).encode(given.text.read_text(encoding="utf-8"))
        model_windows = ids[:256].reshape(2, 128).tolist()
    with tempfile.TemporaryDirectory() as name:
        place, exported, jobs = Path(name), [], []
        for number, case in enumerate(cases):
            source = given.model
            if case.family is not None:
                source = place / f"{number}-{case.family}"
                save_tiny(source, case.family, **{**SIZES, **case.sizes})
            folder, row = export_case(case, source, place / f"{number}", f"vllm-{given.device}")
            windows = model_windows if case.family is None else tiny_windows
            exported.append((case, row, folder, windows))
            jobs.append({"folder": str(folder), "windows": windows, "dtype": narrow, "gpu_memory": 0.2})
        answers = ask_vllm(given.vllm, jobs, place, given.limit)
        rows = []
        for (case, row, folder, windows), answer in zip(exported, answers["answers"], strict=True):
            rows.append(compare(case, row, answer, folder, windows, answers["amx"], getattr(torch, narrow)))
            print(json.dumps(rows[-1]), flush=True)
    return {"vllm": answers["versions"], "amx": answers["amx"], "dtype": narrow, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="the Python of an environment with vllm-cpu")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--plan", type=Path, help="with --model: a plan, such as a search's, in place of `mixed`")
    parser.add_argument("--cases", nargs="*", default=[], help="these alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--speed", nargs="*", default=[], help="with --device cuda: formats whose steps are timed")
    parser.add_argument("--graphs-alone", action="store_true", help="with --speed: without torch.compile")
    parser.add_argument("--limit", type=float, help="seconds of each process of vLLM, whose answers until then count")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.model and not given.text:
        parser.error("--model needs a --text")
    if given.device == "cpu":
        cases = [*CASES, *(OF_A_MODEL if given.model else ())]
    else:
        cases = [*OF_A_MODEL_ON_CUDA] if given.model else []
    if given.plan:
        cases.append(Case("plan of a search", Plan.load(given.plan), None))
    cases = [case for case in cases if not given.cases or case.name in given.cases]
    result: dict[str, Any] = {"rows": []}
    if cases:
        result = run_cases(cases, given)
    if given.speed:
        result |= time_steps(given)
    document = {
        "benchmark": "engine_vllm",
        "machine": machine(given.device),
        "versions": versions(),
        "commit": commit(),
        "bound": f"{TIMES_ROUNDING:g} times what {NARROW[given.device]} changes in ours, {LEAST_BOUND} at least",
        **result,
    }
    print(save("engine_vllm", document, given.output))
    if failed := [f"{row['family']}: {row['case']}" for row in result["rows"] if not row["passed"]]:
        sys.exit(f"vLLM differs beyond the bound, or runs or refuses what it should not: {', '.join(failed)}")


if __name__ == "__main__":
    main()
