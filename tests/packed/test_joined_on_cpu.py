"""Projections joined on a CPU: the numbers of separate layers to the bit, one product for all, and the same files."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba")

from bitplan.packed.fused_projections import MOST_UNCLAIMED, JointLinear, fuse_projections
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.products import cpu_fused
from bitplan.packed.products.cpu_fused import FusedOnCpu
from bitplan.packed.quant_linear import QuantLinear
from tests.crosses import few
from tests.packed.linear_samples import normal, packed

pytestmark = pytest.mark.skipif(
    cpu_fused.why_not_ours(packed("int8_row", 64, 128)) is not None, reason="no fused kernel of ours on this CPU"
)


class Attention(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            QuantLinear(packed(name, outputs, 128, seed=seed)) for seed, outputs in enumerate((64, 33, 31))
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of layers whose products ran through the bound or the direct path."""
    ran: list[str] = []
    forward, joint = QuantLinear._forward, JointLinear.forward
    monkeypatch.setattr(QuantLinear, "_forward", lambda self, x: (ran.append(self.name), forward(self, x))[1])
    monkeypatch.setattr(JointLinear, "forward", lambda self, x: (ran.append("joint"), joint(self, x))[1])
    return ran


@pytest.mark.parametrize(
    "name", few(["q4_0_gguf", "iq4_nl_gguf", "int8_row", "int8_g128", "q8_0_gguf", "fp8_e4m3_row", "mxfp4"], 2)
)
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_joined_products_are_those_of_separate_layers_to_the_bit(name: str, rows: int) -> None:
    alone, joined = Attention(name), Attention(name)
    assert fuse_projections(joined) == ["q_proj+k_proj+v_proj"]
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            for seed in range(2):  # the second call takes the bound path
                x = normal(1, rows, 128, seed=seed).to(dtype)
                assert all(torch.equal(*pair) for pair in zip(alone(x), joined(x), strict=True))
    assert joined.q_proj.joint.layer is not None


def test_one_product_serves_all_layers_and_weights_share_its_memory(products: list[str]) -> None:
    model = Attention("int8_row")
    fuse_projections(model)
    with torch.inference_mode():
        model(normal(1, 128))
    assert products == ["joint", "q_proj+k_proj+v_proj"]
    owners = {layer.weight.data.untyped_storage().data_ptr() for layer in model.children()}
    assert len(owners) == 1


def test_layers_with_different_inputs_run_alone_after_a_few_calls(products: list[str]) -> None:
    model, alone = Attention("int8_row"), Attention("int8_row")
    fuse_projections(model)
    with torch.no_grad():
        for seed in range(MOST_UNCLAIMED + 2):
            x, other = normal(1, 128, seed=seed), normal(1, 128, seed=100 + seed)
            made = model.q_proj(x), model.k_proj(other), model.v_proj(other)
            right = alone.q_proj(x), alone.k_proj(other), alone.v_proj(other)
            assert all(torch.equal(*pair) for pair in zip(made, right, strict=True))
            if seed >= MOST_UNCLAIMED:
                assert "joint" not in products
            products.clear()


def test_tensors_with_factors_of_their_own_stay_alone() -> None:
    model, alone = Attention("nvfp4"), Attention("nvfp4")
    fuse_projections(model)
    x = normal(1, 128)
    with torch.no_grad():
        assert all(torch.equal(*pair) for pair in zip(alone(x), model(x), strict=True))
    assert model.q_proj.joint.layer is None
    parts = [FusedOnCpu().prepare(packed("nvfp4", 64, 128, seed=seed)) for seed in (0, 1)]
    assert FusedOnCpu().join(parts) is None


