"""The one table of names: what tensors are called where no code says what they are for.

A module that can be run is seen (`describe`), and needs no row here. This table is for the rest: bare safetensors and
GGUF files, names in plans and manifests, and the way between the names of transformers, GGUF and MLX. Whoever reads it
says so: such a view has the source "table".

    NAMES      last part (or last two parts) of a module's name -> its role, and what engines join it with
    _ROLES     patterns of names -> the coarser roles that manifests and plans have
    FAMILIES   model type of transformers -> llama.cpp's architecture, how it differs, where its experts are, and which
               of its matrices no packed layer can hold
    TEXT_KEYS, VISION_KEYS    model type -> under which keys of its config.json the sizes of its blocks are
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bitplan.plan.names import natural_order, split_layer
from bitplan.plan.structure.model_view import TABLE, UNKNOWN, ModelView, Stack, TensorRecord

# Experts that lie in a file one by one: model.layers.0.mlp.experts.7.up_proj.weight.
_EXPERT = re.compile(r"((?:.*\.)?experts)\.([0-9]+)\.(.*)")
_ITEM = re.compile(r"\[[0-9]+\]$")  # of a tensor that has all experts
_KIND = re.compile(r"[._](weight|bias|blocks|scales|scale)$")


@dataclass(frozen=True)
class NameRow:
    """Names of one role, "^" before a whole name; engines compute those of one `joined` word and block as one layer."""

    role: str
    names: tuple[str, ...]
    joined: str = ""


# In the order of a decoder block.
NAMES = (
    NameRow("embedding", ("embed_tokens", "token_embd", "wte", "embedding", "tok_embeddings", "word_embeddings")),
    NameRow("attention_norm", ("input_layernorm", "attn_norm", "attn.norm", "attention_norm", "ln_1")),
    NameRow("query", ("q_proj", "attn_q", "query", "wq", "to_q", "q_lin"), "qkv"),
    NameRow("key", ("k_proj", "attn_k", "key", "wk", "to_k", "k_lin"), "qkv"),
    NameRow("value", ("v_proj", "attn_v", "value", "wv", "to_v", "v_lin"), "qkv"),
    NameRow("qkv", ("qkv_proj", "qkv", "attn_qkv", "c_attn", "query_key_value", "Wqkv", "to_qkv")),
    NameRow("sinks", ("sinks", "attn_sinks")),
    NameRow("attention_output", ("o_proj", "attn.out", "attn_output", "attn_out", "wo", "attn.c_proj", "out_lin")),
    NameRow("mlp_norm", ("post_attention_layernorm", "mlp.norm", "ffn_norm", "ln_2", "pre_feedforward_layernorm")),
    NameRow("router", ("router", "mlp.gate", "moe.gate", "block_sparse_moe.gate", "ffn_gate_inp")),
    NameRow("gate", ("gate_proj", "ffn_gate", "w1"), "gate_up"),
    NameRow("up", ("up_proj", "ffn_up", "w3"), "gate_up"),
    NameRow("gate", ("ffn_gate_exps",), "gate_up_exps"),
    NameRow("up", ("ffn_up_exps",), "gate_up_exps"),
    NameRow("up", ("c_fc", "fc1", "dense_h_to_4h")),
    NameRow("gate_up", ("gate_up_proj", "gate_up", "mlp1", "ffn_gate_up_exps")),
    NameRow("down", ("down_proj", "ffn_down", "w2", "mlp2", "ffn_down_exps", "mlp.c_proj", "fc2", "dense_4h_to_h")),
    NameRow("norm", ("output_norm", "ln_f")),
    NameRow("head", ("lm_head", "unembedding", "embed_out", "^output")),
)
_EXPERT_ROLES = ("gate", "up", "gate_up", "down")
_ROW_OF = {name: row for row in NAMES for name in row.names}
_GUESSED = {"embed": "embedding", "position": "position_embedding", "norm": "norm", "bias": "bias", "router": "router"}


# In the order in which they are tried.
_ROLES = tuple(
    (role, re.compile(pattern, re.IGNORECASE))
    for role, pattern in (
        ("scale", r"[._]scales$"),
        ("bias", r"(^|[._])bias$"),
        ("norm", r"norm\w*$|(norm\w*|(^|[._])ln(_?\w+)?)\.(weight|scale|gamma)$"),
        ("router", r"router\b|(^|\.)(gate|wg)\.weight$|shared_expert_gate\b|gate_inp\w*\.weight$"),
        ("rope", r"rotary|(^|[._])rope|inv_freq|freqs_cis|(cos|sin)_cached"),
        (
            "position",
            r"position\w*embed|pos(itional)?_embed|embed_positions|(^|[._])wpe\b|position_embd|relative_\w*bias",
        ),
        ("state", r"(^|[._])(A_log|ssm_a)$"),
        (
            "embed",
            r"embed|embd|\bwte\b|^shared\.weight$|(^|\.)lm_head\b|^output\.weight$|predictions\.decoder\.weight$"
            r"|(^|\.)(score|classifier|qa_outputs|output_projection)\.weight$",
        ),
        ("attn", r"attn|attention|sinks|[qkv]_proj|qkv"),
        ("mlp_weight", r"mlp|ffn|experts|feed_forward"),
    )
)


def guess_role(name: str) -> str:
    """scale, bias, norm, router, rope, position, state, embed (output heads too), attn, mlp_weight, or other."""
    return next((role for role, pattern in _ROLES if pattern.search(name)), "other")


@dataclass(frozen=True)
class ExpertNames:
    """Where a block keeps its experts, one Linear each: `{experts}.{number}.{gate}.weight`."""

    router: str
    experts: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """How a model type of transformers goes into GGUF and comes back.

    architecture    llama.cpp's name; it computes with one activation, whatever a config says
    model_class     transformers' class for what comes back; empty where another type comes back
    permutes        rows of q and k are in another order there
    norms_plus_one  a norm's weight is stored one higher
    columns         pattern of modules whose matrix is [inputs, outputs] (transformers' Conv1D)
    read_directly   pattern of modules whose weight other code reads: multiplies by it, or casts to its type
    expert_columns  its stacked experts are [experts, inputs, outputs]: "packed" where a packed layer holds them,
                    "unpacked" where none computes them
    """

    architecture: str = ""
    model_class: str = ""
    permutes: bool = False
    norms_plus_one: bool = False
    activation: str = "silu"
    experts: ExpertNames | None = None
    columns: str = ""
    read_directly: str = ""
    expert_columns: str = ""


_CONV1D = Family(columns="c_attn|q_attn|c_proj|c_fc")
_UNPACKED_EXPERTS = Family(expert_columns="unpacked")
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", permutes=True),
    "mistral": Family("llama", permutes=True),
    "mixtral": Family(
        "llama",
        "MixtralForCausalLM",
        permutes=True,
        experts=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    ),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": Family(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        experts=ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    ),
    "gemma3": Family("gemma3", norms_plus_one=True, activation="gelu_pytorch_tanh"),
    "gemma3_text": Family("gemma3", "Gemma3ForCausalLM", norms_plus_one=True, activation="gelu_pytorch_tanh"),
    "gpt_oss": Family(expert_columns="packed"),
    **dict.fromkeys(("llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"), _UNPACKED_EXPERTS),
    **dict.fromkeys(("aria", "aria_text"), _UNPACKED_EXPERTS),
    **dict.fromkeys(("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder"), _CONV1D),
    **dict.fromkeys(("mamba", "falcon_mamba"), Family(read_directly="dt_proj|embeddings|lm_head")),
    "mamba2": Family(read_directly="embeddings|lm_head"),
    "jamba": Family(read_directly="dt_proj"),
    **dict.fromkeys(("deberta", "deberta-v2", "sew-d"), Family(read_directly="rel_embeddings|attention.self.in_proj")),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), Family(read_directly="weights_proj")),
    "rwkv": Family(read_directly=r"attention\.output|feed_forward\.value"),  # which it divides before it runs
}


@dataclass(frozen=True)
class ConfigKeys:
    """Under which keys a configuration has the sizes of a stack of blocks; of several keys the first that is there.

    kv_heads       empty: as many as heads. `grouped_if`: only where this key is not False
    ffn            of dense blocks; "mlp_ratio" is a factor of `hidden`
    experts        how many a layer has; empty where there are none. `needs_experts`: the key must be there
    shared_ffn     width of the shared expert, or with `shared_count` of each of so many
    moe_*          which blocks have experts: every n-th counted from one (`step`) or from zero (`every`, or a list of 0
                   and 1), all from a number on (`first`), all but these (`except`); without keys all
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
    moe_step: str = ""
    moe_every: str = ""
    moe_first: str = ""
    moe_except: str = ""
    latent: tuple[str, ...] = ()
    latent_if: str = ""
    latent_norm: str = ""
    gated: bool | tuple[str, ...] = True


_QWEN_MOE = ConfigKeys(
    experts=("num_experts", "num_local_experts"),
    shared_ffn="shared_expert_intermediate_size",
    moe_step="decoder_sparse_step",
    moe_except="mlp_only_layers",
)
_DEEPSEEK = ConfigKeys(
    experts=("n_routed_experts",),
    needs_experts=False,
    shared_ffn="moe_intermediate_size",
    shared_count="n_shared_experts",
    moe_every="moe_layer_freq",
    moe_first="first_k_dense_replace",
    latent=("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
TEXT_KEYS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text"), ConfigKeys()),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text"), ConfigKeys()),
    "mixtral": ConfigKeys(experts=("num_local_experts",), expert_ffn=("intermediate_size",)),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text"), _QWEN_MOE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _DEEPSEEK),
}
_CLIP = ConfigKeys(kv_heads="", head_dim="", gated=False)
_QWEN_VIT = replace(_CLIP, heads="num_heads", blocks="depth")
VISION_KEYS = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _CLIP,
    "qwen2_vl": replace(_QWEN_VIT, hidden="embed_dim", ffn="mlp_ratio"),
    "qwen2_5_vl": replace(_QWEN_VIT, gated=True),
    "qwen3_vl": _QWEN_VIT,
    "qwen3_vl_moe": _QWEN_VIT,
}
MEGATRON_KEYS = ConfigKeys(
    blocks="num_layers",
    kv_heads="num_query_groups",
    grouped_if="group_query_attention",
    head_dim="kv_channels",
    ffn="ffn_hidden_size",
    experts=("num_experts", "num_moe_experts"),
    needs_experts=False,
    expert_ffn=("moe_ffn_hidden_size", "ffn_hidden_size"),
    topk="moe_router_topk",
    shared_ffn="moe_shared_expert_intermediate_size",
    moe_every="moe_layer_freq",
    latent=("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    latent_if="multi_latent_attention",
    latent_norm="qk_layernorm",
    gated=("swiglu", "gated_linear_unit"),
)

GGUF_FAMILIES = {kind: family for kind, family in FAMILIES.items() if family.architecture}
GGUF_MANIFESTS = ("llama", "qwen", "gemma", "phi3")  # manifests that say what tensors are called in GGUF files
_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj|fc1\.weight|fc2\.weight)$")
# What these families are made of, under transformers' names; a model has some of each.
OUTSIDE_BLOCKS = ("model.embed_tokens", "model.norm", "lm_head")
BLOCK_NORMS = (
    *("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
BLOCK_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
BLOCK_FEED = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))


