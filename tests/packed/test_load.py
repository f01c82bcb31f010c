"""Loading gpt-oss packed: logits as transformers gives them on expanded weights, refusals, memory."""

from __future__ import annotations

import gc
import inspect
import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import bitplan
from bitplan.base.errors import FileFormatError, ManifestError, MissingLibraryError, StoreError
from bitplan.files.gguf import GGUFFile, write_gguf
from bitplan.files.gpt_oss import GptOssFile, convert_gpt_oss, make_checkpoint
from bitplan.files.gpt_oss import source as gpt_oss_source
from bitplan.files.gpt_oss.convert import DrawnCheckpoint
from bitplan.files.tensor_bytes import ContainerFile
from bitplan.formats import Encoded
from bitplan.packed.checkpoints.gpt_oss_tensors import GptOssTensors
from bitplan.packed.checkpoints.load import check_filled, load_packed
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.quant_experts import QuantExperts
from bitplan.packed.tile_cache import TileCache
from bitplan.plan.manifest import shipped_manifest

transformers = pytest.importorskip("transformers")
LAYOUTS = ("openai", "hf", "gguf")
SIZES = {"layers": 2, "experts": 8, "hidden": 64, "intermediate": 96, "vocab": 128}
IDS = torch.arange(22).reshape(2, 11) * 5
MLP1 = "block.1.mlp.mlp1_weight."


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The same numbers in every layout, and expanded."""
    folder = tmp_path_factory.mktemp("made")
    paths = {"openai": folder / "openai", "hf": folder / "hf", "gguf": folder / "model.gguf", "wide": folder / "wide"}
    for layout in LAYOUTS:
        make_checkpoint(paths[layout], naming=layout, **SIZES)
    convert_gpt_oss(paths["hf"], paths["wide"], to="hf", experts="bfloat16")
    return paths


@pytest.fixture(scope="module")
def expanded(made):
    """transformers' own model, all in float32."""
    config = transformers.GptOssConfig.from_pretrained(made["wide"])
    model = transformers.GptOssForCausalLM(config)
    weights = safetensors.torch.load_file(made["wide"] / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    model.set_experts_implementation("eager")  # transformers' own plain loop
    return model.eval()


@pytest.fixture
def reads(monkeypatch):
    """How many bytes of tensors are read, at each read."""
    sizes, read = [], ContainerFile._read_exactly

    def counted(self, what, offset, nbytes):
        if what.startswith("tensor"):
            sizes.append(nbytes)
        return read(self, what, offset, nbytes)

    monkeypatch.setattr(ContainerFile, "_read_exactly", counted)
    return sizes


def expert_modules(model):
    return [module for module in model.modules() if isinstance(module, QuantExperts)]


# ---- it runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_expanded_model(made, expanded, layout):
    model, report = load_packed(made[layout], dtype=torch.float32)
    with torch.no_grad():
        expected, result = expanded(IDS).logits, model(IDS).logits
    assert (result - expected).abs().max() < 1e-5 * expected.abs().max()
    assert report.layout == layout
    assert not model.training


@pytest.mark.parametrize("strategy", ["eager", "decode", "tile_cache"])
def test_every_strategy_gives_the_same(made, expanded, strategy):
    cache = TileCache(2**20) if strategy == "tile_cache" else None
    model = load_packed(made["hf"], dtype=torch.float32, strategy=strategy, cache=cache).model
    with torch.no_grad():
        assert (model(IDS).logits - expanded(IDS).logits).abs().max() < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_stays_packed_and_as_the_file_has_it(made, layout, reads):
    model, report = load_packed(made[layout])
    with GptOssFile(made[layout]) as file:
        packed = sum(file.tensors[slot.name].nbytes for slot in file.slots if slot.is_expert)
        assert sum(reads) == file.nbytes  # every byte once
    experts = expert_modules(model)
    assert len(experts) == 2
    assert sum(module.packed_bytes for module in experts) == packed == report.packed_bytes
    assert {part.dtype for module in experts for part in (*module.gate_up.buffers(), *module.down.buffers())} == {
        torch.uint8
    }
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert report.packed_tensors == 4
    assert report.peak_bytes is None
    assert report.device_bytes <= report.file_bytes
    assert report.seconds > 0
    assert json.loads(json.dumps(report.to_dict()))["layout"] == layout


def test_the_layouts_give_the_same_bytes(made):
    states = [load_packed(made[layout]).model.state_dict() for layout in LAYOUTS]
    for other in states[1:]:
        assert states[0].keys() == other.keys()
        assert all(torch.equal(states[0][name], other[name]) for name in other)


def test_shards_and_a_single_file(made, tmp_path):
    tensors = safetensors.torch.load_file(made["hf"] / "model.safetensors")
    index = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for shard in set(index.values()):
        held = {name: tensor for name, tensor in tensors.items() if index[name] == shard}
        safetensors.torch.save_file(held, tmp_path / shard, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    expected = load_packed(made["hf"]).model.state_dict()
    for path in (tmp_path, made["hf"] / "model.safetensors"):
        result = load_packed(path).model.state_dict()
        assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_generate_runs(made, expanded):
    model = load_packed(made["openai"], dtype=torch.float32).model
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    result = model.generate(IDS, attention_mask=mask, **options)
    assert torch.equal(result, expanded.generate(IDS, attention_mask=mask, **options))


def test_a_given_model_is_filled(made, expanded, reads):
    config = transformers.GptOssConfig.from_pretrained(made["wide"])
    with torch.device("meta"):
        own = transformers.GptOssForCausalLM(config)
    model = load_packed(made["gguf"], model=own, dtype=torch.float32).model
    assert model is own
    with torch.no_grad():
        assert (model(IDS).logits - expanded(IDS).logits).abs().max() < 1e-4
    reads.clear()
    config.vocab_size = 64
    with torch.device("meta"):
        other = transformers.GptOssForCausalLM(config)
    with pytest.raises(FileFormatError, match=r"lm_head.weight \(the file has \(128, 64\), the model \(64, 64\)\)"):
        load_packed(made["gguf"], model=other)
    with pytest.raises(FileFormatError, match="does not fit this Linear: 2 missing: bias, weight; "):
        load_packed(made["gguf"], model=nn.Linear(3, 3))
    assert reads == []
    assert all(parameter.is_meta for parameter in other.parameters())


def test_settings_come_along(made, tmp_path):
    convert_gpt_oss(made["hf"], tmp_path / "hf", to="hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config |= {"num_experts_per_tok": 2, "experts_per_token": 2, "rms_norm_eps": 1e-4}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    model = load_packed(tmp_path / "hf").model
    assert model.config.num_experts_per_tok == 2
    assert model.config.rms_norm_eps == 1e-4
    assert getattr(model.config, "quantization_config", None) is None
    assert model.generation_config.eos_token_id == 7
    if "swiglu_limit" in inspect.getsource(transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts):  # not in 5.17
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"swiglu_limit": 3.5}))
        with pytest.raises(FileFormatError, match=r"gate_up_proj of a GptOssExperts: its gating is not gpt-oss.s own"):
            load_packed(tmp_path / "hf")


