"""Train adapters with dynamic selective precision, in a plain loop: which block crosses as BF16, which as INT8?

python examples/selective_precision.py            seconds on a CPU, by the simulated device; device="cuda" in earnest
"""

import logging

import torch
from torch import nn

from bitplan import stream_blocks
from bitplan.streaming import SelectivePrecisionConfig, SelectivePrecisionPolicy


class Block(nn.Module):
    """A frozen matrix and a trained low-rank path beside it; later blocks weigh more."""

    def __init__(self, index: int, width: int = 256) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        self.gain = 0.05 * 2**index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * torch.tanh(self.base(x) + self.up(self.down(x)))


logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.manual_seed(0)
model = nn.Sequential(*[Block(index) for index in range(6)])
x = torch.randn(64, 256)
config = SelectivePrecisionConfig(
    warmup_steps=4, update_interval_steps=4, min_steps_between_switches=8, force_bf16_blocks=("5",)
)

with stream_blocks(model, "*", device="cpu", slots=3) as stream, SelectivePrecisionPolicy(stream, config) as policy:
    policy.calibrate([x], cache="calibration.json")
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-3)
    for step in range(24):
        policy.begin_step(step)
        loss = (model(x) - x).square().mean()
        loss.backward()
        policy.collect_block_grad_stats()
        policy.compute_hints(step)
        optimizer.step()
        optimizer.zero_grad()
        policy.end_step()
    print(f"loss {loss.item():.4f}; {policy.precisions}")
    print(f"one crossing: {policy.scalars()['selective_precision/bytes_saved'] / 1e3:.0f} kB not sent")