def has_no_packed_layer(name: str, kinds: Iterable[str]) -> bool:
    """Whether no packed layer can hold a tensor of a model that consists of these types."""
    for family in (FAMILIES[kind] for kind in kinds if kind in FAMILIES):
        if family.read_directly and _is_weight_of(family.read_directly, name):
            return True
        if family.expert_columns == "unpacked" and _STACKED.search(name):
            return True
    return False


def is_packed_transposed(name: str, kinds: Iterable[str]) -> bool:
    """Whether a tensor of a model that consists of these types lies as [.., inputs, outputs], and is packed turned."""
    for family in (FAMILIES[kind] for kind in kinds if kind in FAMILIES):
        if family.columns and _is_weight_of(family.columns, name):
            return True
        if family.expert_columns == "packed" and _STACKED.search(name):
            return True
    return False


def _is_weight_of(modules: str, name: str) -> bool:
    return re.search(rf"(^|\.)({modules})\.weight$", name) is not None


def split_expert(name: str) -> tuple[str, int, str] | None:
    """The name up to `experts`, the expert's number, and its part's name; None for what is no expert's alone."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), match[3])


def without_expert(name: str) -> str:
    """The name that a projection's weights have in common, of all experts of a layer: without the expert's number."""
    return _EXPERT.sub(r"\1.\3", name)


def row_of(name: str) -> NameRow | None:
    """The row of a tensor or module, by the last parts of its name; None where it has none."""
    module = _ITEM.sub("", name)
    while (shorter := _KIND.sub("", module)) != module:
        module = shorter
    parts = module.split(".")
    return _ROW_OF.get(f"^{module}") or _ROW_OF.get(".".join(parts[-2:])) or _ROW_OF.get(parts[-1])


def joined_name(tensor: str, *, joined: bool = True) -> str:
    """The name that tensors have in common which need one format: of one joined layer, and of a layer's experts."""
    module = without_expert(_ITEM.sub("", tensor).removesuffix(".weight"))
    parent, _, last = module.rpartition(".")
    row = _ROW_OF.get(last)
    last = row.joined if joined and row is not None and row.joined else last
    return f"{parent}.{last}" if parent else last


