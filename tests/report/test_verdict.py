"""What a report says first."""

from types import SimpleNamespace

from sparsellm.recipe import load_recipe
from sparsellm.report.page import verdict


def run(losses=(), ends=(), **changes):
    record = {"step": 120, "tokens": 983_040, "loss": 2.5, "tokens_per_second": 1000.0}
    record |= {"sparsity": {"nnz_mean": [3.52, 3.52], "dead_fraction": [0.1, 0.2]}} | changes
    return SimpleNamespace(
        recipe=load_recipe("debug"),
        train=[record],
        end=record,
        validation=[
            {"step": step, "loss": loss} for step, loss in zip((80, 120), losses, strict=False)
        ],
        session_ends={str(number): {"how": outcome} for number, outcome in enumerate(ends)},
    )


def test_it_says_loss_zeros_and_speed():
    assert verdict(run(losses=[3.0, 2.0], ends=["stopped (SIGTERM)", "finished"])) == [
        "120 of 120 steps, 983,040 tokens.",
        "The validation loss is 2.0000 nats per token.",
        "3.5 of 352 neurons are active for a token: 99.0% of the activations are zero.",
        "1,000 tokens/s.",
    ]


def test_a_loss_of_an_earlier_step_is_said_to_be_one():
    assert "The validation loss after step 80 is 3.0000 nats per token." in verdict(run([3.0]))


def test_it_says_what_is_odd():
    dead = {"nnz_mean": [3.5], "dead_fraction": [0.75]}
    odd = run(
        losses=[2.0, 2.1],
        ends=["killed", "failed: no space", "finished"],
        sparsity=dead,
        skipped_steps=3,
        target_error=-0.25,
        kernels={"sparse": [True], "overflows": 2},
    )
    assert [text for text in verdict(odd) if text.startswith("Odd: ")] == [
        "Odd: the validation loss has risen from 2.0000.",
        "Odd: 3 steps were skipped, as not finite or as spikes.",
        "Odd: the non-zeros are 25.0% below target.",
        "Odd: 75% of the neurons are silent.",
        "Odd: 2 patterns of the last step overflowed, and were computed again.",
        "Odd: a process was killed.",
        "Odd: a process failed: no space.",
    ]
