"""Sound files of weights, and what their users do with a damaged one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

from bitplan.plan import Manifest


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def make_safetensors(folder: Path) -> list[Path]:
    import torch

    from bitplan.files.safetensors import DTYPES, write_safetensors
    from bitplan.formats.elements import torch_dtype

    paths = []
    for number, tags in enumerate((list(DTYPES), ["F32"], ["U8", "F4", "BF16"], [])):
        entries = [(f"layer.{tag}", torch_dtype(DTYPES[tag]), (2, 3)) for tag in tags]
        entries += [("scalar", torch.int64, ()), ("empty", torch.float16, (0, 4)), ("層", torch.uint8, (5,))]
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, dtype, shape in entries}
        path = folder / f"{number}.safetensors"
        with write_safetensors(path, entries, {"format": "pt", "note": "x"} if len(tags) < 4 else {}) as writer:
            for name in writer.order:
                writer.write(name, bytes(i % 2 for i in range(sizes[name])))
        paths.append(path)
    return paths


def read_safetensors(path: Path) -> None:
    import safetensors

    from bitplan.files.safetensors import SafetensorsFile

    with SafetensorsFile(path) as file:
        for name, entry in file.tensors.items():
            tensor = file.read(name)
            assert (tensor.dtype, tuple(tensor.shape), tensor.nbytes) == (entry.torch_dtype, entry.shape, entry.nbytes)
            if entry.shape:
                assert file.read_rows(name, 0, entry.shape[0]).shape == tensor.shape
        if b"-0" in path.read_bytes():  # 0 to Python's json, a float to the library's
            return
        library = {name: len(info["data"]) for name, info in safetensors.deserialize(path.read_bytes())}
        assert library == {name: entry.nbytes for name, entry in file.tensors.items()}, "the library reads it otherwise"


def make_index(folder: Path) -> list[Path]:
    import torch

    from bitplan.files.safetensors import write_safetensors

    for name in "ab":
        with write_safetensors(folder / f"{name}.safetensors", [(name, torch.uint8, (1,))]) as writer:
            writer.write(name, b"1")
    document = {"metadata": {"total_size": 2}, "weight_map": {name: f"{name}.safetensors" for name in "ab"}}
    return [written(folder / "model.safetensors.index.json", json.dumps(document))]


def read_all(path: Path) -> None:
    from bitplan import open_tensors

    with open_tensors(path) as file:
        for name in (*file.specs, *file.tied):
            assert file.read(name).shape == file.spec(name).shape


def make_gguf(folder: Path) -> list[Path]:
    import gguf
    import torch
    from gguf import GGMLQuantizationType as Type
    from gguf import GGUFValueType as V

    from bitplan.files.gguf import GGUFValue, write_gguf

    metadata = {
        "general.architecture": GGUFValue(V.STRING, "llama"),
        "k.u8": GGUFValue(V.UINT8, 7),
        "k.f32": GGUFValue(V.FLOAT32, 0.5),
        "k.bool": GGUFValue(V.BOOL, False),
        "k.i64": GGUFValue(V.INT64, -2),
        "k.words": GGUFValue(V.ARRAY, ("a", "層", ""), V.STRING),
        "k.ints": GGUFValue(V.ARRAY, (1, 2, 3), V.INT16),
        "k.nested": GGUFValue(V.ARRAY, (GGUFValue(V.ARRAY, (1.0,), V.FLOAT64),), V.ARRAY),
    }
    entries = [("a", Type.F32, (3,)), ("b", Type.Q8_0, (2, 64)), ("c", Type.Q4_K, (256,)), ("d", Type.I8, (2, 1, 2, 3))]
    aligned = metadata | {"general.alignment": GGUFValue(V.UINT32, 8)}
    paths = []
    for number, (some, keys) in enumerate(((entries, metadata), (entries[:2], aligned), ([], metadata), (entries, {}))):
        path = folder / f"{number}.gguf"
        with write_gguf(path, some, keys) as writer:
            for name, kind, shape in some:
                block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
                writer.write(name, bytes(torch.Size(shape).numel() // block * block_bytes))
        paths.append(path)
    return paths


def read_gguf(path: Path) -> None:
    """What is read can be written, and is then read the same."""
    from bitplan.files.gguf import GGUFFile, write_gguf

    with GGUFFile(path) as file:
        raw = {name: file.read_raw(name) for name in file.tensors}
        for name, tensor in file.tensors.items():
            assert (tuple(raw[name].shape), raw[name].numel()) == (tensor.raw_shape, tensor.nbytes)
        entries = [(tensor.name, tensor.type, tensor.shape) for tensor in file.tensors.values()]
        with write_gguf(path.with_suffix(".again"), entries, file.metadata) as writer:
            for name in writer.order:
                writer.write(name, raw[name])
        with GGUFFile(path.with_suffix(".again")) as again:
            assert repr(again.metadata) == repr(file.metadata)  # NaN equals itself here
            assert [again.read_raw(name).tolist() for name in again.tensors] == [one.tolist() for one in raw.values()]


def make_split_gguf(folder: Path) -> list[Path]:
    import gguf
    import numpy

    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=1)
    for name in "ab":
        writer.add_tensor(name, numpy.zeros((2, 32), numpy.float32))
    writer.write_header_to_file(folder / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def make_networks(folder: Path) -> list[Path]:
    import torch

    from bitplan.files.poly_network import PolyNetwork
    from bitplan.formats.codec import encode
    from bitplan.formats.registry import DTYPE_NAMES
    from tests.files.test_poly_json import AMBIGUOUS, EVERY_ORIGINAL, ORIGINAL, b64, network, pack, packed

    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    ours = PolyNetwork.from_tensors({fmt: encode(x, fmt) for fmt in DTYPE_NAMES}).document
    few = PolyNetwork.from_tensors({fmt: encode(x[0], fmt) for fmt in ("int4", "uint8", "float16", "ternary")}).document
    known = {tag: pack(tag, codes) for tag, (codes, _) in EVERY_ORIGINAL.items() if tag not in AMBIGUOUS}
    theirs = network(*(packed(dtype=tag, weights=b64(raw)) for tag, raw in known.items()))
    texts = (json.dumps(ours), json.dumps(few), json.dumps(theirs), ORIGINAL)
    return [written(folder / f"{number}.json", text) for number, text in enumerate(texts)]


def read_network(path: Path) -> None:
    from bitplan.files.poly_network import read_poly_json, write_poly_json

    result = read_poly_json(path)
    write_poly_json(path.with_suffix(".again"), result)  # what can be read can be written, and is the same
    assert read_poly_json(path.with_suffix(".again")).document == result.document


def make_packed(folder: Path) -> list[Path]:
    import torch

    from bitplan.files.open_files import write_tensors
    from bitplan.files.tensor_file import TensorSpec
    from bitplan.formats.codec import encode

    x = torch.linspace(-1, 1, 4 * 128).reshape(4, 128)
    packed = {fmt: encode(x, fmt) for fmt in ("mxfp4", "nvfp4", "int8_g128", "q4_0_poly")}
    path = folder / "packed.safetensors"
    promises = [
        *(TensorSpec.of(name, one.shape, one.fmt) for name, one in packed.items()),
        TensorSpec.of("plain", (4, 128), dtype=x.dtype),
    ]
    with write_tensors(path, promises, tied={"alias": "mxfp4"}) as writer:
        for name, one in packed.items():
            writer.write(name, one)
        writer.write("plain", x)
    return [path]


ANY_FORMAT = Manifest.from_document({"version": 1, "patterns": [{"regex": ".*", "format": "float32"}]})


def read_packed_file(path: Path) -> None:
    """What `check --deep` and `load` do."""
    from bitplan import open_tensors
    from bitplan.files.deep_check import deep_check

    with open_tensors(path) as file:
        deep_check(ANY_FORMAT, file)
        for name in file.specs:
            file.read(name)


PAIRS = Manifest.from_document(
    {
        "version": 1,
        "formats": {"FP4": {}, "UE8": {}},
        "patterns": [
            {"regex": ".*blocks", "format": "FP4"},
            {"regex": ".*scales", "format": "UE8"},
            {"regex": ".*", "format": "float32"},
        ],
        "block_size": 128,
        "scale_encoding": "linear_uint8",
        "scale_base": "tensor",
    }
)


def make_pairs(folder: Path) -> list[Path]:
    import safetensors.torch
    import torch

    from bitplan.formats.codec import encode

    encoded = encode(torch.linspace(-1, 1, 4 * 256).reshape(4, 256), "fp4_u8_g128")
    assert encoded.base is not None
    tensors = {
        "w.blocks": encoded.data,
        "w.scales": encoded.scales,
        "w.base": encoded.base.reshape(1),
        "n": torch.ones(2),
    }
    safetensors.torch.save_file(
        {name: one for name, one in tensors.items() if one is not None}, folder / "a.safetensors"
    )
    return [folder / "a.safetensors"]


def read_pairs(path: Path) -> None:
    from bitplan import open_tensors
    from bitplan.files.deep_check import deep_check

    with open_tensors(path) as file:
        deep_check(PAIRS, file)


def make_statistics(folder: Path) -> list[Path]:
    """evidence.safetensors, and llama.cpp's imatrix.gguf."""
    import torch

    from bitplan.files.imatrix import write_imatrix
    from bitplan.files.input_statistics import write_evidence

    squares = torch.linspace(0.1, 1, 32)
    write_imatrix(folder / "imatrix.gguf", {"a": squares, "b": squares}, tokens=1000, datasets=["text"])
    shapes = {"a.moments": (32,), "b.hessian": (32, 32), "b.outputs": (4, 4)}
    metadata = {"shared.c": "a", "weights.a": "00" * 8, "gradient_tokens": "1000"}
    with write_evidence(folder / "evidence.safetensors", shapes, metadata) as writer:
        for name, shape in shapes.items():
            writer.write(name, torch.eye(shape[0]) if len(shape) == 2 else squares)
    return [folder / "imatrix.gguf", folder / "evidence.safetensors"]


