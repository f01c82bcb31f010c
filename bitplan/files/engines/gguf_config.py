"""A Hugging Face config.json from what a GGUF file says of its model: the way back from `gguf_metadata`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitplan.base.documents import is_number, show
from bitplan.base.errors import StoreError
from bitplan.files.engines.gguf_metadata import LOCAL_ROTATIONS, YARN_BETAS, ModelConfig, rope_factors
from bitplan.files.gguf import GGUFValue
from bitplan.files.gpt_oss.config import ONLY_GGUF
from bitplan.files.tensor_file import TensorFile
from bitplan.plan.structure.families import GGUF_FAMILIES

# llama.cpp's architecture -> the model types that come back, by whether they have experts.
_TYPES: dict[str, dict[bool, str]] = {}
for _kind, _family in GGUF_FAMILIES.items():
    if _family.model_class:
        _TYPES.setdefault(_family.architecture, {})[_family.experts is not None] = _kind
_GEMMA_PATTERN = 6
ROTATIONS = "rope_freqs.weight"  # of llama 3: a divisor for each frequency
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of every llama 3 that was published
_CONTEXTS = tuple(2**power for power in range(4, 21))


class _Said:
    """The metadata of one architecture, with errors that name the key."""

    def __init__(self, path: Path, metadata: Mapping[str, GGUFValue]) -> None:
        self.path, self._metadata = path, metadata
        self.architecture = str(self._value("general.architecture"))

    def _value(self, key: str) -> Any:
        found = self._metadata.get(key)
        return None if found is None else found.value

    def get(self, key: str, default: Any = None) -> Any:
        value = self._value(f"{self.architecture}.{key}")
        return default if value is None else value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, Sequence) and not isinstance(value, str) and len({*value}) == 1:
            value = int(value[0])  # one for each layer, all the same
        if type(value) is not int or value <= 0:
            raise StoreError(
                f"{self.path}: {self.architecture}.{key} must be a whole number above zero, got {show(value)}"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A float32 as the short number that it was made of."""
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
    """What transformers needs to know; an architecture of which that is not known is refused."""
    said = _Said(path, file.metadata)
    if said.architecture not in _TYPES:
        raise StoreError(
            f"{path}: architecture {said.architecture!r} is none of which a folder is made ({', '.join(_TYPES)})"
        )
    experts = said.number("expert_count") if said.get("expert_count") else None
    kinds = _TYPES[said.architecture]
    kind = kinds.get(bool(experts)) or next(iter(kinds.values()))
    heads, width = said.number("attention.head_count"), said.number("embedding_length")
    size = said.number("attention.key_length", said.number("rope.dimension_count", width // heads))
    _refuse_other_computations(said, size)
    config: dict[str, Any] = {
        "architectures": [GGUF_FAMILIES[kind].model_class],
        "model_type": kind,
        "dtype": "bfloat16",  # to compute in: a GGUF file names none
        "hidden_size": width,
        "intermediate_size": said.number("feed_forward_length"),
        "num_hidden_layers": said.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.number("attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": said.number("context_length"),
        "rms_norm_eps": said.real("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.spec("token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in file.specs,
        "bos_token_id": said.token("bos"),
        "eos_token_id": said.token("eos"),
        "pad_token_id": said.token("padding"),
        "rope_parameters": _rotations(said),
    }
    if said.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.specs
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.specs
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": said.number("expert_used_count")}
    if kind == "mixtral":
        config["sliding_window"] = None
    elif kind == "qwen3_moe":
        config |= {"moe_intermediate_size": said.number("expert_feed_forward_length"), "norm_topk_prob": True}
        config |= {"num_experts": experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
    elif kind == "gemma3_text":
        config |= _gemma(said, size)
    if ROTATIONS in file.specs:
        config["rope_parameters"] |= _llama_3(path, file, config)
    return config


def _refuse_other_computations(said: _Said, head_size: int) -> None:
    """Refuse what llama.cpp reads and transformers' model of the architecture has no place for."""
    usual: dict[str, float] = {"rope.dimension_count": head_size, "attention.causal": True}
    if said.architecture == "gemma3":
        usual |= {"rope.freq_base_swa": LOCAL_ROTATIONS, "final_logit_softcapping": 0, "attn_logit_softcapping": 0}
    for key, value in usual.items():
        if said.get(key, value) != value:
            raise StoreError(
                f"{said.path}: {said.architecture}.{key} is {show(said.get(key))}, which no config.json that is made "
                f"here says (it has {show(value)}); give the model's folder"
            )


def _llama_3(path: Path, file: TensorFile, config: dict[str, Any]) -> dict[str, Any]:
    """The settings that give the file's rotations, which it has as numbers."""
    wanted = [float(number) for number in file.read_float(ROTATIONS).reshape(-1)]
    for context in _CONTEXTS:
        own = {**_LLAMA_3, "factor": max(wanted), "original_max_position_embeddings": context, "rope_type": "llama3"}
        factors = rope_factors(ModelConfig(path, {**config, "rope_parameters": {**config["rope_parameters"], **own}}))
        assert factors is not None
        if len(factors) == len(wanted) and all(
            abs(one - other) <= 1e-4 * other for one, other in zip(factors, wanted, strict=True)
        ):
            return own
    raise StoreError(
        f"{path}: its rotations ({ROTATIONS}) are none of llama 3's, so no config.json can be made; "
        "give the model's folder"
    )


def _rotations(said: _Said) -> dict[str, Any]:
    rotations: dict[str, Any] = {"rope_theta": said.real("rope.freq_base", 10_000.0), "rope_type": "default"}
    factor = said.real("rope.scaling.factor", said.real("rope.scale_linear", 0.0)) or 1.0  # an older name of it
    kind = said.get("rope.scaling.type", "none" if factor == 1 else "linear")
    unusual = [key for key, usual in ONLY_GGUF.items() if said.real(key, usual) != usual]
    if kind not in ("none", "linear", "yarn") or unusual:
        raise StoreError(
            f"{said.path}: rotary positions of type {show(kind)}{''.join(f', {key}' for key in unusual)}, which no "
            "config.json that is made here says; give the model's folder"
        )
    if kind != "none":
        rotations |= {"rope_type": kind, "factor": factor}
        if said.get("rope.scaling.original_context_length"):
            rotations["original_max_position_embeddings"] = said.number("rope.scaling.original_context_length")
    if kind == "yarn":
        betas = {name: said.real(f"rope.scaling.yarn_{name}", usual) for name, usual in YARN_BETAS.items()}
        rotations |= {name: value for name, value in betas.items() if value != YARN_BETAS[name]}
    return rotations


def _gemma(said: _Said, size: int) -> dict[str, Any]:
    pattern = said.number("attention.sliding_window_pattern", _GEMMA_PATTERN)
    layers = said.number("block_count")
    kinds = ["full_attention" if (at + 1) % pattern == 0 else "sliding_attention" for at in range(layers)]
    rotations = _rotations(said)
    return {
        "sliding_window": said.number("attention.sliding_window"),
        "layer_types": kinds,
        "query_pre_attn_scalar": size,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": rotations,
            "sliding_attention": {"rope_theta": LOCAL_ROTATIONS, "rope_type": "default"},
        },
    }
