"""What a run records and saves is what a plain loop over stock transformers computes."""

import functools
import re
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from sparsellm.runs import checkpoint
from sparsellm.runs.telemetry.records import nnz_bucket_edges, position_bucket_starts, read_metrics
from training.plain import PlainModel, global_batches, held_out


@pytest.fixture
def train(train):
    """Trains by the command; gives the recipe, the records of steps and the last checkpoint."""

    def run(*words):
        done = train(*words)
        return done.recipe, done.records("train"), done.checkpoint(done.recipe.train.steps)

    return run


SPARSE = ["ffn.kernels=sparse"]
TWELL = [*SPARSE, "ffn.format=twell"]
FLAT, RECOMPUTED = ["ffn.gated=false"], ["runtime.activation_checkpointing=true"]
COMPILED = ["runtime.compile=true"]
PATHS = {
    "dense": [],
    "dense, non-gated": FLAT,
    "dense, recomputed": RECOMPUTED,
    "dense, one micro-batch": ["train.micro_batch_size=8"],
    "dense, fused weight gradients": ["runtime.weight_gradients=fused"],
    "dense, a λ for each layer": ["sparsity.target_nnz=20", "sparsity.target_per_layer=true"],
    "union": SPARSE,
    "union, non-gated": [*SPARSE, *FLAT],
    "union, recomputed": [*SPARSE, *RECOMPUTED],
    "union, in the order of the text": [*SPARSE, "runtime.token_order=none"],
    "twell": TWELL,
    "twell, non-gated": [*TWELL, *FLAT],
    "twell, recomputed": [*TWELL, *RECOMPUTED],
    "twell, tokens that do not fit": [*TWELL, "ffn.ell_width=24"],
}
COMPILED_PATHS = [
    pytest.param([*SPARSE, *COMPILED, *RECOMPUTED], id="union, compiled and recomputed"),
    pytest.param(COMPILED, id="dense, compiled", marks=pytest.mark.long),
    pytest.param([*TWELL, *COMPILED, *FLAT], id="twell, compiled", marks=pytest.mark.long),
]


@pytest.mark.parametrize(
    "overrides", [*(pytest.param(path, id=name) for name, path in PATHS.items()), *COMPILED_PATHS]
)
def test_training_is_adamw_on_the_clipped_gradient_of_the_formula(train, overrides, monkeypatch):
    """CE + λ Σ|h| / (tokens · layers), with what the recipe's keys say of the optimizer."""
    # The graphs that are compiled; machine code for them takes seconds.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    recipe, records, path = train(*FORMULA, *overrides)
    model, config = PlainModel(recipe), recipe.optimizer
    parameters = dict(model.stock.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1]},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=False,
    )
    for record, tokens_BT1 in zip(records, islice(global_batches(recipe), 4), strict=True):
        outcome = model(tokens_BT1)
        l1_weight_L = torch.tensor(record["l1_by_layer"])
        assert (l1_weight_L == 0.5).all() or recipe.sparsity.target_per_layer
        optimizer.zero_grad()
        (outcome.cross_entropy + (l1_weight_L * outcome.l1_L).mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), config.clip_norm)
        assert norm > config.clip_norm
        for group in optimizer.param_groups:
            group["lr"] = record["learning_rate"]
        optimizer.step()
        assert record["loss"] == pytest.approx(outcome.cross_entropy.item(), rel=1e-4)
        assert record["l1"] == pytest.approx(outcome.l1_L.mean().item(), rel=1e-4)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    weights, moments = (checkpoint.read_kind(path, kind) for kind in ("model", "optimizer"))
    assert weights.keys() == parameters.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(weights[name], parameter.data, rtol=1e-4, atol=1e-6)
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = optimizer.state[parameter][moment]
            atol = 1e-3 * expected.abs().max().item()
            torch.testing.assert_close(moments[f"{moment}.{name}"], expected, rtol=1e-3, atol=atol)


FORMULA = [
    "train.steps=4",
    "validation.every_steps=0",
    "checkpoint.every_steps=4",
    "sparsity.l1_coefficient=0.5",
    "optimizer.clip_norm=0.8",
    # Else the smallest gradients would be divided by themselves, rounding included.
    "optimizer.eps=1e-3",
]


STEPS, WINDOW = 65, 768
STILL = [
    "sparsity.l1_coefficient=0.02",
    f"sparsity.dead_window_tokens={WINDOW}",
    "ffn.kernels=sparse",
    "runtime.token_order=none",
    "train.micro_batch_size=4",
    "checkpoint.every_steps=100",
    "validation.every_steps=0",
]


