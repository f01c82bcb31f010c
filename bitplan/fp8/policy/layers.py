"""The linear layers of a model as one GPU sees them: kind, name, local shape, and how many tokens reach them.

A model is one or two parts (an LLM, and for a vision-language model a ViT), each a stack of blocks of few distinct
shapes. The kinds follow Megatron's transformer blocks on TransformerEngine, where the names come from:

    attention     qkv: layernorm_column [(heads + 2 kv_heads) head_dim, hidden], divided over TP by rows
                  proj: row [hidden, heads head_dim], divided over TP by columns
    MLA           q_down_proj, kv_down_proj: duplicated, whole on every GPU
                  q_up_proj, kv_up_proj: layernorm_column, the norm between down and up fused (column without one)
                  q_proj: column, where there is no q_lora_rank; proj: row
    MLP           fc1: layernorm_column [ffn, hidden], gate and up together where it is gated; fc2: row [hidden, ffn]
    experts       fc1: column_grouped, fc2: row_grouped, divided over ETP; each GPU holds experts / EP of them
    shared        fc1: column (the router needs the norm too, so it is not fused), fc2: row; all tokens, divided over TP

Not here, because they stay out of FP8: embeddings, the router, the output layer, a VLM's projector.

`model_parts` reads them from a Hugging Face config.json: sizes, experts, dense first layers, a VLM's two halves.

Sizes are read by the keys that the table of families has (`ConfigKeys`), and nothing is guessed: an unknown
architecture or a missing size is an error that names the key, because a wrong shape would be measured, merged and
believed. Known are dense models, mixtures of experts, latent attention (MLA), and the halves that read images.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitplan.base.documents import Reader, load_document, show
from bitplan.base.errors import did_you_mean
from bitplan.fp8.policy.vocabulary import (
    COUNT,
    GROUPED_KINDS,
    NORM_KIND,
    ModelConfigError,
    count_tokens,
    shape_obstacle,
)
from bitplan.plan.structure.families import TEXT_KEYS, VISION_KEYS, ConfigKeys


@dataclass(frozen=True)
class Parallel:
    """Tensor, expert and expert-tensor parallel sizes."""

    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for key in ("tp", "ep", "etp"):
            if not COUNT.holds(getattr(self, key)):
                raise ModelConfigError(f"{key} must be {COUNT.text}, got {getattr(self, key)!r}")


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's MLA: queries, keys and values pass through a low rank; without `q_rank` queries do not."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_fused: bool = True


@dataclass(frozen=True)
class Experts:
    count: int
    ffn: int
    topk: int
    shared_ffn: int = 0


@dataclass(frozen=True)
class ModelPart:
    """One stack of blocks. `keys` maps our field names to the configuration's keys, for messages."""

    part: str
    hidden: int
    dense_blocks: int
    moe_blocks: int
    attention: Attention | LatentAttention
    ffn: int
    gated: bool
    experts: Experts | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    where: str = "model"


@dataclass(frozen=True)
class Layer:
    """One distinct linear layer on one GPU, and how many blocks have it. `shape` is out_features, in_features."""

    part: str
    kind: str
    name: str
    role: str  # attention, mlp, expert or shared expert
    shape: tuple[int, int]
    blocks: int
    parallel: Parallel
    num_gemms: int | None = None
    moe_router_topk: int | None = None

    def tokens(self, seq_length: int, micro_batch_size: int) -> int:
        """Logical tokens, as the policy counts them."""
        return count_tokens(seq_length, micro_batch_size, moe_router_topk=self.moe_router_topk or 1)

    def question(self) -> dict[str, Any]:
        """The arguments of `should_use_fp8`, and fields of a report's row, for this layer, without tokens."""
        size: dict[str, Any] = {"name": self.name, "tp": self.parallel.tp}
        if self.kind in GROUPED_KINDS:
            size = {"etp": self.parallel.etp, "num_gemms": self.num_gemms}
        return {"part": self.part, "kind": self.kind, "shape": self.shape} | size


