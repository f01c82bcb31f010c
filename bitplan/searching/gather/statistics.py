"""What every weight meets on a text: second moments of its inputs, and how much the loss minds a change of its outputs.

For a linear layer y = W x, over the tokens of the text:

    inputs      A = mean of x x^T, [K, K]
    gradient    mean of g^2, [N], where g is the gradient of -log p(token) by y, for tokens drawn from the model itself

Drawn tokens, not the text's, make this the Fisher information: with it 1/2 sum_r gradient_r dW_r A dW_r^T is the
second-order KL between the model and the one with W + dW, but for correlations between outputs and between positions.
An embedding has counts of its tokens in place of A. Gradients by weights are never computed: one pass forward and one
back through activations is all it takes. Statistics are sums until `mean` is asked, so that a run can stop and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.searching.errors import EvidenceFileError, SearchError
from bitplan.searching.gather.subject import SearchSubject, WeightSite
from bitplan.store.files.open_files import open_tensors, write_tensors
from bitplan.store.files.tensor_file import Promise
from bitplan.store.rounding.evidence import HESSIAN, MOMENTS, SHARED, WEIGHTS, EvidenceFile, write_evidence

EVIDENCE, STATISTICS = "evidence.safetensors", "statistics.safetensors"
INPUTS, GRADIENT, COUNTS, LOOKUP = "inputs", "gradient", "counts", "lookup_gradient"
SEED = 0


@dataclass
class InputStatistics:
    """Sums over `tokens` tokens in `windows` windows, under NAME.inputs, NAME.gradient and so on.

    Layers that read the same input share one matrix: `shared` maps a name to the one that holds it.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    windows: int = 0

    def mean(self, name: str, what: str) -> Tensor | None:
        """The mean over tokens, None where the weight has no such part."""
        owner = self.shared.get(name, name) if what == INPUTS else name
        total = self.sums.get(f"{owner}.{what}")
        return None if total is None or not self.tokens else total / self.tokens

    def hessian(self, name: str) -> Tensor | None:
        """[K, K], in any unit: what rounding minimises, for all uses of a weight together; None if no layer uses it."""
        owner = self.shared.get(name, name)
        inputs, gradient = self.sums.get(f"{owner}.{INPUTS}"), self.sums.get(f"{name}.{GRADIENT}")
        lookup, counts = self.sums.get(f"{name}.{LOOKUP}"), self.sums.get(f"{name}.{COUNTS}")
        if inputs is None or gradient is None or lookup is None or counts is None:
            return inputs
        # Tied: a row counts by the gradient of its logit, and by how often it is looked up; of both, the mean row.
        return inputs * float(gradient.mean()) + torch.diag(lookup) * (self.tokens / len(counts))

    def moments(self, name: str) -> Tensor | None:
        """[K], in any unit: how much each column of what is looked up counts; None for weights of layers."""
        return None if self.hessian(name) is not None else self.sums.get(f"{name}.{LOOKUP}")

    def save(self, folder: Path, fingerprint: Mapping[str, str], digests: Mapping[str, str]) -> None:
        """evidence.safetensors, with which `quantize --evidence` rounds; and statistics.safetensors, the rest.

        digests   of each weight, by which `quantize` knows its model
        """
        facts = {"tokens": str(self.tokens), "windows": str(self.windows)}
        facts |= {f"fingerprint.{name}": value for name, value in sorted(fingerprint.items())}
        names = sorted({key.rpartition(".")[0] for key in self.sums})
        own = [name for name in names if name not in self.shared]
        parts = {f"{name}{HESSIAN}": part for name in own if (part := self.hessian(name)) is not None}
        parts |= {f"{name}{MOMENTS}": part for name in own if (part := self.moments(name)) is not None}
        shapes = {key: tuple(part.shape) for key, part in parts.items()}
        shared = {f"{SHARED}{name}": owner for name, owner in sorted(self.shared.items())}
        weights = {f"{WEIGHTS}{name}": digests[name] for name in names}
        with write_evidence(folder / EVIDENCE, shapes, facts | shared | weights) as evidence:
            for key, part in parts.items():
                evidence.write(key, part.float().cpu())
        rest = {key: part for key, part in sorted(self.sums.items()) if not self._is_in_evidence(key)}
        promises = [Promise(key, tuple(part.shape), None, part.dtype) for key, part in rest.items()]
        with write_tensors(folder / STATISTICS, promises, metadata=facts) as writer:
            for key, part in rest.items():
                writer.write(key, part.cpu())

    def _is_in_evidence(self, key: str) -> bool:
        """Whether a sum is in evidence.safetensors as it is: inputs of a weight that is not looked up too."""
        name, _, what = key.rpartition(".")
        return what == INPUTS and f"{name}.{COUNTS}" not in self.sums

    @classmethod
    def load(cls, folder: Path, fingerprint: Mapping[str, str]) -> InputStatistics:
        """Read statistics; those of another model, text or version are refused by what differs."""
        with EvidenceFile(folder / EVIDENCE) as evidence, open_tensors(folder / STATISTICS) as rest:
            facts: Mapping[str, str] = rest.metadata
            for part, value in fingerprint.items():
                if facts.get(f"fingerprint.{part}") != value:
                    raise EvidenceFileError(
                        f"{folder}: its statistics are of another model or run: {part} differs; give another folder, "
                        "or --force to begin again"
                    )
            if any(evidence.metadata.get(key) != value for key, value in facts.items()):
                raise EvidenceFileError(f"{folder}: {EVIDENCE} and {STATISTICS} are of two runs; --force begins again")
            sums = {name: rest.read_float(name) for name in rest.specs}
            shared = {
                key.removeprefix(SHARED): owner for key, owner in evidence.metadata.items() if key.startswith(SHARED)
            }
            for name in evidence.names - shared.keys():
                inputs = evidence.hessian(name)
                if inputs is not None and f"{name}.{COUNTS}" not in sums:
                    sums[f"{name}.{INPUTS}"] = inputs
        return cls(sums, shared, int(facts["tokens"]), int(facts["windows"]))


