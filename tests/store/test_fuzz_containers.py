"""Damaged containers: a file is read in full, or refused with a BitplanError, within bounded memory.

Each case is made from a seed and its number alone; a failure names both, and
`mutate(corpus[...], Random(f"{seed}/{case}"))` gives the same bytes again.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import gguf
import pytest
import safetensors
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as V

from bitplan.errors import BitplanError
from bitplan.formats.dtypes import torch_dtype
from bitplan.store.container import ContainerFile
from bitplan.store.gguf_io import GGUFFile, write_gguf
from bitplan.store.gguf_values import GGUFValue
from bitplan.store.safetensors_io import DTYPES, SafetensorsFile, open_checkpoint, write_safetensors

CASES = [300, pytest.param(3000, marks=pytest.mark.long)]
SEED = 20240611
SLOWEST_CASE_S = 5.0
MEMORY_BYTES = 64 * 2**20

NUMBERS = [0, 1, 2, 3, 4, 7, 8, 12, 31, 32, 64, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62]
NUMBERS += [2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1]
JSON_VALUES: list[Any] = [
    *NUMBERS,
    -1,
    -(2**63),
    2**64,
    10**30,
    1.0,
    1.5,
    1e308,
    True,
    None,
    "",
    "F32",
    "F4",
    "U8",
    "\ud800",
]
JSON_VALUES += [[], {}, [0], [0, 0], [[]], [0] * 100, {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}]


# --- the corpus: small, sound files that use every feature -----------------------------------


def safetensors_corpus(folder: Path) -> list[bytes]:
    corpus = []
    for tags in (list(DTYPES), ["F32"], ["U8", "F4", "BF16"], []):
        entries = [(f"layer.{tag}", torch_dtype(DTYPES[tag]), (2, 3)) for tag in tags]
        entries += [("scalar", torch.int64, ()), ("empty", torch.float16, (0, 4)), ("層", torch.uint8, (5,))]
        with write_safetensors(
            folder / "seed", entries, {"format": "pt", "note": "x"} if len(tags) < 4 else {}
        ) as writer:
            for name in writer.order:
                nbytes = next(torch.Size(shape).numel() * dtype.itemsize for n, dtype, shape in entries if n == name)
                writer.write(name, bytes(i % 2 for i in range(nbytes)))
        corpus.append((folder / "seed").read_bytes())
    return corpus


def gguf_corpus(folder: Path) -> list[bytes]:
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
    choices = [
        (entries, metadata),
        (entries[:2], metadata | {"general.alignment": GGUFValue(V.UINT32, 8)}),
        ([], metadata),
        (entries, {}),
    ]
    corpus = []
    for some, keys in choices:
        with write_gguf(folder / "seed", some, keys) as writer:
            for name, kind, shape in some:
                block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
                writer.write(name, bytes(torch.Size(shape).numel() // block * block_bytes))
        corpus.append((folder / "seed").read_bytes())
    return corpus


# --- mutations -------------------------------------------------------------------------------


def flip_bits(data: bytearray, random: Random) -> None:
    for _ in range(random.choice([1, 1, 2, 8])):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def truncate(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data)) :]


def extend(data: bytearray, random: Random) -> None:
    data += random.randbytes(random.choice([1, 8, 31, 32, 1000]))


def overwrite_number(data: bytearray, random: Random) -> None:
    width = random.choice([1, 2, 4, 8])
    at = random.choice([0, 4, 8, 16, random.randrange(len(data))])
    data[at : at + width] = (random.choice(NUMBERS) % 256**width).to_bytes(width, "little")


def nudge_number(data: bytearray, random: Random) -> None:
    """Change a plausible count or offset a little, which gets past coarse checks."""
    at = random.randrange(len(data))
    data[at] = (data[at] + random.choice([-32, -1, 1, 32])) % 256


def move_section(data: bytearray, random: Random) -> None:
    start, size, at = random.randrange(len(data)), random.randrange(1, 80), random.randrange(len(data))
    section = data[start : start + size]
    if random.random() < 0.5:
        del data[start : start + size]
    data[at:at] = section


def repeat_section(data: bytearray, random: Random) -> None:
    start, size = random.randrange(len(data)), random.randrange(1, 60)
    data[start:start] = data[start : start + size] * random.choice([1, 2, 50])


def edit_header_length(data: bytearray, random: Random) -> None:
    length = int.from_bytes(data[:8], "little") + random.choice([-9, -8, -1, 1, 2, 8, 1000])
    data[:8] = random.choice([length % 2**64, random.choice(NUMBERS)]).to_bytes(8, "little")


def edit_json(data: bytearray, random: Random) -> None:
    """Replace, drop, add or rename anything in the header, and write a header of the right length."""
    length = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + length])
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        edit_document(document, random)
    text = json.dumps(document, ensure_ascii=random.random() < 0.5).encode(errors="surrogatepass")
    data[: 8 + length] = len(text).to_bytes(8, "little") + text


def edit_document(node: Any, random: Random) -> None:
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
        return
    key = random.choice(keys)
    if isinstance(node[key], dict | list) and node[key] and random.random() < 0.75:
        edit_document(node[key], random)
    elif random.random() < 0.15:
        del node[key]
    elif isinstance(node, dict) and random.random() < 0.2:
        node[random.choice(["", "__metadata__", "層", "\ud800", "a/b"])] = node.pop(key)
    elif type(node[key]) is int and random.random() < 0.5:
        node[key] += random.choice([-4, -1, 1, 4])
    else:
        node[key] = random.choice(JSON_VALUES)


ANYWHERE = [flip_bits, truncate, extend, overwrite_number, nudge_number, move_section, repeat_section]


def mutate(corpus: list[bytes], mutations: list[Callable[[bytearray, Random], None]], random: Random) -> bytes:
    data = bytearray(random.choice(corpus))
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        with contextlib.suppress(ValueError, IndexError, RecursionError):  # too damaged for one more
            random.choice(mutations)(data, random)
    return bytes(data)


# --- the outcome of one case -----------------------------------------------------------------


def read_safetensors(path: Path) -> None:
    with SafetensorsFile(path) as file:
        for name, entry in file.tensors.items():
            tensor = file.read(name)
            assert (tensor.dtype, tuple(tensor.shape), tensor.nbytes) == (entry.dtype, entry.shape, entry.nbytes)
            if entry.shape:
                assert file.read_rows(name, 0, entry.shape[0]).shape == tensor.shape
        library = {name: len(info["data"]) for name, info in safetensors.deserialize(path.read_bytes())}
        assert library == {name: entry.nbytes for name, entry in file.tensors.items()}


def read_gguf(path: Path) -> None:
    with GGUFFile(path) as file:
        for name, tensor in file.tensors.items():
            raw = file.read_raw(name)
            assert (tuple(raw.shape), raw.numel()) == (tensor.raw_shape, tensor.nbytes)
            assert file.read_raw_rows(name, 0, raw.numel() // raw.shape[-1]).numel() == raw.numel()
        entries = [(tensor.name, tensor.type, tensor.shape) for tensor in file.tensors.values()]
        with write_gguf(path.with_suffix(".again"), entries, file.metadata) as writer:
            for name in writer.order:
                writer.write(name, file.read_raw(name))
        with GGUFFile(path.with_suffix(".again")) as again:
            assert repr(again.metadata) == repr(file.metadata)  # NaN equals itself here
            assert [again.read_raw(name).tolist() for name in again.tensors] == [
                file.read_raw(name).tolist() for name in file.tensors
            ]


def run_cases(
    path: Path,
    corpus: list[bytes],
    mutations: list[Callable[[bytearray, Random], None]],
    read: Callable[[Path], None],
    cases: int,
) -> Counter[str]:
    for sound in corpus:  # also loads whatever the readers load lazily, before memory is counted
        path.write_bytes(sound)
        read(path)
    outcomes: Counter[str] = Counter()
    for case in range(cases):
        path.write_bytes(mutate(corpus, mutations, Random(f"{SEED}/{case}")))
        which = f"seed {SEED} case {case}"
        begin = time.process_time()
        tracemalloc.start()
        try:
            read(path)
            outcomes["read"] += 1
        except BitplanError as error:
            outcomes["refused"] += 1
            message = str(error).encode()  # which a message with half a surrogate pair would fail
            assert b"\n" not in message, f"{which}: {message!r}"
            assert len(message) < 1500, f"{which}: {message!r}"
        except BaseException as error:
            pytest.fail(f"{which}: {error!r}")
        finally:
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak_bytes < MEMORY_BYTES, f"{which} allocates {peak_bytes} bytes"
        assert time.process_time() - begin < SLOWEST_CASE_S, f"{which} hangs"
    return outcomes


@pytest.fixture(autouse=True)
def _no_tensor_larger_than_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own memory is traced, torch's is not; all of it is asked for in one place."""
    read_exactly = ContainerFile._read_exactly

    def checked(self: ContainerFile[Any], what: str, offset: int, nbytes: int) -> torch.Tensor:
        assert offset + nbytes <= self.path.stat().st_size, what
        return read_exactly(self, what, offset, nbytes)

    monkeypatch.setattr(ContainerFile, "_read_exactly", checked)