@dataclass(frozen=True)
class Case:
    """One layer at one logical token count: what a benchmark times. `obstacle` says why the recipe cannot run it."""

    layer: Layer
    tokens: int
    obstacle: str | None = None


def local_layers(parts: Iterable[ModelPart], parallel: Parallel) -> list[Layer]:
    """The distinct layers of all parts on one GPU; a size that cannot be divided is an error that names its key."""
    parts = list(parts)
    if (parallel.ep > 1 or parallel.etp > 1) and parts and not any(part.experts for part in parts):
        sizes = f"ep {parallel.ep}, etp {parallel.etp}"
        raise ModelConfigError(f"{parts[0].where}: {sizes} were asked for, and the model has no experts; set both to 1")
    return [layer for part in parts for layer in _part_layers(part, parallel)]


def layers_of_shapes(text: str, part: str = "llm", tp: int = 1) -> list[Layer]:
    """Read `12288x4096:norm,4096x4096`: dense layers by outputs and inputs of one GPU, and if a norm is in front."""
    layers = []
    for item in dict.fromkeys(word.strip() for word in text.split(",")):
        size, _, norm = item.partition(":")
        outputs, _, inputs = size.lower().partition("x")
        is_shape = all(word.isascii() and word.isdigit() and 0 < len(word) <= 9 for word in (outputs, inputs))
        if not is_shape or norm not in ("", "norm") or "0" in (outputs, inputs):
            raise ModelConfigError(
                "shapes must be OUTxIN or OUTxIN:norm with commas between, such as 12288x4096:norm,4096x4096, "
                f"got {item!r}"
            )
        kind, shape = NORM_KIND if norm else "column", (int(outputs), int(inputs))
        layers.append(Layer(part, kind, f"{shape[0]}x{shape[1]}", "linear", shape, 1, Parallel(tp=tp)))
    return layers


def bench_cases(layers: Iterable[Layer], sweep: Sequence[tuple[int, int]], recipe: str) -> list[Case]:
    """Every layer at every token count of a sweep of (sequence length, micro batch size), each count once."""
    cases = []
    for layer in layers:
        counts = sorted({layer.tokens(length, batch) for length, batch in sweep})
        cases += [Case(layer, tokens, shape_obstacle(recipe, layer.shape)) for tokens in counts]
    return cases


def _part_layers(part: ModelPart, parallel: Parallel) -> list[Layer]:
    tp = _Divider(part, "tp", parallel.tp)
    blocks = part.dense_blocks + part.moe_blocks
    shapes: list[tuple[str, str, str, tuple[int, int], int]] = []
    attention = part.attention
    if isinstance(attention, LatentAttention):
        shapes += [
            (kind, name, "attention", shape, blocks) for kind, name, shape in _latent(part.hidden, attention, tp)
        ]
    else:
        heads, kv_heads = tp(attention.heads, "heads"), tp(attention.kv_heads, "kv_heads")
        qkv = ((heads + 2 * kv_heads) * attention.head_dim, part.hidden)
        shapes.append(("layernorm_column", "qkv", "attention", qkv, blocks))
        shapes.append(("row", "proj", "attention", (part.hidden, heads * attention.head_dim), blocks))
    if part.dense_blocks:
        ffn = tp(part.ffn, "ffn")
        shapes.append(("layernorm_column", "fc1", "mlp", (_fc1(part, ffn), part.hidden), part.dense_blocks))
        shapes.append(("row", "fc2", "mlp", (part.hidden, ffn), part.dense_blocks))
    if part.experts is not None and part.experts.shared_ffn:
        shared = tp(part.experts.shared_ffn, "shared_ffn")
        shapes.append(("column", "fc1", "shared expert", (_fc1(part, shared), part.hidden), part.moe_blocks))
        shapes.append(("row", "fc2", "shared expert", (part.hidden, shared), part.moe_blocks))
    layers = [Layer(part.part, *shape, parallel) for shape in shapes]
    return layers + (_expert_layers(part, part.experts, parallel) if part.experts is not None else [])


