"""Real processes over gloo train streamed weights: equal to the bit, and to one process with all batches."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from bitplan.base.errors import StreamError
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.options import StreamOptions
from bitplan.streaming.selective.trainer_callbacks import WEIGHTS_FILE
from bitplan.streaming.training.optimizers import HostOptimizer, Lion
from bitplan.streaming.training.processes import SLICE_ALIGNMENT, Processes, hide_from_ddp
from tests.streaming.stream_samples import assert_equal, batch, make_stack, streaming
from tests.streaming.training.process_jobs import SETTINGS, frozen_outside, in_processes, train_alone, train_unevenly

MUON, ADAFACTOR = (HostOptimizer(kind, 1e-3) for kind in (torch.optim.Muon, torch.optim.Adafactor))
UNLIKE = {
    "rate": "step 1: end_step: rank 1 would train other weights than rank 0: learning rate, optimizer or clipping",
    "limit": "step 0: clip_gradients: rank 1 would train other weights .* set them alike in each; here",
    "load": "step 1: end_step: rank 1 would train other weights than rank 0: a state was loaded in some",
    "change": r"layers\.1\.up\.weight is another tensor in rank 1 than in rank 0",
    "rate early": "step 1: backward: rank 1 would train other weights than rank 0: learning rate, optimizer or",
    "change sharded": "step 1: end_step: rank 1 would train .*: weights were changed in some processes alone",
}
JOBS = {
    "train": ("train", {}),
    "sharded": ("train", {"shard_optimizer": True, "clip_grad_norm": 0.1, "formats": "int8_row"}),
    "small": ("train", {"shard_optimizer": True, "moments": "int8"}),
    "bfloat16": ("train", {"dtype": torch.bfloat16}),
    "bfloat16 sharded": ("train", {"dtype": torch.bfloat16, "shard_optimizer": True}),
    "small bfloat16": ("train", {"dtype": torch.bfloat16, "moments": "int8"}),
    "small bfloat16 sharded": ("train", {"dtype": torch.bfloat16, "moments": "int8", "shard_optimizer": True}),
    "packed": ("train", {"dtype": torch.bfloat16, "shard_optimizer": True, "formats": "int8_row"}),
    "lion": ("train", {"shard_optimizer": True, "optimizer": HostOptimizer(Lion, 1e-3)}),
    "muon": ("train", {"shard_optimizer": True, "optimizer": MUON}),
    "adafactor": ("train", {"shard_optimizer": True, "optimizer": ADAFACTOR, "dtype": torch.bfloat16}),
    "adafactor whole": ("train", {"optimizer": ADAFACTOR, "dtype": torch.bfloat16}),
    "resume muon": ("resume", {"optimizer": MUON}),
    "early": ("train", {"update_in_backward": True}),
    "packed early": (
        "train",
        {"dtype": torch.bfloat16, "shard_optimizer": True, "formats": "int8_row", "update_in_backward": True},
    ),
    "muon early": ("train", {"shard_optimizer": True, "optimizer": MUON, "update_in_backward": True}),
    "unalike": ("train_unalike", {}),
    "unalike early": ("train_unalike", {"update_in_backward": True}),
    "nan early": ("meet_nan", {"update_in_backward": True}),
    "torn": ("tear", {}),
    "ddp": ("train_with_ddp", {"max_norm": 0.05}),
    "uneven": ("train_unevenly", {}),
    "nan": ("meet_nan", {}),
    "overflow": ("overflow", {}),
    "resume": ("resume", {}),
    "save": ("save", {"optimizer": SETTINGS, "moments": "int8"}),
    "save muon": ("save", {"optimizer": MUON}),
    "too early": ("clip_too_early", {}),
    "adapters": ("train_adapters", {}),
    "subgroup": ("stream_in_a_subgroup", {}),
    "frozen in one": ("freeze_in_one", {}),
    "differ": ("differ", {}),
    **{f"unlike: {what}": ("train_unlike", {"what": what}) for what in UNLIKE},
    "undone": ("train_unlike", {"what": "undone"}),
    "disagree": ("disagree", {}),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes returned, by job and rank."""
    results = in_processes(2, list(JOBS.values()), tmp_path_factory.mktemp("two"))
    return dict(zip(JOBS, results, strict=True))


