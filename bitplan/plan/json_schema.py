"""JSON Schema of the manifest document, for editors; the reader in manifest.py is stricter and says more.

It is written by hand; a test checks that reader and schema have the same keys and the same verdicts.
"""

from __future__ import annotations

from typing import Any

from bitplan.plan.manifest import BASED_ENCODINGS, MAX_RULES, NIBBLE_ORDERS, SCALE_ENCODINGS, VERSION
from bitplan.plan.plan import PADDINGS

_NAME = {"type": "string", "minLength": 1}


def manifest_schema() -> dict[str, Any]:
    """The schema, a new dict each time."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "bitplan manifest",
        "type": "object",
        "additionalProperties": False,
        "required": ["version", "patterns"],
        "properties": {
            "version": {"const": VERSION},
            "model": {"type": "string", "description": "what the manifest is for, in words"},
            "formats": {
                "type": "object",
                "description": "tag -> what it stands for",
                "additionalProperties": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "bits": {"type": "integer", "minimum": 1, "maximum": 64},
                        "role": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
                        "format": {**_NAME, "description": "a format of bitplan's; `bitplan formats` lists them"},
                        "part": {"enum": ["data", "scales"]},
                    },
                },
            },
            "patterns": {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_RULES,
                "description": "rules in order; the first whose regex matches the whole name wins",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["regex", "format"],
                    "properties": {
                        "regex": _NAME,
                        "format": {**_NAME, "description": "a tag in `formats`, or a format of bitplan's"},
                        "role": _NAME,
                        "optional": {"type": "boolean", "description": "may match no tensor"},
                    },
                },
            },
            "fused_dequant": {"const": True},
            "block_size": {"type": "integer", "minimum": 2, "maximum": 2**20, "multipleOf": 2},
            "scale_encoding": {"enum": list(SCALE_ENCODINGS)},
            "scale_base": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "tensor"}]},
            "axis": {"const": -1},
            "nibble_order": {"enum": list(NIBBLE_ORDERS)},
            "padding": {"enum": list(PADDINGS)},
            "aliases": {
                "type": "object",
                "description": "name with [i] -> the same tensor's name, or names, in another naming",
                "additionalProperties": {"anyOf": [_NAME, {"type": "array", "minItems": 1, "items": _NAME}]},
            },
        },
        "if": {"properties": {"scale_encoding": {"enum": list(BASED_ENCODINGS)}}, "required": ["scale_encoding"]},
        "then": {"required": ["scale_base"]},
    }
