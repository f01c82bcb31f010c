"""What a GGUF file must say of a model for llama.cpp to run it, from a Hugging Face config.json.

Each family says what its architecture is called there, whether the rows of q and k are reordered (llama.cpp rotates
neighbours where transformers rotates halves), and whether norms are stored one less than they are (Gemma).

`config_of` is the way back: a config.json from what a GGUF file says of its model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf.constants import GGUFValueType

from bitplan.base.documents import is_number, show
from bitplan.base.errors import StoreError
from bitplan.base.records import read_json
from bitplan.files.gguf import GGUFValue
from bitplan.files.gpt_oss.config import ONLY_GGUF
from bitplan.files.tensor_file import TensorFile
from bitplan.plan.structure.families import GGUF_FAMILIES, Family

_MOST_LAYERS = 10_000
_MOST_TOKENS = 2**20  # a list of them is made, with names for those that no tokenizer has
YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # and what both sides take where a config has none
_GEMMA_PATTERN = 6  # llama.cpp's own where a file says nothing
LOCAL_ROTATIONS = 10_000.0  # of Gemma's layers that look at a window


def text(value: str) -> GGUFValue:
    return GGUFValue(GGUFValueType.STRING, value)


def whole(value: int) -> GGUFValue:
    return GGUFValue(GGUFValueType.UINT32, int(value))


def real(value: float) -> GGUFValue:
    return GGUFValue(GGUFValueType.FLOAT32, float(value))


def flag(value: bool) -> GGUFValue:
    return GGUFValue(GGUFValueType.BOOL, bool(value))


def array(kind: GGUFValueType, items: Sequence[Any]) -> GGUFValue:
    return GGUFValue(GGUFValueType.ARRAY, items, kind)


class ModelConfig:
    """A folder's config.json, or a `document` in its place, with errors that name the key."""

    def __init__(self, folder: Path, document: Mapping[str, Any] | None = None) -> None:
        self.path = folder / "config.json" if document is None else folder
        whole_config = self._read(folder) if document is None else document
        self.model_type = str(whole_config.get("model_type"))
        inner = whole_config.get("text_config")
        self._values: Mapping[str, Any] = {**whole_config, **inner} if isinstance(inner, dict) else whole_config

    def _read(self, folder: Path) -> dict[str, Any]:
        if not self.path.is_file():
            raise StoreError(f"{folder}: no config.json, so not a Hugging Face model; give the folder that has it")
        document = read_json(self.path)
        if not isinstance(document, dict):
            raise StoreError(f"{self.path}: expected a JSON object, got a {type(document).__name__}")
        return document

    @property
    def family(self) -> Family:
        if self.model_type not in GGUF_FAMILIES:
            raise StoreError(
                f"{self.path}: model_type {show(self.model_type)} is none that is exported to GGUF "
                f"({', '.join(GGUF_FAMILIES)}, gpt_oss)"
            )
        return GGUF_FAMILIES[self.model_type]

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def real(self, key: str, default: float) -> float:
        return real_number(self._values, key, self.path, default)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """The object under a key of the config; empty where the key is missing."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise StoreError(f"{self.path}: {key} must be an object, got {show(value)}")
        return value

    def number(self, *keys: str) -> int:
        """A count above zero, under the first of these keys that is there."""
        for key in keys:
            value = self.get(key)
            if value is not None:
                return _count(value, f"{self.path}: {key}")
        raise StoreError(f"{self.path}: no {' or '.join(keys)}, which llama.cpp needs; copy the original's config.json")

    @property
    def layers(self) -> int:
        count = self.number("num_hidden_layers")
        if count > _MOST_LAYERS:
            raise StoreError(f"{self.path}: num_hidden_layers is {count}, and no model has more than {_MOST_LAYERS}")
        return count

    @property
    def heads(self) -> int:
        return self.number("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.number("num_key_value_heads", "num_attention_heads")

    @property
    def head_size(self) -> int:
        return self.number("head_dim") if self.get("head_dim") else self.number("hidden_size") // self.heads

    @property
    def vocabulary(self) -> int:
        count = self.number("vocab_size")
        if count > _MOST_TOKENS:
            raise StoreError(f"{self.path}: vocab_size is {count}, and no model has more than {_MOST_TOKENS} tokens")
        return count

    @property
    def layer_kinds(self) -> list[Any]:
        """What each layer attends to, as the config says it; empty where it does not."""
        kinds = self.get("layer_types") or []
        if not isinstance(kinds, list):
            raise StoreError(f"{self.path}: layer_types must be a list, got {show(kinds)}")
        return kinds

    @property
    def rope(self) -> Mapping[str, Any]:
        """Rotary settings as transformers 5 writes them; those of older configs in the same form."""
        parameters = self.mapping("rope_parameters")
        parameters = parameters["full_attention"] if isinstance(parameters.get("full_attention"), dict) else parameters
        scaling = dict(self.mapping("rope_scaling"))
        scaling.setdefault("rope_type", scaling.pop("type", parameters.get("rope_type", "default")))
        rope = {"rope_theta": self.get("rope_theta", 10000.0), **parameters, **scaling}
        if not isinstance(rope["rope_type"], str):
            raise StoreError(f"{self.path}: rope_type must be a text, got {show(rope['rope_type'])}")
        return rope

    def rope_number(self, key: str) -> float:
        """A number of the rotary settings, which must be above zero; the error names the key."""
        value = real_number(self.rope, key, self.path)
        if value <= 0:
            raise StoreError(f"{self.path}: {key} of its rotary positions must be above zero, got {value}")
        return value


def _count(value: Any, where: str) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise StoreError(f"{where} must be a whole number from 1 to {2**31 - 1}, got {show(value)}")
    return value


def real_number(values: Mapping[str, Any], key: str, path: Path, default: float | None = None) -> float:
    """The number under a key; where it is none, the error names file and key."""
    value: Any = default if values.get(key) is None else values[key]
    if not is_number(value):
        raise StoreError(f"{path}: {key} must be a number, got {'none' if value is None else show(value)}")
    return float(value)


def is_gpt_oss(folder: Path) -> bool:
    """Whether a folder holds gpt-oss, which has a converter of its own."""
    return (folder / "config.json").is_file() and ModelConfig(folder).model_type == "gpt_oss"


def _check_computation(config: ModelConfig) -> None:
    """Refuse what llama.cpp would compute otherwise without a word."""
    family = config.family
    act = config.get("hidden_act") or config.get("hidden_activation") or family.activation
    if act not in (family.activation, {"silu": "swish"}.get(family.activation)):
        raise StoreError(
            f"{config.path}: activation {show(act)}; llama.cpp's {family.architecture} computes {family.activation!r}"
        )
    if family.architecture == "qwen3moe" and not config.get("norm_topk_prob", False):
        raise StoreError(f"{config.path}: norm_topk_prob is false; llama.cpp's qwen3moe always divides by the sum")
    if family.architecture == "qwen3moe" and (
        config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    ):
        raise StoreError(f"{config.path}: some layers are dense; llama.cpp's qwen3moe has experts in every layer")
    scale = config.get("query_pre_attn_scalar", config.head_size)
    is_largest = config.layers == 62  # llama.cpp knows Gemma 3 27B by its layers, and scales it by another size
    if family.architecture == "gemma3" and not is_largest and scale != config.head_size:
        raise StoreError(
            f"{config.path}: query_pre_attn_scalar is {show(scale)}; llama.cpp's gemma3 takes the size of a head, "
            f"{config.head_size}"
        )
    if family.architecture == "gemma3":
        _check_gemma(config)


def _check_gemma(config: ModelConfig) -> None:
    """Refuse settings of Gemma 3 that llama.cpp does not read, but computes in one way."""
    by_layer = config.mapping("rope_parameters").get("sliding_attention")
    near = by_layer if isinstance(by_layer, dict) else {"rope_theta": config.get("rope_local_base_freq")}
    taken = {
        "the window's rope_theta": (near.get("rope_theta") or LOCAL_ROTATIONS, LOCAL_ROTATIONS),
        "the window's rope_type": (near.get("rope_type", "default"), "default"),
        "use_bidirectional_attention": (config.get("use_bidirectional_attention", False), False),
        "attn_logit_softcapping": (config.get("attn_logit_softcapping"), None),
        "final_logit_softcapping": (config.get("final_logit_softcapping"), None),
    }
    for key, (value, usual) in taken.items():
        if value != usual:
            raise StoreError(f"{config.path}: {key} is {show(value)}; llama.cpp's gemma3 computes with {show(usual)}")


def shorter_context(config: ModelConfig) -> int | None:
    """The attention window, if llama.cpp has none for the architecture: within it both compute the same."""
    has_switch = config.model_type.startswith("qwen")
    kinds = config.layer_kinds or ["sliding_attention"]
    used = config.get("use_sliding_window", False) if has_switch else "sliding_attention" in kinds
    if config.family.architecture == "gemma3" or not used or not config.get("sliding_window"):
        return None
    window = config.number("sliding_window")
    return window if window < config.number("max_position_embeddings") else None


def _window_pattern(config: ModelConfig) -> int:
    """The number n such that every n-th layer of a Gemma attends to the whole text, all others to a window."""
    kinds = config.layer_kinds
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    pattern = full[0] + 1 if full else max(_GEMMA_PATTERN, len(kinds) + 1)
    if not kinds:
        keys = [key for key in ("sliding_window_pattern", "_sliding_window_pattern") if config.get(key)]
        return config.number(*keys) if keys else _GEMMA_PATTERN
    if full != list(range(pattern - 1, len(kinds), pattern)):
        raise StoreError(
            f"{config.path}: layer_types repeat in no pattern, and llama.cpp needs one; export to another target"
        )
    return pattern


def model_metadata(config: ModelConfig, name: str) -> dict[str, GGUFValue]:
    """GGUF metadata from a config: architecture, sizes and constants, under llama.cpp's keys."""
    family = config.family
    _check_computation(config)
    fields = {
        "block_count": whole(config.layers),
        "context_length": whole(shorter_context(config) or config.number("max_position_embeddings")),
        "embedding_length": whole(config.number("hidden_size")),
        "feed_forward_length": whole(config.number("intermediate_size")),
        "attention.head_count": whole(config.heads),
        "attention.head_count_kv": whole(config.kv_heads),
        "attention.key_length": whole(config.head_size),
        "attention.value_length": whole(config.head_size),
        "attention.layer_norm_rms_epsilon": real(config.real("rms_norm_eps", 1e-6)),
        "rope.dimension_count": whole(config.head_size),
        "vocab_size": whole(config.vocabulary),
        **_rope(config),
    }
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        fields["expert_count"] = whole(config.number("num_local_experts", "num_experts"))
        fields["expert_used_count"] = whole(config.number("num_experts_per_tok"))
        if config.get("moe_intermediate_size"):
            fields["expert_feed_forward_length"] = whole(config.number("moe_intermediate_size"))
    if family.architecture == "gemma3" and config.get("sliding_window"):
        fields["attention.sliding_window"] = whole(config.number("sliding_window"))
        if (pattern := _window_pattern(config)) != _GEMMA_PATTERN:
            fields["attention.sliding_window_pattern"] = whole(pattern)
    return {
        "general.architecture": text(family.architecture),
        "general.type": text("model"),
        "general.name": text(name),
        **{f"{family.architecture}.{key}": value for key, value in fields.items()},
    }


