"""A causal language model whose weights stay on disk, and are read one by one when needed.

For work that goes through a model block by block: memory holds only the tensors in use, not the model. Names and shapes
decide where each tensor comes from (`checkpoints.tensor_sources`), as for packed models.
"""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
from torch import Tensor, nn

from bitplan.base.errors import FileFormatError, MeasureError
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import CONFIG, QUANTIZATION_KEYS, read_config
from bitplan.packed.checkpoints.load import empty_model, read_plain
from bitplan.packed.checkpoints.tensor_sources import FilePiece, assign
from bitplan.packed.language.causal_lm import CausalLM, no_causal_model, read_tokenizer


class ModelOnDisk:
    """A model with its parameters on the meta device; `read` gives the numbers of one of them.

    The file stays open as long as this object lives.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = empty_model(folder, read_config(folder), torch.float32, torch.device("cpu"))
        if getattr(model, "get_output_embeddings", lambda: None)() is None:
            raise MeasureError(no_causal_model(str(folder), type(model).__name__))
        self._file = open_tensors(folder)  # its header alone takes longer to read than most tensors
        weakref.finalize(self, self._file.close)
        assignment = assign(model, self._file, str(folder))
        stored = {name: spec.nbytes for name, spec in self._file.specs.items()}
        self._recipes = {target: recipe for recipe in assignment.recipes for target in recipe.targets}
        for alias, name in assignment.ties.items():
            _share(model, alias, name)
        self.lm = CausalLM(model.eval(), read_tokenizer(folder), str(folder), stored)

    @property
    def stacked(self) -> dict[str, tuple[str, FilePiece]]:
        """Tensors of the file that the model keeps as items of a stack: the stack, and where they lie in it."""
        return {
            piece.name: (target, piece)
            for target, recipe in self._recipes.items()
            if recipe.converter is None
            for piece in recipe.pieces
            if piece.item is not None
        }

    def read(self, name: str) -> Tensor:
        """A parameter by its name in the model, in the type of the file."""
        return read_plain(self._recipes[name], self._file, self.lm.model)[name]


def is_plain_folder(path: Path) -> bool:
    """Whether a model is a folder of plain weights: packed ones and GGUF files are decoded as a whole."""
    if not path.is_dir() or not (path / CONFIG).is_file() or QUANTIZATION_KEYS & read_config(path).keys():
        return False
    try:
        with open_tensors(path) as file:
            return not any(spec.encoded for spec in file.specs.values())
    except FileFormatError:
        return False  # the reader of the model will say what is wrong


def _share(model: nn.Module, alias: str, name: str) -> None:
    owner, _, local = alias.rpartition(".")
    model.get_submodule(owner)._parameters[local] = model.get_parameter(name)