@pytest.mark.parametrize("cases", CASES)
def test_damaged_safetensors(cases, tmp_path):
    mutations = [*ANYWHERE, edit_header_length, edit_json, edit_json, edit_json]
    outcomes = run_cases(tmp_path / "a.safetensors", safetensors_corpus(tmp_path), mutations, read_safetensors, cases)
    assert min(outcomes["read"], outcomes["refused"]) > cases // 50, outcomes


@pytest.mark.parametrize("cases", CASES)
def test_damaged_gguf(cases, tmp_path):
    mutations = [*ANYWHERE, overwrite_number, nudge_number]
    outcomes = run_cases(tmp_path / "a.gguf", gguf_corpus(tmp_path), mutations, read_gguf, cases)
    assert min(outcomes["read"], outcomes["refused"]) > cases // 50, outcomes


def test_damaged_index(tmp_path):
    with write_safetensors(tmp_path / "one.safetensors", [("a", torch.uint8, (1,))]) as writer:
        writer.write("a", b"1")
    document = {"metadata": {"total_size": 1}, "weight_map": {"a": "one.safetensors"}}
    text = json.dumps(document).encode()
    index = tmp_path / "model.safetensors.index.json"
    for case in range(500):
        random = Random(f"{SEED}/{case}")
        data = bytearray(len(text).to_bytes(8, "little") + text)
        random.choice([edit_json, flip_bits, truncate, move_section, repeat_section])(data, random)
        index.write_bytes(data[8:])
        try:
            with open_checkpoint(index) as checkpoint:
                assert checkpoint.read("a").tolist() == [ord("1")]
        except BitplanError:
            continue
        except BaseException as error:
            pytest.fail(f"seed {SEED} case {case}: {error!r}")


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to ask for its peak memory")
def test_memory_is_bounded_by_one_tensor(tmp_path):
    """Neither a second copy of a tensor nor a map of the file would fit."""
    size, names = 64 * 2**20, ["a", "b"]
    tensor = torch.ones(size, dtype=torch.uint8)

    def write_both() -> None:
        with write_safetensors(tmp_path / "st", [(name, torch.uint8, (size,)) for name in names]) as writer:
            for name in names:
                writer.write(name, tensor)
        with write_gguf(tmp_path / "gguf", [(name, Type.I8, (size,)) for name in names], {}) as gguf_writer:
            for name in names:
                gguf_writer.write(name, tensor)

    def read_both() -> None:
        with SafetensorsFile(tmp_path / "st") as st, GGUFFile(tmp_path / "gguf") as gg:
            for name in names:
                assert st.read(name)[-1] == 1
                assert gg.read_raw(name)[-1] == 1

    assert peak_resident_bytes(write_both) < size // 2
    assert peak_resident_bytes(read_both) < size + size // 2
    for path in tmp_path.iterdir():
        path.unlink()


def peak_resident_bytes(action: Callable[[], None]) -> int:
    """How far the resident memory of this process rises above what it was."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    action()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def test_random_bytes_after_a_sound_beginning(tmp_path):
    for length in range(0, 400, 7):
        random = Random(f"{SEED}/{length}")
        gguf_head = b"GGUF" + struct.pack("<IQQ", 3, random.randrange(4), random.randrange(4))
        st_text = b'{"a":' + random.randbytes(length) + b"}"
        for reader, content in [
            (GGUFFile, gguf_head + random.randbytes(length)),
            (SafetensorsFile, len(st_text).to_bytes(8, "little") + st_text),
        ]:
            (tmp_path / "a").write_bytes(content)
            with contextlib.suppress(BitplanError), reader(tmp_path / "a"):
                pass
