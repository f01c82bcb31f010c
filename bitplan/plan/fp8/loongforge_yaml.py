"""From a LoongForge YAML to the parts of a model and the FP8 options of each.

A file describes one model, or under `model` a `foundation` (the LLM) and an `image_encoder` (the ViT), each with sizes
under Megatron's names and its own FP8 keys:

    fp8: "e4m3"                    the format; "hybrid" takes E5M2 for gradients
    fp8_recipe: "blockwise"        tensorwise, rowwise, blockwise or mxfp8
    fp8_param: true                weights are kept in FP8
    selective_fp8: true            ask the policy, module by module
    fp8_dynamic_policy_path: ...   the policy's file, relative to the YAML or to a folder above it
    fp8_dynamic_num_tokens: 4096   tokens per step in this part, where it is not seq_length x micro_batch_size

`defaults` includes other files, as in Hydra; the caller reads them (`open_base`), so that this module stays pure. Other
keys are ignored, but an unknown key with one of our prefixes is a spelling mistake, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bitplan.documents import FLAG, NAME, document_key, keys_of, one_of, show
from bitplan.errors import did_you_mean
from bitplan.formats.fp8_recipes import RECIPES
from bitplan.plan.fp8.layers import Attention, Experts, LatentAttention, ModelPart, Parallel
from bitplan.plan.fp8.model_parts import MAX_BLOCKS, ConfigObject, whole
from bitplan.plan.fp8.vocabulary import COUNT, DEFAULT_RECIPE, ModelConfigError
from bitplan.yaml_reader import load_yaml

MAX_FILES = 32
MAX_FILES_DEEP = 8
MAX_PACKAGE_PARTS = 8
COMPONENTS = {"foundation": "llm", "image_encoder": "vit"}
OpenBase = Callable[[str], str]  # the name of another file, as written in `defaults` -> its text


@dataclass(frozen=True)
class Fp8Options:
    """What the YAML asks of FP8 in one part of a model."""

    fp8: str | None = document_key(one_of("e4m3", "hybrid"), None)
    fp8_recipe: str = document_key(one_of(*RECIPES), DEFAULT_RECIPE)
    fp8_param: bool = document_key(FLAG, False)
    selective_fp8: bool = document_key(FLAG, False)
    fp8_dynamic_policy_path: str | None = document_key(NAME, None)
    fp8_dynamic_num_tokens: int | None = document_key(COUNT, None)


@dataclass(frozen=True)
class YamlModel:
    """The parts of a model, the FP8 keys of each, and the parallel sizes that the file sets (else None)."""

    parts: tuple[ModelPart, ...]
    options: Mapping[str, Fp8Options]
    tp: int | None = None
    ep: int | None = None
    etp: int | None = None
    tokens: int | None = None  # seq_length x micro_batch_size, of the LLM or of the only part

    def parallel(self, tp: int | None = None, ep: int | None = None, etp: int | None = None) -> Parallel:
        """The given sizes, else those of the file, else 1; with experts etp defaults to tp, as in Megatron."""
        chosen = tp or self.tp or 1
        follows = chosen if any(part.experts for part in self.parts) else 1
        return Parallel(chosen, ep or self.ep or 1, etp or self.etp or follows)


_SIZE_KEYS = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
_PARALLEL_KEYS = {
    "tp": "tensor_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def read_yaml_model(
    text: str,
    *,
    where: str = "model.yaml",
    open_base: OpenBase | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> YamlModel:
    """The model of a YAML file. `overrides` replace the LLM's keys, like a launch script's arguments."""
    document = _compose(text, where, open_base, depth=0, opened=[where])
    model = document.get("model")
    if isinstance(model, Mapping) and any(name in model for name in COMPONENTS):
        components = {COMPONENTS[name]: (model[name], f"model.{name}.") for name in COMPONENTS if name in model}
    else:
        components = {_single_part(document): (document, "")}
    parts, options = [], {}
    sizes: dict[str, int | None] = {}
    for part, (values, prefix) in components.items():
        config = ConfigObject(values, prefix, where)
        if part == "llm" or len(components) == 1:
            config = ConfigObject({**config.values, **(overrides or {})}, prefix, where)
        options[part] = _options(config)
        # A file that only switches FP8 on need not describe a model.
        if options[part] == Fp8Options() or any(key in config.values for key in _SIZE_KEYS):
            parts.append(_part(config, part))
        if part == "llm" or len(components) == 1:
            sizes["tokens"] = _tokens(config) or _tokens(ConfigObject(document, "", where))
        for word, key in _PARALLEL_KEYS.items():
            sizes[word] = sizes.get(word) or config.optional(key)
    return YamlModel(tuple(parts), options, **sizes)


# ---- defaults --------------------------------------------------------------------------------------------------------


def _compose(text: str, where: str, open_base: OpenBase | None, depth: int, opened: list[str]) -> dict[str, Any]:
    """The document merged with its `defaults`: later files win over earlier ones, itself is last, or at `_self_`."""
    own = load_yaml(text, where=where)
    bases = own.pop("defaults", [])
    if not isinstance(bases, list):
        raise ModelConfigError(f"{where}: defaults must be a list, got {show(bases)}")
    if depth > MAX_FILES_DEEP:
        raise ModelConfigError(
            f"{where}: defaults lead more than {MAX_FILES_DEEP} files deep; does a file take itself in?"
        )
    result: dict[str, Any] = {}
    for item in [*bases, *([] if "_self_" in bases else ["_self_"])]:
        if item == "_self_":
            result = _over(result, own)
            continue
        name, package = _base_name(item, where)
        if open_base is None:
            raise ModelConfigError(f"{where}: defaults name {name!r}; give open_base, which reads such files")
        opened.append(name)
        if len(opened) > MAX_FILES:
            raise ModelConfigError(f"{where}: defaults take in more than {MAX_FILES} files")
        below = _compose(open_base(name), name, open_base, depth + 1, opened)
        for key in reversed(package):
            below = {key: below}
        result = _over(result, below)
    return result


def _base_name(item: Any, where: str) -> tuple[str, list[str]]:
    """The file that an item names, and the keys under which it is inserted."""
    if isinstance(item, str):
        return item, []
    if isinstance(item, dict) and len(item) == 1:
        (group, name), *_ = item.items()
        if isinstance(group, str) and isinstance(name, str) and " " not in group:
            folder, _, package = group.partition("@")
            parts = package.split(".") if package else []
            if len(parts) <= MAX_PACKAGE_PARTS:
                return f"{folder}/{name}", parts
    raise ModelConfigError(f"{where}: an item of defaults must be NAME or FOLDER@PACKAGE: NAME, got {show(item)}")


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _over(result[key], value) if both else value
    return result


# ---- one part --------------------------------------------------------------------------------------------------------


def _single_part(document: Mapping[str, Any]) -> str:
    """The part of a file with one part: "vit" for an image encoder, by its class or its type; else "llm"."""
    target, model_type = str(document.get("_target_", "")), str(document.get("model_type", ""))
    return "vit" if ".encoder." in target or model_type.endswith("_vit") else "llm"


def _options(config: ConfigObject) -> Fp8Options:
    known = keys_of(Fp8Options)
    for name in config.values:
        if str(name).startswith(("fp8", "selective_fp8")) and name not in known:
            raise config.fail(f"unknown key {config.prefix}{name}{did_you_mean(name, known)}")
    given = {name: value for name, value in config.values.items() if name in known and value is not None}
    for name, value in given.items():
        if not known[name].holds(value):
            raise config.fail(f"{config.prefix}{name} must be {known[name].text}, got {show(value)}")
    options = Fp8Options(**given)
    if options.selective_fp8 and options.fp8 is None:
        raise config.fail(
            f'{config.prefix}selective_fp8 chooses where FP8 is used, and fp8 is not set; add fp8: "e4m3"'
        )
    if options.selective_fp8 and options.fp8_dynamic_policy_path is None:
        raise config.fail(f"{config.prefix}selective_fp8 asks a policy; add fp8_dynamic_policy_path")
    return options


def _tokens(config: ConfigObject) -> int | None:
    length, batch = config.optional("seq_length"), config.optional("micro_batch_size")
    return length * batch if length and batch else None


def _part(config: ConfigObject, part: str) -> ModelPart:
    blocks = config.blocks("num_layers")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    count = config.first_of("num_experts", "num_moe_experts")
    moe = _moe_blocks(config, blocks) if config.optional(count) else 0
    dense = blocks - moe
    ffn = config.size("ffn_hidden_size") if dense else config.optional("ffn_hidden_size") or 0
    experts = None
    if moe:
        expert_ffn = config.first_of("moe_ffn_hidden_size", "ffn_hidden_size")
        shared = config.optional("moe_shared_expert_intermediate_size") or 0
        experts = Experts(config.size(count), config.size(expert_ffn), config.size("moe_router_topk"), shared)
    gated = bool(config.values.get("swiglu") or config.values.get("gated_linear_unit"))
    keys = config.names(
        heads="num_attention_heads",
        kv_heads="num_query_groups",
        ffn="ffn_hidden_size",
        experts=count,
        expert_ffn="moe_ffn_hidden_size",
        shared_ffn="moe_shared_expert_intermediate_size",
    )
    attention = _attention(config, hidden, heads)
    return ModelPart(part, hidden, dense, moe, attention, ffn, gated, experts, keys, config.where)


def _attention(config: ConfigObject, hidden: int, heads: int) -> Attention | LatentAttention:
    if config.values.get("multi_latent_attention"):
        return LatentAttention(
            heads,
            config.optional("q_lora_rank"),
            config.size("kv_lora_rank"),
            config.size("qk_head_dim"),
            config.size("qk_pos_emb_head_dim"),
            config.size("v_head_dim"),
            norm_fused=bool(config.values.get("qk_layernorm")),
        )
    grouped = config.values.get("group_query_attention") is not False
    kv_heads = config.size("num_query_groups", heads) if grouped else heads
    head_dim = config.optional("kv_channels") or whole(hidden, heads, config.where, config.prefix + "hidden_size")
    return Attention(heads, kv_heads, head_dim)


def _moe_blocks(config: ConfigObject, blocks: int) -> int:
    """How many blocks have experts: every n-th, or by a list of 0 and 1, which may be spelt `[0]*3+[1]*58`."""
    value: Any = config.values.get("moe_layer_freq")
    value = 1 if value is None else value
    if COUNT.holds(value):
        return sum(block % value == 0 for block in range(blocks))
    pattern = _spelt_out(value) if isinstance(value, str) else value
    if not isinstance(pattern, list) or len(pattern) != blocks or not all(each in (0, 1) for each in pattern):
        raise config.fail(
            f"{config.prefix}moe_layer_freq must be a count, or {blocks} times 0 or 1 as a list or spelt like "
            f"[0]*3+[1]*58, got {show(value)}"
        )
    return sum(pattern)


def _spelt_out(text: str) -> list[int] | None:
    """`[0]*3+[1]*58`, also as an argument: `${moe_freq:"[0]*3+[1]*58"}`. No regular expression: it could backtrack."""
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
