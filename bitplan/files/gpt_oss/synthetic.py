"""Makes gpt-oss checkpoints of any size, for tests and benchmarks: real packed bytes, realistic numbers.

Weights are drawn from a normal distribution with the deviation of a new layer and encoded by the real encoder, so that
codes and scales are distributed as in a trained model. Each part has its own seed: the same seed gives the same numbers
in every layout (and on every run, on the same kind of device).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bitplan.base.devices import known_device
from bitplan.files.gpt_oss.config import Settings
from bitplan.files.gpt_oss.convert import ConvertReport, ExpertFormat, OnBytes, open_destination, save_gpt_oss
from bitplan.files.gpt_oss.layouts import GptOssShape, Layout, make_shape, part_shape
from bitplan.files.gpt_oss.source import MXFP4, GptOssSource, Matrix
from bitplan.formats.dispatch import encode

CHUNK_NUMBERS = 2**25


def make_checkpoint(
    path: str | Path,
    *,
    naming: Layout = "openai",
    size: str = "tiny",
    expert_format: ExpertFormat = "mxfp4",
    seed: int = 0,
    device: str | torch.device = "cpu",
    force: bool = False,
    on_bytes: OnBytes = lambda _count, _name: None,
    **sizes: int | None,
) -> ConvertReport:
    """Write a checkpoint with the tensors of gpt-oss and random numbers, and its config.

    path           as `convert_gpt_oss` takes it: a .safetensors or .gguf file, or a folder to be made
    naming         openai, hf or gguf
    size           a preset (tiny, 20b, 120b)
    expert_format  bfloat16 makes a checkpoint like that of a fine-tuned model (hf and gguf)
    device         where numbers are drawn and encoded; "cuda" for the large ones
    sizes          those of a `GptOssShape`, such as layers=4, in place of the preset's own
    """
    shape = make_shape(size, **sizes)
    source = DrawnCheckpoint(shape, packed=expert_format == "mxfp4", seed=seed, device=device)
    with open_destination(path, naming, force=force) as weights:
        is_folder = weights != Path(path)
        report = save_gpt_oss(
            source, weights, naming, experts=expert_format, is_folder=is_folder, force=force, on_bytes=on_bytes
        )
    report.output, report.from_layout = str(path), "drawn"
    report.tensors = [replace(tensor, action="drawn") for tensor in report.tensors]
    return report


class DrawnCheckpoint(GptOssSource):
    """A source without a file behind it."""

    def __init__(self, shape: GptOssShape, *, packed: bool, seed: int, device: str | torch.device) -> None:
        self.where = f"seed {seed}"
        self.shape = shape
        self.settings = Settings(experts_per_token=min(Settings.experts_per_token, shape.experts))
        self.experts = None if packed else torch.bfloat16
        self._seed = seed
        self._device = known_device(device, "draw on the CPU")

    def dtype(self, part: str, layer: int | None) -> torch.dtype:
        return torch.bfloat16

    def rows(self, part: str, layer: int | None) -> Iterator[Tensor]:
        shape = part_shape(part, self.shape)
        inputs = math.prod(shape[1:])
        step = max(1, CHUNK_NUMBERS // inputs)
        for start in range(0, shape[0], step):
            numbers = self._draw((min(step, shape[0] - start), *shape[1:]), part, layer, start)
            yield _scaled(part, numbers, inputs).to(torch.bfloat16)

    def expert(self, layer: int, parts: tuple[str, ...], index: int) -> Matrix:
        outputs, inputs = self.shape.matrix(parts)
        drawn = self._draw((outputs, inputs), "+".join(parts), layer, index)
        numbers = drawn.div_(math.sqrt(inputs)).to(torch.bfloat16)
        return numbers if self.experts is not None else encode(numbers, MXFP4)

    def _draw(self, shape: tuple[int, ...], part: str, layer: int | None, index: int) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{part}/{layer}/{index}".encode(), digest_size=7).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(shape, generator=generator, device=self._device)


def _scaled(part: str, numbers: Tensor, inputs: int) -> Tensor:
    """Numbers roughly as in a trained model: norms near one, small biases, weights scaled by their inputs."""
    if part.endswith("norm"):
        return 1 + numbers / 8
    if part.endswith("bias"):
        return numbers / 32
    if part in ("embed", "sinks"):
        return numbers
    return numbers / math.sqrt(inputs)
