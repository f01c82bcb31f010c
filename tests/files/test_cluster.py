"""Work on a Dask cluster gives the bytes of work alone; what cannot be done there is one line."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

pytest.importorskip("distributed")

from distributed import LocalCluster

import bitplan.files.cluster
from bitplan.base.errors import FormatError, StoreError
from bitplan.files.cluster import Cluster, InFiles, received, sent
from bitplan.files.engines.targets import export_model
from bitplan.files.quantize_files import QuantizeOptions, quantize_file
from bitplan.formats.dispatch import encode
from tests.files.engines.tiny_models import save_tiny


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two workers, threads of this process: importing torch in others takes seconds."""
    with LocalCluster(processes=False, dashboard_address=":0", n_workers=2, threads_per_worker=1) as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def source(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(48, 64, generator=generator) for i in range(9)}
    tensors["kept.weight"] = torch.randn(3, 5, generator=generator).bfloat16()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_quantized_on_a_cluster_is_quantized_alone(address: str, source: Path) -> None:
    done: list[str] = []
    options = QuantizeOptions(dask=address, on_tensor=lambda spec: done.append(spec.name))
    outputs = [source.with_name(f"{name}.safetensors") for name in ("alone", "there")]
    reports = [
        quantize_file(source, output, "mxfp4", keep=["kept.weight"], options=how)
        for output, how in zip(outputs, (None, options), strict=True)
    ]
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert reports[0].rows == reports[1].rows
    assert len(done) == 10


def test_exported_on_a_cluster_is_exported_alone(address: str, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    save_tiny(folder, "llama")
    for target, name, fmt in (("gguf", "{}.gguf", "q4_0_gguf"), ("compressed-tensors", "{}", "int8_row")):
        alone, there = (tmp_path / name.format(place) for place in ("alone", "there"))
        export_model(folder, alone, target, fmt)
        export_model(folder, there, target, fmt, dask=address)
        if target == "gguf":
            assert alone.read_bytes() == there.read_bytes()
            continue
        files = sorted(path.name for path in alone.iterdir())
        assert files == sorted(path.name for path in there.iterdir())
        for file in (file for file in files if file.endswith(".safetensors")):
            assert (alone / file).read_bytes() == (there / file).read_bytes()


def test_an_error_of_a_worker_is_the_users(address: str, source: Path) -> None:
    tensors = safetensors.torch.load_file(source)
    tensors["layers.4.weight"][2, 3] = float("nan")
    safetensors.torch.save_file(tensors, source)
    output = source.with_name("out.safetensors")
    with pytest.raises(FormatError, match=r"layers\.4\.weight.*NaN"):
        quantize_file(source, output, "int8_row", keep=["kept*"], options=QuantizeOptions(dask=address))
    assert not output.exists()


def test_what_a_worker_cannot_see_is_refused(address: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"model.safetensors": 1}
    monkeypatch.setattr("bitplan.files.quantize_files.file_sizes", lambda _files: sizes)
    with pytest.raises(StoreError, match=r"is another model on the worker at .*folder that all machines share"):
        quantize_file(source, source.with_name("o.safetensors"), "int8_row", options=QuantizeOptions(dask=address))


def test_no_scheduler_and_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitplan.files.cluster, "CONNECT_S", 0.5)
    with pytest.raises(StoreError, match=r"tcp://127\.0\.0\.1:9: no Dask scheduler answers there.*dask worker"):
        Cluster("tcp://127.0.0.1:9")
    with (
        LocalCluster(processes=False, dashboard_address=":0", n_workers=0) as empty,
        pytest.raises(StoreError, match="has no workers; start some: dask worker"),
    ):
        Cluster(empty.scheduler_address)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_tensors_are_the_same_behind_the_wire(dtype: torch.dtype) -> None:
    for shape in ((3, 4), (0, 4), ()):
        tensor = torch.randint(0, 2, shape).to(dtype)
        there = received(sent([tensor, {"figures": 1}]))
        assert there[1] == {"figures": 1}
        assert there[0].dtype == dtype
        assert there[0].shape == tensor.shape
        assert torch.equal(there[0].float(), tensor.float())


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "q4_k_gguf", "int8_row"])
def test_packed_tensors_are_the_same_behind_the_wire(fmt: str) -> None:
    encoded = encode(torch.randn(4, 256), fmt)
    there = received(sent(encoded))
    assert there.fmt is encoded.fmt
    assert there.to_bytes() == encoded.to_bytes()


class KilledOnce:
    """Ends the process that it is first asked in, as a machine that is switched off."""

    files: tuple[Path, ...] = ()

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def make(self, job: int) -> tuple[int, torch.Tensor]:
        if job == 3 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return job, torch.full((2,), job, dtype=torch.bfloat16)

    def close(self) -> None: ...


def killed_once(mark: Path) -> KilledOnce:
    return KilledOnce(mark)


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
def test_a_killed_workers_tensor_is_made_again(workers: int, tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as processes,
        Cluster(processes.scheduler_address) as cluster,
    ):
        made = list(cluster.map(partial(killed_once, tmp_path / "mark"), range(12)))
    assert (tmp_path / "mark").exists()
    assert [job for job, _ in made] == list(range(12))
    assert all(bool((tensor == job).all()) for job, tensor in made)
    assert threading.current_thread() is threading.main_thread()


class KillsOnce:
    """A tensor in a file of a worker that ends when it is first asked for it."""

    def __init__(self, mark: Path | None) -> None:
        self._mark = mark

    def read(self) -> torch.Tensor:
        if self._mark is not None and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((3,), 7, dtype=torch.float16)


class InFilesMaker:
    """Gives answers that wait in files; the file of job 1 is lost with its worker."""

    files: tuple[Path, ...] = ()

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def make(self, job: int) -> InFiles:
        return InFiles(
            {"job": torch.tensor(job)}, {"a": KillsOnce(None), "b": KillsOnce(self._mark if job == 1 else None)}
        )

    def close(self) -> None: ...


def test_answers_in_files_are_fetched_one_by_one(address: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    with Cluster(address) as cluster:
        answers = [
            (facts, dict(tensors)) for facts, tensors in cluster.map_in_files(partial(InFilesMaker, mark), range(5))
        ]
    assert [int(facts["job"]) for facts, _ in answers] == list(range(5))
    for _, tensors in answers:
        assert list(tensors) == ["a", "b"]
        assert all(tensor.dtype == torch.float16 and tensor.tolist() == [7, 7, 7] for tensor in tensors.values())


def test_a_file_that_cannot_be_had_is_named(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitplan.files.cluster, "LOOK_S", 0.1)
    monkeypatch.setattr(KillsOnce, "read", lambda _self: (tmp_path / "gone").read_bytes())
    with Cluster(address) as cluster:
        _, tensors = next(cluster.map_in_files(partial(InFilesMaker, tmp_path / "mark"), range(2)))
        with pytest.raises(StoreError, match=r"does not give the a .*No such file.*its disk"):
            next(tensors)


@pytest.mark.long
def test_files_of_a_killed_worker_are_made_again(tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as processes,
        Cluster(processes.scheduler_address) as cluster,
    ):
        made = cluster.map_in_files(partial(InFilesMaker, tmp_path / "mark"), range(4))
        answers = [(int(facts["job"]), dict(tensors)) for facts, tensors in made]
    assert (tmp_path / "mark").exists()
    assert [job for job, _ in answers] == list(range(4))
    assert all(tensors["b"].tolist() == [7, 7, 7] for _, tensors in answers)