def test_threads_that_share_a_model_get_their_own_products() -> None:
    model, alone = Attention("int8_row"), Attention("int8_row")
    fuse_projections(model)
    inputs = [normal(1, 128, seed=seed) for seed in range(4)]
    with torch.no_grad():
        expected = [alone(x) for x in inputs]
    wrong: list[int] = []

    def work(place: int) -> None:
        with torch.no_grad():
            for _ in range(200):
                made = model(inputs[place])
                if not all(torch.equal(*pair) for pair in zip(made, expected[place], strict=True)):
                    wrong.append(place)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_folder_loads_joined_and_saves_the_same_bytes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import bitplan
    import bitplan.transformers

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "float")
    bitplan.quantize_file(tmp_path / "float", tmp_path / "packed", "int8_row")
    tokens = torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    model, _ = bitplan.load_packed(tmp_path / "packed")
    words = model.generate(tokens, **options)
    joint = model.get_submodule("model.layers.1.mlp.up_proj").joint
    assert joint is not None
    assert joint.layer is not None
    bitplan.save_packed(model, tmp_path / "again")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(theirs.generate(tokens, **options), words)
    assert theirs.get_submodule("model.layers.0.self_attn.q_proj").joint.layer is not None
    theirs.save_pretrained(tmp_path / "once-more")
    first = (tmp_path / "packed" / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == first
    assert (tmp_path / "once-more" / "model.safetensors").read_bytes() == first


def test_a_part_is_given_once_so_that_it_may_be_written_in_place() -> None:
    model, alone = Attention("int8_row"), Attention("int8_row")
    fuse_projections(model)
    x = normal(1, 128)
    with torch.no_grad():
        model.q_proj(x).zero_()
        assert torch.equal(model.q_proj(x), alone.q_proj(x))
    with torch.inference_mode():  # where tensors count no writes
        x = normal(1, 128)
        model.q_proj(x)
        x.add_(1)
        assert torch.equal(model.q_proj(x), alone.q_proj(x))


def test_what_learns_may_be_added_in_place_to_a_part() -> None:
    model = Attention("int8_row")
    fuse_projections(model)
    learned = nn.Parameter(torch.ones(64))
    made = model.q_proj(normal(1, 128))
    assert model.q_proj.joint.layer is not None
    made += learned
    made.sum().backward()
    assert learned.grad is not None


@pytest.mark.parametrize("change", ["bias", "weight", "parts"])
def test_what_is_set_after_the_layers_were_joined_counts(change: str) -> None:
    model, alone = Attention("int8_row"), Attention("int8_row")
    fuse_projections(model)
    x, other, before = normal(1, 128), packed("int8_row", 33, 128, seed=9), model.k_proj.weight
    with torch.no_grad():
        model(x)
        assert model.q_proj.joint.layer is not None
        for each in (model, alone):
            if change == "bias":
                each.k_proj.bias = nn.Parameter(torch.ones(33))
            elif change == "weight":
                each.k_proj.weight = PackedWeight(other)
            else:
                each.k_proj.weight.data, each.k_proj.weight.scales = other.data.clone(), other.scales.clone()
        for _ in range(2):
            assert all(torch.equal(*pair) for pair in zip(alone(x), model(x), strict=True))
    assert before.fmt.name == "int8_row"  # kept: a weight that is freed says so itself


@pytest.mark.parametrize("change", ["bias", "weight"])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_graph_of_joined_layers_sees_what_is_set(change: str, compiled_first: bool) -> None:
    torch._dynamo.reset()
    model, alone, x = Attention("int8_row"), Attention("int8_row"), normal(1, 128)
    fuse_projections(model)
    graph = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        (graph if compiled_first else model)(x)
        assert model.q_proj.joint.layer is not None
        for each in (model, alone):
            if change == "bias":
                each.q_proj.bias = nn.Parameter(torch.ones(64))
            else:
                each.q_proj.weight = PackedWeight(packed("int8_row", 64, 128, seed=9))
        assert all(torch.equal(*pair) for pair in zip(alone(x), graph(x), strict=True))


def test_a_weight_that_was_replaced_and_is_freed_later_changes_nothing() -> None:
    """A compiler holds on to weights of earlier graphs until garbage is collected, maybe while it makes the next."""
    model, x = Attention("int8_row"), normal(1, 128)
    fuse_projections(model)
    with torch.no_grad():
        model(x)
        replaced: list[PackedWeight] = [model.q_proj.weight]
        model.q_proj.weight = PackedWeight(packed("int8_row", 64, 128, seed=9))
        model(x)
        joint_layer = model.q_proj.joint.layer
        assert joint_layer is not None
        replaced[0].forget()  # it is nobody's any more
        assert model.q_proj.joint.layer is joint_layer
        replaced.clear()
        gc.collect()
        assert model.q_proj.joint.layer is joint_layer


def test_layers_that_were_joined_in_inference_mode_load_a_state() -> None:
    model, other, x = Attention("int8_row"), Attention("int8_row"), normal(1, 128)
    fuse_projections(model)
    with torch.inference_mode():
        model(x)
    assert model.q_proj.joint.layer is not None
    other.k_proj.weight = PackedWeight(packed("int8_row", 33, 128, seed=9))
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert all(torch.equal(*pair) for pair in zip(other(x), model(x), strict=True))


def test_autocast_may_be_switched_between_joined_layers() -> None:
    model, x = Attention("int8_row"), normal(1, 128)
    fuse_projections(model)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = model.q_proj(x)
        assert (first.dtype, model.k_proj(x).dtype) == (torch.bfloat16, torch.float32)


def test_joined_layers_are_exported_for_any_number_of_rows() -> None:
    model, x = Attention("int8_row"), normal(3, 128)
    fuse_projections(model)
    with torch.no_grad():
        model(x)
        made = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},)).module()
        more = normal(40, 128)
        assert all(torch.equal(*pair) for pair in zip(model(more), made(more), strict=True))
