"""From a Hugging Face config.json to the parts of a model: sizes, experts, dense first layers, a VLM's two halves.

Sizes are read by the key names of each family (`PartKeys`, a row of a table), and nothing is guessed: an unknown
architecture or a missing size is an error that names the key, because a wrong shape would be measured, merged and
believed.

    dense      llama, mistral, qwen2, qwen3 and the text halves of qwen2_vl, qwen2_5_vl, qwen3_vl
    MoE        mixtral; qwen2_moe, qwen3_moe, qwen3_vl_moe (decoder_sparse_step, mlp_only_layers, a shared expert)
    MLA        deepseek_v2, deepseek_v3 (n_shared_experts, first_k_dense_replace, moe_layer_freq)
    ViT        the vision_config of qwen2_vl, qwen2_5_vl, qwen3_vl(_moe), clip and siglip
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitplan.base.documents import Reader, load_document, show
from bitplan.base.errors import did_you_mean
from bitplan.fp8.policy.layers import Attention, Experts, LatentAttention, ModelPart
from bitplan.fp8.policy.vocabulary import COUNT, ModelConfigError


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


MAX_BLOCKS = 10_000


@dataclass(frozen=True)
class PartKeys:
    """Under which keys a family's configuration has the sizes of its blocks; of several keys the first that is there.

    kv_heads       empty: as many as heads. `grouped_if`: only where this key is not False
    ffn            of dense blocks; "mlp_ratio" is a factor of `hidden`
    experts        how many a layer has; empty where there are none. `needs_experts`: the key must be there
    shared_ffn     width of the shared expert, or with `shared_count` of each of so many
    moe_blocks     how many of the blocks have experts
    latent         queries' and keys' and values' rank, and the dimensions without rotation, with it, and of values;
                   `latent_if`: only where this key is set; `latent_norm`: the key for a norm between down and up
    gated          whether the MLP is, or the keys that say so
    """

    blocks: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    grouped_if: str = ""
    head_dim: str = "head_dim"
    ffn: str = "intermediate_size"
    experts: tuple[str, ...] = ()
    needs_experts: bool = True
    expert_ffn: tuple[str, ...] = ("moe_intermediate_size",)
    topk: str = "num_experts_per_tok"
    shared_ffn: str = ""
    shared_count: str = ""
    moe_blocks: Callable[[ConfigObject, int], int] = lambda _, blocks: blocks
    latent: tuple[str, ...] = ()
    latent_if: str = ""
    latent_norm: str = ""
    gated: bool | tuple[str, ...] = True


def _qwen_moe_blocks(config: ConfigObject, blocks: int) -> int:
    step, dense_only = config.size("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or []
    if not isinstance(dense_only, list | tuple) or not all(type(block) is int for block in dense_only):
        raise config.fail(f"{config.prefix}mlp_only_layers must be a list of block numbers, got {show(dense_only)}")
    return sum((block + 1) % step == 0 and block not in dense_only for block in range(blocks))


def _deepseek_moe_blocks(config: ConfigObject, blocks: int) -> int:
    first, every = config.optional("first_k_dense_replace") or 0, config.size("moe_layer_freq", 1)
    return sum(block >= first and block % every == 0 for block in range(blocks))


_DENSE = PartKeys()
_QWEN_MOE = PartKeys(
    experts=("num_experts", "num_local_experts"),
    shared_ffn="shared_expert_intermediate_size",
    moe_blocks=_qwen_moe_blocks,
)
_DEEPSEEK = PartKeys(
    experts=("n_routed_experts",),
    needs_experts=False,
    shared_ffn="moe_intermediate_size",
    shared_count="n_shared_experts",
    moe_blocks=_deepseek_moe_blocks,
    latent=("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_TEXT = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text"), _DENSE),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text"), _DENSE),
    "mixtral": PartKeys(experts=("num_local_experts",), expert_ffn=("intermediate_size",)),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text"), _QWEN_MOE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _DEEPSEEK),
}
_CLIP = PartKeys(kv_heads="", head_dim="", gated=False)
_QWEN_VIT = replace(_CLIP, heads="num_heads", blocks="depth")
_VISION = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _CLIP,
    "qwen2_vl": replace(_QWEN_VIT, hidden="embed_dim", ffn="mlp_ratio"),
    "qwen2_5_vl": replace(_QWEN_VIT, gated=True),
    "qwen3_vl": _QWEN_VIT,
    "qwen3_vl_moe": _QWEN_VIT,
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


def _text_part(config: ConfigObject, model_type: Any) -> ModelPart:
    keys = _TEXT.get(model_type) if isinstance(model_type, str) else None
    if keys is None:
        known = sorted(_TEXT)
        hint = did_you_mean(model_type[:80], known) if isinstance(model_type, str) else ""
        raise config.fail(
            f"{config.prefix}model_type {show(model_type)} is not known; known are {', '.join(known)}{hint}; "
            "another architecture can be described by its YAML keys"
        )
    return read_part(config, "llm", keys)


def _vision_part(config: ConfigObject, model_type: Any) -> ModelPart:
    given = config.values.get("model_type", model_type)
    names = [str(name).removesuffix("_vision") for name in (given, model_type)]
    keys = next((_VISION[name] for name in names if name in _VISION), None)
    if keys is None:
        known = ", ".join(sorted(_VISION))
        raise config.fail(f"vision_config.model_type {show(given)} is not known; known are {known}")
    return read_part(config, "vit", keys)


def read_part(config: ConfigObject, part: str, keys: PartKeys) -> ModelPart:
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
        moe = keys.moe_blocks(config, blocks)
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


def _attention(config: ConfigObject, keys: PartKeys, hidden: int, heads: int) -> Attention | LatentAttention:
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
