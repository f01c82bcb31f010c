"""What a running model takes beside its weights and its keys and values, measured in a process of its own.

The probe is the model's own architecture with few layers, a small vocabulary and packed weights of no meaning: what
passes between layers, masks and decoded keys and values do not depend on the number of layers, and logits are counted.
On a CPU a small model has more of its layers, for what the allocator keeps free between blocks grows with them.
Its cache is filled with numbers up to the context; then the last piece of a prompt and one token are read, as
`generate` reads them, on a CPU a few pieces on the way, too, and beside the model's tokenizer. The highest resident
memory of that process (on a GPU, of torch's allocator), less the weights and the cache that it held, is the answer,
with 2% more: what is asked for is a limit.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from bitplan.base.documents import LIST, NUMBER, OBJECT, SIZE, TEXT, Kind, Reader, is_number, load_document
from bitplan.base.hardware import give_back_memory
from bitplan.base.records import write_json
from bitplan.searching.engine_memory import EngineMemory, Held
from bitplan.searching.goal import EvidenceFileError, GoalError, SearchError

LAYERS, VOCABULARY, ROWS_AT_ONCE = 2, 512, 2048
PROBED_NUMBERS = 2**26  # in the layers of a probe on a CPU, 256 MB in float32, where the first few have no more
DECODED_SHAPES = ((2048, 4096), (8192, 4096))
PROBE_S = 600.0
MEMORY, DOCUMENT, VERSION = "memory.json", "bitplan-memory", 1


def _are_sizes(item: Any) -> bool:
    costs = item.values() if type(item) is dict else [None]
    return all(type(cost) is list and len(cost) in (2, 4) and all(map(_is_size, cost)) for cost in costs)


def _is_size(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1e12


PROBE_KEYS = {"context": SIZE, "batch": SIZE, "device": TEXT, "nbytes": SIZE, "times": OBJECT, "floor": SIZE}
PROBE_KEYS["decoded"] = Kind("an object of formats to [bytes, bytes a number, us, us a number]", _are_sizes)
WIDE, NARROW, MORE_LAYERS = "int8_row", "mxfp4", 4  # formats and layers whose tokens are timed
TIMED_TOKENS, WARM_TOKENS, LAUNCH_TURNS, DECODINGS = 12, 4, 40, 5
SHORTEST = 1e-7  # microseconds a byte: 10 TB/s
CYCLES_A_SECOND, LONGEST_WAIT_S = 2_000_000_000, 0.2  # of a GPU that waits for its host
MOST_PIECES = 4  # of a prompt, that the probe reads on a CPU
MARGIN = 1.02  # two runs of one process differ by 1 to 1.5%


@dataclass(frozen=True)
class TokenTimes:
    """What a token takes, in microseconds, for a context and batch on a device.

    gpu_rate, bus_rate   bytes of weights that products read in a microsecond, on the GPU and over the bus
    crossing             what a product takes more, beside its bytes, where its weights are on the host
    rest                 of the GPU beside these bytes: starting products, attention, norms, the next token
    launch               of the host, to launch all of it
    chosen               the share of a layer's experts that a token goes through
    """

    gpu_rate: float
    bus_rate: float
    crossing: float
    rest: float
    launch: float
    chosen: float = 1.0

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def token_us(self, products: float) -> float:
        """Microseconds of a whole token, if its products with weights take `products`."""
        return max(self.launch, self.rest + products)


TIMES_KEYS = dict.fromkeys(("gpu_rate", "bus_rate", "crossing", "rest", "launch", "chosen"), NUMBER)


@dataclass(frozen=True)
class MemoryProbe:
    """Bytes beside weights, keys and values, for a context and batch on a device; and for two memories, times.

    On a GPU `floor` are those that stay between products, and `decoded` is what decoding a weight takes, by format:
    bytes while it runs, of any weight and of each of its numbers, and in the same way microseconds.
    """

    context: int
    batch: int
    device: str
    nbytes: int
    times: TokenTimes | None = None
    floor: int | None = None
    decoded: Mapping[str, Sequence[float]] | None = None

    def is_of(self, context: int, batch: int, device: str, *, timed: bool = False) -> bool:
        same = (self.context, self.batch, self.device) == (context, batch, device)
        return same and not (timed and self.times is None)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_document(cls, probe: Any, reader: Reader, where: str) -> MemoryProbe:
        item = reader.keys(where, probe, PROBE_KEYS, ("context", "batch", "device", "nbytes"))
        times = item.get("times")
        token_times = (
            None if times is None else TokenTimes(**reader.keys(f"{where}.times", times, TIMES_KEYS, tuple(TIMES_KEYS)))
        )
        return cls(**item | {"times": token_times})


def probe_memory(
    model: nn.Module | str | Path,
    context: int,
    batch: int,
    device: str = "cpu",
    *,
    timed: bool = False,
    source: Path | None = None,
) -> MemoryProbe:
    """Measure in a child process; `model` gives its config, or is the folder or GGUF file that has it.

    timed    how long a token takes, too, and bytes of weights in either memory
    source   the folder or GGUF file of the model, whose tokenizer a running process holds
    """
    config = config_of(model)
    check_positions(config, context)
    request = {
        "config": config.to_dict(),
        "model_type": config.model_type,
        "context": context,
        "batch": batch,
        "device": device,
        "timed": timed,
        "source": None if source is None else str(source),
    }
    # The child imports the command line, as `bitplan generate` does.
    code = "import bitplan.cli.app; from bitplan.searching.memory_probe import run_probe; run_probe()"
    command = [sys.executable, "-c", code]
    try:
        words = json.dumps(request, default=str)
        done = subprocess.run(command, input=words, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SearchError(
            f"the memory beside weights was not measured within {PROBE_S:.0f} s for {config.model_type} with "
            f"{context:,} tokens of context and a batch of {batch}; ask for a shorter context, or run again on an idle "
            "machine"
        ) from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last_line = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise SearchError(f"the memory beside weights could not be measured for {config.model_type}: {last_line[:300]}")
    answer = json.loads(lines[-1])
    times = answer.get("times")
    token_times = None if times is None else TokenTimes(**times)
    beside = int(MARGIN * answer["nbytes"])
    return MemoryProbe(context, batch, device, beside, token_times, answer.get("floor"), answer.get("decoded"))


def check_positions(config: Any, context: int) -> None:
    """Refuse a context beyond the model's positions, as running the model does."""
    text_config = config.get_text_config(decoder=True)
    positions = getattr(text_config, "max_position_embeddings", None)
    if isinstance(positions, int) and context > positions:
        raise GoalError(
            f"{config.model_type}: the model was made for texts of {positions:,} tokens or fewer, got a context of "
            f"{context:,}",
            settings={"context": positions},
        )


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
    """What measuring memory needs to know of a fit's goal: texts, context, device."""

    @property
    def device(self) -> str: ...

    @property
    def engine(self) -> EngineMemory: ...

    @property
    def ram(self) -> int | None: ...


