"""What the linear layers of a model meet on a text, block by block: X^T X of their inputs, for `quantize --evidence`.

The model of a Hugging Face folder is built without memory behind it. What lies outside of its blocks is read once; then
one block after the other is read, run on the states of all windows, and dropped. In memory are one block, its
statistics and the states. Blocks see exact inputs: those of rounded blocks before them gained nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.errors import MeasureError, StoreError
from bitplan.measure.quality.perplexity import spread_windows
from bitplan.runtime.causal_lm import CausalLM, read_tokenizer
from bitplan.runtime.packed.checkpoints.build import empty_model
from bitplan.store.files.open_files import open_tensors
from bitplan.store.files.tensor_file import TensorFile
from bitplan.store.models.transformers_names import silence_transformers
from bitplan.store.packed_folder import is_model_folder, read_config
from bitplan.store.rounding.evidence import HESSIAN, WEIGHTS, weight_digest, write_evidence

WINDOWS, CONTEXT, BATCH = 96, 512, 4
# A tied weight is also what tokens start as, where every column counts: so much of the mean is added to all.
LOOKED_UP = 0.1
OnBlock = Callable[[str], None]


def gather_inputs(
    folder: str | Path,
    text: str,
    output: str | Path,
    *,
    windows: int = WINDOWS,
    context: int | None = None,
    device: str | None = None,
    on_block: OnBlock | None = None,
) -> None:
    """Write evidence.safetensors of a Hugging Face folder: X^T X of every linear layer in its blocks, and of the head.

    windows    how many windows of the text, spread over it; more are better, and cost one pass forward each
    context    tokens in a window: 512, or what the model has
    on_block   called with the name of each block that is done
    """
    source = Path(folder)
    if not source.is_dir() or not is_model_folder(source):
        raise StoreError(f"{source}: expected a Hugging Face folder (config.json, weights, tokenizer)")
    with open_tensors(source) as file, silence_transformers(), torch.no_grad():
        model = empty_model(source, read_config(source), torch.float32, torch.device(device or "cpu"))
        lm = CausalLM(model, read_tokenizer(source), str(source))
        batches = _batches(lm, text, windows, context)
        walk = _Walk(file, model, torch.device(device or "cpu"))
        shapes = {f"{name}{HESSIAN}": (columns, columns) for name, columns in walk.columns().items()}
        facts = {"tokens": str(sum(batch.numel() for batch in batches))}
        facts |= {f"{WEIGHTS}{name}": weight_digest(file.read_float(name)) for name in walk.columns()}
        with write_evidence(output, shapes, facts) as evidence:
            for done, sums in walk.blocks(batches):
                for name, total in sums.items():
                    if not bool(total.isfinite().all()):
                        raise MeasureError(f"{source}: the inputs of {name} hold NaN or infinity on this text")
                    evidence.write(f"{name}{HESSIAN}", total.cpu())
                if on_block:
                    on_block(done)


def _batches(lm: CausalLM, text: str, windows: int, context: int | None) -> list[Tensor]:
    """[batch, length] token ids, all of one shape, so that all are called alike."""
    length = min(CONTEXT, lm.positions or CONTEXT) if context is None else context
    lm.check_context(length)
    whole = [window for window in lm.windows(text, length) if len(window) == length]
    chosen = spread_windows(whole, windows * length) if len(whole) > windows else whole
    size = math.gcd(len(chosen), BATCH)
    return [torch.stack(chosen[at : at + size]) for at in range(0, len(chosen), size)]


class _EnoughError(Exception):
    """What was wanted is there: the rest of the pass is not needed."""


class _Stand(nn.Module):
    """In a block's place: remembers how it was called, and passes on the state, or another one that was put here."""

    block: nn.Module

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not as a part of the model
        self.state: Tensor | None = None
        self.keywords: dict[str, Any] = {}
        self.instead: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)  # models ask their blocks what kind they are

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        self.state, self.keywords = hidden_states, keywords
        return hidden_states if self.instead is None else self.instead


