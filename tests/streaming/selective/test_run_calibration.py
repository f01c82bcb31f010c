"""Calibration on a stream: relative errors against resident models, the cache, a killed run, stale caches by name."""

from __future__ import annotations

import copy
import json
from functools import partial

import pytest
import torch
from torch import nn

from bitplan import decode, encode
from bitplan.streaming.selective.calibration import CalibrationError, run_calibration
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy
from bitplan.streaming.training.adamw import AdamWSettings
from tests.streaming.stream_samples import batch, streaming
from tests.streaming.stream_samples import make_stack as make_any_stack

FORMATS = ["int8_row", "fp8_e4m3_row"]
BATCHES = [batch(seed) for seed in range(3)]
COUNT = 4
make_stack = partial(make_any_stack, count=COUNT)


def rounded(weight, fmt):
    return decode(encode(weight, fmt), weight.dtype)


def quiet(*_):
    """No bar."""


def relative(reference, result):
    return float((reference - result).norm() / reference.norm())


def expected_errors(model):
    """Resident: each block's and layer's error on the input it has in bf16, the mean over the batches."""
    base = copy.deepcopy(model).eval()
    with torch.no_grad():
        for layer in base.layers:
            for linear in (layer.up, layer.down):
                linear.weight.copy_(linear.weight.bfloat16().float())
        blocks = {f"layers.{at}": dict.fromkeys(FORMATS, 0.0) for at in range(COUNT)}
        layers = {f"layers.{at}.{name}": dict.fromkeys(FORMATS, 0.0) for at in range(COUNT) for name in ("up", "down")}
        for data in BATCHES:
            hidden = base.first(data)
            for at, layer in enumerate(base.layers):
                inside = layer.norm(hidden)
                middle = torch.nn.functional.gelu(layer.up(inside))
                for fmt in FORMATS:
                    low = copy.deepcopy(layer)
                    for name, x in (("up", inside), ("down", middle)):
                        linear = getattr(layer, name)
                        # What is encoded is the weight itself, not its bf16; the layer's figure starts from bf16.
                        getattr(low, name).weight.copy_(rounded(getattr(model.layers[at], name).weight, fmt))
                        error = linear.weight - rounded(linear.weight, fmt)
                        moved = torch.nn.functional.linear(x, error).norm() / linear(x).norm()
                        layers[f"layers.{at}.{name}"][fmt] += float(moved) / len(BATCHES)
                    blocks[f"layers.{at}"][fmt] += relative(layer(hidden), low(hidden)) / len(BATCHES)
                hidden = layer(hidden)
    return blocks, layers


def test_errors_are_those_of_a_resident_model():
    model = make_stack(adapters=False)
    blocks, layers = expected_errors(model)
    before = copy.deepcopy(model.state_dict())
    with streaming(model, train="weights", optimizer=AdamWSettings(), formats={"layers.0": "int8_row"}) as stream:
        formats = stream.formats
        model.train()
        torch.manual_seed(7)
        result = run_calibration(stream, iter(BATCHES), formats=FORMATS, progress=quiet)
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(7)))
        assert model.training
        stream.begin_step(0)
        assert stream.formats == formats
    for value, expected in ((result.blocks, blocks), (result.layers, layers)):
        assert set(value) == set(expected)
        for name, row in expected.items():
            assert value[name] == pytest.approx(row, rel=2e-2), name
    assert 0 < result.blocks["layers.1"]["int8_row"] < result.blocks["layers.1"]["fp8_e4m3_row"]
    assert result.excluded == {}
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_plain_model_is_streamed_for_it():
    model = make_stack(adapters=True)
    message = []
    result = run_calibration(
        model,
        [(one,) for one in BATCHES],
        samples=2,
        formats=FORMATS,
        blocks="layers.*",
        device="cpu",
        progress=lambda *row: message.append(row),
    )
    assert set(result.blocks) == {f"layers.{at}" for at in range(COUNT)}
    assert "layers.0.up.base" in result.layers
    assert [row[:2] for row in message] == [(at, 6) for at in range(1, 7)]
    model(BATCHES[0])  # it is itself again