def _expert_layers(part: ModelPart, experts: Experts, parallel: Parallel) -> list[Layer]:
    ffn = _Divider(part, "etp", parallel.etp)(experts.ffn, "expert_ffn")
    gemms = _Divider(part, "ep", parallel.ep)(experts.count, "experts")
    shapes = (("column_grouped", "fc1", (_fc1(part, ffn), part.hidden)), ("row_grouped", "fc2", (part.hidden, ffn)))
    return [
        Layer(part.part, kind, name, "expert", shape, part.moe_blocks, parallel, gemms, experts.topk)
        for kind, name, shape in shapes
    ]


def _latent(hidden: int, mla: LatentAttention, tp: _Divider) -> list[tuple[str, str, tuple[int, int]]]:
    heads = tp(mla.heads, "heads")
    up = "layernorm_column" if mla.norm_fused else "column"
    q_out = heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_rank is None:
        queries = [("column", "q_proj", (q_out, hidden))]
    else:
        queries = [("duplicated", "q_down_proj", (mla.q_rank, hidden)), (up, "q_up_proj", (q_out, mla.q_rank))]
    return [
        *queries,
        ("duplicated", "kv_down_proj", (mla.kv_rank + mla.rope_dim, hidden)),
        (up, "kv_up_proj", (heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)),
        ("row", "proj", (hidden, heads * mla.v_dim)),
    ]


def _fc1(part: ModelPart, ffn: int) -> int:
    return 2 * ffn if part.gated else ffn


@dataclass(frozen=True)
class _Divider:
    """Divides a size of a part over GPUs, or says which key of the configuration cannot be divided."""

    part: ModelPart
    what: str
    over: int

    def __call__(self, size: int, word: str) -> int:
        if size % self.over:
            key = self.part.keys.get(word, word)
            fitting = [str(count) for count in (1, 2, 4, 8, 16, 32, 64) if size % count == 0]
            raise ModelConfigError(
                f"{self.part.where}: {key} is {size}, which {self.what} {self.over} does not divide; "
                f"choose {self.what} from {', '.join(fitting)}"
            )
        return size // self.over


# ---- from a config.json ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigObject:
    """An object of a configuration; messages about its values have the full name of the key."""

    values: Mapping[str, Any]
    prefix: str
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            name = self.prefix.rstrip(".") or "the configuration"
            raise ModelConfigError(f"{self.where}: {name} must be an object, got {show(self.values)}")

    def size(self, key: str, default: int | None = None) -> int:
        value: Any = self.values.get(key)
        if value is None and default is not None:
            return default
        reader = Reader(self.where, ModelConfigError)
        if key not in self.values:
            reader.miss(self.prefix + key, COUNT.text)
        if not COUNT.holds(value):
            reader.fail(self.prefix + key, COUNT.text, value)
        return int(value)

    def blocks(self, key: str) -> int:
        """The number of blocks: a size within a limit, since blocks are counted one by one."""
        count = self.size(key)
        if count > MAX_BLOCKS:
            raise self.fail(f"{self.prefix}{key} must be at most {MAX_BLOCKS}, got {count}")
        return count

    def optional(self, key: str) -> int | None:
        return None if self.values.get(key) in (None, 0) else self.size(key)

    def first_of(self, *keys: str) -> str:
        """Choose the first key that is present; if none is, the first of all, which the error then names."""
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def names(self, **ours: str) -> dict[str, str]:
        return {name: self.prefix + key for name, key in ours.items()}

    def fail(self, message: str) -> ModelConfigError:
        return ModelConfigError(f"{self.where}: {message}")


MAX_BLOCKS = 10_000
YAML_KEYS = "another architecture can be described by its YAML keys"


