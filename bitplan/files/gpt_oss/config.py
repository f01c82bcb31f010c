"""The settings of a gpt-oss checkpoint beside its tensors: config.json in two spellings, and GGUF's metadata.

Sizes follow from the tensors; a config that contradicts them is refused. The rest (`Settings`) is translated from one
spelling to the other, and missing values are those that OpenAI published. What only one spelling can say stays in it:
`check_settings_held` refuses to write it in another. The tokenizer is not written into GGUF: its vocabulary is marked
as absent (`tokenizer.ggml.model` is "none"), which llama.cpp loads.

Rotary positions have a type. YaRN, without rounding the ends of its ramp (`truncate`: false) and with an attention
factor that follows from its factor, is in all three spellings, and so is none at all (OpenAI's factor of 1); linear
scaling is in Hugging Face's and GGUF's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gguf.constants import GGUFValueType

from bitplan.base.documents import Fields, Kind, is_number, one_of, show
from bitplan.base.errors import FileFormatError, StoreError
from bitplan.base.records import read_json
from bitplan.files.gguf import GGUFValue
from bitplan.files.gpt_oss.layouts import LAYOUT_TITLES, GptOssShape, Layout

CONFIG = "config.json"
LARGEST = 2**62  # of any setting; a larger one fits no tensor, and would overflow
ARCHITECTURE = "gpt-oss"
QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
_END_OF_TEXT, _PAD = 200002, 199999  # of the published tokenizer
_FILE_TYPE_BF16, _FILE_TYPE_MXFP4, _QUANTIZATION_VERSION = 32, 38, 2


@dataclass(frozen=True)
class Settings:
    """Settings that do not follow from tensors; the defaults are those of the published models.

    rope_type   yarn, linear or default, which is no scaling
    only_here   what the spelling that they were read from can say and `Settings` cannot, in words
    """

    experts_per_token: int = 4
    sliding_window: int = 128
    initial_context: int = 4096
    max_positions: int = 131072
    rope_type: str = "yarn"
    rope_theta: float = 150000.0
    rope_factor: float = 32.0
    rope_beta_slow: float = 1.0
    rope_beta_fast: float = 32.0
    swiglu_limit: float = 7.0
    norm_epsilon: float = 1e-5
    only_here: tuple[str, ...] = ()


# Sizes and settings under the names of Hugging Face's config, OpenAI's config and GGUF's metadata; rotary
# positions are in a part of Hugging Face's config of their own (`_ROPE_HF`).
_SPELLINGS = """
layers            | num_hidden_layers       | num_hidden_layers      | block_count
experts           | num_local_experts       | num_experts            | expert_count
hidden            | hidden_size             | hidden_size            | embedding_length
intermediate      | intermediate_size       | intermediate_size      | expert_feed_forward_length
heads             | num_attention_heads     | num_attention_heads    | attention.head_count
kv_heads          | num_key_value_heads     | num_key_value_heads    | attention.head_count_kv
head_dim          | head_dim                | head_dim               | attention.key_length
vocab             | vocab_size              | vocab_size             | vocab_size
experts_per_token | num_experts_per_tok     | experts_per_token      | expert_used_count
sliding_window    | sliding_window          | sliding_window         | attention.sliding_window
initial_context   | initial_context_length  | initial_context_length | rope.scaling.original_context_length
max_positions     | max_position_embeddings |                        | context_length
rope_theta        | rope_theta              | rope_theta             | rope.freq_base
rope_factor       |                         | rope_scaling_factor    | rope.scaling.factor
rope_beta_slow    |                         | rope_ntk_alpha         |
rope_beta_fast    |                         | rope_ntk_beta          |
swiglu_limit      | swiglu_limit            | swiglu_limit           |
norm_epsilon      | rms_norm_eps            |                        | attention.layer_norm_rms_epsilon
"""


def _named(column: int, owner: type[GptOssShape] | type[Settings]) -> dict[str, str]:
    rows = [[cell.strip() for cell in line.split("|")] for line in _SPELLINGS.strip().splitlines()]
    names = {item.name for item in fields(owner)}
    return {row[0]: row[column] for row in rows if row[0] in names and row[column]}


_SIZES_HF, _SIZES_OPENAI, _SIZES_GGUF = (_named(column, GptOssShape) for column in (1, 2, 3))
_SETTINGS_HF, _SETTINGS_OPENAI, _SETTINGS_GGUF = (_named(column, Settings) for column in (1, 2, 3))
_ROPE_HF = {
    "rope_theta": "rope_theta",
    "rope_factor": "factor",
    "rope_beta_slow": "beta_slow",
    "rope_beta_fast": "beta_fast",
    "initial_context": "original_max_position_embeddings",
}


# Settings that programs of a layout take to be as published, whatever a file says, and types that they do not know.
_FIXED: dict[Layout, tuple[str, ...]] = {"openai": ("norm_epsilon",), "hf": (), "gguf": ("swiglu_limit",)}
_ROPE_TYPES: dict[Layout, tuple[str, ...]] = {
    "openai": ("yarn", "default"),
    "hf": ("yarn", "default", "linear"),
    "gguf": ("yarn", "default", "linear"),
}
BETAS_GGUF = {"rope_beta_slow": "rope.scaling.yarn_beta_slow", "rope_beta_fast": "rope.scaling.yarn_beta_fast"}
_TYPES_GGUF = {"none": "default", "linear": "linear", "yarn": "yarn"}
# Keys of llama.cpp's that other spellings have not, and the values with which they change nothing.
ONLY_GGUF = {
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
# Keys of transformers' config that other spellings have not, and the published values.
_ONLY_HF = {"swiglu_alpha": 1.702, "tie_word_embeddings": False, "partial_rotary_factor": 1.0}

_FLOAT = Kind("a number above 0 and below 2^62", lambda value: is_number(value) and 0 < value < LARGEST)
_INT = Kind("an integer above 0 and below 2^62", lambda value: _FLOAT.holds(value) and value == int(value))


def read_config(path: Path, shape: GptOssShape) -> tuple[Settings, dict[str, Any] | None]:
    """Settings of a config.json, whose sizes must be the tensors', and the document if it is Hugging Face's."""
    document = Fields(read_json(path), str(path)).value
    kind = document.get("model_type", "gpt_oss")
    if kind != "gpt_oss":
        raise FileFormatError(f"{path}: is for model_type {str(kind)[:40]!r}, and the tensors are gpt-oss's")
    if "num_experts" in document or "rope_scaling_factor" in document:
        _check_sizes(path, _SIZES_OPENAI, document, shape)
        settings = _settings(path, _SETTINGS_OPENAI, document)
        _check_experts(path, _SETTINGS_OPENAI, settings, shape)
        if settings.rope_factor <= 1:  # which OpenAI's code takes for none
            settings = replace(settings, rope_type="default", rope_factor=Settings.rope_factor)
            return replace(settings, max_positions=settings.initial_context), None
        return replace(settings, max_positions=round(settings.initial_context * settings.rope_factor)), None
    _check_sizes(path, _SIZES_HF, document, shape)
    settings = _with_rope(path, document, _settings(path, _SETTINGS_HF, document))
    _check_experts(path, _SETTINGS_HF, settings, shape)
    only_here = [*settings.only_here, *_unusual(document, _ONLY_HF)]
    types = document.get("layer_types")
    if types is not None and types != layer_types(shape):
        if type(types) is not list or len(types) != shape.layers:
            raise FileFormatError(f"{path}: layer_types must name {shape.layers} layers, got {show(types)}")
        only_here.append(f"layer_types {show(types)}")
    if document.get("sliding_window", 0) is None:
        only_here.append("sliding_window null")
    return replace(settings, only_here=tuple(only_here)), document


def _with_rope(path: Path, document: Mapping[str, Any], settings: Settings) -> Settings:
    """The rotary positions of a config in Hugging Face's spelling, as transformers reads them."""
    # The names of transformers 4 and 5; one that is empty counts as missing under the older name only.
    key = "rope_scaling" if document.get("rope_scaling") else "rope_parameters"
    if document.get(key) is None:
        return settings
    rope = Fields(document, str(path)).fields(key)
    settings = _settings(Path(rope.where), _ROPE_HF, rope.value, settings)
    kind = rope.text("rope_type", rope.text("type", "default"))
    only_here = []
    used = {"rope_type", "type", "rope_theta"}
    if kind == "yarn":
        used |= {*_ROPE_HF.values(), "truncate", "attention_factor"}
        factor = rope.get("factor", _FLOAT)
        if "original_max_position_embeddings" not in rope:
            settings = replace(settings, initial_context=settings.max_positions)
        attention = rope.get("attention_factor", _FLOAT, None)
        usual = 0.1 * math.log(max(factor, 1.0)) + 1.0
        if attention is not None and not math.isclose(attention, usual, rel_tol=1e-6):
            only_here.append(f"attention_factor {attention} (YaRN's own is {usual:.7g})")
        if rope.flag("truncate", True):
            only_here.append("truncate true, which is YaRN's default")
    elif kind == "linear":
        used |= {"factor"}
        rope.get("factor", _FLOAT)
    elif kind != "default":
        only_here.append(f"rotary positions of type {show(kind)}")
    only_here += [
        f"{name} {show(value)}" for name, value in rope.value.items() if name not in used and value is not None
    ]
    return replace(settings, rope_type=kind, only_here=tuple(only_here))


