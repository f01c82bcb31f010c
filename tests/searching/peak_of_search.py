"""A program that searches a model with a large vocabulary within LIMIT bytes, and prints what it needed at most."""

from __future__ import annotations

import resource
import sys

import torch
import transformers

import bitplan
from bitplan.searching import SearchOptions

VOCABULARY, LENGTH = 24_000, 96


def main(limit: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(1))
    goal = {"bits": 5.0}
    bitplan.search(
        model, [ids], goal=goal, formats=["mxfp4", "int8_row"], options=SearchOptions(memory=limit or None, note=print)
    )
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main(int(sys.argv[1]))