def of_all(results):
    """The tensors that every process has, which are the same bits."""
    errors = [one.get("message") for one in results if "tensors" not in one]
    assert not errors, errors
    for other in results[1:]:
        assert_equal(other["tensors"], results[0]["tensors"])
    return results[0]["tensors"]


def test_two_processes_train_as_one_that_accumulates_to_the_bit(two):
    alone = train_alone(2)
    assert_equal(of_all(two["train"]), alone["tensors"])
    for step, loss in enumerate(alone["losses"]):
        assert sum(one["losses"][step] for one in two["train"]) / 2 == pytest.approx(loss, rel=1e-6)


def test_two_processes_train_as_one_with_the_joined_batch(two):
    """Whose sums have another order: tiny gradients round another way, and AdamW makes their steps large."""
    joined = train_alone(2, joined=True)
    assert difference(of_all(two["train"]), joined["tensors"]) < 1e-3
    for step, loss in enumerate(joined["losses"]):
        assert sum(one["losses"][step] for one in two["train"]) / 2 == pytest.approx(loss, rel=1e-4)


def difference(result, expected):
    """The largest relative difference of any tensor."""
    assert result.keys() == expected.keys()
    return max(float((one - expected[name]).norm() / expected[name].norm()) for name, one in result.items())


def test_sharded_states_are_half_in_each_process_and_change_no_bit(two):
    assert_equal(of_all(two["sharded"]), train_alone(2, clip_grad_norm=0.1, formats="int8_row")["tensors"])
    whole, first, second = (one["bytes"]["states"] for one in (two["train"][0], *two["sharded"]))
    assert first + second == whole
    assert abs(first - second) <= 10 * 2 * 4 * SLICE_ALIGNMENT  # of ten weights the first slice may be longer


@pytest.mark.parametrize("kind", ["bfloat16", "small bfloat16"])
def test_sharded_masters_are_half_in_each_process_and_change_no_bit(two, kind):
    assert_equal(of_all(two[f"{kind} sharded"]), of_all(two[kind]))
    for part in ("masters", "states"):
        whole, first, second = (one["bytes"][part] for one in (two[kind][0], *two[f"{kind} sharded"]))
        assert first + second == pytest.approx(whole, rel=0.01)
        assert first < 0.52 * whole
    whole, first, second = (one["bytes"] for one in (two[kind][0], *two[f"{kind} sharded"]))
    count = sum(one.numel() for one in two[kind][0]["parameters"].values())
    for divided in (first, second):  # all tensors that its process holds, each memory counted once
        fewer = 4.0 + 2.0 if kind == "bfloat16" else 1.0 + 1.06
        assert (whole["held"] - divided["held"]) / count == pytest.approx(fewer, abs=0.1)
    assert_equal(two[f"{kind} sharded"][0]["parameters"], two[kind][0]["parameters"])
    assert_equal(two[f"{kind} sharded"][1]["parameters"], two[kind][0]["parameters"])


def test_packed_weights_of_divided_masters_are_the_same_in_all(two):
    of_all(two["packed"])
    assert_equal(two["packed"][0]["parameters"], two["packed"][1]["parameters"])


def test_another_optimizer_is_divided_where_it_steps_parts(two):
    assert_equal(of_all(two["lion"]), train_alone(2, optimizer=HostOptimizer(Lion, 1e-3))["tensors"])