def _unusual(document: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    """The keys of a document that have another value than the usual one, in words."""
    return [f"{key} {show(document[key])}" for key, value in usual.items() if document.get(key) not in (None, value)]


def layer_types(shape: GptOssShape) -> list[str]:
    """What each layer attends to: OpenAI's and llama.cpp's programs know no other order."""
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(shape.layers)]


def check_settings_held(where: str, settings: Settings, layout: Layout) -> None:
    """Refuse to write settings in a layout that cannot say them: the model would compute something else."""
    usual, faults = Settings(), list(settings.only_here)
    if settings.rope_type not in _ROPE_TYPES[layout]:
        faults.append(f"rotary positions of type {show(settings.rope_type)}")
    for name in _FIXED[layout]:
        if getattr(settings, name) != getattr(usual, name):
            faults.append(f"{_SETTINGS_HF[name]} {getattr(settings, name)} (always {getattr(usual, name)} there)")
    if faults:
        raise StoreError(
            f"{where}: {LAYOUT_TITLES[layout]} layout cannot say {'; '.join(dict.fromkeys(faults))[:600]}; keep the "
            "checkpoint in its layout, or change the config and know that the model computes otherwise"
        )


def _check_experts(path: Path, names: Mapping[str, str], settings: Settings, shape: GptOssShape) -> None:
    if settings.experts_per_token > shape.experts:
        raise FileFormatError(
            f"{path}: {names['experts_per_token']} is {settings.experts_per_token} (4 where it is missing), and a "
            f"layer has {shape.experts} experts; give a number from 1 to {shape.experts}"
        )


