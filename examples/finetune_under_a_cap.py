"""Fine-tune adapters on a model that does not fit the memory it is given.

    python examples/finetune_under_a_cap.py                    a GPU, capped at 8 GB; 14.5 GB of BF16 weights
    python examples/finetune_under_a_cap.py --tiny             seconds on a CPU, by the simulated device

The model is a stack of transformer blocks with random weights, so nothing is downloaded; the task is to give
back half the input. What counts is that the loss falls while the weights pass through a few slots,
and that the peak stays under the cap. Formats: the matrices of every block as int8_row, but the first and last block
as they are.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitplan import stream_blocks
from bitplan.streaming import SimulatedDevice

GB = 10**9


class AdaptedLinear(nn.Module):
    """A frozen matrix, and a trained low-rank path beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        maker = "cuda" if torch.cuda.is_available() else "cpu"  # drawing billions of numbers on a CPU takes minutes
        weight = torch.empty(outputs, inputs, dtype=dtype, device=maker).uniform_(-1, 1).mul_(inputs**-0.5)
        self.weight = nn.Parameter(weight.cpu(), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, inputs, dtype=dtype) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + x @ self.down.t() @ self.up.t()


class Block(nn.Module):
    def __init__(self, hidden: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, dtype=dtype).requires_grad_(False)
        self.up = AdaptedLinear(hidden, 4 * hidden, rank, dtype)
        self.down = AdaptedLinear(4 * hidden, hidden, rank, dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self, blocks: int, hidden: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, rank, dtype) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cap-gb", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.tiny:
        cap, blocks, hidden, rank, dtype, rows = 600_000, 8, 64, 4, torch.float32, 32
        device: SimulatedDevice | str = SimulatedDevice(capacity_bytes=cap)
    else:
        cap, blocks, hidden, rank, dtype, rows = int(arguments.cap_gb * GB), 24, 6144, 16, torch.bfloat16, 2048
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))  # the cap is torch's own: over it is an error
        device = "cuda"
    model = Model(blocks, hidden, rank, dtype)
    weights = sum(one.nbytes for one in model.parameters())
    x = torch.randn(rows, hidden, dtype=dtype).to("cpu" if arguments.tiny else "cuda")
    target = x * 0.5

    formats = {f"layers.{index}": "int8_row" for index in range(1, blocks - 1)}
    with stream_blocks(model, "layers.*", device=device, formats=formats, slots=3) as stream:
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.2 / hidden)
        losses = []
        for step in range(arguments.steps):
            stream.begin_step(step)
            loss = (model(x) - target).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stream.end_step()
            losses.append(loss.detach())  # reading it here would wait for the GPU
        stream.synchronize()
        stats = stream.stats
        assert stats.last is not None
        print(f"weights {weights / GB:.3f} GB, cap {cap / GB:.4f} GB, peak {stats.last.vram_peak_bytes / GB:.4f} GB")
        print(f"loss {losses[0].item():.4f} -> {losses[-1].item():.4f} in {arguments.steps} steps")
        print(f"per step: {stats.last.bytes_h2d / GB:.4f} GB to the device, stall {stats.last.stall_ms:.1f} ms")
        print(f"by format: {dict(stats.last.bytes_h2d_by_format)}")


if __name__ == "__main__":
    main()
