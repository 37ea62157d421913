"""Dense or sparse training, layer by layer: from exact sums, alike on all ranks."""

import json

import pytest
import torch

from sparsellm.ffn.dispatch import Costs, Measured
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.model import build_model
from sparsellm.training.counting.counters import Counters, SkippedSteps
from sparsellm.training.counting.kernel_policy import (
    _measure_costs,
    described_costs,
    each_path,
    kernels_state,
    restore_kernels,
    set_up_kernels,
)
from sparsellm.training.counting.layout import CounterLayout
from sparsellm.training.objective import Objective
from sparsellm.training.rehearsal import warm_up
from sparsellm.training.step import choose_kernels

COSTS = Costs(dense=1.0, fixed=0.4, per_neuron=0.01)  # left over 57 neurons, come back to below 52
CPU = torch.device("cpu")


def _ffns(kernels="auto", costs=COSTS, layers=2):
    ffns = [SparseFFN(8, 96, gated=True) for _ in range(layers)]
    for ffn in ffns:
        ffn.use_kernels(kernels, costs)
    return ffns


def _path_after(ffn, *unions):
    for union in unions:
        ffn.update_kernels(union, mean_nnz=1e9)
    return ffn.path


def test_dense_until_sparse_is_predicted_to_be_faster_with_hysteresis():
    [ffn] = _ffns(layers=1)
    assert ffn.path == "dense"
    assert _path_after(ffn, 90.0) == "dense"
    assert _path_after(ffn, 55.0) == "dense"
    assert _path_after(ffn, 51.0) == "sparse"
    assert _path_after(ffn, 56.0) == "sparse"
    assert _path_after(ffn, 58.0) == "dense"


def test_without_costs_and_without_a_choice():
    [ffn] = _ffns(costs=None, layers=1)
    assert _path_after(ffn, 0.0) == "dense"
    for kernels in ("dense", "sparse"):
        [ffn] = _ffns(kernels, layers=1)
        assert _path_after(ffn, 0.0, 96.0) == kernels
    silu = SparseFFN(8, 96, activation="silu", gated=True)
    silu.use_kernels("auto", COSTS)
    assert _path_after(silu, 0.0) == "dense"
    with pytest.raises(ValueError, match="sparse needs activation relu or relu2, not silu"):
        silu.use_kernels("sparse")
    with pytest.raises(ValueError, match="'fast' must be one of auto, sparse, dense"):
        silu.use_kernels("fast")


def test_capacity_is_the_layers_own_and_starts_over_with_another_number_of_tokens():
    one, other = _ffns("sparse")
    assert one.capacity_for(65) == 2 * 96 + 1
    assert one.capacity_for(6400) == 100 * 96 + 1
    for _ in range(32):
        one.observe_union(100)
    assert one.capacity_for(6400) == 1024
    assert other.capacity_for(6400) == 100 * 96 + 1
    assert one.capacity_for(128) == 2 * 96 + 1
    with torch.no_grad():
        assert one.capacity_for(128) == 0
    one.use_kernels("dense")
    assert one.capacity_for(128) is None


def _batches(tiny):
    """A recipe, its model, and four micro-batches of 96 tokens: a whole block and half of one."""
    recipe = tiny("train.micro_batch_size=3", "train.global_batch_tokens=384")
    generator = torch.Generator().manual_seed(5)
    batches = torch.randint(257, (4, 3, 33), generator=generator)
    return recipe, build_model(recipe, eos_token_id=256), batches


def _sums(recipe, model, batches):
    objective = Objective(model, recipe.runtime)
    ffns = [layer.mlp for layer in model.model.layers]
    layout = CounterLayout(recipe, CPU)
    step = Counters(layout, ffns, recipe.micro_batch_tokens, len(batches))
    losses = []
    for tokens in batches:
        losses.append(objective(tokens[:, :-1], tokens[:, 1:]))
        step.add(losses[-1])
    limits = SkippedSteps().limits(None)
    assert not step.reduce(torch.tensor(0.0), limits, stop=True, failed=False)
    step.send(None)
    return ffns, losses, step.read()


