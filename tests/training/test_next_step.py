"""A step that begins within the one before changes no number, and loses nothing when it fails."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsellm.data.loader import MicroBatchReader
from sparsellm.processes.signals import StopRequest
from sparsellm.training.optimization.schedule import next_may_launch
from sparsellm.training.step import micro_batches, train_step

STEPS = 5


@pytest.fixture
def trained(build):
    """The losses, weights, λ and data position of a short run."""

    def train(*overrides, launch_next):
        run = build("train.steps=20", "checkpoint.every_steps=0", *overrides)
        assert {ffn.path for ffn in run.ffns} == {run.recipe.ffn.kernels}
        losses = []
        for step in range(STEPS):
            totals = train_step(run, StopRequest(), launch_next=launch_next and step + 1 < STEPS)
            losses.append((totals.reading, totals.l1_by_layer))
            position = run.loader.state_dict(run.data_position)
            assert run.data_position.tokens == position["tokens"]
            losses.append(position)
        weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        return losses, weights, run.stats.state_dict()

    return train


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.micro_batch_size=8"],
        ["train.micro_batch_size=2", "runtime.weight_gradients=fused"],
        ["train.micro_batch_size=2", "sparsity.target_nnz=10", "sparsity.target_per_layer=true"],
        ["train.micro_batch_size=4", "runtime.activation_checkpointing=true"],
    ],
)
@pytest.mark.parametrize("kernels", ["dense", "sparse"])
def test_it_changes_no_bit(trained, overrides, kernels):
    common = [*overrides, f"ffn.kernels={kernels}", "data.num_workers=0"]
    together, apart = (trained(*common, launch_next=launch) for launch in (True, False))
    assert together[0] == apart[0]
    for actual, expected in zip(together[1:], apart[1:], strict=True):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_kernels_are_chosen_by_every_step_that_was_read(build, monkeypatch):
    chosen = []
    monkeypatch.setattr(
        "sparsellm.ffn.training_path.module.SparseFFN.update_kernels",
        lambda ffn, mean_union, mean_nnz: chosen.append((mean_union, mean_nnz)),
    )
    run = build("checkpoint.every_steps=0")
    expected = []
    for step, launch_next in enumerate([True, True, False, False]):
        reading = train_step(run, StopRequest(), launch_next=launch_next).reading
        expected += zip(reading.kernels.union_mean, reading.nnz_L, strict=True)
        assert len(chosen) == 2 * (step if launch_next else step + 1)  # two layers
    assert chosen == expected


def test_not_where_something_comes_between(tiny):
    overrides = ["train.steps=12", "checkpoint.every_steps=5", "validation.every_steps=4"]
    recipe = tiny(*overrides, "evaluation.every_steps=7")
    apart = [step for step in range(1, 13) if not next_may_launch(recipe, step)]
    assert apart == [4, 5, 7, 8, 10, 12]
    dropout = "model.huggingface={attention_dropout: 0.1}"
    for other in ("sparsity.reinit_rate=0.1", "train.micro_batch_size=auto", dropout):
        assert not next_may_launch(tiny("checkpoint.every_steps=0", other), 1)


def test_ddp_sums_gradients_at_the_last_micro_batch_also_after_a_discarded_step(build):
    run = build("train.steps=20", "train.micro_batch_size=2", "runtime.compile=false")
    synced = []
    assert micro_batches(run) == 4
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run.objective = DistributedDataParallel(run.objective)
    run.objective.register_forward_pre_hook(
        lambda model, _: synced.append(model.require_backward_grad_sync)
    )
    before = run.data_position
    train_step(run, StopRequest(), launch_next=True)
    assert synced == [False, False, False, True, False]
    queued, run.queued = run.queued, None  # whose first forward pass holds its graph
    run.loader.go_back(before)
    synced.clear()
    train_step(run, StopRequest())
    assert synced == [False, False, False, True]
    assert queued.step is not None


def test_an_error_in_it_leaves_the_step_before_whole(train, monkeypatch):
    overrides = ["train.steps=9", "checkpoint.every_steps=8"]
    next_batch, failed = MicroBatchReader.next, []

    def fail_in_step_4(reader):
        if reader.step == 4 and not failed:
            failed.append(reader.step)
            raise RuntimeError("injected fault")
        return next_batch(reader)

    monkeypatch.setattr(MicroBatchReader, "next", fail_in_step_4)
    with pytest.raises(RuntimeError, match="injected fault"):
        train(*overrides)
    assert "resumes from step_00000003" in train(*overrides).stdout