def test_an_adapter_trains_over_packed_experts(made):
    model = load_packed(made["hf"], dtype=torch.float32).model.requires_grad_(False)

    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.down, self.up = inner, nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.inner(x) + self.up(self.down(x))

    layer = model.model.layers[0].self_attn
    layer.o_proj = Adapter(layer.o_proj)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"model.layers.0.self_attn.o_proj.up.weight"}


# ---- types -----------------------------------------------------------------------------------------------------------


def test_numbers_that_the_models_type_does_not_hold_are_an_error(made, tmp_path):
    with GGUFFile(made["gguf"]) as file:
        entries = [(name, item.type, item.shape) for name, item in file.tensors.items()]
        raw = {name: file.read_raw(name).clone() for name in file.tensors}
        raw["blk.1.attn_q.bias"].view(torch.float32)[3] = 1 / 3
        with write_gguf(tmp_path / "third.gguf", entries, file.metadata) as writer:
            for name, payload in raw.items():
                writer.write(name, payload.numpy().tobytes())
    with pytest.raises(
        FileFormatError, match=r"third.gguf: 'model.layers.1.self_attn.q_proj.bias' is torch.float32, and 1"
    ):
        load_packed(tmp_path / "third.gguf")
    name = "model.layers.1.self_attn.q_proj.bias"
    stored = load_packed(tmp_path / "third.gguf", dtype=torch.float32).model.state_dict()[name][3]
    rounded = load_packed(tmp_path / "third.gguf", dtype=torch.bfloat16).model.state_dict()[name][3]
    assert stored == torch.tensor(1 / 3)
    assert rounded == torch.tensor(1 / 3).bfloat16()


# ---- refusals --------------------------------------------------------------------------------------------------------


def swap(tensors, one, two):
    tensors[one], tensors[two] = tensors[two], tensors[one]


