"""The head of a model card, in the hub's form: licence, language, data, tags and scores."""

from __future__ import annotations

import re

from huggingface_hub import EvalResult, ModelCardData

from sparsellm.data.corpus import hub_sources
from sparsellm.evaluate.suite import load_suite
from sparsellm.recipe import Recipe
from sparsellm.runs.evaluations import Evaluation

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")


def check_license(name: str) -> None:
    """Raises ValueError unless it looks like one of the hub's licenses, such as ``apache-2.0``."""
    if not _LICENSE.fullmatch(name):
        raise ValueError(
            f"--license {name!r}: give the hub's identifier in lower case, such as apache-2.0, mit "
            "or other"
        )


def metadata(recipe: Recipe, evaluation: Evaluation | None, license_name: str | None) -> str:
    """The YAML between the card's two ``---`` lines.

    Args:
        recipe: of the model.
        evaluation: its scores; omitted if a limit was set, since such scores are not reported.
        license_name: the hub's identifier; None where nobody said.
    """
    sources = [] if recipe.data.files else hub_sources(recipe.data.corpus)
    languages = sorted({source.language for source in sources if source.language})
    sparse = ["activation-sparsity"] if recipe.activation.exact_zeros else []
    data = ModelCardData(
        language=languages or None,
        license=license_name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["sparsellm", *sparse, recipe.ffn.activation],
        datasets=[source.repo for source in sources] or None,
        model_name=recipe.name,
        eval_results=_results(evaluation) or None,
    )
    return str(data.to_yaml())


def _results(evaluation: Evaluation | None) -> list[EvalResult]:
    if evaluation is None or evaluation.limit is not None:
        return []
    suite = load_suite().tasks
    results = []
    for (task, metric), score in evaluation.scores.items():
        known = suite.get(task)
        if metric in ("acc", "acc_norm"):
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=known.dataset if known else task,
                    dataset_revision=known.revision if known else None,
                    dataset_name=task,
                    metric_type="accuracy",
                    metric_name=metric,
                    metric_value=round(100 * score.value, 2),
                )
            )
    return results
