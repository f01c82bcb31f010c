"""The demo's model: a character-level transformer small enough to train in seconds on two CPU cores.

Widths are multiples of 128, so that every block format fits its weights without padding. ReLU, not GELU: on a CPU its
gradient takes a tenth of the time, and the demo is about formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 128
HEADS = 4
BLOCKS = 6
CONTEXT = 64
HELD_OUT = 0.1


class TinyTransformer(nn.Module):
    """Pre-norm decoder over characters."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(DemoBlock() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class DemoBlock(nn.Module):
    """Causal attention, then a feed-forward layer, each with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_in = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_mid = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        heads = self.qkv(self.norm_in(hidden)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        added: Tensor = self.down(functional.relu(self.up(self.norm_mid(hidden))))
        return hidden + added


def shipped_text() -> str:
    """A slice of Shakespeare (public domain) that comes with the package."""
    return resources.files("bitplan").joinpath("data/shakespeare.txt").read_text(encoding="utf-8")


class Corpus:
    """Text as ids, split into a part to train on and a part held out."""

    def __init__(self, text: str) -> None:
        alphabet = sorted(set(text))
        code = {letter: index for index, letter in enumerate(alphabet)}
        ids = torch.tensor([code[letter] for letter in text])
        cut = int(len(ids) * (1 - HELD_OUT))
        self.vocabulary = len(alphabet)
        self.train, self.held_out = ids[:cut], ids[cut:]

    def batches(self, count: int, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Random windows of the training part, and the character that follows each of their characters."""
        for _ in range(count):
            starts = torch.randint(len(self.train) - CONTEXT - 1, (size, 1), generator=generator)
            windows = self.train[starts + torch.arange(CONTEXT + 1)]
            yield windows[:, :-1], windows[:, 1:]

    def held_out_windows(self, count: int) -> Tensor:
        """Evenly spaced windows of the held-out part, [count, CONTEXT]."""
        starts = torch.linspace(0, len(self.held_out) - CONTEXT - 1, count).long().unsqueeze(1)
        return self.held_out[starts + torch.arange(CONTEXT)]
