"""What a report begins with: a run's loss, zeros and speed in words, and what is odd about it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from sparsellm.report.collect import RunData
from sparsellm.runs.metrics import mean

RISEN = 0.01  # of the held-out loss above its lowest, relative
OFF_TARGET = 0.1  # of the non-zeros, relative
MANY_DEAD = 0.5  # of the neurons


def verdict(run: RunData) -> list[str]:
    """Sentences; the last ones begin with "Odd:", if there are any."""
    end = run.train[-1]
    found = [f"{end['step']:,} of {run.recipe.train.steps:,} steps, {end['tokens']:,} tokens."]
    if run.validation:
        found.append(f"The held-out loss is {run.validation[-1]['loss']:.4f} nats per token.")
    elif end.get("loss") is not None:
        found.append(f"The training loss is {end['loss']:.4f} nats per token; none was held out.")
    if nnz := end["sparsity"]["nnz_mean"]:
        width = run.recipe.model.intermediate_size
        zeros = f"{mean(nnz):,.1f} of {width:,} neurons fire for a token"
        found.append(f"{zeros}: {1 - mean(nnz) / width:.1%} of the activations are zero.")
    rates = [r["tokens_per_second"] for r in run.train if r.get("tokens_per_second")]
    if rates:
        sparse = (end.get("kernels") or {}).get("sparse", [])
        kernels = f"; {sum(sparse)} of {len(sparse)} layers on sparse kernels" if sparse else ""
        found.append(f"{statistics.median(rates):,.0f} tokens/s{kernels}.")
    return found + [f"Odd: {text}." for text in _odd(run)]


def _odd(run: RunData) -> Iterator[str]:
    end, losses = run.train[-1], [record["loss"] for record in run.validation]
    if losses and losses[-1] > (1 + RISEN) * min(losses):
        yield f"the held-out loss has risen from {min(losses):.4f}"
    if end.get("skipped_steps"):
        yield f"{end['skipped_steps']} steps were skipped, as not finite or as spikes"
    if abs(off := end.get("target_error") or 0.0) > OFF_TARGET:
        yield f"the non-zeros are {off:+.0%} off their target"
    dead = end["sparsity"]["dead_fraction"]
    if dead and mean(dead) > MANY_DEAD:
        yield f"{mean(dead):.0%} of the neurons are silent"
    if lost := (end.get("kernels") or {}).get("overflows"):
        yield f"{lost:,} patterns of the last step overflowed, and were computed again"
    hows = [ended["how"] for ended in run.session_ends.values()]
    for how in dict.fromkeys(how for how in hows if how.startswith(("failed", "killed"))):
        yield f"a process was {how}" if how == "killed" else f"a process {how}"
