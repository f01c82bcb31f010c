"""gpt-oss to GGUF: its experts are woven, biased and packed in ways of their own, which `store.gpt_oss` knows."""

from __future__ import annotations

import math
from pathlib import Path

from bitplan.errors import StoreError
from bitplan.formats import Format, get_format
from bitplan.store.export.gguf_metadata import ModelConfig, text
from bitplan.store.export.gguf_tokenizer import tokenizer_metadata
from bitplan.store.export.targets import ExportReport, ExportRequest, ExportRow, OnBytes
from bitplan.store.files.gguf_split_write import check_gguf_output
from bitplan.store.gpt_oss.convert import save_gpt_oss
from bitplan.store.gpt_oss.layouts import GGUF_WIDE, LayoutTensor, list_slots
from bitplan.store.gpt_oss.source import GptOssFile

_EXPERTS = {"mxfp4": "mxfp4", "mxfp4_gguf": "mxfp4", "bfloat16": "bfloat16"}


class GptOssExport:
    """A prepared export; see `bitplan.store.export.targets`."""

    def __init__(self, request: ExportRequest) -> None:
        wanted = request.formats.name if isinstance(request.formats, Format) else request.formats
        if not isinstance(wanted, str) or wanted not in _EXPERTS or request.keep or request.only:
            raise StoreError(
                f"{request.source}: gpt-oss is exported with its experts in mxfp4 or bfloat16 and the rest as it is; "
                f"give --format mxfp4 or --format bfloat16, and neither --keep nor --only"
            )
        if request.evidence is not None or request.part_bytes is not None:
            raise StoreError(f"{request.source}: gpt-oss is exported to one file, and takes no evidence")
        self._request, self._experts = request, _EXPERTS[wanted]
        folder = request.source if request.source.is_dir() else request.source.parent
        config = ModelConfig(folder)
        self._metadata = {"general.name": text(folder.resolve().name)}
        self._metadata |= tokenizer_metadata(folder, config.vocabulary, request.pretokenizer)
        self._file = GptOssFile(request.source)
        check_gguf_output(request.output, None, inputs=self._file.files, force=request.force)
        slots = list_slots("gguf", self._file.shape, packed=self._experts == "mxfp4")
        rows = [self._row(slot) for slot in slots]
        self.report = ExportReport(str(request.source), str(request.output), "gguf", rows)

    def _row(self, slot: LayoutTensor) -> ExportRow:
        if slot.is_expert:
            name, why = ("mxfp4_gguf" if self._experts == "mxfp4" else "bfloat16"), "experts"
        elif set(slot.parts) <= GGUF_WIDE:
            name, why = "float32", "norms, biases and routers: llama.cpp computes them in float32"
        else:
            name, why = "bfloat16", "stays"
        fmt = get_format(name)
        size = fmt.nbytes(slot.shape) if math.prod(slot.shape) else 0
        return ExportRow(slot.name, ", ".join(slot.parts), slot.shape, "", name, why, size)

    def write(self, on_bytes: OnBytes | None = None) -> None:
        save_gpt_oss(
            self._file,
            Path(self._request.output),
            "gguf",
            experts="mxfp4" if self._experts == "mxfp4" else "bfloat16",
            scale_rule=self._request.scale_rule,
            metadata=self._metadata,
            force=self._request.force,
            on_bytes=on_bytes or (lambda _count, _name: None),
        )
        self.report.files = [str(self._request.output)]

    def close(self) -> None:
        self._file.close()
