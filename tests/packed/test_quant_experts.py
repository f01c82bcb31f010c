"""QuantExperts against a plain loop in float64 over decoded weights: numbers, gradients, routing, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bitplan
from bitplan.packed import expert_products
from bitplan.packed.crossover import Pick
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.quant_experts import QuantExperts
from bitplan.packed.tile_cache import TileCache
from tests.crosses import few

FORMATS = ("mxfp4", "fp4_u8_g128", "nvfp4", "int8_row", "int8_g128", "int4_g32", "q4_0_gguf", "fp8_e4m3_row")
E, H, INNER = 5, 128, 128  # experts, hidden, intermediate


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(fmt="mxfp4", *, biases=True, device="cpu", **options):
    gate_up = bitplan.encode(drawn(E, 2 * INNER, H, seed=1) / H**0.5, fmt).to(device)
    down = bitplan.encode(drawn(E, H, INNER, seed=2) / INNER**0.5, fmt).to(device)
    if biases:
        options |= {"gate_up_bias": drawn(E, 2 * INNER, seed=3).to(device), "down_bias": drawn(E, H, seed=4).to(device)}
    return QuantExperts(gate_up, down, **options)


def routed(tokens, top_k=2, seed=5):
    scores, ids = torch.topk(drawn(tokens, E, seed=seed), top_k)
    return ids, scores.softmax(-1)


def reference(experts, x, ids, weights):
    """Token by token, expert by expert, in float64."""
    gate_up, down = (bitplan.decode(packed.encoded, torch.float64) for packed in (experts.gate_up, experts.down))
    rows = []
    for token in range(x.shape[0]):
        row = torch.zeros(H, dtype=torch.float64)
        for slot in range(ids.shape[1]):
            e = int(ids[token, slot])
            both = gate_up[e] @ x[token].double()
            if experts.gate_up_bias is not None:
                both = both + experts.gate_up_bias[e].double()
            if experts.activation == "swiglu":
                gate, up = both[:INNER], both[INNER:]
                inner = gate * torch.sigmoid(gate) * up
            else:
                gate, up = both[0::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            out = down[e] @ inner
            if experts.down_bias is not None:
                out = out + experts.down_bias[e].double()
            row = row + weights[token, slot].double() * out
        rows.append(row)
    return torch.stack(rows) if rows else x.double()


def close(given, expected, tolerance):
    assert given.shape == expected.shape
    if expected.numel():
        assert (given.double().cpu() - expected.cpu()).abs().max() <= tolerance * expected.abs().max().cpu()


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.cross("fmt", few(FORMATS, 4))
@pytest.mark.cross("strategy", ["auto", "eager"])
def test_equals_a_plain_loop(fmt, strategy):
    experts = make(fmt, strategy=strategy)
    x, (ids, weights) = 3 * drawn(9, H, seed=6), routed(9)
    with torch.no_grad():
        close(experts(x, ids, weights), reference(experts, x, ids, weights), 1e-6)


def test_numbers_reach_the_clamp():
    experts, x = make(), 30 * drawn(4, H, seed=6)
    ids, weights = routed(4)
    with torch.no_grad():
        close(experts(x, ids, weights), reference(experts, x, ids, weights), 1e-6)
        assert bitplan.decode(experts.gate_up.encoded).flatten(0, 1).mul(x[0]).sum(-1).max() > 7


def test_swiglu_without_biases():
    experts = make("int8_row", activation="swiglu", biases=False)
    x, (ids, weights) = drawn(7, H, seed=6), routed(7)
    with torch.no_grad():
        close(experts(x, ids, weights), reference(experts, x, ids, weights), 1e-6)


@pytest.mark.cross(
    "ids",
    [
        pytest.param([[0, 2], [2, 0], [0, 2]], id="experts without a token"),
        pytest.param([[3, 3], [3, 3]], id="all on one, twice"),
        pytest.param([[4, 3, 2, 1, 0], [0, 1, 2, 3, 4]], id="all experts in any order"),
        pytest.param([[1]], id="one token, one expert"),
        pytest.param([], id="no token"),
    ],
)
@pytest.mark.cross("strategy", ["decode", "eager", "tile_cache", "fused"])
def test_routing(ids, strategy):
    cache = TileCache(2**20) if strategy == "tile_cache" else None
    experts = make(strategy=strategy, cache=cache)
    chosen = torch.tensor(ids, dtype=torch.int64).reshape(len(ids), -1) if ids else torch.zeros(0, 2, dtype=torch.int64)
    weights = drawn(*chosen.shape, seed=7).softmax(-1)
    x = drawn(len(ids), H, seed=6).to(torch.bfloat16)
    with torch.no_grad():
        result = experts(x, chosen, weights.to(torch.bfloat16))
    assert result.shape == (len(ids), H)
    assert result.dtype == torch.bfloat16
    close(result, reference(experts, x, chosen, weights.to(torch.bfloat16)), 2e-2 if strategy == "fused" else 4e-3)


def test_a_cpu_multiplies_in_float32(monkeypatch):
    """bfloat16 tokens give the float32 result, rounded once; and no product sees a bfloat16."""
    seen, mm, addmm = set(), torch.mm, torch.addmm
    monkeypatch.setattr(torch, "mm", lambda a, b, **rest: seen.add(a.dtype) or mm(a, b, **rest))
    monkeypatch.setattr(torch, "addmm", lambda c, a, b, **rest: seen.add(a.dtype) or addmm(c, a, b, **rest))
    experts, x, (ids, weights) = make(), drawn(6, H, seed=6).bfloat16(), routed(6)
    x.requires_grad_()
    result = experts(x, ids, weights)
    assert torch.equal(result, experts(x.float(), ids, weights).bfloat16())
    result.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(experts(x, ids, weights), result)
    assert seen == {torch.float32}


def test_fused_is_two_launches_under_the_interpreter(monkeypatch):
    from bitplan.packed.products import fused_few_rows as triton_matmul

    calls, fused = [], triton_matmul.fused_experts
    monkeypatch.setattr(triton_matmul, "fused_experts", lambda *a, **k: calls.append(k["per_pair"]) or fused(*a, **k))
    monkeypatch.setattr(expert_products.ExpertMatrices, "decoded", None)  # nothing is expanded
    experts = make(strategy="fused")
    x, (ids, weights) = drawn(12, H, seed=6).bfloat16(), routed(12)
    with torch.no_grad():
        close(experts(x, ids, weights), reference(experts, x, ids, weights), 2e-2)
        experts(x, ids, weights)
    assert calls == [False, True] * 2
    assert experts.derived_bytes > 0


def test_only_active_experts_are_expanded(monkeypatch):
    asked, decode = [], expert_products.decode
    monkeypatch.setattr(
        expert_products, "decode", lambda given, dtype: asked.append(given.shape) or decode(given, dtype)
    )
    experts = make(strategy="decode")
    with torch.no_grad():
        experts(drawn(3, H), torch.tensor([[1, 4]] * 3), torch.full((3, 2), 0.5))
    assert asked == [(2 * INNER, H)] * 2 + [(H, INNER)] * 2
    assert experts.derived_bytes == 0


def test_the_cache_keeps_experts_and_forgets_those_that_changed():
    one = 4 * H * 2 * INNER  # of gate_up; half of it is one of down
    cache = TileCache(2 * one)
    experts = make(strategy="tile_cache", cache=cache)
    x, ids, weights = drawn(3, H), torch.tensor([[1, 4]] * 3), torch.full((3, 2), 0.5)
    with torch.no_grad():
        expected = make(strategy="decode")(x, ids, weights)
        assert torch.equal(experts(x, ids, weights), expected)
        assert (cache.counters.misses, cache.counters.nbytes) == (4, 2 * one)
        cache.budget_bytes = 3 * one
        for _ in range(2):
            assert torch.equal(experts(x, ids, weights), expected)
        assert cache.counters.hits >= 4
        experts.load_state_dict(make("mxfp4").state_dict())
        assert cache.counters.nbytes == 0


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.cross("fmt", ["mxfp4", "int8_row"])
@pytest.mark.cross("activation", ["gpt_oss", "swiglu"])
def test_gradients_are_those_through_decoded_weights(fmt, activation):
    experts = make(fmt, activation=activation)
    ids, given = routed(8, 3)
    tensors = {}
    for run in (experts, lambda *inputs: reference(experts, *inputs)):
        x, weights = drawn(8, H, seed=6).requires_grad_(), given.clone().requires_grad_()
        (run(x, ids, weights).double() * drawn(8, H, seed=8).double()).sum().backward()
        mine = [x.grad, weights.grad, experts.gate_up_bias.grad, experts.down_bias.grad]
        tensors.setdefault("all", []).append([tensor.clone() for tensor in mine])
        experts.zero_grad()
    for value, expected in zip(*tensors["all"], strict=True):
        close(value, expected.double(), 1e-5)


def test_gradcheck_in_float64():
    experts = make("int8_row").double()
    assert experts.gate_up.encoded.scales.dtype == torch.float32
    x, (ids, weights) = drawn(3, H, seed=6, dtype=torch.float64).requires_grad_(), routed(3)
    weights = weights.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: experts(a, ids, b), (x, weights), fast_mode=True)


def test_gradients_of_the_fused_forward_are_those_of_decode():
    x, (ids, weights) = drawn(10, H, seed=6).bfloat16(), routed(10)
    grads = []
    for strategy in ("fused", "decode"):
        experts = make(strategy=strategy)
        inputs = [x.clone().requires_grad_(), weights.bfloat16().requires_grad_()]
        experts(inputs[0], ids, inputs[1]).float().square().sum().backward()
        grads.append([*(item.grad for item in inputs), experts.gate_up_bias.grad, experts.down_bias.grad])
    for value, expected in zip(*grads, strict=True):
        close(value, expected.double(), 3e-2)


def test_a_step_with_an_adapter_changes_only_the_adapter():
    class Adapted(nn.Module):
        """LoRA on what goes into the experts, and a router."""

        def __init__(self):
            super().__init__()
            self.experts, self.router = make(), nn.Linear(H, E)
            self.down, self.up = nn.Linear(H, 4, bias=False), nn.Linear(4, H, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            scores, ids = torch.topk(self.router(x), 2)
            return self.experts(x + self.up(self.down(x)), ids, scores.softmax(-1))

    torch.manual_seed(0)
    model = Adapted()
    model.experts.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x, wanted = drawn(16, H, seed=6), drawn(16, H, seed=9)
    losses = []
    for _ in range(3):
        loss = (model(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"router.weight", "router.bias", "down.weight", "up.weight"}
    assert losses[2] < losses[1] < losses[0]


# ---- state -----------------------------------------------------------------------------------------------------------


def test_casts_leave_the_bytes_alone_and_state_goes_round():
    experts = make("nvfp4", strategy="eager")
    x, (ids, weights) = drawn(4, H, seed=6), routed(4)
    with torch.no_grad():
        before = experts(x, ids, weights)
        assert experts.derived_bytes == 4 * E * 3 * INNER * H
        other = make("nvfp4", strategy="eager")
        for part in other.down.buffers():
            part.zero_()
        assert not torch.equal(other(x, ids, weights), before)
        other.load_state_dict(experts.state_dict())  # what was expanded from the old bytes is not used again
        assert torch.equal(other(x, ids, weights), before)
        assert torch.equal(copy.deepcopy(experts)(x, ids, weights), before)
        experts.to(torch.bfloat16)
        assert experts.down_bias.dtype == torch.bfloat16
        assert experts.down.encoded.base.dtype == torch.float32
        assert experts.packed_bytes == other.packed_bytes


def test_explain_says_what_runs_and_why(monkeypatch):
    experts = make()
    assert experts.explain(8) == Pick("decode", "not fused: no grouped kernel for cpu")
    assert make(strategy="eager").explain(8) == Pick("eager", "asked for")
    experts(drawn(3, H), *routed(3))
    assert experts.last_pick == experts.explain(6)
    monkeypatch.setattr(type(experts.down), "device", torch.device("cuda"))
    for rows, strategy, reason in (
        (32 * E, "fused", "160 rows over 5 experts are 32.0 for each, at most 32"),
        (32 * E + 1, "decode", "161 rows over 5 experts are 32.2 for each, above 32"),
    ):
        assert experts.explain(rows) == Pick(strategy, reason)
    assert experts.explain(8, torch.float16).strategy == "decode"
    assert "bfloat16" in experts.explain(8, torch.float16).reason


def test_a_weight_that_changes_before_the_backward_is_an_error():
    experts, x = make(), drawn(3, H).requires_grad_()
    out = experts(x, *routed(3))
    experts.load_state_dict(make().state_dict())
    with pytest.raises(LayerError, match="loaded or written between forward and backward"):
        out.sum().backward()


def test_a_weight_put_in_the_place_of_another_is_the_one_that_runs():
    experts, x, routes = make(), drawn(3, H), routed(3)
    before = experts(x, *routes)
    experts.gate_up = PackedWeight(bitplan.encode(2 * bitplan.decode(experts.gate_up.encoded), "mxfp4"))
    wanted = QuantExperts(
        experts.gate_up,
        experts.down,
        gate_up_bias=experts.gate_up_bias.detach(),
        down_bias=experts.down_bias.detach(),
    )(x, *routes)
    assert not torch.equal(before, wanted)
    assert torch.equal(experts(x, *routes), wanted)


def test_on_a_cpu_the_device_is_the_reason_not_the_type_of_the_inputs(monkeypatch):
    kernels = pytest.importorskip("bitplan.packed.products.fused_weights")
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(LayerError, match="the fused kernels run on CUDA, and the weight is on cpu"):
        make(strategy="fused")(drawn(2, H), *routed(2))


REFUSALS = {
    "X: no strategy 'fuse'; there are auto, .*did you mean 'fused'": lambda: make(strategy="fuse", name="X"),
    "no activation 'relu'; there are gpt_oss, swiglu": lambda: make(activation="relu"),
    "'tile_cache' needs a cache with a budget, got None": lambda: make(strategy="tile_cache")(drawn(2, H), *routed(2)),
    "down is .5, 256, 128., so gate_up must be .5, 256, 256.": lambda: QuantExperts(GOOD, GOOD),
    "gate_up_bias must be .5, 256., got .5, 128.": lambda: make(biases=False, gate_up_bias=drawn(5, 128)),
    "gate_up: the blocks of fp8_e4m3_b128 do not lie within a row; use a": lambda: make("fp8_e4m3_b128"),
    "down must be .* with 32 inputs or more, got .5, 128, 16.": lambda: QuantExperts(
        GOOD, bitplan.encode(drawn(5, 128, 16), "int8_row")
    ),
    "tokens must be floats .tokens, 128., got torch.float32 .2, 64.": lambda: make()(drawn(2, 64), *routed(2)),
    "got torch.int64 .2, 128.": lambda: make()(drawn(2, H).long(), *routed(2)),
    r"must both be \[3, top_k\], got \(2, 2\) and \(2, 2\)": lambda: make()(drawn(3, H), *routed(2)),
    r"got \(2, 2\) and \(2, 5\)": lambda: make()(drawn(2, H), routed(2)[0], drawn(2, E)),
    r"expert_ids must lie in 0..4, got 1 below and 2 above of 4": lambda: make()(
        drawn(2, H), torch.tensor([[-1, 5], [99, 0]]), drawn(2, 2)
    ),
    "strategy 'fused' cannot run: the fused kernels .*; set strategy='auto'": lambda: make(strategy="fused")(
        drawn(2, H), *routed(2)
    ),
    "gate_up: the weight must be an Encoded or a PackedWeight, got a Tensor; pack it": lambda: QuantExperts(
        drawn(5, 256, 128), GOOD
    ),
    "tokens must be a torch.Tensor, got a str": lambda: make()("text", *routed(2)),
    "expert_weights must be a dense tensor, got torch.sparse_coo": lambda: make()(
        drawn(2, H), routed(2)[0], drawn(2, 2).to_sparse()
    ),
    "expert_ids must be integers, got torch.float32": lambda: make()(drawn(2, H), drawn(2, 2), drawn(2, 2)),
    "expert_ids must be integers, got torch.bool": lambda: make()(drawn(2, H), routed(2)[0].bool(), drawn(2, 2)),
    "got torch.float8_e4m3fn": lambda: make()(drawn(2, H).to(torch.float8_e4m3fn), *routed(2)),
    "expert_ids lie on meta, tokens on cpu": lambda: make()(drawn(2, H), routed(2)[0].to("meta"), drawn(2, 2)),
    "expert_weights lie on meta, tokens on cpu": lambda: make()(drawn(2, H), routed(2)[0], drawn(2, 2).to("meta")),
}
GOOD = bitplan.encode(drawn(5, 256, 128), "int8_row")


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    with pytest.raises(LayerError, match=message) as caught:
        REFUSALS[message]()
    assert "\n" not in str(caught.value)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 40, 500])
def test_fused_equals_decode_on_a_gpu(fmt, tokens):
    x, (ids, weights) = drawn(tokens, H, seed=6).bfloat16(), routed(tokens)
    expected = reference(make(fmt), x, ids, weights.bfloat16())
    with torch.no_grad():
        for strategy in ("fused", "decode", "eager", "auto"):
            experts = make(fmt, strategy=strategy, device="cuda")
            close(experts(x.cuda(), ids.cuda(), weights.bfloat16().cuda()), expected, 2e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_fused_never_waits_for_the_gpu():
    experts = make(strategy="fused", device="cuda")
    x, (ids, weights) = drawn(40, H, seed=6).bfloat16().cuda(), routed(40)
    ids, weights = ids.cuda(), weights.bfloat16().cuda()
    with torch.no_grad():
        experts(x, ids, weights)
        try:
            torch.cuda.set_sync_debug_mode("error")
            experts(x, ids, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gradients_on_a_gpu():
    ids, given = routed(60)
    grads = []
    for device, strategy in (("cuda", "fused"), ("cuda", "decode"), ("cpu", "decode")):
        experts = make(strategy=strategy, device=device)
        x = drawn(60, H, seed=6).bfloat16().to(device).requires_grad_()
        weights = given.bfloat16().to(device).requires_grad_()
        experts(x, ids.to(device), weights).float().square().sum().backward()
        grads.append([x.grad, weights.grad])
    for row in grads[:2]:
        for value, expected in zip(row, grads[2], strict=True):
            close(value, expected.double(), 3e-2)


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", few(["tile_cache", "auto", "eager"], 2))
def test_a_compiled_layer_has_no_break_and_gives_the_same_numbers_and_gradients(strategy):
    torch._dynamo.reset()
    experts = make(strategy=strategy, cache=TileCache(2**20) if strategy == "tile_cache" else None)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for tokens in (3, 5, 9):  # the number of tokens becomes a variable of the graph
        ids, weights = routed(tokens)
        x = drawn(tokens, H, seed=6).requires_grad_()
        results = []
        for run in (experts, compiled):
            y = run(x, ids, weights)
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, experts.down_bias))))
        for given, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(results[1][0], results[0][0])


def test_the_fused_way_in_a_graph_is_the_fused_way_outside():
    torch._dynamo.reset()
    experts, x = make(strategy="fused"), drawn(5, H, seed=6).bfloat16()
    ids, weights = routed(5)
    with torch.no_grad():
        y = experts(x, ids, weights)
        assert torch.equal(torch.compile(experts, backend="eager", fullgraph=True)(x, ids, weights), y)


def test_the_operator_of_experts_is_sound_and_has_no_second_derivative():
    weight, (ids, _) = make("int8_row").gate_up, routed(4)
    given = (weight.data, weight.scales, None, None, None, None, None, "int8_row", weight.shape[1], False)
    x = drawn(4, H, seed=6).requires_grad_()
    arguments = (x, None, ids.long(), *given, "*:decode", 0, 0)
    torch.library.opcheck(torch.ops.bitplan.packed_experts.default, arguments)
    y = torch.ops.bitplan.packed_experts(*arguments)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(LayerError, match="no second derivative"):
        grad.sum().backward()