def read_metadata(path: Path, metadata: Mapping[str, GGUFValue], shape: GptOssShape) -> Settings:
    """The settings in a GGUF file's metadata; it must fit the tensors."""
    start = f"{ARCHITECTURE}."
    document = {key.removeprefix(start): item.value for key, item in metadata.items() if key.startswith(start)}
    _check_sizes(path, _SIZES_GGUF, document, shape)
    settings = _settings(path, _SETTINGS_GGUF | BETAS_GGUF, document)
    _check_experts(path, _SETTINGS_GGUF, settings, shape)
    # llama.cpp takes a factor without a type for linear scaling.
    missing = "linear" if "rope.scaling.factor" in document else "none"
    kind = Fields(document, str(path)).get("rope.scaling.type", one_of(*_TYPES_GGUF), missing)
    settings = replace(settings, rope_type=_TYPES_GGUF[kind], only_here=tuple(_unusual(document, ONLY_GGUF)))
    # Stored as float32, 1e-5 is read as 9.999999747e-06, and should be written as 1e-5.
    return replace(settings, norm_epsilon=float(f"{settings.norm_epsilon:.7g}"))


def _check_sizes(path: Path, names: Mapping[str, str], document: Mapping[str, Any], shape: GptOssShape) -> None:
    for size, key in names.items():
        if document.get(key) is not None and document[key] != getattr(shape, size):
            raise FileFormatError(
                f"{path}: {key} is {show(document[key])}, and the tensors give {getattr(shape, size)}; "
                "the checkpoint is incomplete, or this is another model's"
            )