def test_statistics_and_averages_are_those_of_the_steps_that_were_taken(train):
    """Weights that stand still can be computed with afterwards; what exceeds the averages a little
    is skipped."""
    _, _, weights = train(*STILL, "train.steps=12", "optimizer.learning_rate=3e-3")
    overrides = [
        "optimizer.learning_rate=1e-30",
        "train.spike_threshold=1.02",
        f"train.steps={STEPS}",
    ]
    recipe, records, path = train(*STILL, *overrides, "name=still", f"--init-from={weights}")
    model = PlainModel(recipe)
    model.load(checkpoint.read_kind(weights, "model"))
    steps = [_measured(model, tokens_BT1) for tokens_BT1 in islice(global_batches(recipe), STEPS)]
    watched_SV = np.array([watched for watched, _ in steps])

    accepted: list[int] = []
    skipped = {r["step"]: r["error"] for r in read_metrics(recipe.run_path) if "error" in r}
    shape = steps[0][1].shape
    silent_LN = torch.zeros(shape[0], shape[-1], dtype=torch.int64)
    window_LN, window_tokens = torch.zeros_like(silent_LN), 0
    activity_LN, some_dead = None, False
    by_step = {record["step"]: record for record in records}
    for index, (watched_V, active_LBTN) in enumerate(steps):
        if len(accepted) >= 50:
            average_V = _average(watched_SV[accepted])
            if (watched_V > 1.02 * average_V).any():
                _assert_named(skipped.pop(index + 1), watched_V, average_V)
                continue
        accepted.append(index)
        active_LN, tokens = active_LBTN.sum((1, 2)), active_LBTN[0, ..., 0].numel()
        silent_LN = torch.where(active_LN > 0, 0, silent_LN + tokens)
        window_LN, window_tokens = window_LN + active_LN, window_tokens + tokens
        if window_tokens >= WINDOW:
            activity_LN, window_LN, window_tokens = window_LN, torch.zeros_like(window_LN), 0
        record = by_step.pop(index + 1)
        assert record["skipped_steps"] == index + 1 - len(accepted)
        dead_L = (silent_LN >= WINDOW).double().mean(1)
        np.testing.assert_allclose(record["sparsity"]["dead_fraction"], dead_L)
        some_dead |= bool(((dead_L > 0) & (dead_L < 1)).any())
        _assert_statistics(record, active_LBTN)
    assert not skipped
    assert not by_step
    assert 0 < STEPS - len(accepted) < 15
    assert some_dead  # in steps that depend on the text, which is that of Python's own library
    saved = checkpoint.read_kind(path, "stats")
    assert torch.equal(saved["silent_tokens_LN"], silent_LN)
    assert torch.equal(saved["window_fired_LN"], window_LN)
    assert torch.equal(saved["activity_LN"], activity_LN)
    assert int(saved["activity_tokens"]) == WINDOW
    assert int(saved["window_seen_tokens"]) == window_tokens


def _measured(model, tokens_BT1):
    """Loss and norm of the gradient; which neurons are active."""
    outcome = model(tokens_BT1)
    model.stock.zero_grad()
    (outcome.cross_entropy + 0.02 * outcome.l1_L.mean()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.stock.parameters()])
    return [outcome.cross_entropy.item(), norm.item()], outcome.active_LBTN


def _average(values_SV):
    """Of what was taken so far; a step weighs 2% less than the one after it."""
    weights_S = 0.98 ** np.arange(len(values_SV))[::-1]
    return weights_S @ values_SV / weights_S.sum()


def _assert_named(error, watched_V, average_V):
    named = re.findall(r"(loss|gradient norm) (\S+) is (\S+) times its average ([^\s,]+)", error)
    places = {"loss": 0, "gradient norm": 1}
    spikes = [name for name, v in places.items() if watched_V[v] > 1.02 * average_V[v]]
    assert [name for name, *_ in named] == spikes
    for name, *numbers in named:
        watched, average = watched_V[places[name]], average_V[places[name]]
        assert [float(n) for n in numbers] == [
            pytest.approx(watched, rel=1e-3),
            pytest.approx(watched / average, rel=1e-2),
            pytest.approx(average, rel=1e-3),
        ]


def _assert_statistics(record, active_LBTN):
    stats, nnz_LM = record["sparsity"], active_LBTN.sum(-1).flatten(1).numpy()
    np.testing.assert_allclose(stats["nnz_mean"], nnz_LM.mean(1))
    np.testing.assert_array_equal(stats["nnz_max"], nnz_LM.max(1))
    for percent, key in ((50, "nnz_p50"), (99, "nnz_p99")):
        expected = np.percentile(nnz_LM, percent, axis=1, method="inverted_cdf")
        np.testing.assert_array_equal(stats[key], expected)
    edges = nnz_bucket_edges(active_LBTN.shape[-1])
    bins = [*edges, edges[-1] + 1]
    np.testing.assert_array_equal(stats["nnz_histogram"], np.histogram(nnz_LM, bins=bins)[0])
    starts = position_bucket_starts(active_LBTN.shape[2])
    for bucket, (start, end) in enumerate(pairwise([*starts, active_LBTN.shape[2]])):
        expected = active_LBTN[:, :, start:end].sum(-1).double().mean((1, 2))
        bucket_means = [layer[bucket] for layer in stats["nnz_by_position"]]
        np.testing.assert_allclose(bucket_means, expected)
    blocks_LbMN = active_LBTN.flatten(1, 2).unflatten(1, (-1, 64))
    union_L = blocks_LbMN.any(2).sum(-1).double().mean(1)
    np.testing.assert_allclose(record["kernels"]["union_mean"], union_L)


@pytest.mark.parametrize("sequences", [1, 5, 8])
def test_held_out_loss_is_the_mean_over_its_tokens(train, sequences):
    """However many sequences pad the last micro-batch."""
    overrides = [f"validation.tokens={32 * sequences}", "train.micro_batch_size=4"]
    recipe, _, path = train(*overrides)
    model = PlainModel(recipe)
    model.load(checkpoint.read_kind(path, "model"))
    tokens_ST1 = held_out(recipe)
    assert len(tokens_ST1) == sequences
    (record,) = read_metrics(recipe.run_path, "validation")
    assert record["num_targets"] == 32 * sequences
    assert record["loss"] == pytest.approx(model(tokens_ST1).cross_entropy.item(), rel=1e-5)