def gather_statistics(
    subject: SearchSubject,
    windows: Sequence[Tensor],
    *,
    into: InputStatistics | None = None,
    sites: Sequence[WeightSite] | None = None,
    on_window: Callable[[int], None] | None = None,
) -> InputStatistics:
    """Add the windows that `into` has not seen yet, one after the other."""
    found = into if into is not None else InputStatistics()
    gatherer = _Gatherer(subject, list(subject.sites.values()) if sites is None else list(sites), found)
    with gatherer.hooked():
        for index in range(found.windows, len(windows)):
            gatherer.add(windows[index], index)
            if on_window:
                on_window(1)
    return found


class _Gatherer:
    def __init__(self, subject: SearchSubject, sites: Sequence[WeightSite], into: InputStatistics) -> None:
        self._subject, self._sites, self._into = subject, sites, into
        self._window: dict[str, Tensor] = {}
        self._last: tuple[Tensor, str] | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        wanted = [parameter for parameter in self._subject.model.parameters() if parameter.requires_grad]
        try:
            for parameter in wanted:
                parameter.requires_grad_(False)
            for module in self._subject.model.modules():
                if isinstance(module, nn.Embedding):  # where the graph of activations begins
                    handles.append(module.register_forward_hook(_require_gradient))
            for site in self._sites:
                handles += [linear.register_forward_hook(self._linear_hook(site.name)) for linear in site.linears]
                handles += [each.register_forward_hook(self._embedding_hook(site.name)) for each in site.embeddings]
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in wanted:
                parameter.requires_grad_(True)

    def add(self, window: Tensor, index: int) -> None:
        """Sums of one window, taken over whole: an interrupted window leaves no trace."""
        self._window, self._last = {}, None
        with torch.enable_grad():
            logits = self._subject.logits(window[None])[0]
            if not bool(torch.isfinite(logits).all()):
                raise SearchError(
                    f"{self._subject.where}: the model gives NaN or infinity in window {index} of the text; "
                    "look for NaN or overflow in its weights"
                )
            logprobs = torch.log_softmax(logits.float(), -1)
            generator = torch.Generator(logits.device).manual_seed(SEED + index)
            drawn = torch.multinomial(logprobs.detach().exp(), 1, generator=generator)
            (-logprobs.gather(-1, drawn).sum()).backward()
        self._last = None
        for name, part in self._window.items():
            if name in self._into.sums:
                self._into.sums[name] += part.to(self._into.sums[name].device)
            else:
                self._into.sums[name] = part
        self._into.tokens += len(window)
        self._into.windows += 1

    def _linear_hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_module: nn.Module, args: Any, output: Tensor) -> None:
            inputs = args[0].detach()
            if self._last is not None and self._last[0] is args[0]:
                self._into.shared[name] = self._last[1]
            else:
                self._last = (args[0], name)
                rows = inputs.reshape(-1, inputs.shape[-1]).float()
                self._add(f"{name}.{INPUTS}", rows.T @ rows)
            self._watch(output, f"{name}.{GRADIENT}")

        return hook

    def _embedding_hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            counts = torch.bincount(args[0].reshape(-1), minlength=module.num_embeddings)
            self._add(f"{name}.{COUNTS}", counts.float())
            self._watch(output, f"{name}.{LOOKUP}")

        return hook

    def _watch(self, output: Tensor, key: str) -> None:
        def hook(gradient: Tensor) -> None:
            self._add(key, gradient.detach().reshape(-1, gradient.shape[-1]).float().square().sum(0))

        if output.requires_grad:
            output.register_hook(hook)

    def _add(self, key: str, part: Tensor) -> None:
        self._window[key] = self._window[key] + part if key in self._window else part


def _require_gradient(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_() if not output.requires_grad else output