def _settings(
    path: Path, names: Mapping[str, str], document: Mapping[str, Any], base: Settings | None = None
) -> Settings:
    settings, integers = Fields(document, str(path)), {field.name for field in fields(Settings) if field.type == "int"}
    values: dict[str, Any] = {}
    for setting, key in names.items():
        value = settings.get(key, _INT if setting in integers else _FLOAT, None)
        if value is not None:
            values[setting] = int(value) if setting in integers else float(value)
    return replace(base or Settings(), **values)


def hf_config(shape: GptOssShape, settings: Settings, *, packed: bool) -> dict[str, Any]:
    """config.json as transformers' GptOssConfig reads it."""
    document: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "experts_per_token": settings.experts_per_token,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": layer_types(shape),
        "model_type": "gpt_oss",
        "output_router_logits": False,
        "rope_scaling": _hf_rope(settings),
        "router_aux_loss_coef": 0.9,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    document |= {key: getattr(shape, name) for name, key in _SIZES_HF.items()}
    document |= {key: getattr(settings, name) for name, key in _SETTINGS_HF.items()}
    if shape.vocab > _END_OF_TEXT:  # torch refuses a padding token beyond the vocabulary
        document |= {"eos_token_id": _END_OF_TEXT, "pad_token_id": _PAD}
    return dict(sorted(with_quantization(document, packed=packed).items()))


def _hf_rope(settings: Settings) -> dict[str, Any]:
    if settings.rope_type == "default":
        return {"rope_type": "default"}
    if settings.rope_type == "linear":
        return {"factor": settings.rope_factor, "rope_type": "linear"}
    return {
        "beta_fast": settings.rope_beta_fast,
        "beta_slow": settings.rope_beta_slow,
        "factor": settings.rope_factor,
        "original_max_position_embeddings": settings.initial_context,
        "rope_type": "yarn",
        "truncate": False,
    }


def with_quantization(document: Mapping[str, Any], *, packed: bool) -> dict[str, Any]:
    """Make the config say that experts are in MXFP4 or in floats; one that already says so is not changed."""
    config = dict(document)
    quantization = config.get("quantization_config")
    if not packed:
        config.pop("quantization_config", None)
    elif not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4":
        config["quantization_config"] = QUANTIZATION
    else:  # `dequantize` would expand the experts again when the model is loaded
        config["quantization_config"] = {key: value for key, value in quantization.items() if key != "dequantize"}
    return config


def openai_config(shape: GptOssShape, settings: Settings) -> dict[str, Any]:
    """config.json as the openai/gpt-oss package reads it."""
    sizes = {key: getattr(shape, name) for name, key in _SIZES_OPENAI.items()}
    if settings.rope_type == "default":
        settings = replace(settings, rope_factor=1.0, initial_context=settings.max_positions)
    return sizes | {key: getattr(settings, name) for name, key in _SETTINGS_OPENAI.items()}


def gguf_metadata(shape: GptOssShape, settings: Settings, *, packed: bool) -> dict[str, GGUFValue]:
    """The keys llama.cpp needs to load the weights; the tokenizer is not among them."""
    kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    values: dict[str, int | float | str] = {
        "general.architecture": ARCHITECTURE,
        "general.file_type": _FILE_TYPE_MXFP4 if packed else _FILE_TYPE_BF16,
        "general.quantization_version": _QUANTIZATION_VERSION,
    }
    architecture_values: dict[str, int | float | str] = {key: getattr(shape, name) for name, key in _SIZES_GGUF.items()}
    architecture_values |= {key: getattr(settings, name) for name, key in _SETTINGS_GGUF.items()}
    architecture_values |= {
        "attention.value_length": shape.head_dim,
        "feed_forward_length": shape.intermediate,
        "rope.dimension_count": shape.head_dim,
        "rope.scaling.type": next(name for name, kind in _TYPES_GGUF.items() if kind == settings.rope_type),
    }
    if settings.rope_type != "yarn":
        del architecture_values["rope.scaling.original_context_length"]
    if settings.rope_type == "default":
        del architecture_values["rope.scaling.factor"]
    usual = Settings()
    architecture_values |= {
        key: getattr(settings, name)
        for name, key in BETAS_GGUF.items()
        if getattr(settings, name) != getattr(usual, name)
    }
    values |= {f"{ARCHITECTURE}.{key}": value for key, value in architecture_values.items()}
    values["tokenizer.ggml.model"] = "none"
    return {key: GGUFValue(kinds[type(value)], value) for key, value in values.items()}