def load_model_parts(path: str | Path) -> list[ModelPart]:
    """The parts of the model in a config.json, or in the folder that has one."""
    source = Path(path)
    if source.is_dir():
        source = source / "config.json"
    elif source.suffix != ".json":
        raise ModelConfigError(
            f"{source}: {'no such folder' if not source.exists() else 'is neither'}; give a model's config.json, the "
            "folder that has one, or a .yaml file"
        )
    return model_parts(load_document(source, ModelConfigError), where=str(source))


def model_parts(config: Any, *, where: str = "config.json", advice: str = YAML_KEYS) -> list[ModelPart]:
    """One part for a language model; for a vision-language model the LLM and the ViT, kept apart.

    `advice` goes with the refusal of an architecture that is not known.
    """
    if not isinstance(config, Mapping):
        raise ModelConfigError(f"{where}: a model's config.json must be an object, got {show(config)}")
    model_type = config.get("model_type")
    if "vision_config" not in config:
        return [_text_part(ConfigObject(config, "", where), model_type, advice)]
    nested = next((key for key in ("text_config", "llm_config") if key in config), None)
    text = config if nested is None else config[nested]
    prefix = "" if nested is None else f"{nested}."
    vision = ConfigObject(config["vision_config"], "vision_config.", where)
    inner = ConfigObject(text, prefix, where)
    text_type = inner.values.get("model_type", model_type)
    return [_text_part(inner, text_type, advice), _vision_part(vision, model_type)]


def _text_part(config: ConfigObject, model_type: Any, advice: str) -> ModelPart:
    keys = TEXT_KEYS.get(model_type) if isinstance(model_type, str) else None
    if keys is None:
        known = sorted(TEXT_KEYS)
        hint = did_you_mean(model_type[:80], known) if isinstance(model_type, str) else ""
        raise config.fail(
            f"{config.prefix}model_type {show(model_type)} is not known; known are {', '.join(known)}{hint}; {advice}"
        )
    return read_part(config, "llm", keys)


def _vision_part(config: ConfigObject, model_type: Any) -> ModelPart:
    stated = config.values.get("model_type", model_type)
    names = [str(name).removesuffix("_vision") for name in (stated, model_type)]
    keys = next((VISION_KEYS[name] for name in names if name in VISION_KEYS), None)
    if keys is None:
        known = ", ".join(sorted(VISION_KEYS))
        raise config.fail(f"vision_config.model_type {show(stated)} is not known; known are {known}")
    return read_part(config, "vit", keys)


def read_part(config: ConfigObject, part: str, keys: ConfigKeys) -> ModelPart:
    """A part by the sizes that its configuration has under these keys."""
    blocks, hidden, heads = config.blocks(keys.blocks), config.size(keys.hidden), config.size(keys.heads)
    named = {"heads": keys.heads, "kv_heads": keys.kv_heads or keys.heads, "ffn": keys.ffn}
    experts, moe = None, 0
    count = config.first_of(*keys.experts) if keys.experts else ""
    if count and (keys.needs_experts or config.optional(count)):
        width = config.first_of(*keys.expert_ffn)
        shared = (config.optional(keys.shared_ffn) or 0) if keys.shared_ffn else 0
        if keys.shared_count:
            shared *= config.optional(keys.shared_count) or 0
        experts = Experts(config.size(count), config.size(width), config.size(keys.topk), shared)
        # How many of the blocks have experts.
        step = config.size(keys.moe_step, 1) if keys.moe_step else 1
        first = (config.optional(keys.moe_first) or 0) if keys.moe_first else 0
        dense: Any = (config.values.get(keys.moe_except) or []) if keys.moe_except else []
        if not isinstance(dense, list | tuple) or not all(type(block) is int for block in dense):
            raise config.fail(f"{config.prefix}{keys.moe_except} must be a list of block numbers, got {show(dense)}")
        pattern = _moe_pattern(config, keys.moe_every, blocks) if keys.moe_every else [1] * blocks
        moe = sum(
            bool(is_moe) and (block + 1) % step == 0 and block >= first and block not in dense
            for block, is_moe in enumerate(pattern)
        )
        shared_key = keys.shared_ffn + (f" x {keys.shared_count}" if keys.shared_count else "")
        named |= {"experts": count, "expert_ffn": width, "shared_ffn": shared_key}
    if keys.ffn == "mlp_ratio":
        ffn = _ratio(config, hidden)
    else:
        ffn = config.size(keys.ffn) if blocks > moe else config.optional(keys.ffn) or 0
    gated = keys.gated if isinstance(keys.gated, bool) else any(config.values.get(key) for key in keys.gated)
    attention = _attention(config, keys, hidden, heads)
    used = experts if moe else None
    return ModelPart(part, hidden, blocks - moe, moe, attention, ffn, gated, used, config.names(**named), config.where)


