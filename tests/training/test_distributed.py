"""The same global batch, split in every way: one loss, one gradient, one set of statistics."""

import functools
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from warm import ranks

WORKER = Path(__file__).with_name("gradient_worker.py")
RECOMPUTED = "runtime.activation_checkpointing=true"
FUSED = "runtime.weight_gradients=fused"


def _gradients(num_processes, out, common, splits, config=""):
    """A step for each split, all in one launch: (gradient by parameter, numbers) of each."""
    words = [word for split in splits for word in ("--", *split)]
    ranks(num_processes, str(WORKER), str(out), *common, *words, config=config)
    files = [Path(f"{out}-{index}.safetensors") for index in range(len(splits))]
    return [(load_file(f), json.loads(f.with_suffix(".json").read_text())) for f in files]


def _relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("several", [2, pytest.param(4, marks=pytest.mark.long)])
def test_gradient_does_not_depend_on_the_split(tiny_overrides, tmp_path, several):
    # clip_norm out of the way: what is compared is the gradient, not its direction.
    common = [*tiny_overrides, "sparsity.l1_coefficient=0.5", "optimizer.clip_norm=1e6"]
    common += ["validation.every_steps=0"]
    common += ["sparsity.target_nnz=10", "sparsity.target_per_layer=true"]
    expected = numbers = None
    for num_processes in (1, several):
        splits = [
            (f"train.micro_batch_size={size}", *ways)
            for size in (8, 4, 2, 1)
            if size * num_processes <= 8
            for ways in itertools.product(("", RECOMPUTED), ("", FUSED))
        ]
        if several == 2:  # every pair of a size and a way, not every triple
            splits = splits[::3]
        splits = [tuple(filter(None, split)) for split in splits]
        out = tmp_path / f"{num_processes}"
        for (gradients, same), split in zip(
            _gradients(num_processes, out, common, splits), splits, strict=True
        ):
            if expected is None:
                expected, numbers = gradients, same
                assert numbers["l1"] > 0
                assert len(set(numbers["target"]["fast"])) == 2  # layers have an error each
            assert same["world_size"] == num_processes
            for name, gradient in expected.items():
                torch.testing.assert_close(
                    gradients[name],
                    gradient,
                    rtol=2e-4,
                    atol=2e-6,
                    msg=lambda m, n=name, s=split: f"{s} {n}: {m}",
                )
            for key in ("loss", "l1", "grad_norm"):
                assert same[key] == pytest.approx(numbers[key], rel=1e-5)
            assert same["sums"] == (num_processes > 1)  # one, of all numbers of the step
            assert same["stats"] == numbers["stats"]  # integers: exactly
            assert same["target"] == numbers["target"]  # so every rank moves λ alike
            # DDP's stay in its buckets, where the next step adds to them.
            assert same["gradient_storages"] == (0 if num_processes == 1 else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [pytest.param("ddp8.yaml", marks=pytest.mark.long), "fsdp2.yaml"]
)
def test_muon_trains_to_the_losses_of_one_process(train, train_on, config):
    common = ["optimizer.name=muon", "train.micro_batch_size=1"]
    common += ["optimizer.gate_learning_rate=3e-2"]  # ten times that of all others
    common += ["optimizer.normalize_neurons=true"]
    common += ["runtime.compile=false", "validation.every_steps=0"]
    common += ["model.intermediate_size=65"]  # shards of 33 and 32 neurons
    expected = train(*common, "name=alone").losses()
    losses = train_on(2, *common, "name=several", config=config).losses()
    # Muon multiplies in bf16, which takes sums in another order to other digits.
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.long
def test_fsdp2_and_the_sparse_kernels_compute_the_gradient_of_one_dense_process(
    tiny_overrides, tmp_path
):
    common = [*tiny_overrides, "sparsity.l1_coefficient=0.5", "optimizer.clip_norm=1e6"]
    common += ["validation.every_steps=0", "train.micro_batch_size=2"]
    [(expected, numbers)] = _gradients(1, tmp_path / "one", common, [("ffn.kernels=dense",)])
    recomputed = "runtime.activation_checkpointing=true"
    splits = [("ffn.kernels=dense",), ("ffn.kernels=sparse",), ("ffn.kernels=sparse", recomputed)]
    splits.append(("ffn.kernels=sparse", recomputed, "runtime.token_order=auto"))
    splits.append(("ffn.kernels=dense", "train.micro_batch_size=4"))
    splits.append(("ffn.kernels=dense", recomputed, "runtime.weight_gradients=fused"))
    # bf16: the gradient has the rounding of bf16 activations, but losses are summed in fp32 (in
    # bf16 they would be 2e-3 off).
    for precision, loss_tolerance, tolerance in (("fp32", 1e-6, 1e-4), ("bf16", 1e-4, 0.1)):
        out, overrides = tmp_path / precision, [*common, f"runtime.precision={precision}"]
        outcomes_of_splits = _gradients(2, out, overrides, splits, config="fsdp2.yaml")
        for split, (actual, same) in zip(splits, outcomes_of_splits, strict=True):
            assert same["world_size"] == 2
            assert same["loss"] == pytest.approx(numbers["loss"], rel=loss_tolerance)
            assert same["l1"] == pytest.approx(numbers["l1"], rel=10 * loss_tolerance)
            if precision == "fp32":
                assert same["stats"] == numbers["stats"]
            for name, value in expected.items():
                assert _relative(actual[name], value) < tolerance, (precision, split, name)
        # Weights are gathered once a step, be it of two micro-batches or of one.
        assert len({same["gathers"] for _, same in outcomes_of_splits}) == 1