class StopError(Exception):
    pass


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    cache = tmp_path / "calibration.json"
    passes = []

    def forward_until(limit):
        def forward(model, data):
            if len(passes) == limit:
                raise StopError
            passes.append(1)
            return model(data)

        return forward

    with streaming(make_stack(adapters=True)) as stream:
        whole = run_calibration(stream, BATCHES, formats=FORMATS, progress=quiet)
        for limit in (2, 4, 6):
            passes.clear()
            with pytest.raises(StopError):
                run_calibration(
                    stream, BATCHES, formats=FORMATS, cache=cache, progress=quiet, forward=forward_until(limit)
                )
        partial = json.loads(cache.read_text())
        assert len(partial["layers"]) == 3
        done = sum(len(rows) for rows in partial["blocks"].values())
        assert 0 < done < 6
        passes.clear()
        resumed = run_calibration(
            stream, BATCHES, formats=FORMATS, cache=cache, progress=quiet, forward=forward_until(99)
        )
        assert len(passes) < 9, "what was measured is not measured again"
        assert resumed == whole
        passes.clear()
        again = run_calibration(stream, BATCHES, formats=FORMATS, cache=cache, progress=quiet, forward=forward_until(0))
        assert again == whole
        assert not passes


def test_a_stale_cache_is_refused_by_name(tmp_path):
    cache = tmp_path / "calibration.json"
    options = {"formats": FORMATS, "cache": cache, "progress": quiet, "blocks": "layers.*", "device": "cpu"}
    run_calibration(make_stack(adapters=True), BATCHES, **options)
    before = cache.read_bytes()

    other = make_stack(adapters=True)
    other.layers[3].down.weight.data[0, 0] += 1
    with pytest.raises(
        CalibrationError, match=r"stale: the weights of 'layers\.3' differ .*on_stale='redo', or delete the file"
    ):
        run_calibration(other, BATCHES, **options)
    outside = make_stack(adapters=True)
    outside.first.bias.data[0] += 1
    with pytest.raises(CalibrationError, match=r"the weights of 'rest' differ"):
        run_calibration(outside, BATCHES, **options)
    with pytest.raises(CalibrationError, match=r"stale: the data of 'batch 1' differ"):
        run_calibration(make_stack(adapters=True), [BATCHES[0], BATCHES[0], BATCHES[2]], **options)
    with pytest.raises(CalibrationError, match=r"the data of 'batch 2' differ .*is not there"):
        run_calibration(make_stack(adapters=True), BATCHES[:2], **options)
    with pytest.raises(CalibrationError, match=r"the quantizer settings of .*int8_g128.* differ"):
        run_calibration(make_stack(adapters=True), BATCHES, **options | {"formats": ["int8_g128"]})
    with pytest.raises(CalibrationError, match=r"the block layout of 'layers\.3' differ"):
        run_calibration(make_stack(adapters=True, count=3), BATCHES, **options)
    document = json.loads(before)
    document["fingerprint"]["versions"]["torch"] = "1.0"
    cache.write_text(json.dumps(document))
    with pytest.raises(CalibrationError, match=r"the versions of 'torch' differ \(torch was 1\.0, is"):
        run_calibration(make_stack(adapters=True), BATCHES, **options)


def test_a_stale_cache_is_redone_when_asked_and_few_batches_are_said(tmp_path, caplog):
    cache, model = tmp_path / "c.json", make_stack(adapters=False)
    with streaming(model, train="nothing") as stream:
        run_calibration(stream, BATCHES[:1], formats=FORMATS[:1], samples=1, cache=cache, progress=quiet)
        assert not caplog.text
        with torch.no_grad():
            model.layers[3].up.weight.mul_(1.5)
        options = {"formats": FORMATS[:1], "cache": cache, "progress": quiet}
        result = run_calibration(stream, BATCHES[:1], on_stale="redo", **options)
        assert caplog.text.count("calibrating on 1 of 4 samples: no more batches came") == 1
        assert result == run_calibration(stream, BATCHES[:1], samples=1, **options)  # and the file is of now
        with pytest.raises(CalibrationError, match="on_stale='again': there are 'refuse', 'redo'"):
            run_calibration(stream, BATCHES, on_stale="again", **options)