def test_weights_that_an_optimizer_needs_whole_are_dealt_out_and_no_bit_changes(two):
    tensors = of_all(two["muon"])
    assert_equal(tensors, train_alone(2, optimizer=MUON)["tensors"])
    for one in two["resume muon"]:
        assert_equal(one["sharded"], tensors)
        assert_equal(one["whole"], tensors)
    assert_equal(of_all(two["adafactor"]), of_all(two["adafactor whole"]))
    assert_equal(two["adafactor"][1]["parameters"], two["adafactor whole"][1]["parameters"])
    whole, first, second = (one["bytes"] for one in (two["adafactor whole"][0], *two["adafactor"]))
    assert first["masters"] + second["masters"] == whole["masters"]
    assert first["masters"] == pytest.approx(second["masters"], rel=0.02)


def test_matrices_go_to_the_process_that_has_least():
    processes = object.__new__(Processes)
    processes.count = 2
    assert processes.owners({"a": 2, "b": 5, "c": 3, "d": 5}) == {"b": 0, "d": 1, "c": 0, "a": 1}


def test_sharded_moments_in_8_bits_change_no_bit(two):
    assert_equal(of_all(two["small"]), train_alone(2, moments="int8")["tensors"])


def test_bfloat16_gradients_are_added_in_float32_and_rounded_once(two):
    assert 0 < difference(of_all(two["bfloat16"]), train_alone(2, dtype=torch.bfloat16)["tensors"]) < 0.05


def test_ddp_around_a_stream_averages_the_rest_and_all_have_one_norm(two):
    tensors = of_all(two["ddp"])
    assert two["ddp"][0]["norms"] == two["ddp"][1]["norms"]
    assert min(two["ddp"][0]["norms"]) > 0.05  # they were clipped
    assert {"first.weight", "head.bias", "layers.1.up.weight"} <= tensors.keys()


def test_uneven_batches_are_means_of_processes(two):
    assert difference(of_all(two["uneven"]), train_unevenly(None, 1)["tensors"]) < 1e-3


def test_a_gradient_that_is_not_finite_stops_the_step_in_all(two):
    of_all(two["nan"])
    (first,), (second,) = (one["errors"] for one in two["nan"])
    assert re.match(
        r"BlockNonFiniteError: step 1: end_step: rank 1 failed, and no process goes on with the step: .*layers\.", first
    )
    assert re.match(r"BlockNonFiniteError: layers\..*, step 1: gradient holds NaN", second)


@pytest.mark.parametrize(("kind", "whole"), [("early", "train"), ("packed early", "packed"), ("muon early", "muon")])
def test_updates_in_backward_change_no_bit(two, kind, whole):
    assert_equal(of_all(two[kind]), of_all(two[whole]))
    for one in two[kind]:
        assert_equal(one["parameters"], two[whole][0]["parameters"])
        assert one["early"] == ["layers.1", "layers.0"]


def test_blocks_that_compute_once_in_every_process_are_updated_in_backward_and_others_at_the_end(two):
    assert_equal(of_all(two["unalike early"]), of_all(two["unalike"]))
    for one in two["unalike early"]:
        assert one["early"] == [["layers.1"], ["layers.1", "layers.0"], ["layers.1", "layers.0"]]


def test_a_gradient_that_is_not_finite_stops_updates_in_backward_in_all(two):
    assert_equal(of_all(two["nan early"]), of_all(two["nan"]))
    (first,), (second,) = (one["errors"] for one in two["nan early"])
    assert re.match(
        r"BlockNonFiniteError: step 1: gradients of layers\.1: rank 1 failed, and no process goes on", first
    )
    assert re.match(r"BlockNonFiniteError: layers\.1.*, step 1: .*; the masters are as they were before", second)


def test_weights_of_two_steps_are_so_in_all_processes_and_a_state_goes_on(two):
    assert_equal(of_all(two["torn"]), of_all(two["train"]))
    assert two["torn"][1]["early"] == ["layers.1"]
    for one, says in zip(two["torn"], ("gradients of layers.0: rank 1 failed", "some masters have"), strict=True):
        assert "update broke off after 1 of 2 blocks" in one["torn"]
        assert says in one["torn"]