def regrouped(tensors, blocks, scales):
    """Shapes of blocks and scales replaced, with zeros in them."""
    tensors |= {f"{MLP1}blocks": torch.zeros(blocks, dtype=torch.uint8)}
    tensors |= {f"{MLP1}scales": torch.zeros(scales, dtype=torch.uint8)}


RULE_B, RULE_S = r"\(patterns\[10\] .*mlp1_weight.*blocks.*\)", r"\(patterns\[11\] .*mlp1_weight.*scales.*\)"
FAULTS = {
    "missing scales": (
        lambda t: t.pop(f"{MLP1}scales"),
        f"missing-scales: {MLP1}blocks {RULE_B}: its scales .{MLP1}scales",
    ),
    "missing blocks": (lambda t: t.pop(f"{MLP1}blocks"), f"missing-data: {MLP1}scales {RULE_S}: its data"),
    "swapped": (lambda t: swap(t, f"{MLP1}blocks", f"{MLP1}scales"), f"swapped: {MLP1}blocks {RULE_B}: there are more"),
    "half a nibble": (
        lambda t: regrouped(t, (8, 192, 3, 1), (8, 192, 2)),
        f"nibble-parity: {MLP1}blocks {RULE_B}: 3 numbers to a scale is half a byte",
    ),
    "another block": (
        lambda t: regrouped(t, (8, 192, 4, 8), (8, 192, 4)),
        f"block-size: {MLP1}blocks {RULE_B}: the shapes give blocks of 16, the manifest declares 32",
    ),
    "floats for codes": (
        lambda t: t.update({f"{MLP1}blocks": t[f"{MLP1}blocks"].to(torch.bfloat16)}),
        f"dtype: {MLP1}blocks {RULE_B}: the data of mxfp4 must be uint8, the file has bfloat16",
    ),
    "a stranger": (lambda t: t.update({"lora.weight": torch.ones(3)}), "unmatched: lora.weight: no rule matches"),
}


