"""What a running model takes beside its weights and its keys and values, measured in a process of its own.

The probe is the model's own architecture with few layers, a small vocabulary and packed weights of no meaning: what
passes between layers, masks and decoded keys and values do not depend on the number of layers, and logits are counted.
Its cache is filled with numbers up to the context; then the last piece of a prompt and one token are read, as
`generate` reads them, and the highest resident memory of that process (on a GPU, of torch's allocator), less the
weights and the cache that it held, is the answer, with 2% more: what is asked for is a limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from bitplan.base.documents import LIST, SIZE, TEXT, Reader, load_document
from bitplan.base.records import write_json
from bitplan.searching.engine_memory import EngineMemory, Held
from bitplan.searching.goal import EvidenceFileError, SearchError

LAYERS, VOCABULARY, ROWS_AT_ONCE = 2, 512, 2048
PROBE_S = 600.0
MEMORY, DOCUMENT, VERSION = "memory.json", "bitplan-memory", 1
PROBE_KEYS = {"context": SIZE, "batch": SIZE, "device": TEXT, "nbytes": SIZE}
MARGIN = 1.02  # two runs of one process differ by 1 to 1.5%


@dataclass(frozen=True)
class MemoryProbe:
    """Bytes beside weights, keys and values, for a context and batch on a device."""

    context: int
    batch: int
    device: str
    nbytes: int

    def is_of(self, context: int, batch: int, device: str) -> bool:
        return (self.context, self.batch, self.device) == (context, batch, device)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_memory(model: nn.Module | str | Path, context: int, batch: int, device: str = "cpu") -> MemoryProbe:
    """Measure in a child process; `model` gives its config, or is the folder or GGUF file that has it."""
    config = config_of(model)
    request = {
        "config": config.to_dict(),
        "model_type": config.model_type,
        "context": context,
        "batch": batch,
        "device": device,
    }
    # The child imports the command line, as `bitplan generate` does.
    code = "import bitplan.cli.app; from bitplan.searching.memory_probe import run_probe; run_probe()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, input=json.dumps(request, default=str), capture_output=True, text=True, timeout=PROBE_S, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise SearchError(f"the memory beside weights could not be measured for {config.model_type}: {said[:300]}")
    return MemoryProbe(context, batch, device, int(MARGIN * int(lines[-1])))


def config_of(model: nn.Module | str | Path) -> Any:
    """The config of a model of transformers, or of the folder or GGUF file that has it."""
    import transformers

    from bitplan.files.headers import is_gguf

    if isinstance(model, nn.Module):
        return model.config
    path = Path(model)
    if is_gguf(path):
        return transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    return transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


class FitLike(Held, Protocol):
    """The goal of a fit, as far as memory beside weights depends on it."""

    @property
    def device(self) -> str: ...

    @property
    def engine(self) -> EngineMemory: ...


@dataclass
class Reserve:
    """Memory beside weights, keys and values: measured for bitplan, by a formula for other engines.

    Two runs of one process differ by 10 MB, so what was measured is kept: the same goal has the same plan.
    """

    model: nn.Module | str | Path
    goal: FitLike
    folder: Path | None = None
    writes: bool = False

    def at(self, context: int) -> MemoryProbe:
        """For a context, with the goal's texts and device."""
        goal = self.goal
        if goal.engine.overhead is not None:
            held = _HeldAtOnce(context, goal.batch)
            return MemoryProbe(context, goal.batch, goal.device, goal.engine.overhead(config_of(self.model), held))
        known = self._known()
        found = next((one for one in known if one.is_of(context, goal.batch, goal.device)), None)
        if found is None:
            found = probe_memory(self.model, context, goal.batch, goal.device)
            if self.folder is not None and self.writes:
                self.folder.mkdir(parents=True, exist_ok=True)
                probes = [one.to_dict() for one in (*known, found)]
                write_json(self.folder / MEMORY, {"document": DOCUMENT, "version": VERSION, "probes": probes})
        return found

    def estimate(self, context: int) -> int:
        """Bytes for a context: by the line through the goal's and a quarter of it, which takes no memory to measure."""
        goal = self.goal
        if goal.engine.overhead is not None or context == goal.context:
            return self.at(context).nbytes
        less = max(2, goal.context // 4)
        low, high = self.at(less).nbytes, self.at(goal.context).nbytes
        slope = max(0.0, (high - low) / max(1, goal.context - less))
        return int(high + slope * (context - goal.context))

    def _known(self) -> list[MemoryProbe]:
        path = None if self.folder is None else self.folder / MEMORY
        if path is None or not path.is_file():
            return []
        document = load_document(path, EvidenceFileError)
        reader = Reader(str(path), EvidenceFileError)
        reader.require_document(document, DOCUMENT, "memory.json of a fit")
        reader.version(document, VERSION)
        reader.keys("", document, {"document": TEXT, "version": SIZE, "probes": LIST}, ("probes",))
        return [
            MemoryProbe(**reader.keys(f"probes[{number}]", probe, PROBE_KEYS, tuple(PROBE_KEYS)))
            for number, probe in enumerate(document["probes"])
        ]


@dataclass(frozen=True)
class _HeldAtOnce:
    context: int
    batch: int


def run_probe() -> None:
    """The child: reads a request, prints the bytes."""
    request = json.load(sys.stdin)
    print(_measure(request["config"], request["model_type"], request["context"], request["batch"], request["device"]))


def _measure(config: dict[str, Any], model_type: str, context: int, batch: int, device: str) -> int:
    import torch
    import transformers

    from bitplan.packed.apply_plan import apply_plan
    from bitplan.packed.kv_cache import KVCache
    from bitplan.packed.language.generation import weight_bytes
    from bitplan.packed.language.token_steps import PIECE_TOKENS
    from bitplan.packed.rounded_inputs import round_inputs

    place = torch.device(device)
    vocabulary = int(config.get("vocab_size") or VOCABULARY)
    small = config | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "dtype": None}
    small |= dict.fromkeys(("quantization_config", "pad_token_id", "bos_token_id", "eos_token_id"))
    if isinstance(config.get("layer_types"), list):
        kinds = config["layer_types"]
        small["layer_types"] = [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0])]
    made = transformers.AutoConfig.for_model(model_type, **{k: v for k, v in small.items() if k != "model_type"})
    model: Any = transformers.AutoModelForCausalLM.from_config(made, trust_remote_code=False).eval()
    apply_plan(model, "int8_row", unsupported="skip")
    if place.type == "cpu":
        round_inputs(model, "int8")
    model.to(place)
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64, device=place), use_cache=False)  # compiled loops
        cache = KVCache(model.config, "int8")
        piece = min(PIECE_TOKENS, max(1, context - 1))
        _fill(model, cache, batch, context - 1 - piece, place)
        _forget_peak(place)
        for length in (piece, 1):
            model(
                input_ids=torch.zeros(batch, length, dtype=torch.int64, device=place),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
    logits = 3 * 4 * batch * (vocabulary - VOCABULARY)
    return _peak(place) - weight_bytes(model) - cache.nbytes + max(0, logits)


def _fill(model: Any, cache: Any, batch: int, tokens: int, place: Any) -> None:
    """Rows of the shape that the model gives, until the cache holds so many tokens."""
    import torch

    first = torch.zeros(batch, 1, dtype=torch.int64, device=place)
    left = tokens
    if left > 0:
        model(input_ids=first, past_key_values=cache, use_cache=True)
        left -= 1
    while left > 0:
        count = min(left, max(1, ROWS_AT_ONCE // batch))
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.update(*(rows.numbers()[:, :, :1].repeat(1, 1, count, 1) for rows in (layer.keys, layer.values)))
        left -= count


def _forget_peak(place: Any) -> None:
    import torch

    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
        return
    with suppress(OSError):  # where it is another system, the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what is resident now


def _peak(place: Any) -> int:
    from bitplan.packed.language.generation import peak_bytes

    if place.type == "cpu":
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.is_file() else []
        found = next((line for line in lines if line.startswith("VmHWM:")), None)
        if found is not None:
            return int(found.split()[1]) * 1024
    return peak_bytes(place) or 0