def test_a_step_that_overflows_in_one_process_is_skipped_in_all(two):
    of_all(two["overflow"])
    assert [one["skipped"] for one in two["overflow"]] == [[False, True, False]] * 2
    assert {one["scale"] for one in two["overflow"]} == {1.0}


def test_a_state_of_divided_masters_goes_on_in_one_process(two):
    state, tensors = two["small bfloat16 sharded"][0]["state"], of_all(two["small bfloat16 sharded"])
    model = frozen_outside(make_stack(adapters=False, count=2, dtype=torch.bfloat16, seed=1))
    with streaming(model, train="weights", optimizer=SETTINGS, moments="int8") as stream:
        stream.load_state_dict(state)
        assert_equal(stream.state_dict()["tensors"], tensors)
        assert_equal(dict(model.layers.state_dict()), two["small bfloat16"][0]["parameters"])


def test_sharded_moments_are_saved_whole(two):
    expected = of_all(two["train"])
    for one in two["resume"]:
        assert_equal(one["sharded"], expected)
        assert_equal(one["whole"], expected)


@pytest.mark.parametrize("kind", ["save", "save muon"])
def test_divided_states_are_written_weight_by_weight_and_a_failure_leaves_nobody_waiting(two, kind):
    tensors, first = of_all(two[kind]), two[kind][0]
    assert_equal(first["saved"], tensors)
    assert "missing" in first["refused"]
    if kind == "save":  # Muon's momentum is not copied in the process that keeps it
        assert first["held"] <= 3  # a master and two moments


def test_a_backward_after_clipping_is_refused(two):
    for one in two["too early"]:
        assert "step 0: gradient: it came after clip_gradients, which has averaged the gradients" in one["message"]


def test_adapters_under_ddp_have_the_mean_gradient(two):
    gradients = of_all(two["adapters"])
    means = {}
    for rank in range(2):
        model = make_stack(adapters=True, count=2)
        with streaming(model, formats="int8_row") as stream:
            stream.begin_step(0)
            model(batch(rank)).square().mean().backward()
            stream.end_step()
        for name, one in model.named_parameters():
            if one.grad is not None:
                means[name] = means.get(name, 0) + one.grad / 2
    assert difference(gradients, means) < 1e-5


def test_a_stream_of_a_subgroup_is_refused_as_it_opens(two):
    first, second = two["subgroup"]
    says = r"all 2 processes .*, and rank 0, which is in a smaller group \(rank 0\), waits for rank 1: "
    assert re.search(says, first["message"])
    assert not second["message"]
    assert_equal(of_all(two["subgroup"]), of_all(two["train"]))  # the group alone is no error


def test_processes_with_other_weights_are_refused(two):
    for one in two["differ"]:
        assert one["error"] == "StreamError"
        assert one["message"].startswith("layers.1.norm.bias is another tensor in rank 1 than in rank 0")


def test_a_weight_that_is_frozen_in_one_process_alone_is_refused_in_all(two):
    for one in two["frozen in one"]:
        assert one["error"] == "StreamError"
        says = "layers.1.up.weight, step 1: frozen (requires_grad=False) in rank 1 and trained in the others"
        assert one["message"].startswith(says)


@pytest.mark.parametrize("what", UNLIKE)
def test_processes_that_would_train_other_weights_are_refused(two, what):
    for one in two[f"unlike: {what}"]:
        assert one["error"] == "StreamError"
        assert re.search(UNLIKE[what], one["message"]), one["message"]


def test_a_change_that_one_process_takes_back_is_none(two):
    of_all(two["undone"])