@dataclass
class _Walk:
    """A model whose parameters are read when their block's turn comes."""

    file: TensorFile
    model: Any
    device: torch.device
    prefix: str = ""
    stands: list[_Stand] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = self.model.config.get_text_config().num_hidden_layers
        lists = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if not lists:
            raise StoreError(f"{self.file.path}: its model has no list of {count} blocks; gather by `bitplan search`")
        self.prefix, found = lists[0]
        self.stands = [_Stand(block) for block in found]
        for place, stand in enumerate(self.stands):
            found[place] = stand

    def columns(self) -> dict[str, int]:
        """The inputs of every linear layer whose weight the file has, by the weight's name in the file."""
        named = {
            f"{self.prefix}.{place}.{name}.weight": module.in_features
            for place, stand in enumerate(self.stands)
            for name, module in stand.block.named_modules()
            if isinstance(module, nn.Linear)
        }
        head = self.model.get_output_embeddings()
        if isinstance(head, nn.Linear):
            named[self._head_name()] = head.in_features
        return {name: columns for name, columns in named.items() if name in self.file.specs}

    def blocks(self, batches: list[Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Each block's name with the sums of its layers, then the head's."""
        wanted = self.columns()
        self._read(self.model, "")
        states = [self._first_state(ids) for ids in batches]
        for place, stand in enumerate(self.stands):
            name, block = f"{self.prefix}.{place}", stand.block
            self._read(block, f"{name}.")
            sums = _InputSums(f"{name}.", block)
            with sums.hooked():
                for at, state in enumerate(states):
                    out = block(state, **stand.keywords)
                    states[at] = out if isinstance(out, Tensor) else out[0]
            block.to_empty(device="meta")
            yield name, {key: total for key, total in sums.totals.items() if key in wanted}
        head = self._head_name()
        if head in wanted:
            yield head, {head: self._head_sum(batches, states)}

    def _first_state(self, ids: Tensor) -> Tensor:
        self.model.base_model(input_ids=ids.to(self.device), use_cache=False)
        state = self.stands[0].state
        assert state is not None
        return state

    def _head_sum(self, batches: list[Tensor], states: list[Tensor]) -> Tensor:
        head = self.model.get_output_embeddings()
        sums = _InputSums("", head)
        for ids, state in zip(batches, states, strict=True):
            self.stands[-1].instead = state
            with sums.hooked(stop=True), contextlib.suppress(_EnoughError):
                self.model(input_ids=ids.to(self.device), use_cache=False)
        total = sums.totals["weight"]
        if self._is_tied():
            total.diagonal().add_(LOOKED_UP * total.diagonal().mean())
        return total

    def _is_tied(self) -> bool:
        return bool(self.model.config.get_text_config().tie_word_embeddings)

    def _head_name(self) -> str:
        """The name under which the file has the weight of the head."""
        modules = {id(module): name for name, module in self.model.named_modules()}
        part = self.model.get_input_embeddings() if self._is_tied() else self.model.get_output_embeddings()
        return f"{modules.get(id(part), '')}.weight"

    def _read(self, module: nn.Module, prefix: str) -> None:
        """Real numbers for the parameters and saved buffers of a module; stands have none."""
        for path, part in module.named_modules():
            for kept in (part._parameters, part._buffers):
                for local, tensor in kept.items():
                    if tensor is None or tensor.device.type != "meta":
                        continue
                    name = f"{prefix}{path}.{local}" if path else f"{prefix}{local}"
                    if part is self.model.get_output_embeddings() and self._is_tied():
                        continue  # its inputs are wanted, not its outputs
                    if name not in self.file.specs:
                        raise StoreError(
                            f"{self.file.path}: no tensor {name!r}, as the model of its config has it; "
                            "gather by `bitplan search`, which lets transformers rename them"
                        )
                    numbers = self.file.read_float(name).float().to(self.device)
                    kept[local] = nn.Parameter(numbers, False) if kept is part._parameters else numbers


class _InputSums:
    """X^T X of the inputs of each linear layer of a module; layers that read one input share the sum."""

    def __init__(self, prefix: str, module: nn.Module) -> None:
        self.totals: dict[str, Tensor] = {}
        self._linears = {
            f"{prefix}{name}.weight" if name else f"{prefix}weight": part
            for name, part in module.named_modules()
            if isinstance(part, nn.Linear)
        }
        self._last: tuple[Tensor, str] | None = None

    @contextlib.contextmanager
    def hooked(self, *, stop: bool = False) -> Iterator[None]:
        """Within this, calls are counted; with `stop` the first call ends the pass."""
        handles = [part.register_forward_pre_hook(self._hook(name, stop)) for name, part in self._linears.items()]
        try:
            yield
        finally:
            self._last = None
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, stop: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._last is not None and self._last[0] is args[0]:
                self.totals[name] = self.totals[self._last[1]]
            else:
                self._last = (args[0], name)
                rows = args[0].reshape(-1, args[0].shape[-1]).float()
                if name in self.totals:
                    self.totals[name].addmm_(rows.T, rows)
                else:
                    self.totals[name] = rows.T @ rows
            if stop:
                raise _EnoughError

        return hook