@pytest.mark.slow
def test_fsdp2_shares_what_it_has_gathered_in_fp8(tiny_overrides, tmp_path):
    """As one process does: weights are quantised once per step, before the first micro-batch."""
    common = [*tiny_overrides, "sparsity.l1_coefficient=0.5", "optimizer.clip_norm=1e6"]
    common += ["validation.every_steps=0", "runtime.precision=fp8", "runtime.compile=false"]
    [(expected, numbers)] = _gradients(1, tmp_path / "one", common, [("train.micro_batch_size=8",)])
    assert numbers["own_weights"] == 0
    splits = [
        ("train.micro_batch_size=4",),
        ("train.micro_batch_size=2", "ffn.kernels=sparse"),
        ("train.micro_batch_size=1", "runtime.activation_checkpointing=true"),
    ]
    for actual, same in _gradients(2, tmp_path / "two", common, splits, config="fsdp2.yaml"):
        assert same["own_weights"] == 0
        assert same["loss"] == pytest.approx(numbers["loss"], rel=1e-3)
        for name, value in expected.items():
            if value.ndim == 2:  # the gradients of norms are small differences
                assert _relative(actual[name], value) < 0.2, name


@pytest.mark.long
def test_shards_within_nodes_and_replicas_across_compute_the_gradient_of_one_process(
    tiny_overrides, tmp_path
):
    common = [*tiny_overrides, "sparsity.l1_coefficient=0.5", "optimizer.clip_norm=1e6"]
    common += ["validation.every_steps=0", "ffn.kernels=dense"]
    whole = [("train.micro_batch_size=8",)]
    [(expected, numbers)] = _gradients(1, tmp_path / "one", common, whole)
    # The second in two rounds: sums within nodes and across them come at the last.
    splits = [("train.micro_batch_size=2",), ("train.micro_batch_size=1",)]
    for precision, tolerance in (("fp32", 1e-4), ("bf16", 0.1)):
        out, overrides = tmp_path / precision, [*common, f"runtime.precision={precision}"]
        outcomes_of_splits = _gradients(4, out, overrides, splits, config="hsdp.yaml")
        for split, (actual, same) in zip(splits, outcomes_of_splits, strict=True):
            assert same["world_size"] == 4
            assert same["mesh"] == [2, 2]  # sharded over two and held twice, not sharded over four
            # Losses are summed in fp32: in bf16 they would be 2e-3 off.
            assert same["loss"] == pytest.approx(numbers["loss"], rel=tolerance / 100)
            assert same["l1"] == pytest.approx(numbers["l1"], rel=tolerance / 10)
            assert same["grad_norm"] == pytest.approx(numbers["grad_norm"], rel=tolerance)
            if precision == "fp32":
                assert same["stats"] == numbers["stats"]
            for name, value in expected.items():
                assert _relative(actual[name], value) < tolerance, (precision, split, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", ["ddp8.yaml", pytest.param("fsdp2.yaml", marks=pytest.mark.long)]
)
def test_two_processes_train_to_the_same_bits_killed_or_not(train, train_on, config):
    """Whether a step begins early, which none does before a save; and to the losses of one."""
    common = ["train.micro_batch_size=1", "validation.tokens=160"]

    def records(done):
        keys = ("kind", "step", "loss", "grad_norm")
        return [tuple(map(record.get, keys)) for record in done.records() if "loss" in record]

    train_on_two = functools.partial(train_on, 2, *common, config=config)
    early = train_on_two("name=early", "checkpoint.every_steps=0")
    assert early.stdout.count("step 4/4 | loss") == 1  # one rank speaks
    straight = records(early)
    saved = train_on_two("name=saved", "checkpoint.every_steps=1")
    assert records(saved) == straight
    for step in (3, 4):  # as if it had been killed before
        shutil.rmtree(saved.checkpoint(step))
    again = train_on_two("name=saved", "checkpoint.every_steps=1")
    assert "resuming from" in again.stdout
    assert "step 3/4 | loss" in again.stdout
    assert records(again) == straight

    alone = train(*common, "name=alone")
    kinds = [kind for kind, *_ in straight]
    assert kinds == ["train"] * 4 + ["validation"]
    for (*which, loss, _), (*same, of_one, _) in zip(straight, records(alone), strict=True):
        assert which == same
        assert loss == pytest.approx(of_one, rel=1e-5)