def _rope(config: ModelConfig) -> dict[str, GGUFValue]:
    rope = config.rope
    keys = {"rope.freq_base": real(config.rope_number("rope_theta"))}
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": text(kind), "rope.scaling.factor": real(config.rope_number("factor"))}
        keys |= _yarn(config) if kind == "yarn" else {}
    elif kind not in ("default", "llama3"):
        raise StoreError(
            f"{config.path}: rotary positions of type {show(kind)} are not exported; GGUF's are none of them"
        )
    return keys


def _yarn(config: ModelConfig) -> dict[str, GGUFValue]:
    """YaRN's own settings; those that llama.cpp derives itself must be what it derives."""
    rope, keys = config.rope, {}
    if rope.get("original_max_position_embeddings"):
        context = int(config.rope_number("original_max_position_embeddings"))
        keys["rope.scaling.original_context_length"] = whole(context)
    for name, usual in YARN_BETAS.items():
        if rope.get(name) is not None and config.rope_number(name) != usual:
            keys[f"rope.scaling.yarn_{name}"] = real(config.rope_number(name))
    usual = _attention(config, 1.0)
    attention = usual
    if rope.get("attention_factor") is not None:
        attention = config.rope_number("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = _attention(config, config.rope_number("mscale"))
        attention /= _attention(config, config.rope_number("mscale_all_dim"))
    if not math.isclose(attention, usual, rel_tol=1e-6) or rope.get("truncate", True) is not True:
        raise StoreError(
            f"{config.path}: YaRN with an attention factor of {attention:.7g} and truncate "
            f"{show(rope.get('truncate', True))} is not exported; llama.cpp computes it with {usual:.7g} and truncates"
            "; export to another target"
        )
    return keys


def _attention(config: ModelConfig, scale: float) -> float:
    """The factor by which YaRN multiplies queries and keys."""
    return 0.1 * scale * math.log(max(config.rope_number("factor"), 1.0)) + 1.0


def rope_factors(config: ModelConfig) -> list[float] | None:
    """Llama 3's stretching of slow rotations, one divisor for each frequency; None where there is none.

    A rotation that turns at least high_freq_factor times within the original context stays, one that turns less than
    low_freq_factor times slows down by `factor`, and between them it goes from one to the other linearly in its rate.
    """
    if config.rope["rope_type"] != "llama3":
        return None
    factor, low, high = map(config.rope_number, ("factor", "low_freq_factor", "high_freq_factor"))
    context, size = config.rope_number("original_max_position_embeddings"), config.head_size
    base = config.rope_number("rope_theta")
    if low >= high:
        raise StoreError(f"{config.path}: low_freq_factor must be below high_freq_factor, got {low} and {high}")
    divisors = []
    for pair in range(size // 2):
        turns = context / (2 * math.pi * base ** (2 * pair / size))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors


# ---- the way back ----------------------------------------------------------------------------------------------------


# llama.cpp's architecture -> the model types that come back, by whether they have experts.
_TYPES: dict[str, dict[bool, str]] = {}
for _kind, _family in GGUF_FAMILIES.items():
    if _family.model_class:
        _TYPES.setdefault(_family.architecture, {})[_family.experts is not None] = _kind
ROTATIONS = "rope_freqs.weight"  # of llama 3: a divisor for each frequency
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of every llama 3 that was published
_CONTEXTS = tuple(2**power for power in range(4, 21))


class _MetadataReader:
    """The metadata of one architecture, with errors that name the key."""

    def __init__(self, path: Path, metadata: Mapping[str, GGUFValue]) -> None:
        self.path, self._metadata = path, metadata
        self.architecture = str(self._value("general.architecture"))

    def _value(self, key: str) -> Any:
        entry = self._metadata.get(key)
        return None if entry is None else entry.value

    def get(self, key: str, default: Any = None) -> Any:
        value = self._value(f"{self.architecture}.{key}")
        return default if value is None else value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, Sequence) and not isinstance(value, str) and len({*value}) == 1:
            value = value[0]  # one for each layer, all the same
        return _count(value, f"{self.path}: {self.architecture}.{key}")

    def real(self, key: str, default: float | None = None) -> float:
        """A float32 as the decimal of seven digits that it was made of: 0.1, not 0.10000000149."""
        value = self.get(key, default)
        if not is_number(value):
            raise StoreError(f"{self.path}: {self.architecture}.{key} must be a number, got {show(value)}")
        return float(f"{float(value):.7g}")

    def token(self, kind: str) -> Any:
        return self._value(f"tokenizer.ggml.{kind}_token_id")


def is_known(file: TensorFile) -> bool:
    """Whether a GGUF file is of an architecture of which a folder is made."""
    return getattr(file.metadata.get("general.architecture"), "value", None) in _TYPES


def config_of(path: Path, file: TensorFile) -> dict[str, Any]:
    """Make transformers' config.json from the metadata of a GGUF file; an architecture that is not known is refused."""
    source = _MetadataReader(path, file.metadata)
    if source.architecture not in _TYPES:
        raise StoreError(
            f"{path}: architecture {source.architecture!r} is none of which a folder is made ({', '.join(_TYPES)})"
        )
    experts = source.number("expert_count") if source.get("expert_count") else None
    kinds = _TYPES[source.architecture]
    kind = kinds.get(bool(experts)) or next(iter(kinds.values()))
    heads, width = source.number("attention.head_count"), source.number("embedding_length")
    size = source.number("attention.key_length", source.number("rope.dimension_count", width // heads))
    _refuse_other_computations(source, size)
    config: dict[str, Any] = {
        "architectures": [GGUF_FAMILIES[kind].model_class],
        "model_type": kind,
        "dtype": "bfloat16",  # to compute in: a GGUF file names none
        "hidden_size": width,
        "intermediate_size": source.number("feed_forward_length"),
        "num_hidden_layers": source.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.number("attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": source.number("context_length"),
        "rms_norm_eps": source.real("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.spec("token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in file.specs,
        "bos_token_id": source.token("bos"),
        "eos_token_id": source.token("eos"),
        "pad_token_id": source.token("padding"),
        "rope_parameters": _rotations(source),
    }
    if source.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.specs
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.specs
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": source.number("expert_used_count")}
    if kind == "mixtral":
        config["sliding_window"] = None
    elif kind == "qwen3_moe":
        config |= {"moe_intermediate_size": source.number("expert_feed_forward_length"), "norm_topk_prob": True}
        config |= {"num_experts": experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
    elif kind == "gemma3_text":
        config |= _gemma(source, size)
    if ROTATIONS in file.specs:
        config["rope_parameters"] |= _llama_3(path, file, config)
    return config


def _refuse_other_computations(source: _MetadataReader, head_size: int) -> None:
    """Refuse what llama.cpp reads and transformers' model of the architecture has no place for."""
    usual: dict[str, float] = {"rope.dimension_count": head_size, "attention.causal": True}
    if source.architecture == "gemma3":
        usual |= {"rope.freq_base_swa": LOCAL_ROTATIONS, "final_logit_softcapping": 0, "attn_logit_softcapping": 0}
    for key, value in usual.items():
        if source.get(key, value) != value:
            raise StoreError(
                f"{source.path}: {source.architecture}.{key} is {show(source.get(key))}, which no config.json that is "
                f"made here says (it has {show(value)}); give the model's folder"
            )


def _llama_3(path: Path, file: TensorFile, config: dict[str, Any]) -> dict[str, Any]:
    """The settings that give the file's rotations, which it has as numbers."""
    stored = [float(number) for number in file.read_float(ROTATIONS).reshape(-1)]
    for context in _CONTEXTS:
        rope = {**_LLAMA_3, "factor": max(stored), "original_max_position_embeddings": context, "rope_type": "llama3"}
        factors = rope_factors(ModelConfig(path, {**config, "rope_parameters": {**config["rope_parameters"], **rope}}))
        assert factors is not None
        if len(factors) == len(stored) and all(
            abs(one - other) <= 1e-4 * other for one, other in zip(factors, stored, strict=True)
        ):
            return rope
    raise StoreError(
        f"{path}: its rotations ({ROTATIONS}) are none of llama 3's, so no config.json can be made; "
        "give the model's folder"
    )


def _rotations(source: _MetadataReader) -> dict[str, Any]:
    base = source.real("rope.freq_base", 10_000.0)
    if base <= 0:
        raise StoreError(f"{source.path}: {source.architecture}.rope.freq_base must be above zero, got {base}")
    rotations: dict[str, Any] = {"rope_theta": base, "rope_type": "default"}
    factor = source.real("rope.scaling.factor", source.real("rope.scale_linear", 0.0)) or 1.0  # an older name of it
    kind = source.get("rope.scaling.type", "none" if factor == 1 else "linear")
    unusual = [key for key, usual in ONLY_GGUF.items() if source.real(key, usual) != usual]
    if kind not in ("none", "linear", "yarn") or unusual:
        raise StoreError(
            f"{source.path}: rotary positions of type {show(kind)}{''.join(f', {key}' for key in unusual)}, which no "
            "config.json that is made here says; give the model's folder"
        )
    if kind != "none":
        rotations |= {"rope_type": kind, "factor": factor}
        if source.get("rope.scaling.original_context_length"):
            rotations["original_max_position_embeddings"] = source.number("rope.scaling.original_context_length")
    if kind == "yarn":
        betas = {name: source.real(f"rope.scaling.yarn_{name}", usual) for name, usual in YARN_BETAS.items()}
        rotations |= {name: value for name, value in betas.items() if value != YARN_BETAS[name]}
    return rotations


def _gemma(source: _MetadataReader, size: int) -> dict[str, Any]:
    pattern = source.number("attention.sliding_window_pattern", _GEMMA_PATTERN)
    layers = source.number("block_count")
    kinds = ["full_attention" if (at + 1) % pattern == 0 else "sliding_attention" for at in range(layers)]
    rotations = _rotations(source)
    return {
        "sliding_window": source.number("attention.sliding_window"),
        "layer_types": kinds,
        "query_pre_attn_scalar": size,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": rotations,
            "sliding_attention": {"rope_theta": LOCAL_ROTATIONS, "rope_type": "default"},
        },
    }