def role_of(name: str) -> str:
    """The role of a tensor as its name says; "unknown" where names say nothing."""
    if name.endswith((".bias", "_bias")):
        return "bias"
    row = row_of(name)
    role = row.role if row is not None else _GUESSED.get(guess_role(name), UNKNOWN)
    return "norm" if role.endswith("_norm") else role


def view_by_names(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> ModelView:
    """What names alone say of tensors (name, shape, format): roles, and what engines join. Nothing was seen."""
    records, joined, blocks = [], dict[str, list[str]](), dict[str, None]()
    for name, shape, fmt in tensors:
        row = row_of(name)
        experts = shape[0] if row is not None and row.role in _EXPERT_ROLES and len(shape) == 3 else 0
        records.append(
            TensorRecord(name, tuple(shape), "", role_of(name), name.rpartition(".")[0], fmt, experts=experts)
        )
        if row is not None and row.joined and name.endswith(".weight"):
            holder = name.removesuffix(".weight").rpartition(".")[0]
            joined.setdefault(f"{holder}.{row.joined}", []).append(name)
        before, number, _ = split_layer(name)
        if number:
            blocks[f"{before}{number}"] = None
    stacks: dict[str, list[str]] = {}
    for block in natural_order(blocks):
        stacks.setdefault(block.rpartition(".")[0], []).append(block)
    return ModelView(
        TABLE,
        tuple(records),
        stacks=tuple(Stack(path, tuple(paths), (0,) * len(paths)) for path, paths in stacks.items()),
        joined=tuple(tuple(names) for names in joined.values() if len(names) > 1),
        notes=("no code was run: roles are those that the table of families has for these names",),
    )