def test_processes_in_other_steps_are_refused(two):
    first, second = two["disagree"]
    assert "step 0: end_step: rank 1 is in step 1: all processes begin, clip and end the same steps" in first["message"]
    assert "step 1: end_step: rank 0 is in step 0" in second["message"]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", r"rank 1 ended with ValueError: no such\\nfile"),
        ("killed", "no answer from rank 1: it died, or hangs; look at its output"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_a_process_that_ends_is_named_by_the_others(how, says, early, tmp_path):
    ((first, second),) = in_processes(2, [("lose", {"how": how, "update_in_backward": early})], tmp_path)
    assert (second and second["error"]) == (None if how == "killed" else "ValueError")
    where = "step 1: .*" if early else "step 1: end_step: "
    assert re.search(rf"{where}rank 0 of 2: {says}", first["message"]), first["message"]
    assert first["error"] == ("StreamError" if "of two steps" in first["message"] else "PeerLostError")


@pytest.mark.long
def test_trainers_of_two_processes_train_one_model(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    jobs = [("train_with_hugging_face", {"folder": str(tmp_path)}), ("fit_with_lightning", {})]
    for results in in_processes(2, jobs, tmp_path):
        tensors = of_all(results)
        assert {"layers.1.up.weight.exp_avg"} <= {name.removeprefix("stack.") for name in tensors}
    saved = load_file(tmp_path / "checkpoint-2" / WEIGHTS_FILE)
    assert saved["stack.layers.1.up.weight.exp_avg"].shape == (256, 128)  # whole, of divided moments


@pytest.mark.long
def test_four_processes(tmp_path):
    names = ("train", "sharded", "ddp", "small bfloat16", "small bfloat16 sharded", "early", "packed", "packed early")
    train, sharded, ddp, small, small_sharded, *early = in_processes(4, [JOBS[job] for job in names], tmp_path)
    assert_equal(of_all(train), train_alone(4)["tensors"])
    assert_equal(of_all(sharded), train_alone(4, clip_grad_norm=0.1, formats="int8_row")["tensors"])
    of_all(ddp)
    assert_equal(of_all(early[0]), of_all(train))
    assert_equal(of_all(early[2]), of_all(early[1]))
    assert_equal(of_all(small_sharded), of_all(small))
    assert sum(one["bytes"]["masters"] for one in small_sharded) == small[0]["bytes"]["masters"]


@pytest.fixture
def a_group():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_models_that_are_wrapped_or_divided_are_refused(a_group):
    def refused(model, says, blocks="layers.*"):
        with pytest.raises(StreamError, match=says):
            stream_blocks(model, blocks, device="cpu", train="weights")

    wrapped = DistributedDataParallel(make_stack(adapters=False, count=2), process_group=None)
    refused(wrapped, "wrapped in DistributedDataParallel already.*its .module", "module.layers.*")
    sharded = make_stack(adapters=False, count=2)
    fully_shard(sharded.layers[1], mesh=a_group)
    refused(sharded, r"layers\.1 is sharded by FSDP.*shard_optimizer=True")
    divided = make_stack(adapters=False, count=2)
    divided.layers[0].up.weight = nn.Parameter(distribute_tensor(divided.layers[0].up.weight.data, a_group))
    refused(divided, r"layers\.0\.up\.weight is divided over .*DTensor, tensor parallel")


def test_ddp_leaves_streamed_parameters_alone_until_the_stream_is_closed():
    model = make_stack(adapters=False, count=2)
    model._ddp_params_and_buffers_to_ignore = ["head.bias"]
    with streaming(model, train="nothing") as stream:
        assert model._ddp_params_and_buffers_to_ignore == ["head.bias", *stream.formats]
    assert model._ddp_params_and_buffers_to_ignore == ["head.bias"]
    other = nn.Linear(2, 2)
    hide_from_ddp(other, ["weight"])()
    assert not hasattr(other, "_ddp_params_and_buffers_to_ignore")


def test_sharding_needs_weights():
    with pytest.raises(
        StreamError, match=r"shard_optimizer=True divides AdamW of streamed weights, but train='adapters'"
    ):
        stream_blocks(make_stack(adapters=True), "layers.*", device="cpu", options=StreamOptions(shard_optimizer=True))
