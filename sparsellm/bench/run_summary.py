"""A training run's curve as recorded figures: loss, non-zeros and dead neurons over steps.

Hardware, commit and date are those that the run recorded: another machine may have trained it.
"""

from __future__ import annotations

from pathlib import Path

from sparsellm.bench.record import Measurement, taken_by
from sparsellm.report.collect import read_recipe
from sparsellm.runs.records import read_metrics


def run(
    run_path: Path, bench: str, num_points: int = 12
) -> tuple[list[Measurement], dict[str, str]]:
    """About ``num_points`` records of the run, evenly spaced, always with the first and last.

    Also returns where they were measured.

    Raises:
        FileNotFoundError: the folder is not a run, or its recipe is missing.
        ValueError: nothing was logged, or a file of the run is damaged.
    """
    records = read_metrics(run_path)
    train = [r for r in records if r["kind"] == "train"]
    if not train:
        raise ValueError(f"{run_path}: nothing was logged")
    recipe = read_recipe(run_path)
    last = len(train) - 1
    chosen = sorted({round(i * last / (num_points - 1)) for i in range(num_points)})
    model = recipe.model
    base = {
        "recipe": recipe.name,
        "layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "l1_coefficient": recipe.sparsity.l1_coefficient,
        "kernels": recipe.ffn.kernels,
        "seed": recipe.seed,
    }
    found = []
    for record in (train[i] for i in chosen):
        case = base | {"step": record["step"], "tokens": record["tokens"]}
        sparsity = record["sparsity"]
        nnz = sum(sparsity["nnz_mean"]) / model.num_hidden_layers
        dead = sum(sparsity["dead_fraction"]) / model.num_hidden_layers
        found += [
            Measurement(bench, case, "loss", record["loss"], "nats per token"),
            Measurement(bench, case, "nnz", nnz, "neurons per token, mean over layers"),
            Measurement(bench, case, "nnz_fraction", nnz / model.intermediate_size, "of N"),
            Measurement(bench, case, "dead_fraction", dead, "of N, mean over layers"),
            Measurement(bench, case, "throughput", record["tokens_per_second"], "tokens/s"),
        ]
    validation = [r for r in records if r["kind"] == "validation"]
    for record in validation:
        case = base | {"step": record["step"], "tokens": record["tokens"]}
        found.append(Measurement(bench, case, "validation_loss", record["loss"], "nats per token"))
    return found, taken_by([r for r in records if r["kind"] == "session"])
