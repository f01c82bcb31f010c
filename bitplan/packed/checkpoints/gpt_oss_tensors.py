"""A gpt-oss checkpoint in OpenAI's, Hugging Face's or GGUF's layout, read under the names of transformers' model.

`load_packed` reads it as any other file: its experts are stacks in mxfp4, [experts, outputs, inputs], gate and up
alternating by rows. Every tensor is allocated once and filled from chunks of at most 64 MiB, experts one by one. They
are moved as bytes: from the safetensors layouts unchanged, from GGUF into gpt-oss's order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bitplan.base.errors import FileFormatError, Finding, FormatError
from bitplan.base.records import on_failure, read_json, write_json
from bitplan.files.gguf_tensors import GGUFTensors
from bitplan.files.gpt_oss.config import ARCHITECTURE, check_settings_held, hf_config
from bitplan.files.gpt_oss.layouts import GGUF_WIDE, LayoutTensor, list_slots
from bitplan.files.gpt_oss.source import GATE_UP, MXFP4, GptOssFile, plain_rows
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import CONFIG, is_packed_config
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.formats import Encoded
from bitplan.formats.scale_rules import E8M0_NAN
from bitplan.plan import Manifest, check_headers
from bitplan.plan.check_manifest import CAST, OTHER_MODEL, require_clean
from bitplan.plan.manifest import open_manifest

ManifestLike = Manifest | str | Path
PACKED_EXPERTS = (".mlp1_weight.blocks", ".experts.gate_up_proj_blocks")
FLOAT_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")  # Hugging Face's names of plain experts


class GptOssTensors(TensorFile):
    """The checkpoint after its headers were checked against the manifest; `stored` is the file as it is.

    `folder` holds config.json in Hugging Face's spelling: the checkpoint's own, or one that is made of its settings.
    `dtype` is the type of the embedding. Experts are put together on `device`.
    """

    def __init__(self, stored: TensorFile, manifest: ManifestLike, device: torch.device) -> None:
        self.path, self.stored, self._device = stored.path, stored, device
        self.rules = manifest if isinstance(manifest, Manifest) else open_manifest(manifest)
        self._config_folder: tempfile.TemporaryDirectory[str] | None = None
        is_gguf = isinstance(stored, GGUFTensors)
        if not is_gguf:
            _refuse_floats(stored)
            require_clean(self.rules, stored.specs, checkpoint=str(stored.path))
        self._file = GptOssFile(stored)
        with on_failure(self.close):
            _refuse_float_experts(self._file)
            if is_gguf:
                require_clean(self.rules, _translated(self._file), checkpoint=str(stored.path))
            self.kind, self.dtype = self._file.layout, self._file.dtype("embed", None)
            self._write_config()
        self._slots = {slot.name: slot for slot in list_slots("hf", self._file.shape, packed=False)}
        self.specs = {name: self._spec(slot) for name, slot in self._slots.items()}

    def _write_config(self) -> None:
        """Make a folder with the config that a checkpoint of another layout stands for."""
        if self._file.config is not None:
            return
        check_settings_held(self._file.where, self._file.settings, "hf")
        self._config_folder = tempfile.TemporaryDirectory()
        document = hf_config(self._file.shape, self._file.settings, packed=True)
        write_json(Path(self._config_folder.name) / CONFIG, document)

    @property
    def folder(self) -> Path:
        return self._file.folder if self._config_folder is None else Path(self._config_folder.name)

    @property
    def files(self) -> list[Path]:
        return self._file.files

    def close(self) -> None:
        self._file.close()
        self.stored.close()
        if self._config_folder is not None:
            self._config_folder.cleanup()

    def _spec(self, slot: LayoutTensor) -> TensorSpec:
        if slot.is_expert:
            shape = (self._file.shape.experts, *self._file.shape.matrix(slot.parts))
            return TensorSpec.of(slot.name, shape, MXFP4, transposed=True)
        return TensorSpec.of(slot.name, slot.shape, dtype=self._type_of(slot))

    def _type_of(self, slot: LayoutTensor) -> torch.dtype:
        first, *others = (self._file.dtype(part, slot.layer) for part in slot.parts)
        for other in others:
            first = torch.promote_types(first, other)
        return first

    def read(self, name: str) -> Tensor | Encoded:
        slot = self._slots[name]
        if slot.is_expert:
            return self._read_experts(slot)
        numbers, start = torch.empty(slot.shape, dtype=self._type_of(slot)), 0
        for rows in plain_rows(self._file, slot):
            numbers[start : start + rows.shape[0]].copy_(rows)
            start += rows.shape[0]
        return numbers

    def _read_experts(self, slot: LayoutTensor) -> Encoded:
        file, shape = self._file, self.specs[slot.name].shape
        assert slot.layer is not None
        stacks = {
            part: torch.empty(size, dtype=dtype, device=self._device)
            for part, (dtype, size) in MXFP4.part_shapes(shape).items()
        }
        for index in range(shape[0]):
            try:
                matrix = file.expert(slot.layer, slot.parts, index, self._device)
            except FormatError as error:
                raise FileFormatError(f"{file.where}: {error}") from None
            assert isinstance(matrix, Encoded)
            if bool((matrix.parts["scales"] == E8M0_NAN).any()):
                kind = ("scales", slot.parts, slot.layer)
                name = next(one.name for one in file.slots if (one.kind, one.parts, one.layer) == kind)
                raise FileFormatError(
                    f"{file.where}: {name!r}, expert {index}: a scale byte 255, which is NaN; "
                    "convert or download the file again"
                )
            for part, numbers in matrix.parts.items():
                stacks[part][index].copy_(numbers)
        return Encoded(MXFP4, shape, **stacks)


def is_gpt_oss(path: Path) -> bool:
    """Whether a file or folder is a gpt-oss checkpoint in one of its own layouts, not in that of `bitplan quantize`."""
    with open_tensors(path) as file:
        return holds_gpt_oss(file)


def holds_gpt_oss(file: TensorFile) -> bool:
    """Whether an open file is a gpt-oss checkpoint in one of its own layouts."""
    config_file = file.path / CONFIG
    if config_file.is_file():
        config = read_json(config_file)
        if not isinstance(config, dict) or is_packed_config(config):
            return False
        if config.get("model_type") is not None:
            return bool(config["model_type"] == "gpt_oss")
    if isinstance(file, GGUFTensors):
        kind = file.file.metadata.get("general.architecture")
        return kind is not None and kind.value == ARCHITECTURE
    return any(name.endswith(PACKED_EXPERTS + FLOAT_EXPERTS) and not spec.encoded for name, spec in file.specs.items())


def gpt_oss_findings(
    path: Path, rules: Manifest, headers: Mapping[str, TensorSpec]
) -> tuple[Mapping[str, TensorSpec], list[Finding]]:
    """What `load_packed` would refuse: by the manifest, then by what a gpt-oss checkpoint and its config must be.

    The headers come back under the names that the manifest knows, which are not GGUF's.
    """
    structure: list[Finding] = []
    try:
        with GptOssFile(path) as file:
            if file.layout == "gguf":
                headers = _translated(file)
            _refuse_float_experts(file)
    except FileFormatError as error:
        structure = [Finding("gpt-oss", path.name, str(error))]
    findings = check_headers(rules, headers)
    if structure and all(finding.code in (CAST, OTHER_MODEL) for finding in findings):
        findings = structure
    return headers, findings


def _refuse_floats(headers: TensorFile) -> None:
    """Refuse experts as floats before the manifest, which knows packed experts only, asks for a rule for them."""
    for name, spec in headers.specs.items():
        if name.endswith(FLOAT_EXPERTS) and spec.torch_dtype.is_floating_point:
            raise _floats(headers.path, name, spec.torch_dtype)


def _refuse_float_experts(file: GptOssFile) -> None:
    if file.experts is not None:
        raise _floats(file.path, file.expert_name(0, GATE_UP), file.experts)


def _floats(path: Path, name: str, dtype: torch.dtype) -> FileFormatError:
    return FileFormatError(
        f"{path}: {name!r} is {dtype}: these experts are not packed, and are not loaded as floats; "
        "pack them with `bitplan gpt-oss convert` first"
    )


def _translated(file: GptOssFile) -> dict[str, TensorSpec]:
    """A GGUF file's headers under Hugging Face's names; tensors that GGUF stores wider count as bfloat16."""
    headers = {}
    for slot in list_slots("hf", file.shape):
        dtypes = {torch.uint8} if slot.is_expert else {file.dtype(part, slot.layer) for part in slot.parts}
        is_wide = dtypes == {torch.float32} and set(slot.parts) <= GGUF_WIDE
        dtype = torch.bfloat16 if is_wide else dtypes.pop()
        headers[slot.name] = TensorSpec.of(slot.name, slot.shape, dtype=dtype)
    return headers
