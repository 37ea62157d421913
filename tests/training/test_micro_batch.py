"""`train.micro_batch_size: auto`: which size a run has changes its speed, and nothing else."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sparsellm.recipe.estimate import estimate_memory
from sparsellm.training import micro_batch, rehearsal
from sparsellm.training.micro_batch import MicroBatch, first_micro_batch, possible_sizes
from sparsellm.training.objective import Objective, total_loss
from sparsellm.training.rehearsal import double_if_it_fits
from sparsellm.training.step import clear_gradients, forward

WORKER = Path(__file__).with_name("small_memory.py")
CALM_STEPS = 3  # not the 20 of a real run
ONE_LAYER = "model.num_hidden_layers=1"


@pytest.fixture(autouse=True)
def _soon_calm(monkeypatch):
    monkeypatch.setattr(micro_batch, "CALM_STEPS", CALM_STEPS)


def test_sizes_are_powers_of_two_that_divide_a_rank_s_share(tiny):
    of_12 = tiny("train.micro_batch_size=auto", "train.global_batch_tokens=384")
    assert possible_sizes(of_12, 1) == [1, 2, 4]
    assert possible_sizes(of_12, 4) == [1]
    assert possible_sizes(tiny("train.micro_batch_size=auto"), 2) == [1, 2, 4]


@pytest.mark.parametrize("value", ["-1", "0", "1.5", "true", "most"])
def test_other_values_are_refused(tiny, value):
    with pytest.raises(ValueError, match=r"micro_batch_size.*auto or a whole number greater than"):
        tiny(f"train.micro_batch_size={value}")


def test_it_is_time_to_grow_once_sparse_layers_have_settled():
    size = MicroBatch(2, largest=8)
    dense, half, sparse = [False, False], [False, True], [True, True]
    assert not any(size.observe(dense) for _ in range(3 * CALM_STEPS))
    assert [size.observe(half) for _ in range(CALM_STEPS)] == [False] * CALM_STEPS
    assert [size.observe(sparse) for _ in range(CALM_STEPS + 1)].index(True) == CALM_STEPS
    size.stays = True
    assert not any(size.observe(sparse) for _ in range(3 * CALM_STEPS))


@pytest.mark.parametrize(
    ("fsdp", "mesh", "shards"),
    [(False, None, 1), (True, None, 4), (True, SimpleNamespace(dp_shard_size=2), 2)],
)
def test_the_first_size_fits_with_weights_as_they_are_divided(
    tiny, monkeypatch, fsdp, mesh, shards
):
    recipe = tiny("train.micro_batch_size=auto", "train.global_batch_tokens=1024")
    ranks = {"num_processes": 4, "is_fsdp2": fsdp, "parallelism_config": mesh}
    accelerator = SimpleNamespace(device=torch.device("cpu"), **ranks)
    monkeypatch.setattr(micro_batch, "ROOM", 1.0)
    two = estimate_memory(recipe.with_micro_batch(2), shards, 4).total
    for memory, size in ((two, 2), (two - 1, 1)):
        monkeypatch.setattr(micro_batch, "device_memory", lambda _, memory=memory: memory)
        assert first_micro_batch(recipe, accelerator) == MicroBatch(size, largest=min(4 * size, 8))


@pytest.fixture
def memory(tiny, monkeypatch):
    """A device with room for one dense sequence, of which sparse layers leave nearly all free."""
    one = estimate_memory(tiny("train.micro_batch_size=1", ONE_LAYER)).total
    monkeypatch.setattr(
        micro_batch, "device_memory", lambda device: int(one / micro_batch.ROOM) + 1
    )
    monkeypatch.setattr(micro_batch, "memory_used", lambda device: (0, 1))


@pytest.fixture
def train(train):
    common = [ONE_LAYER, "ffn.kernels=sparse", "runtime.compile=false", "train.steps=12"]
    common += ["validation.every_steps=12", "optimizer.min_lr_ratio=1", "checkpoint.every_steps=10"]

    def run(name, *further):
        done = train(*common, f"name={name}", *further)
        return done.stdout, done.records("train")

    return run


def _sizes(records):
    sizes = [int(record["micro_batch_size"]) for record in records]
    return [
        (step, size) for step, size in enumerate(sizes, 1) if sizes[step - 2 : step - 1] != [size]
    ]


def _assert_same_losses(records, other_records):
    assert [r["step"] for r in records] == [r["step"] for r in other_records]
    for key in ("loss", "grad_norm", "l1"):
        assert [r[key] for r in records] == pytest.approx([r[key] for r in other_records], rel=1e-4)


def test_it_grows_and_neither_losses_nor_a_resume_notice(memory, train):
    output, grown = train("grown", "train.micro_batch_size=auto")
    assert "step 1 begins with 1 sequence × 8 micro-batches" in output
    first, second = CALM_STEPS + 2, 2 * CALM_STEPS + 2
    assert _sizes(grown) == [(1, 1), (first, 2), (second, 4)]
    _, fixed = train("fixed", "train.micro_batch_size=1")
    assert _sizes(fixed) == [(1, 1)]
    _assert_same_losses(grown, fixed)
    train("halves", "train.micro_batch_size=auto", f"train.steps={first + 1}")
    output, halves = train("halves", "train.micro_batch_size=auto")
    assert f"step {first + 2} goes on with 2 sequences × 4 micro-batches" in output
    assert _sizes(halves) == _sizes(grown)
    assert [r["loss"] for r in halves] == [r["loss"] for r in grown]  # to the bit


@pytest.mark.parametrize(
    ("precision", "distils"), [("fp32", False), ("fp8", False), ("fp32", True)]
)
def test_a_growth_compiles_nothing(memory, build, monkeypatch, precision, distils):
    # Which sizes a graph is for is known once it is traced; machine code for it takes seconds.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    recipe = ["ffn.kernels=sparse", f"runtime.precision={precision}", "model.num_hidden_layers=1"]
    tokens_BT1 = torch.arange(4 * 33).view(4, 33) % 250
    teacher_BTV = torch.randn(4, 32, 320, generator=torch.Generator().manual_seed(0))
    runs = []
    for compiled in (True, False):
        run = build(*recipe, "train.micro_batch_size=auto", f"runtime.compile={compiled}")
        runs.append(run)
        for layer in run.model.model.layers:  # FSDP2's hooks, too, make new tensors of a block's
            layer.register_forward_pre_hook(lambda _, args: tuple(x.view_as(x) for x in args))
    for size in (2, 4):  # torch would compile a first size of 1 for itself
        gradients = []
        for run in runs:
            if distils:
                run.teacher = SimpleNamespace(logits=lambda ids_BT: teacher_BTV[: len(ids_BT)])
            _backward(run, tokens_BT1[:size], distillation=0.5 * distils)
            gradients.append([p.grad for p in run.model.parameters()])
            clear_gradients(run.optimizer, run.objective)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
        assert counters["stats"]["unique_graphs"] == 2  # a block, the loss


def _backward(run, tokens_BT1, distillation):
    sums, num_targets = forward(run, tokens_BT1), tokens_BT1[:, 1:].numel()
    total_loss(sums, 0.1, num_targets, 1, distillation).backward()


@pytest.mark.parametrize(("room", "size"), [(10, 2), (9, 1), (None, 1)])
def test_it_grows_where_twice_the_activations_fit(memory, build, monkeypatch, room, size):
    run = build("train.micro_batch_size=auto", "runtime.compile=false")
    # Between steps 5 parts are in use, and 8 at the peak: 1 of gradients, 2 that double.
    part = sum(p.nbytes for p in run.objective.parameters())
    used = (5 * part, 8 * part) if room else None
    monkeypatch.setattr(micro_batch, "memory_used", lambda device: used)
    monkeypatch.setattr(micro_batch, "device_memory", lambda device: (room or 10) * part)
    monkeypatch.setattr(micro_batch, "ROOM", 1.0)
    for _ in range(CALM_STEPS + 1):
        double_if_it_fits(run, [True, True])
    assert run.micro_batch.size == size


@pytest.mark.parametrize(("reshards", "predicted"), [(False, 9), (True, 10)])
def test_what_fsdp2_gathers_does_not_grow(memory, build, monkeypatch, reshards, predicted):
    run = build("train.micro_batch_size=1", "runtime.compile=false")
    monkeypatch.setattr(rehearsal, "FSDPModule", type(run.objective))
    plugin = SimpleNamespace(reshard_after_forward=reshards)
    monkeypatch.setitem(run.accelerator.state.__dict__, "fsdp_plugin", plugin)
    # At the peak 4 parts more than between steps: whole gradients, gathered weights, 2 that double.
    part = sum(p.nbytes for p in run.objective.parameters())
    assert rehearsal._predicted(run, 3 * part, 7 * part) == predicted * part


def test_a_size_that_does_not_fit_is_not_taken(memory, train, monkeypatch):
    _limit(monkeypatch, lambda sequences: sequences > 2)
    output, records = train("small", "train.micro_batch_size=auto")
    assert [size for _, size in _sizes(records)] == [1, 2]
    assert "stays at 2 sequences × 4 micro-batches" in output


def test_a_first_size_that_does_not_fit_is_halved(train, monkeypatch):
    _limit(monkeypatch, lambda sequences: sequences > 2)
    output, records = train("halved", "train.micro_batch_size=auto")  # this machine has room for 8
    assert "step 1 begins with 2 sequences × 4 micro-batches" in output
    assert _sizes(records) == [(1, 2)]


def test_a_step_that_runs_out_of_memory_is_done_again(memory, train, monkeypatch):
    calls = []

    def too_large(sequences):
        calls.append(sequences)
        return sequences == 2 and calls.count(2) == 10  # in the middle of a step

    _limit(monkeypatch, too_large)
    output, again = train("again", "train.micro_batch_size=auto")
    assert "ran out of memory, and is done again with 1 sequence × 8 micro-batches" in output
    assert [size for _, size in _sizes(again)] == [1, 2, 1]
    monkeypatch.undo()
    _assert_same_losses(again, train("fixed", "train.micro_batch_size=1")[1])


def test_a_step_that_fails_under_fsdp2_is_not_done_again(memory, build, process_group):
    """FSDP2 keeps what it has accumulated where no one can clear it."""
    run = build("train.micro_batch_size=auto", "runtime.compile=false")
    run.micro_batch.size, run.between_steps = 2, True
    assert rehearsal.may_shrink(run)
    model = fully_shard(run.objective, mesh=DeviceMesh("cpu", [0]))

    def norm_after(last):
        model.zero_grad()
        model.set_requires_gradient_sync(last)
        sums = forward(run, torch.zeros(2, 33, dtype=torch.int64))
        total_loss(sums, 0.0, 256, 1, run.recipe.train.distillation).backward()
        return sum(p.grad.to_local().square().sum().item() for p in model.parameters() if last)

    once = norm_after(last=True)
    norm_after(last=False)
    assert norm_after(last=True) == pytest.approx(4 * once)  # twice the gradient
    assert not rehearsal.may_shrink(run)


def _limit(monkeypatch, too_large):
    real = Objective.forward

    def forward(self, inputs_BT, *args):
        if torch.is_grad_enabled() and too_large(inputs_BT.shape[0]):
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return real(self, inputs_BT, *args)

    monkeypatch.setattr(Objective, "forward", forward)


@pytest.mark.long
@pytest.mark.parametrize("config", ["ddp8.yaml", "fsdp2.yaml"])
def test_ranks_agree_though_one_has_less_memory(train_on, config):
    overrides = ["train.micro_batch_size=auto", "ffn.kernels=sparse"]
    overrides += ["runtime.compile=false", "validation.every_steps=0", "train.steps=26"]

    def sizes(room_of_rank_1):
        program = (str(WORKER), str(room_of_rank_1))
        words = (*overrides, f"name=with{room_of_rank_1}")
        done = train_on(2, *words, program=program, config=config)
        return [size for _, size in _sizes(done.records("train"))]

    assert sizes(2) == [1, 2]
    assert sizes(1) == [1]