def read_statistics(path: Path) -> None:
    """What `quantize --evidence` asks of statistics."""
    from bitplan.files.round_with_evidence import open_evidence

    with open_evidence(path) as file:
        for name in file.names:
            columns = file.columns(name)
            for expert in (None, 0, 3):
                moments = file.moments(name, expert)
                assert moments is None or moments.shape == (columns,)
            hessian = file.hessian(name)
            assert hessian is None or hessian.shape == (columns, columns)
            file.outputs(name)
            file.digest(name)
        for value in getattr(file, "gguf_keys", {}).values():
            assert value.value is not None


def make_gpt_oss(naming: str, damaged: str) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        from bitplan.files.gpt_oss import make_checkpoint
        from bitplan.files.gpt_oss import source as check

        # The package's own manifest takes longer to read than a damaged file, and is the same for each.
        check.shipped_manifest = functools.cache(check.shipped_manifest)  # type: ignore[attr-defined]
        sizes = {"layers": 1, "experts": 2, "hidden": 64, "intermediate": 64, "heads": 2, "kv_heads": 1, "vocab": 8}
        path = folder / damaged if naming == "gguf" else folder / "model"
        make_checkpoint(path, naming=naming, head_dim=32, **sizes)  # type: ignore[arg-type]
        return [path] if naming == "gguf" else [path / damaged]

    return make


def read_gpt_oss(path: Path) -> None:
    from bitplan.files.gpt_oss import GptOssFile
    from bitplan.files.gpt_oss.config import hf_config

    with GptOssFile(path if path.suffix == ".gguf" else path.parent) as file:
        json.dumps(hf_config(file.shape, file.settings, packed=True), allow_nan=False).encode()
        if file.config is not None:
            json.dumps(file.config, ensure_ascii=False, allow_nan=False).encode()


def make_schemes(damaged: str) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        from tests.files.quantized_folders import FOLDERS

        for name, write in FOLDERS.items():
            write(folder / name)
        return [folder / name / damaged for name in FOLDERS]

    return make


def read_scheme(path: Path) -> None:
    read_all(path.parent)
