"""gpt-oss checkpoints: opened and checked, converted between three layouts, made from drawn numbers."""

from bitplan.store.gpt_oss_convert import ConvertReport, convert_gpt_oss
from bitplan.store.gpt_oss_layouts import PRESETS, GptOssShape, checkpoint_bytes, make_shape
from bitplan.store.gpt_oss_make import make_checkpoint
from bitplan.store.gpt_oss_source import GptOssFile

__all__ = [
    "PRESETS",
    "ConvertReport",
    "GptOssFile",
    "GptOssShape",
    "checkpoint_bytes",
    "convert_gpt_oss",
    "make_checkpoint",
    "make_shape",
]