def refused(path, reads, match, kind=ManifestError, **options):
    """One line that names the file, and nothing was read."""
    before = len(reads)
    with pytest.raises(kind, match=match) as caught:
        load_packed(path, **options)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(reads) == before


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_is_not_whole(made, tmp_path, reads, fault):
    change, message = FAULTS[fault]
    tensors = safetensors.torch.load_file(made["openai"] / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", reads, f"gpt-oss does not fit .*model.safetensors: {message}")


def test_shapes_that_lie(made, tmp_path, reads):
    whole = (made["openai"] / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    header[f"{MLP1}scales"]["shape"][0] = 9
    text = json.dumps(header).encode()
    path = tmp_path / "lies.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[start:])
    refused(
        path, reads, f"tensor '{MLP1}scales': U8 of shape .9, 192, 2. takes 3456 bytes, data_offsets", FileFormatError
    )
    tensors = safetensors.torch.load_file(made["openai"] / "model.safetensors")
    for part in ("blocks", "scales"):  # of one mind, and not those of this model
        tensors[MLP1 + part] = tensors[MLP1 + part].unflatten(1, (2, 96)).flatten(0, 1)
    safetensors.torch.save_file(tensors, path)
    refused(path, reads, f"{MLP1}blocks' is uint8 .16, 96, 2, 16.: expected shape", FileFormatError)


def test_manifests_for_another_model(made, reads, tmp_path):
    for layout in LAYOUTS:
        refused(made[layout], reads, "llama does not fit .*", manifest="llama")
    rules = {"version": 1, "patterns": [{"regex": "decoder.*", "format": "BF16"}]}
    (tmp_path / "mine.json").write_text(json.dumps(rules))
    for layout in LAYOUTS:
        refused(made[layout], reads, "mine.json does not fit .*: other-model: ", manifest=tmp_path / "mine.json")
    assert load_packed(made["gguf"], manifest=shipped_manifest("gpt-oss")).report.packed_tensors == 4


def test_experts_in_floats_are_never_loaded(made, tmp_path, reads):
    message = (
        "down_proj' is torch.bfloat16: these experts are not packed, .*; pack them with `bitplan gpt-oss convert` first"
    )
    refused(made["wide"], reads, message, FileFormatError)
    convert_gpt_oss(made["hf"], tmp_path / "wide.gguf", to="gguf", experts="bfloat16")
    reads.clear()
    message = (
        "'blk.0.ffn_gate_exps.weight' is torch.bfloat16: these experts are not packed, and are not loaded as floats"
    )
    refused(tmp_path / "wide.gguf", reads, message, FileFormatError)


def test_other_refusals(made, tmp_path, reads, monkeypatch):
    refused(tmp_path / "none.safetensors", reads, "no such file", FileFormatError)
    with pytest.raises(LayerError, match="no strategy 'fast'"):
        load_packed(made["hf"], strategy="fast")
    with pytest.raises(LayerError, match=r"model.layers.0.mlp.experts: strategy 'tile_cache' needs a cache with a"):
        load_packed(made["hf"], strategy="tile_cache")
    with pytest.raises(LayerError, match=r"layers.0.mlp.experts: strategy 'fused' cannot run: the fused kernels"):
        load_packed(made["hf"], strategy="fused", dtype=torch.float32)
    if not torch.cuda.is_available():
        with pytest.raises(StoreError, match="device 'cuda': torch sees no GPU here"):
            load_packed(made["hf"], device="cuda")
    with pytest.raises(StoreError, match="device 'gpu': there is no such kind; use cpu, or cuda"):
        load_packed(made["hf"], device="gpu")
    for wrong in (torch.int8, "float32"):
        with pytest.raises(StoreError, match=r"dtype must be a float type of torch \(bfloat16, .*, got "):
            load_packed(made["hf"], dtype=wrong)
    make_checkpoint(tmp_path / "hf", naming="hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    reads.clear()
    refused(tmp_path / "hf", reads, "num_hidden_layers is 3, and the tensors give 2", FileFormatError)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")  # it replaces itself there
    refused(made["hf"], reads, "needs transformers 5, 4.57.1 is installed: pip install", MissingLibraryError)


def test_a_failure_on_the_way_leaves_nothing(made, monkeypatch):
    """Cut short under our hands, on the way: no model, and what was read is let go."""
    config = transformers.GptOssConfig.from_pretrained(made["wide"])
    with torch.device("meta"):
        own = transformers.GptOssForCausalLM(config)
    alive, whole = [], GptOssTensors.read

    def watched(file, name):
        if len(alive) == 20:
            raise FileFormatError(f"{file.path}: tensor {name!r} is cut short")
        result = whole(file, name)
        alive.append(weakref.ref(result.data if isinstance(result, Encoded) else result))
        return result

    monkeypatch.setattr(GptOssTensors, "read", watched)
    with pytest.raises(FileFormatError, match="cut short") as caught:
        load_packed(made["hf"], model=own)
    gc.collect()
    assert len(alive) == 20
    assert caught.tb is not None
    assert sum(ref() is not None for ref in alive) <= 1  # the last, while the traceback is still held
    assert all(parameter.is_meta for parameter in own.parameters())
    assert not expert_modules(own)


def test_a_scale_without_a_meaning_is_refused_from_gguf(made, tmp_path):
    data = bytearray(made["gguf"].read_bytes())
    with GGUFFile(made["gguf"]) as file:
        start = file.tensors["blk.1.ffn_up_exps.weight"].start
        data[start + 96 * 2 * 17] = 255  # the first block of expert 1
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(FileFormatError, match=r"bad.gguf: 'blk.1.ffn_up_exps.weight', expert 1: a scale byte 255"):
        load_packed(tmp_path / "bad.gguf")


def changed(source, folder, change):
    """A copy of a checkpoint with other numbers."""
    shutil.copytree(source, folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def test_scales_and_norms_must_be_numbers(made, tmp_path):
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    bad = changed(made["hf"], tmp_path / "scale", lambda tensors: tensors[scales][3, 5].fill_(255))
    with pytest.raises(FileFormatError, match=rf"scale: '{scales}', expert 3: a scale byte 255, which is NaN"):
        load_packed(bad)
    norm = "model.layers.0.input_layernorm.weight"
    bad = changed(made["hf"], tmp_path / "norm", lambda tensors: tensors[norm][2:4].fill_(torch.nan))
    with pytest.raises(FileFormatError, match=rf"norm: '{norm}': 2 of 64 numbers of a norm are NaN or infinite"):
        load_packed(bad)


def test_a_deep_check_reads_every_tensor_first(made, tmp_path):
    name = "model.embed_tokens.weight"
    bad = changed(made["hf"], tmp_path / "embed", lambda tensors: tensors[name][2:4].fill_(torch.inf))
    load_packed(bad)
    with pytest.raises(FileFormatError, match=f"embed: {name}: 0 NaN and 128 infinite"):
        load_packed(bad, check="deep")
    load_packed(made["hf"], check="deep")
    with pytest.raises(StoreError, match="check must be 'headers' or 'deep', got 'thorough'"):
        load_packed(made["hf"], check="thorough")


def test_what_is_checked_at_the_end_can_fail(made):
    model = load_packed(made["hf"]).model
    model.lm_head.to("meta")
    with pytest.raises(StoreError, match=r"here: 1 tensors were not loaded, .* 'lm_head.weight'"):
        check_filled(model, "here")


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_read_is_larger_than_a_chunk_or_an_expert(made, reads, monkeypatch, layout):
    monkeypatch.setattr(gpt_oss_source, "CHUNK_BYTES", 300)
    load_packed(made[layout])
    expert = 192 * 64 * 17 // 32
    biases = 8 * 192 * 4
    assert max(reads) <= max(expert, biases)


# Not ru_maxrss: across fork and exec it keeps the parent's peak.
PEAK = """
import re, sys
from bitplan.packed.checkpoints.load import load_packed
from transformers import GptOssForCausalLM  # before the count begins
def status(key): return 1024 * int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = status("VmRSS")
model, report = load_packed(sys.argv[1])
print(report.device_bytes, status("VmHWM") - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its peak memory from Linux's /proc")
def test_peak_host_memory_is_the_model_and_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(DrawnCheckpoint, "_draw", lambda _self, shape, *_: torch.ones(shape))  # drawing takes seconds
    sizes = {"layers": 2, "experts": 32, "hidden": 1024, "intermediate": 1024, "vocab": 2048}
    make_checkpoint(tmp_path / "hf", naming="hf", **sizes)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    model, peak = map(int, done.stdout.split())
    assert model > 100 * 2**20
    assert peak < model + 64 * 2**20 + 40 * 2**20  # expanded, the experts would be 400 MB


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_peak_memory_on_a_gpu(tmp_path, layout):
    path = tmp_path / ("model.gguf" if layout == "gguf" else "model")
    sizes = {"size": "20b", "layers": 2, "vocab": 20480}
    make_checkpoint(path, naming=layout, device="cuda", **sizes)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, report = load_packed(path, device="cuda")
    assert report.peak_bytes <= 1.05 * report.file_bytes
    assert report.device_bytes <= report.file_bytes
    assert {part.device.type for part in (*model.parameters(), *model.buffers())} == {"cuda"}
    with torch.no_grad():
        model(torch.arange(8, device="cuda")[None])
    held = torch.cuda.memory_allocated() - before
    assert sum(module.derived_bytes for module in expert_modules(model)) < 0.08 * report.packed_bytes
    assert held <= 1.1 * report.file_bytes


@pytest.mark.gpu
def test_logits_on_a_gpu(made, expanded):
    with torch.no_grad():
        expected = expanded(IDS).logits
    for strategy in ("auto", "fused", "decode"):
        model = load_packed(made["hf"], device="cuda", strategy=strategy).model
        with torch.no_grad():
            result = model(IDS.cuda()).logits.float().cpu()
        assert torch.nn.functional.cosine_similarity(result.flatten(), expected.flatten(), dim=0) > 0.99


@pytest.mark.gpu
def test_no_room_is_told_before_anything_is_read(made, reads, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 10**10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    refused(made["hf"], reads, "bytes, and cuda:0 has 1000 free; nothing was read", StoreError, device="cuda")


@pytest.mark.parametrize("shards", [False, True])
def test_saving_gives_the_same_bytes(made, tmp_path, shards):
    source = made["hf"]
    if shards:
        tensors = safetensors.torch.load_file(source / "model.safetensors")
        folder = source = tmp_path / "shards"
        folder.mkdir()
        shutil.copy(made["hf"] / "config.json", folder)
        halves = {"model-1.safetensors": list(tensors)[::2], "model-2.safetensors": list(tensors)[1::2]}
        for name, half in halves.items():
            safetensors.torch.save_file({one: tensors[one] for one in half}, folder / name, {"format": "pt"})
        weight_map = {one: name for name, half in halves.items() for one in half}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load_packed(source).model.save_pretrained(tmp_path / "again")
    for path in source.iterdir():
        if not path.name.endswith((".index.json", "bitplan_evidence.json")):  # the certificate says who wrote it
            assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    written = {path.name for path in (tmp_path / "again").iterdir()}
    assert written == {path.name for path in source.iterdir()} | {"bitplan_evidence.json"}


def test_other_layouts_are_saved_as_hugging_faces(made, tmp_path):
    model = load_packed(made["gguf"], dtype=torch.float32).model
    bitplan.save_packed(model, tmp_path / "hf")
    again = load_packed(tmp_path / "hf", dtype=torch.float32).model
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