def test_a_step_is_counted_exactly_and_the_same_on_either_path(tiny):
    recipe, model, batches = _batches(tiny)
    ffns, losses, dense = _sums(recipe, model, batches)
    unions = [[loss.union_L[layer].item() for loss in losses] for layer in range(2)]
    expected = sum(loss.cross_entropy_sum.item() for loss in losses) / 384
    assert dense.metrics["loss"] == pytest.approx(expected)
    assert dense.stop
    assert dense.kernels.union_mean == [sum(union) / 8 for union in unions]
    assert dense.largest_union_L == [max(union) for union in unions]
    counted = sum(loss.nnz_LBT.sum((1, 2)) for loss in losses)
    assert dense.nnz_L == [count / 384 for count in counted.tolist()]
    assert (dense.kernels.sparse, dense.kernels.overflows) == ([False, False], 0)
    ffns[1].use_kernels("sparse")
    ffns[1].capacity_for(96)
    ffns[1]._capacity.columns = max(unions[1]) - 1  # the largest does not fit
    _, _, mixed = _sums(recipe, model, batches)
    assert mixed.kernels.union_mean == dense.kernels.union_mean
    assert mixed.kernels.sparse == [False, True]
    assert mixed.kernels.overflows == unions[1].count(max(unions[1]))
    assert mixed.metrics["loss"] == dense.metrics["loss"]
    choose_kernels(ffns, [mixed])
    assert ffns[1].capacity_for(96) == 129  # over the worst case, less than any size


def test_twell_is_chosen_by_non_zeros_and_counts_tokens_beyond_its_backup(tiny, monkeypatch):
    [ffn] = _ffns(layers=1)
    ffn.use_format("twell")
    for nnz, path in ((90.0, "dense"), (51.0, "sparse"), (56.0, "sparse"), (58.0, "dense")):
        ffn.update_kernels(mean_union=1e9, mean_nnz=nnz)
        assert ffn.path == path
    recipe, model, batches = _batches(tiny)
    ffns, _, dense = _sums(recipe, model, batches)
    ffns[1].use_kernels("sparse")
    ffns[1].use_format("twell", ell_width=1)  # every token has more than one non-zero
    for rows, overflows in ((96, 0), (8, 4)):  # of the backup, for 96 tokens; four micro-batches
        module = "sparsellm.ffn.training_path.module"
        monkeypatch.setattr(f"{module}.backup_rows_for", lambda _, rows=rows: rows)
        _, _, reading = _sums(recipe, model, batches)
        assert reading.kernels.sparse == [False, True]
        assert reading.kernels.overflows == overflows
        assert reading.kernels.union_mean == dense.kernels.union_mean
        assert reading.nnz_L == dense.nnz_L
        assert reading.metrics["l1"] == pytest.approx(dense.metrics["l1"])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_costs_are_those_of_a_micro_batch_and_their_mean_over_ranks(tiny, monkeypatch, num_ranks):
    calls = []

    def measure(call, **options):
        calls.append((call, options))
        return COSTS

    def add_other_rank(tensor, group=None):
        tensor += torch.tensor([3.0, 0.6, 0.03])

    monkeypatch.setattr("sparsellm.ffn.costs.measure_training_costs", measure)
    if num_ranks == 2:
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 2)
        monkeypatch.setattr("torch.distributed.all_reduce", add_other_rank)
    costs = _measure_costs(tiny("runtime.compile=false", "runtime.token_order=auto"), CPU)
    expected = COSTS if num_ranks == 1 else Costs(dense=2.0, fixed=0.5, per_neuron=0.02)
    assert (costs.dense, costs.fixed) == pytest.approx((expected.dense, expected.fixed))
    assert costs.per_neuron == pytest.approx(expected.per_neuron)
    [(call, options)] = calls
    assert call == Measured(64, 32, 64, True, "union", -1, fp8=False)
    assert options == {"compiled": False, "ordered": True, "linears": None}


