"""gpt-oss checkpoints: opened and checked, converted between three layouts, made from drawn numbers."""

from bitplan.files.gpt_oss.convert import ConvertReport, convert_gpt_oss
from bitplan.files.gpt_oss.layouts import PRESETS, GptOssShape, checkpoint_bytes, make_shape
from bitplan.files.gpt_oss.source import GptOssFile
from bitplan.files.gpt_oss.convert import make_checkpoint

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