@dataclass
class Reserve:
    """Memory of a running model beside weights, keys and values: measured for bitplan, a formula for other engines.

    Two runs of one process differ by 10 MB, so what was measured is kept: the same goal has the same plan.
    """

    model: nn.Module | str | Path
    goal: FitLike
    folder: Path | None = None
    writes: bool = False
    source: Path | None = None  # of a module: the folder or GGUF file that it came from

    def at(self, context: int) -> MemoryProbe:
        """Measure, or find, the memory beside weights at a context, with the goal's texts and device."""
        goal = self.goal
        if goal.engine.overhead is not None:
            request, config = _HeldAtOnce(context, goal.batch), config_of(self.model)
            if context == goal.context:
                check_positions(config, context)
            return MemoryProbe(context, goal.batch, goal.device, goal.engine.overhead(config, request))
        probes_before = self._known()
        timed = goal.ram is not None
        probe = next((one for one in probes_before if one.is_of(context, goal.batch, goal.device, timed=timed)), None)
        if probe is None:
            more: dict[str, Any] = {"timed": True} if timed else {}
            source = self.source if isinstance(self.model, nn.Module) else Path(self.model)
            more |= {} if source is None else {"source": source}
            probe = probe_memory(self.model, context, goal.batch, goal.device, **more)
            if self.folder is not None and self.writes:
                self.folder.mkdir(parents=True, exist_ok=True)
                probes = [one.to_dict() for one in (*probes_before, probe)]
                write_json(self.folder / MEMORY, {"document": DOCUMENT, "version": VERSION, "probes": probes})
        return probe

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
            MemoryProbe.from_document(probe, reader, f"probes[{number}]")
            for number, probe in enumerate(document["probes"])
        ]


