"""From a Hugging Face config.json to the parts of a model: sizes, experts, dense first layers, a VLM's two halves.

Sizes are read by the key names of each family, and nothing is guessed: an unknown architecture or a missing size is an
error that names the key, because a wrong shape would be measured, merged and believed.

    dense      llama, mistral, qwen2, qwen3 and the text halves of qwen2_vl, qwen2_5_vl, qwen3_vl
    MoE        mixtral; qwen2_moe, qwen3_moe, qwen3_vl_moe (decoder_sparse_step, mlp_only_layers, a shared expert)
    MLA        deepseek_v2, deepseek_v3 (n_shared_experts, first_k_dense_replace, moe_layer_freq)
    ViT        the vision_config of qwen2_vl, qwen2_5_vl, qwen3_vl(_moe), clip and siglip
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitplan.base.documents import Reader, load_document, show
from bitplan.base.errors import did_you_mean
from bitplan.fp8.policy.layers import Attention, Experts, LatentAttention, ModelPart
from bitplan.fp8.policy.vocabulary import COUNT, ModelConfigError

_TEXT = {
    "llama": "dense",
    "mistral": "dense",
    "qwen2": "dense",
    "qwen3": "dense",
    "qwen2_vl": "dense",
    "qwen2_vl_text": "dense",
    "qwen2_5_vl": "dense",
    "qwen2_5_vl_text": "dense",
    "qwen3_vl": "dense",
    "qwen3_vl_text": "dense",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen_moe",
    "qwen3_moe": "qwen_moe",
    "qwen3_vl_moe": "qwen_moe",
    "qwen3_vl_moe_text": "qwen_moe",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
}
MAX_BLOCKS = 10_000
_CLIP = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_QWEN_VIT = ("hidden_size", "intermediate_size", "num_heads", "depth")
# Keys for hidden size, ffn, heads and blocks, and whether the MLP is gated.
_VISION = {
    "clip_vision_model": (_CLIP, False),
    "siglip_vision_model": (_CLIP, False),
    "qwen2_vl": (("embed_dim", "mlp_ratio", "num_heads", "depth"), False),
    "qwen2_5_vl": (_QWEN_VIT, True),
    "qwen3_vl": (_QWEN_VIT, False),
    "qwen3_vl_moe": (_QWEN_VIT, False),
}


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


def model_parts(config: Any, *, where: str = "config.json") -> list[ModelPart]:
    """One part for a language model; for a vision-language model the LLM and the ViT, kept apart."""
    if not isinstance(config, Mapping):
        raise ModelConfigError(f"{where}: a model's config.json must be an object, got {show(config)}")
    model_type = config.get("model_type")
    if "vision_config" not in config:
        return [_text_part(ConfigObject(config, "", where), model_type)]
    nested = next((key for key in ("text_config", "llm_config") if key in config), None)
    text = config if nested is None else config[nested]
    prefix = "" if nested is None else f"{nested}."
    vision = ConfigObject(config["vision_config"], "vision_config.", where)
    own_type = ConfigObject(text, prefix, where).values.get("model_type", model_type)
    return [_text_part(ConfigObject(text, prefix, where), own_type), _vision_part(vision, model_type)]


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
        """The first key that is present; else the first key, for the error to name."""
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def names(self, **ours: str) -> dict[str, str]:
        return {name: self.prefix + key for name, key in ours.items()}

    def fail(self, message: str) -> ModelConfigError:
        return ModelConfigError(f"{self.where}: {message}")


def _text_part(config: ConfigObject, model_type: Any) -> ModelPart:
    family = _TEXT.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = sorted(_TEXT)
        hint = did_you_mean(model_type[:80], known) if isinstance(model_type, str) else ""
        raise config.fail(
            f"{config.prefix}model_type {show(model_type)} is not known; known are {', '.join(known)}{hint}; "
            "another architecture can be described by its YAML keys"
        )
    if family == "dense":
        return _block_part(config, None, {}, config.blocks("num_hidden_layers"), 0)
    if family == "mixtral":
        return _mixtral(config)
    return _qwen_moe(config) if family == "qwen_moe" else _deepseek(config)


def _block_part(config: ConfigObject, experts: Experts | None, keys: dict[str, str], dense: int, moe: int) -> ModelPart:
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    hidden = config.size("hidden_size")
    head_dim = config.optional("head_dim") or whole(hidden, heads, config.where, config.prefix + "hidden_size")
    ffn = config.size("intermediate_size") if dense else config.optional("intermediate_size") or 0
    own_keys = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "ffn": "intermediate_size"}
    attention = Attention(heads, kv_heads, head_dim)
    return ModelPart(
        "llm", hidden, dense, moe, attention, ffn, True, experts, config.names(**own_keys) | keys, config.where
    )


def _mixtral(config: ConfigObject) -> ModelPart:
    experts = Experts(
        config.size("num_local_experts"), config.size("intermediate_size"), config.size("num_experts_per_tok")
    )
    keys = config.names(experts="num_local_experts", expert_ffn="intermediate_size")
    return _block_part(config, experts, keys, 0, config.blocks("num_hidden_layers"))


def _qwen_moe(config: ConfigObject) -> ModelPart:
    count = config.first_of("num_experts", "num_local_experts")
    shared = config.optional("shared_expert_intermediate_size") or 0
    experts = Experts(
        config.size(count), config.size("moe_intermediate_size"), config.size("num_experts_per_tok"), shared
    )
    keys = config.names(experts=count, expert_ffn="moe_intermediate_size", shared_ffn="shared_expert_intermediate_size")
    blocks, step = config.blocks("num_hidden_layers"), config.size("decoder_sparse_step", 1)
    dense_only = config.values.get("mlp_only_layers") or []
    if not isinstance(dense_only, list | tuple) or not all(type(block) is int for block in dense_only):
        raise config.fail(f"{config.prefix}mlp_only_layers must be a list of block numbers, got {show(dense_only)}")
    moe = sum((block + 1) % step == 0 and block not in dense_only for block in range(blocks))
    return _block_part(config, experts if moe else None, keys, blocks - moe, moe)


def _deepseek(config: ConfigObject) -> ModelPart:
    blocks = config.blocks("num_hidden_layers")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    attention = LatentAttention(
        heads,
        config.optional("q_lora_rank"),
        config.size("kv_lora_rank"),
        config.size("qk_nope_head_dim"),
        config.size("qk_rope_head_dim"),
        config.size("v_head_dim"),
    )
    experts, moe = None, 0
    if config.optional("n_routed_experts"):
        ffn = config.size("moe_intermediate_size")
        shared = (config.optional("n_shared_experts") or 0) * ffn
        experts = Experts(config.size("n_routed_experts"), ffn, config.size("num_experts_per_tok"), shared)
        first, every = config.optional("first_k_dense_replace") or 0, config.size("moe_layer_freq", 1)
        moe = sum(block >= first and block % every == 0 for block in range(blocks))
    own_keys = config.names(
        heads="num_attention_heads",
        ffn="intermediate_size",
        experts="n_routed_experts",
        expert_ffn="moe_intermediate_size",
        shared_ffn="moe_intermediate_size x n_shared_experts",
    )
    dense = blocks - moe
    ffn = config.size("intermediate_size") if dense else 0
    return ModelPart("llm", hidden, dense, moe, attention, ffn, True, experts if moe else None, own_keys, config.where)


def _vision_part(config: ConfigObject, model_type: Any) -> ModelPart:
    given = config.values.get("model_type", model_type)
    names = [str(name).removesuffix("_vision") for name in (given, model_type)]
    own = next((name for name in names if name in _VISION), None)
    if own is None:
        known = ", ".join(sorted(_VISION))
        raise config.fail(f"vision_config.model_type {show(given)} is not known; known are {known}")
    (hidden_key, ffn_key, heads_key, blocks_key), gated = _VISION[own]
    hidden, heads = config.size(hidden_key), config.size(heads_key)
    ffn = _ratio(config, hidden) if ffn_key == "mlp_ratio" else config.size(ffn_key)
    head_dim = whole(hidden, heads, config.where, config.prefix + hidden_key)
    keys = config.names(heads=heads_key, kv_heads=heads_key, ffn=ffn_key)
    attention = Attention(heads, heads, head_dim)
    return ModelPart("vit", hidden, config.blocks(blocks_key), 0, attention, ffn, gated, None, keys, config.where)


def _ratio(config: ConfigObject, hidden: int) -> int:
    ratio: Any = config.values.get("mlp_ratio")
    if type(ratio) not in (int, float) or not 0 < ratio < 1000 or (hidden * ratio) % 1:
        raise config.fail(f"vision_config.mlp_ratio must be a number that gives a whole size, got {show(ratio)}")
    return int(hidden * ratio)


def whole(size: int, by: int, where: str, key: str) -> int:
    """A size divided among heads, which must come out even."""
    if size % by:
        raise ModelConfigError(f"{where}: {key} {size} is not a multiple of the {by} heads, and no head size is given")
    return size // by