def test_adapters_and_the_order_of_batches_are_no_part_of_the_key(tmp_path):
    model, options = make_stack(adapters=True), {"formats": FORMATS[:1], "samples": 3, "cache": tmp_path / "c.json"}
    with streaming(model) as stream:
        first = run_calibration(stream, BATCHES, progress=quiet, **options)
        with torch.no_grad():
            for one in model.parameters():
                if one.requires_grad:
                    one.add_(0.01)
        again = run_calibration(stream, BATCHES[::-1], progress=lambda *_: pytest.fail("measured again"), **options)
        assert again == first
        with torch.no_grad():
            model.layers[2].up.base.weight.add_(0.01)
        with pytest.raises(CalibrationError, match=r"stale: the weights of 'layers\.2' differ"):
            run_calibration(stream, BATCHES, progress=quiet, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"document": "bitplan-calibration", "version": 9}', "version must be 1"),
        ('{"document": "other", "version": 1}', "document must be one of 'bitplan-calibration'"),
    ],
)
def test_a_file_that_is_no_calibration(text, message, tmp_path):
    cache = tmp_path / "calibration.json"
    cache.write_text(text)
    with pytest.raises(CalibrationError, match=message):
        run_calibration(make_stack(adapters=True), BATCHES, cache=cache, blocks="layers.*", device="cpu")
    assert cache.read_text() == text


def test_wrong_figures_in_a_cache_are_refused(tmp_path):
    cache = tmp_path / "calibration.json"
    options = {"cache": cache, "progress": quiet, "blocks": "layers.*", "device": "cpu"}
    run_calibration(make_stack(adapters=True), BATCHES, **options)
    document = json.loads(cache.read_text())
    document["blocks"]["int8_row"]["0"]["layers.2"] = -1
    cache.write_text(json.dumps(document))
    with pytest.raises(
        CalibrationError, match=r"blocks\.int8_row\.0\.layers\.2 must be a number from 0, or null, got -1"
    ):
        run_calibration(make_stack(adapters=True), BATCHES, **options)


def test_refusals():
    with pytest.raises(CalibrationError, match="no batches"):
        run_calibration(make_stack(adapters=True), [], blocks="layers.*", device="cpu")
    with pytest.raises(CalibrationError, match="no formats"):
        run_calibration(make_stack(adapters=True), BATCHES, formats=[], blocks="layers.*", device="cpu")
    with pytest.raises(CalibrationError, match="got a object in it"):
        run_calibration(make_stack(adapters=True), [{"x": object()}], blocks="layers.*", device="cpu")


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 64, bias=False)), nn.Sequential(nn.Linear(64, 4))])

    def forward(self, x):
        return self.layers[1](self.layers[0](x * 0))


def test_an_output_of_zero_gives_no_error_and_is_counted():
    result = run_calibration(Silent(), BATCHES, formats=["int8_row"], blocks="layers.*", device="cpu", progress=quiet)
    assert result.blocks["layers.0"] == {}
    assert result.excluded["layers.0"] == 3
    assert result.blocks["layers.1"]["int8_row"] == 0.0


def test_a_llama_with_a_cache_and_keywords():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config).requires_grad_(False)
    ids = torch.randint(64, (2, 16))
    result = run_calibration(
        model, [{"input_ids": ids}], formats=["int8_row"], device="cpu", progress=quiet, blocks="model.layers.*"
    )
    assert 0 < result.blocks["model.layers.1"]["int8_row"] < 0.05
    assert len(result.layers) == 14


def test_the_policy_uses_it():
    model = make_stack(adapters=True)
    with streaming(model) as stream:
        result = run_calibration(stream, BATCHES, progress=quiet)
        config = SelectivePrecisionConfig(telemetry_enabled=False)
        with SelectivePrecisionPolicy(stream, config, calibration=result) as policy:
            assert policy.quant_errors["layers.0"]["int8"] == result.blocks["layers.0"]["int8_row"]
        layered = SelectivePrecisionConfig(telemetry_enabled=False, granularity="layer")
        with SelectivePrecisionPolicy(stream, layered, calibration=result) as policy:
            assert policy.quant_errors["layers.0.down"]["int8"] == result.layers["layers.0.down"]["int8_row"]
