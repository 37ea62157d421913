"""A sweep's folder: which runs it holds, whose, and which are finished. Needs no PyTorch."""

import json
import shlex
import sys
from collections.abc import Sequence, Set
from typing import Any

from sparsellm.recipe import Recipe, load_recipe
from sparsellm.recipe.keys import flatten
from sparsellm.recipe.strict import read_model
from sparsellm.report.sweep_runs import SweepFile
from sparsellm.runs.checkpoint import latest
from sparsellm.runs.files import RECIPE_FILE, SWEEP_FILE, write_atomically
from sparsellm.runs.huggingface import hf_files
from sparsellm.runs.huggingface.find import weights_id
from sparsellm.runs.telemetry.records import METRICS_FILE, of_kind, read_metrics
from sparsellm.sweep.plan import PlannedRun, SweepPlan
from sparsellm.training.optimization.schedule import measurements_due

_REMEDY = "move it away, or give the sweep another name"


def begin(plan: SweepPlan) -> None:
    """Writes ``sweep.json``, by which the folder is reported.

    Raises:
        ValueError: the folder has runs of another sweep, which would no longer be reported.
    """
    file = plan.folder / SWEEP_FILE
    if file.is_file():
        listed = read_model(file, SweepFile, "delete it")["runs"]
        planned = {run.name for run in plan.runs}
        names = [run["name"] for run in listed if run["name"] not in planned]
        if orphans := [name for name in names if (plan.folder / name / METRICS_FILE).is_file()]:
            raise ValueError(
                f"{plan.folder} holds runs of another sweep called {plan.name} "
                f"({', '.join(orphans)}), which its report and summary would lose: give this sweep "
                "another `name`, or move those runs away if they are needed no more"
            )
    content = {
        "name": plan.name,
        "description": plan.description,
        "command": shlex.join(["sparsellm", *sys.argv[1:]]),
        "runs": [{"name": r.name, "group": r.group, "seed": r.recipe.seed} for r in plan.runs],
    }
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content, indent=1) + "\n")


def is_finished(run: PlannedRun) -> bool:
    """Whether a run's records reach its last step, including the final measurements.

    Raises:
        ValueError: the folder's run has another recipe, or began with other weights.
    """
    recipe, path = run.recipe, run.recipe.run_path
    if not (path / METRICS_FILE).is_file() or not (path / RECIPE_FILE).is_file():
        return False
    recipes = (load_recipe(str(path / RECIPE_FILE)), recipe)
    saved, present = map(_comparable, recipes)
    if any(hf_files.has_own_tokenizer(r) for r in recipes):  # the tokenizer's first place was gone
        saved["data.tokenizer"] = present["data.tokenizer"]
    if keys := [k for k in saved | present if saved.get(k, ...) != present.get(k, ...)]:
        raise ValueError(
            f"{path} is a run of another recipe (it differs in {', '.join(keys)}): {_REMEDY}"
        )
    records = read_metrics(path)
    _check_source(run, records)
    last = [r for r in records if r["step"] == recipe.train.steps]
    done = {r["kind"] for r in last}
    failed = {r["what"] for r in last if r["kind"] == "failure"}
    if "step" in failed:
        done.add("train")  # the step was skipped, and counts
    done |= failed  # what a resumed run does not measure again
    return done >= {"train", *measurements_due(recipe, recipe.train.steps)}


def check_sources(runs: Sequence[PlannedRun], done: Set[str]) -> None:
    """Checks that no run whose source will be trained again is among those that are ``done``.

    Raises:
        ValueError: one is.
    """
    trained = {run.name for run in runs} - done
    for run in runs:
        if run.name in done and run.init_from in trained:
            raise ValueError(
                f"{run.recipe.run_path} began with weights of {run.init_from}, which is not "
                f"finished and will have others: {_REMEDY}"
            )


def check_texts(plan: SweepPlan, chosen: Sequence[PlannedRun], done: Set[str]) -> None:
    """Checks that no run that the report has beside the ``chosen`` ones has read other text.

    A chosen run that is not ``done`` checks that itself where it resumes. Text on the hub, which
    has a pinned revision, is not compared.

    Raises:
        ValueError: one has, since files or an environment variable have changed.
    """
    from sparsellm.data.text.corpus import hub_sources, load_corpora

    configs = {str(run.recipe.data): run.recipe.data for run in chosen}
    present = {
        key: {corpus.name: corpus.text_id for corpus in load_corpora(data)}
        for key, data in configs.items()
        if not hub_sources(data.corpus)
    }
    trained_now = {run.name for run in chosen} - done
    for run in plan.runs:
        path, now = run.recipe.run_path, present.get(str(run.recipe.data))
        if not now or run.name in trained_now or not (path / METRICS_FILE).is_file():
            continue
        sessions = read_metrics(path, "session")
        texts = sessions[-1].get("texts", {}) if sessions else {}
        if names := [name for name in now if texts.get(name, now[name]) != now[name]]:
            raise ValueError(
                f"{path} has read other text of corpus {', '.join(names)} than there is now, so "
                "its losses cannot be compared: restore the text, or move the run away, or give "
                "the sweep another name"
            )


def _check_source(run: PlannedRun, records: list[dict[str, Any]]) -> None:
    """Compares the weights that a run began with, by its records, with those that it would have."""
    sessions = of_kind(records, "session")
    if not sessions:
        return
    origin, path = sessions[-1].get("init_from") or {}, run.recipe.run_path
    if origin.get("name") != run.init_from:
        began = f"weights of {origin['name']}" if origin else "random weights"
        present = f"those of {run.init_from}" if run.init_from else "random ones"
        raise ValueError(f"{path} began with {began}, and would with {present} now: {_REMEDY}")
    newest = None if run.source_path is None else latest(run.source_path / "checkpoints")
    if newest is not None and weights_id(newest) != origin["id"]:
        raise ValueError(
            f"{path} began with weights of {run.init_from} that are no longer its last ones "
            f"({newest}): {_REMEDY}"
        )


def _comparable(recipe: Recipe) -> dict[str, Any]:
    """The settings that must not change when a run is resumed."""
    return flatten(recipe.model_dump(mode="json", exclude={"description", "logging", "checkpoint"}))