def test_costs_of_another_format_are_not_resumed():
    ffns = _ffns()
    state = kernels_state(ffns, CPU)
    state["paths"] = ["sparse", "sparse"]
    state["costs"]["fixed"] = 0.1
    other = _ffns()
    for ffn in other:
        ffn.use_format("twell")
    restore_kernels(other, state, CPU)
    assert [ffn.path for ffn in other] == ["dense", "dense"]
    assert other[0].costs == COSTS
    restore_kernels(ffns, state, CPU)
    assert [ffn.path for ffn in ffns] == ["sparse", "sparse"]


def test_every_path_is_warmed_up_and_the_choice_stays():
    ffns = [*_ffns(), *_ffns("sparse"), *_ffns(costs=None)]
    ffns[0].path = "sparse"
    paths = [ffn.path for ffn in ffns]
    warmed_up = [[ffn.path for ffn in ffns] for _ in each_path(ffns)]
    assert warmed_up == [paths, [*["sparse"] * 4, *["dense"] * 2]]
    assert [ffn.path for ffn in ffns] == paths
    assert len(list(each_path(_ffns("dense")))) == 1


def test_a_resumed_run_continues_with_the_choice_and_the_costs_of_before():
    ffns = _ffns()
    ffns[1].path = "sparse"
    state = json.loads(json.dumps(kernels_state(ffns, CPU)))
    resumed = _ffns(costs=Costs(1.0, 0.5, 0.02))  # measured anew: never the same twice
    restore_kernels(resumed, state, CPU)
    assert [ffn.path for ffn in resumed] == ["dense", "sparse"]
    assert resumed[0].costs == COSTS
    for changed in (None, state | {"device": "another GPU"}, state | {"costs": None}):
        other = _ffns(costs=Costs(1.0, 0.5, 0.02))
        restore_kernels(other, changed, CPU)
        assert [ffn.path for ffn in other] == ["dense", "dense"]
        assert other[0].costs == Costs(1.0, 0.5, 0.02)
    forced = _ffns("dense")
    restore_kernels(forced, state, CPU)
    assert [ffn.path for ffn in forced] == ["dense", "dense"]


@pytest.mark.parametrize(
    ("kernels", "path"), [("auto", "dense"), ("dense", "dense"), ("sparse", "sparse")]
)
def test_on_a_cpu_auto_is_dense(tiny, kernels, path):
    ffns = _ffns(costs=None)
    assert set_up_kernels(tiny(f"ffn.kernels={kernels}"), ffns, CPU) is None
    assert {ffn.kernels for ffn in ffns} == {kernels}
    assert {ffn.path for ffn in ffns} == {path}


def test_what_was_measured_is_said():
    ffn = SparseFFN(16, 64, gated=True)
    assert described_costs([ffn]) is None
    ffn.use_kernels("auto", Costs(dense=2.0, fixed=0.92, per_neuron=0.02))
    assert "2.00 ms dense, and 0.92 ms sparse" in described_costs([ffn])
    assert "for at least one of 64 tokens are fewer than 46 of 64" in described_costs([ffn])
    ffn.use_kernels("auto", Costs(dense=2.0, fixed=3.0, per_neuron=0.02))
    assert "dense at every density here" in described_costs([ffn])
    ffn.use_kernels("dense", Costs(dense=2.0, fixed=0.9, per_neuron=0.02))
    assert described_costs([ffn]) is None


def test_warm_up_runs_two_micro_batches_on_the_sparse_path_alone(build):
    run = build()
    assert run.recipe.accumulation_steps(1) > 1
    for ffn in run.ffns:
        ffn.use_kernels("auto", COSTS)
    paths = []
    run.objective.register_forward_hook(lambda *_: paths.append(run.ffns[0].path))
    warm_up(run)
    assert paths == ["dense", "sparse", "sparse"]