@dataclass(frozen=True)
class _HeldAtOnce:
    context: int
    batch: int
    on_gpu: bool = False


def run_probe() -> None:
    """Run the child process of `probe_memory`: read a request from standard input, print what was measured."""
    request = json.load(sys.stdin)
    words = ("config", "model_type", "context", "batch", "device")
    held = _tokenizer(request["source"])
    answer: dict[str, Any] = _measure(*(request[word] for word in words))
    del held
    if request["timed"]:
        answer["times"] = _measure_times(*(request[word] for word in words)).to_dict()
    print(json.dumps(answer))


def _tokenizer(source: str | None) -> Any:
    """What a running process holds of a tokenizer, where the model has one."""
    from bitplan.files.headers import has_tokenizer, is_gguf
    from bitplan.packed.language.generation import tokenizer_of

    path = None if source is None else Path(source)
    return tokenizer_of(path) if path is not None and (is_gguf(path) or has_tokenizer(path)) else None


def _measure(config: dict[str, Any], model_type: str, context: int, batch: int, device: str) -> dict[str, Any]:
    import torch

    from bitplan.packed.language.generation import weight_bytes
    from bitplan.packed.language.token_steps import piece_tokens

    torch_device = torch.device(device)
    vocabulary = int(config.get("vocab_size") or VOCABULARY)
    layers = _probed_layers(config, model_type) if torch_device.type == "cpu" else LAYERS
    model = _small_model(config, model_type, torch_device, layers, "int8_row")
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64, device=torch_device), use_cache=False)  # compiled loops
        piece = min(piece_tokens(batch, on_cpu=torch_device.type == "cpu"), max(1, context - 1))
        pieces = _pieces_read(max(1, context - 1), piece, MOST_PIECES if torch_device.type == "cpu" else 1)
        cache = _filled(model, batch, pieces[0][0], torch_device)
        _forget_peak(torch_device)
        held = pieces[0][0]
        for start, length in pieces:
            if start > held:
                _fill(model, cache, batch, start - held, torch_device)
            held = start + length
            model(
                input_ids=torch.zeros(batch, length, dtype=torch.int64, device=torch_device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        step = _next_tokens(model, cache, batch, torch_device)
        for _ in range(WARM_TOKENS if torch_device.type == "cuda" else 1):  # until a graph of them is recorded
            step()
    logits = 3 * 4 * batch * (vocabulary - VOCABULARY)
    own_bytes: int = weight_bytes(model) + cache.nbytes
    if torch_device.type == "cuda":  # room for more tokens, which the cache's own bytes leave out
        own_bytes += _storage_bytes(cache) - cache.nbytes
    answer = {"nbytes": _peak(torch_device) - own_bytes + max(0, logits)}
    if torch_device.type != "cuda":
        return answer
    floor = max(0, torch.cuda.memory_allocated(torch_device) - own_bytes)
    return answer | {"floor": floor + max(0, logits), "decoded": _decoding_costs(torch_device)}


def _pieces_read(tokens: int, piece: int, most: int) -> list[tuple[int, int]]:
    """Where the pieces of a prompt that are read begin, and their lengths; the last ends with the prompt.

    Several, for contexts that grow: what is freed behind each of them stays in the process, in blocks of other sizes.
    """
    count, pieces, read = min(most, -(-tokens // piece)), list[tuple[int, int]](), 0
    for number in range(1, count + 1):
        end = tokens * number // count
        start = max(read, end - piece)
        pieces.append((start, end - start))
        read = end
    return pieces


def _storage_bytes(cache: Any) -> int:
    """What keys and values take with the room that is kept for more of them."""
    stored = [rows for layer in cache.layers for rows in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    storages = [part.untyped_storage() for rows in stored if rows is not None for part in rows.parts.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _decoding_costs(device: Any) -> dict[str, tuple[float, ...]]:
    """Measured costs of decoding, by format: bytes for any weight and for each number, microseconds likewise."""
    import torch

    from bitplan.formats import Encoded, get_format
    from bitplan.formats.dispatch import decode
    from bitplan.searching.runtime_formats import candidates, target_of

    def line(few: float, many: float) -> tuple[float, float]:
        few_numbers, many_numbers = (rows * cols for rows, cols in DECODED_SHAPES)
        per_number = max(0.0, (many - few) / (many_numbers - few_numbers))
        return max(0.0, few - few_numbers * per_number), per_number

    costs: dict[str, tuple[float, ...]] = {}
    for name in candidates(target_of("bitplan"), None, bits=0):
        fmt = get_format(name)
        if fmt.is_cast:
            continue
        taken, lasted = [], []
        for shape in DECODED_SHAPES:
            parts = {
                part: torch.zeros(size, dtype=dtype, device=device)
                for part, (dtype, size) in fmt.part_shapes(shape).items()
            }
            encoded, seconds = Encoded(fmt, shape, **parts), []
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(DECODINGS):
                torch.cuda.synchronize(device)
                started = time.perf_counter()
                decode(encoded, torch.bfloat16)
                torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - started)
            taken.append(torch.cuda.max_memory_allocated(device) - before)
            lasted.append(1e6 * statistics.median(seconds))
        costs[name] = (*line(*taken), *line(*lasted))
    return costs


def _probed_layers(config: dict[str, Any], model_type: str) -> int:
    """How many of the model's layers a probe on a CPU has: all of a small model's, few of a large one's."""
    few = sum(part.numel() for part in _empty_model(config, model_type, LAYERS, "meta").parameters())
    most = int(config.get("num_hidden_layers") or LAYERS)
    affordable: int = PROBED_NUMBERS * LAYERS // few
    return max(LAYERS, min(most, affordable))


def _empty_model(config: dict[str, Any], model_type: str, layers: int, device: Any, dtype: Any = None) -> Any:
    """The architecture with few layers, as transformers makes it."""
    import torch
    import transformers

    small = config | {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "dtype": None}
    small |= dict.fromkeys(("quantization_config", "pad_token_id", "bos_token_id", "eos_token_id"))
    if isinstance(config.get("layer_types"), list):
        kinds = config["layer_types"]
        other = next((kind for kind in kinds if kind != kinds[0]), kinds[0])
        small["layer_types"] = [other if layer % 2 else kinds[0] for layer in range(layers)]
    shrunk = transformers.AutoConfig.for_model(model_type, **{k: v for k, v in small.items() if k != "model_type"})
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(shrunk, trust_remote_code=False, dtype=dtype).eval()


def _small_model(config: dict[str, Any], model_type: str, device: Any, layers: int, fmt: str) -> Any:
    """The architecture with few layers, packed in one format, on a device; numbers have no meaning."""
    import torch

    from bitplan.packed.apply_plan import apply_plan
    from bitplan.packed.fused_projections import fuse_what_is_seen
    from bitplan.packed.rounded_inputs import round_inputs, runs_on_integers

    on_cpu = device.type == "cpu"
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = torch.float32 if on_cpu else getattr(torch, stored)
    model = _empty_model(config, model_type, layers, device, dtype).to(device)
    apply_plan(model, fmt, unsupported="skip")
    if on_cpu and runs_on_integers(model):  # as `load_for_running` does: packed experts take inputs as they are
        round_inputs(model, "int8")
    fuse_what_is_seen(model)
    return model


def _filled(model: Any, batch: int, tokens: int, device: Any) -> Any:
    """A cache in 8 bits that holds so many tokens: on a GPU read piece by piece, as a prompt is."""
    import torch

    from bitplan.packed.kv_cache import KVCache
    from bitplan.packed.language.token_steps import PIECE_TOKENS
    from bitplan.packed.rounded_kv import round_kv

    if device.type == "cpu":
        cache = KVCache(model.config, "int8")
        _fill(model, cache, batch, tokens, device)
        return cache
    round_kv(model, "int8")
    filled: Any = None
    for piece in torch.zeros(batch, max(1, tokens), dtype=torch.int64, device=device).split(PIECE_TOKENS, dim=1):
        filled = model(input_ids=piece, past_key_values=filled, use_cache=True, logits_to_keep=1).past_key_values
    return filled


@dataclass(frozen=True)
class _Token:
    """Measured microseconds of one token: work on the device, launching by the host, and both together."""

    busy: float
    launch: float
    whole: float


def _measure_times(config: dict[str, Any], model_type: str, context: int, batch: int, device: str) -> TokenTimes:
    """Time tokens of small models: in two formats, with weights in either memory, and with more layers."""
    import torch

    torch_device = torch.device(device)
    read: dict[str, float] = {}
    tokens: dict[tuple[str, bool], _Token] = {}
    products = 0
    chosen = _chosen_share(config)

    def ready(fmt: str, layers: int) -> tuple[Any, Any]:
        model = _small_model(config, model_type, torch_device, layers, fmt)
        return model, _filled(model, batch, max(1, context - 1 - 2 * TIMED_TOKENS), torch_device)

    with torch.inference_mode():
        small, larger = {WIDE: ready(WIDE, LAYERS)}, ready(WIDE, MORE_LAYERS)
        many = _timed_token(*larger, batch, torch_device)
        launch, launch_more = 0.0, 0.0  # a CPU's product is done when it returns
        if torch_device.type != "cpu":
            launch, launch_more = _launched_in_turns(small[WIDE], larger, batch, torch_device)
        del larger
        for fmt in (WIDE, NARROW):
            model, cache = small.pop(fmt) if fmt in small else ready(fmt, LAYERS)
            tokens[fmt, False] = _timed_token(model, cache, batch, torch_device)
            read[fmt], products = _send_to_host(model, torch_device, chosen, batch)
            tokens[fmt, True] = _timed_token(model, cache, batch, torch_device)
            del model, cache
    few = tokens[WIDE, False]
    apart = read[WIDE] - read[NARROW]
    gpu_us = max(0.0, (few.busy - tokens[NARROW, False].busy) / apart)
    slower = {fmt: tokens[fmt, True].busy - tokens[fmt, False].busy for fmt in (WIDE, NARROW)}
    bus_us = max(SHORTEST, gpu_us + (slower[WIDE] - slower[NARROW]) / apart)
    crossing = max(0.0, (slower[NARROW] - read[NARROW] * (bus_us - gpu_us)) / products)
    turn = max(0.0, many.whole - max(many.busy, many.launch))
    more = (int(config.get("num_hidden_layers") or LAYERS) - LAYERS) / (MORE_LAYERS - LAYERS)
    rest_few, rest_many = few.busy - gpu_us * read[WIDE], many.busy - gpu_us * read[WIDE] * MORE_LAYERS / LAYERS
    return TokenTimes(
        1 / max(gpu_us, SHORTEST),
        1 / bus_us,
        crossing,
        max(0.0, rest_few + more * (rest_many - rest_few)) + turn,
        max(0.0, launch + more * launch_more) + turn,
        chosen,
    )


def _chosen_share(config: dict[str, Any]) -> float:
    """The share of a layer's experts that a token goes through; 1 where there are none."""
    counts = (config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((count for count in counts if isinstance(count, int) and count > 0), None)
    chosen = config.get("num_experts_per_tok")
    return 1.0 if experts is None or not isinstance(chosen, int) else min(1.0, chosen / experts)


def _send_to_host(model: Any, device: Any, chosen: float, batch: int) -> tuple[float, int]:
    """Let all multiplied weights lie in the host's memory; bytes of them that a token reads, and products with them."""
    from bitplan.packed.packed_weight import PackedWeight, wait_in_host
    from bitplan.packed.quant_embedding import QuantEmbedding

    tables = {id(one.weight) for one in model.modules() if isinstance(one, QuantEmbedding)}
    weights = {id(one): one for one in model.modules() if isinstance(one, PackedWeight) and id(one) not in tables}
    read = 0.0
    for weight in weights.values():
        share = 1 - (1 - chosen) ** batch if len(weight.shape) == 3 else 1.0
        read += share * weight.get_buffer("data").nbytes
        wait_in_host(weight, device)
    layers = [one for one in model.modules() if getattr(one, "joint", None) is not None and one.joint_at]
    return read, len(weights) - len(layers)


def _launched_in_turns(few: Any, many: Any, batch: int, device: Any) -> tuple[float, float]:
    """Microseconds of the host to launch a token of the smaller model, and how many more of the larger one's.

    Medians of turns, so that a host that is slow for a while is so for both. Each launch finds the GPU with nothing to
    do: one behind a thousand others would wait for the GPU.
    """
    import torch

    def launched(step: Callable[[], Any]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        token = step()
        microseconds = 1e6 * (time.perf_counter() - started)
        token.tolist()
        return microseconds

    steps = [_next_tokens(model, cache, batch, device) for model, cache in (few, many)]
    turns = [[launched(step) for step in steps] for _ in range(WARM_TOKENS + LAUNCH_TURNS)][WARM_TOKENS:]
    return statistics.median(one for one, _ in turns), statistics.median(more - one for one, more in turns)


def _next_tokens(model: Any, cache: Any, batch: int, device: Any) -> Callable[[], Any]:
    """What makes one more token of each text, as `generate` does: on a GPU one that is recorded, where it can be."""
    import torch

    ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    if device.type == "cuda":
        from bitplan.packed.language.token_graph import TokenGraph

        recorded = TokenGraph(model, {"logits_to_keep": 1}, cache)
        return lambda: recorded(ids).argmax(-1)
    return lambda: (
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
    )


def _timed_token(model: Any, cache: Any, batch: int, device: Any) -> _Token:
    """Median times of a few tokens; on a GPU its own work and the host's are timed apart."""
    import torch

    step = _next_tokens(model, cache, batch, device)
    samples: list[tuple[float, float, float]] = []
    for turn in range(TIMED_TOKENS):
        if device.type == "cpu":
            started = time.perf_counter()
            step().tolist()
            seconds = time.perf_counter() - started
            samples.append((seconds, 0.0, seconds))
            continue
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        token = step()
        launched = time.perf_counter() - started
        token.tolist()
        total_seconds = time.perf_counter() - started
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(CYCLES_A_SECOND * min(LONGEST_WAIT_S, 2 * launched + 1e-3)))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize(device)
        if turn >= WARM_TOKENS:
            samples.append((begin.elapsed_time(end) / 1e3, launched, total_seconds))
    medians = [1e6 * statistics.median(times) for times in zip(*samples[-TIMED_TOKENS + WARM_TOKENS :], strict=True)]
    return _Token(*medians)


def _fill(model: Any, cache: Any, batch: int, tokens: int, device: Any) -> None:
    """Put random rows of the model's shape into the cache until it holds so many tokens."""
    import torch

    first = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    remaining = tokens
    if remaining > 0:
        model(input_ids=first, past_key_values=cache, use_cache=True)
        remaining -= 1
    while remaining > 0:
        count = min(remaining, max(1, ROWS_AT_ONCE // batch))
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.update(*(rows.numbers()[:, :, :1].repeat(1, 1, count, 1) for rows in (layer.keys, layer.values)))
        remaining -= count


def _forget_peak(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    give_back_memory()  # as `load_for_running` does
    with suppress(OSError):  # where it is another system, the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what is resident now


def _peak(device: Any) -> int:
    from bitplan.packed.language.generation import peak_bytes

    if device.type == "cpu":
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.is_file() else []
        peak_line = next((line for line in lines if line.startswith("VmHWM:")), None)
        if peak_line is not None:
            return int(peak_line.split()[1]) * 1024
    return peak_bytes(device) or 0