def _attention(config: ConfigObject, keys: ConfigKeys, hidden: int, heads: int) -> Attention | LatentAttention:
    if keys.latent and (not keys.latent_if or config.values.get(keys.latent_if)):
        kv_rank, nope, rope, values = (config.size(key) for key in keys.latent[1:])
        fused = not keys.latent_norm or bool(config.values.get(keys.latent_norm))
        return LatentAttention(heads, config.optional(keys.latent[0]), kv_rank, nope, rope, values, fused)
    is_grouped = keys.kv_heads and (not keys.grouped_if or config.values.get(keys.grouped_if) is not False)
    kv_heads = config.size(keys.kv_heads, heads) if is_grouped else heads
    head_dim = config.optional(keys.head_dim) if keys.head_dim else None
    if head_dim is None and hidden % heads:
        raise config.fail(
            f"{config.prefix}{keys.hidden} {hidden} is not a multiple of the {heads} heads, and no head size is given"
        )
    return Attention(heads, kv_heads, head_dim or hidden // heads)


def _ratio(config: ConfigObject, hidden: int) -> int:
    ratio: Any = config.values.get("mlp_ratio")
    if type(ratio) not in (int, float) or not 0 < ratio < 1000 or (hidden * ratio) % 1:
        raise config.fail(f"vision_config.mlp_ratio must be a number that gives a whole size, got {show(ratio)}")
    return int(hidden * ratio)


def _moe_pattern(config: ConfigObject, key: str, blocks: int) -> list[int]:
    """Return 0 or 1 for each block: every n-th has experts, or a list says which, which may be spelt `[0]*3+[1]*58`."""
    value: Any = config.values.get(key)
    value = 1 if value is None else value
    if COUNT.holds(value):
        return [int(block % value == 0) for block in range(blocks)]
    pattern = _spelt_out(value) if isinstance(value, str) else value
    if not isinstance(pattern, list) or len(pattern) != blocks or not all(flag in (0, 1) for flag in pattern):
        raise config.fail(
            f"{config.prefix}{key} must be a count, or {blocks} times 0 or 1 as a list or spelt like "
            f"[0]*3+[1]*58, got {show(value)}"
        )
    return pattern


def _spelt_out(text: str) -> list[int] | None:
    """Read `[0]*3+[1]*58` or `${moe_freq:"[0]*3+[1]*58"}`, without a regular expression, which could backtrack."""
    if text.startswith("${") and text.endswith("}"):
        text = text[2:-1].partition(":")[2].strip()
    result: list[int] = []
    for term in text.strip("\"'() ").split("+"):
        inner, _, times = term.strip().partition("]")
        times = times.removeprefix("*") if times else "1"
        digits = [digit.strip() for digit in inner.removeprefix("[").split(",")]
        if not inner.startswith("[") or "]" not in term or not times.isascii() or not times.isdecimal():
            return None
        if len(times) > 4 or len(result) > MAX_BLOCKS or any(digit not in ("0", "1") for digit in digits):
            return None
        result += [int(digit) for digit in digits] * int(times)
    return result