@pytest.mark.long
def test_sparse_kernels_in_token_order_train_under_ddp(train_on):
    """After a first step gradients lie in DDP's buckets, to which several micro-batches add."""
    overrides = ["ffn.kernels=sparse", "runtime.compile=false"]
    # Two micro-batches on each rank, of two blocks of tokens.
    overrides += ["train.micro_batch_size=4", "train.global_batch_tokens=512"]
    overrides += ["validation.every_steps=0", "checkpoint.every_steps=0"]

    def train(name, further):
        records = train_on(2, *overrides, further, f"name={name}").records("train")
        losses = [(record["loss"], record["grad_norm"]) for record in records]
        return losses, [record["kernels"]["union_mean"] for record in records]

    as_read, unions = train("a", "runtime.token_order=none")
    first, sorted_unions = train("b", "runtime.token_order=auto")
    again, _ = train("c", "runtime.token_order=auto")
    dense, _ = train("d", "ffn.kernels=dense")
    assert len(first) == 4
    assert first == again
    assert unions != sorted_unions  # of 64 other tokens each
    for run_records in (as_read, first):
        for numbers, usual in zip(run_records, dense, strict=True):
            assert numbers == pytest.approx(usual, rel=1e-4)


@pytest.mark.long
def test_another_number_of_processes_continues_with_the_same_stream(train, train_on):
    overrides = ["train.micro_batch_size=1", "optimizer.min_lr_ratio=1"]
    train_on(2, *overrides, "name=changed")
    longer = [*overrides, "train.steps=6", "data.num_workers=1"]
    changed, straight = (train(*longer, f"name={name}") for name in ("changed", "straight"))
    losses = [record["loss"] for record in changed.records("train")]
    assert len(losses) == 6
    usual = [record["loss"] for record in straight.records("train")]
    assert losses == pytest.approx(usual, rel=1e-5)
    other = [*overrides, "train.steps=7", "name=changed", "seed=1"]
    refused = train(*other, status=1)
    assert "seed 0 and this run has 1" in refused.stderr
    assert "data.on_mismatch=restart" in refused.stderr
    restarted = train(*other, "data.on_mismatch=restart")
    assert "data stream starts over" in restarted.stdout
