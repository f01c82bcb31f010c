"""Model descriptions from files: a Hugging Face config.json, or a YAML with the files that its `defaults` name."""

from __future__ import annotations

from pathlib import Path

from bitplan.documents import load_bytes
from bitplan.plan.fp8.loongforge_yaml import YamlModel, read_yaml_model
from bitplan.plan.fp8.model_parts import load_model_parts
from bitplan.plan.fp8.vocabulary import ModelConfigError
from bitplan.yaml_reader import MAX_YAML_CHARACTERS

_SUFFIXES = (".yaml", ".yml")
_ROOTS = ("configs", "config", "conf")  # a `defaults` item may be relative to the root of the configurations
_LONGEST_NAME = 200


def open_model(path: str | Path) -> YamlModel:
    """The parts of a model from a config.json, a folder with one, or a YAML; only a YAML can set parallel sizes."""
    source = Path(path)
    if source.suffix not in _SUFFIXES:
        return YamlModel(tuple(load_model_parts(source)), {})
    model = open_yaml_model(source)
    if not model.parts:
        raise ModelConfigError(f"{source}: has FP8 keys and no sizes; add num_layers, hidden_size, ... or `defaults`")
    return model


def open_yaml_model(path: str | Path) -> YamlModel:
    """A YAML model; files that `defaults` names are looked for beside the file, then in the folders above it.

    The search never leaves the root of the configurations: the nearest folder above that is named `configs`, `config`
    or `conf`, else the folder of the file itself. Symbolic links are resolved first.
    """
    source = Path(path)
    beside = source.resolve().parent
    above = [beside, *beside.parents]
    root = next((folder for folder in above if folder.name in _ROOTS), beside)
    folders = above[: above.index(root) + 1]

    def open_base(name: str) -> str:
        _check_name(source, name)
        for folder in folders:
            for suffix in _SUFFIXES:
                path = (folder / f"{name}{suffix}").resolve()
                if not path.is_file():
                    continue
                if not path.is_relative_to(root):
                    raise ModelConfigError(
                        f"{source}: defaults name {name[:120]!r}, which lies outside of {root}; "
                        f"put it there, or name that folder's root `configs`"
                    )
                return _read(path)
        tried = ", ".join(str(folder / f"{name}.yaml") for folder in folders[:2])
        raise ModelConfigError(f"{source}: defaults name {name!r}, and there is no such file (looked for {tried})")

    return read_yaml_model(_read(source), where=str(source), open_base=open_base)


def _check_name(source: Path, name: str) -> None:
    if Path(name).is_absolute() or "\0" in name or len(name) > _LONGEST_NAME:
        raise ModelConfigError(
            f"{source}: an item of defaults must be a relative path of at most {_LONGEST_NAME} letters, "
            f"got {name[:120]!r}"
        )


def find_policy(written: str, beside: str | Path) -> Path:
    """The policy that a YAML names, searched in the YAML's folder, the folders above it and the current folder."""
    folder = Path(beside).resolve().parent
    tried = [above / written for above in (folder, *folder.parents)]
    existing = next((path for path in (*tried, Path(written)) if path.is_file()), None)
    if existing is None:
        raise ModelConfigError(f"{beside}: fp8_dynamic_policy_path names {written!r}, and there is no {tried[0]}")
    return existing


def _read(path: Path) -> str:
    try:
        return load_bytes(path, ModelConfigError, max_bytes=4 * MAX_YAML_CHARACTERS, what="model's YAML").decode()
    except UnicodeDecodeError:
        raise ModelConfigError(f"{path}: not UTF-8 text, so not a model's YAML") from None
