"""The state of a run in a checkpoint: saved, restored, and initialised from other weights."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from sparsellm import __version__
from sparsellm.data.position import DataStateMismatch, merge
from sparsellm.processes.distributed import together
from sparsellm.recipe import Recipe, without_removed
from sparsellm.runs import checkpoint, state
from sparsellm.runs.history import parent_of
from sparsellm.runs.pretrained import read_weights
from sparsellm.runs.records import Parent
from sparsellm.strict import flatten, load_yaml
from sparsellm.training.kernel_policy import kernels_state, restore_kernels
from sparsellm.training.run import Run
from sparsellm.training.schedule import rate_changes

_CHANGED = "changed since the checkpoint: "
# Keys that decide which function the weights compute.
_MODEL_KEYS = ("model.", "ffn.activation ", "ffn.gated ", "data.tokenizer ")
_CHANGED_MODEL = tuple(f"{_CHANGED}{key}" for key in _MODEL_KEYS)
_CHANGED_DATA = f"{_CHANGED}data."


def begin_save(run: Run) -> None:
    """Begins a checkpoint of the run after `run.step` steps; called by all ranks.

    Returns once the tensors are copied to host memory; `run.saver` goes on in the background.

    Raises:
        CheckpointError: the previous save failed.
    """
    recipe, accelerator = run.recipe, run.accelerator
    run.saver.begin(
        checkpoint.Snapshot(
            step=run.step,
            model=state.model_tensors(run.model),
            optimizer=state.optimizer_tensors(run.model, run.optimizer),
            stats=run.stats.state_dict(),
            trainer={
                "step": run.step,
                "tokens": run.tokens,
                **run.skips.state_dict(),
                "world_size": accelerator.num_processes,
                "sparsellm": __version__,
                "torch": torch.__version__,
                "init_from": run.origin,
                "parent": asdict(run.parent) if run.parent else None,
                **({"teacher": run.teacher.name} if run.teacher else {}),
                "kernels": kernels_state(run.ffns, accelerator.device),
                "target": run.target.state_dict() if run.target else None,
                "micro_batch": run.micro_batch.state_dict(),
            },
            recipe_yaml=recipe.to_yaml(),
            data=run.loader.state_dict(run.data_position),
            rng=_rng_state(),
        )
    )


def first_state(run: Run, resume_from: Path | None, init_from: Path | None) -> None:
    """Restores or initialises the run, without changing its folder."""
    say = run.accelerator.print
    run.activity.begin("loading", run.step)
    if resume_from is not None:
        say(f"resuming from {resume_from}")
        for note in restore_run(run, resume_from):
            say(f"  {note}")
    elif init_from is not None:
        say("\n  ".join(initialise_run(run, init_from)))


def initialise_run(run: Run, path: Path) -> list[str]:
    """Gives a run at step 0 the weights of a checkpoint, run or exported folder; nothing else.

    Returns sentences that describe the weights and how the recipe's model differs from theirs.

    Raises:
        FileNotFoundError, ValueError: it is damaged, or its tensors have other shapes.
    """
    weights = read_weights(path)
    state.restore_model(
        run.model, weights.tensors, str(weights.path), "train a recipe of the same shapes"
    )
    run.origin = {
        "name": weights.recipe.name,
        "step": weights.trainer["step"],
        "tokens": weights.trainer["tokens"],
    }
    changes = _recipe_changes(weights.recipe.model_dump(mode="json"), run.recipe)
    return [
        f"weights of {weights.path}; the optimizer and the data begin at step 0",
        *(note for note in changes if note.startswith(_CHANGED_MODEL)),
    ]


def restore_run(run: Run, path: Path) -> list[str]:
    """Restores a checkpoint's state; returns sentences on what changed in the recipe since.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is damaged, or of another model.
        DataStateMismatch: the data stream cannot continue with this corpus, seed or tokenizer, and
            `data.on_mismatch` is `refuse`.
    """
    accelerator = run.accelerator
    with together(accelerator.device):
        saved = checkpoint.load(path, accelerator.process_index, accelerator.num_processes)
    saved_recipe = without_removed(load_yaml(path / checkpoint.RECIPE_FILE))
    before, now = saved_recipe.get("optimizer", {}).get("name", "adamw"), run.recipe.optimizer.name
    if before != now:
        raise ValueError(
            f"{path} has the state of optimizer.name {before}, not {now}: resume with "
            f"--set optimizer.name={before}, or start a new run from its weights: "
            f"--set name=NEW --init-from {path}"
        )
    if now == "muon":
        check_gate_optimizer(path, saved_recipe, run.recipe)
    changes = _recipe_changes(saved_recipe, run.recipe)
    notes = changes + _rate_notes(saved_recipe, run.recipe, saved.step)
    try:
        with together(accelerator.device):
            state.restore(run.model, run.optimizer, path)
    except ValueError as error:
        raise ValueError(f"{error}{_cause(changes, _CHANGED_MODEL)}") from error
    run.stats.load_state_dict(checkpoint.read_kind(path, checkpoint.STATS))
    run.step, run.tokens = saved.step, saved.trainer["tokens"]
    run.skips.load_state_dict(saved.trainer)
    run.origin = saved.trainer.get("init_from")
    if path.resolve().parent == run.checkpoints.resolve():
        run.parent = parent_of(path)
    else:
        name, place = saved_recipe.get("name", ""), str(path.resolve())
        run.parent = Parent(name, run.step, run.tokens, place, saved.manifest.id)
    run.saver.ancestors = saved.manifest.branch
    restore_kernels(run.ffns, saved.trainer.get("kernels"), accelerator.device)
    run.micro_batch.saved = saved.trainer.get("micro_batch")
    saved_target = saved.trainer.get("target")
    if run.target and not (saved_target and run.target.load_state_dict(saved_target)):
        notes.append(
            f"λ starts anew from sparsity.l1_coefficient {run.recipe.sparsity.l1_coefficient:g}"
        )
    elif run.target and _cause(changes, f"{_CHANGED}sparsity.l1_coefficient "):
        notes.append("λ goes on as the controller left it, whatever sparsity.l1_coefficient is now")
    try:
        notes += run.loader.load_state_dict(merge(checkpoint.data_states(path)))
    except DataStateMismatch as mismatch:
        if run.recipe.data.on_mismatch == "refuse":
            raise DataStateMismatch(
                f"{mismatch}{_cause(changes, _CHANGED_DATA)}. Train as it was then, or let the "
                "data stream start over with --set data.on_mismatch=restart"
            ) from None
        notes.append(f"the data stream starts over from its beginning: {mismatch}")
    if saved.rng:  # else there were fewer ranks: this one keeps its own
        _set_rng_state(saved.rng)
    return notes


def check_gate_optimizer(path: Path, saved_recipe: dict[str, Any], recipe: Recipe) -> None:
    """Refuses a resume that would give the gates' state to another optimizer.

    Before `optimizer.gate_optimizer` existed, Muon updated the gates of every model without L1.
    """
    optimizer = saved_recipe.get("optimizer", {})
    l1 = saved_recipe.get("sparsity", {}).get("l1_coefficient", 0)
    gated = saved_recipe.get("ffn", {}).get("gated", True)
    default = "adamw" if l1 or (gated and "gate_optimizer" in optimizer) else "muon"
    before = optimizer.get("gate_optimizer") or default
    now = "adamw" if recipe.gates_by_adamw else "muon"
    if before != now:
        raise ValueError(
            f"{path} has the state of gates that {before} updated, not {now}: resume with "
            f"--set optimizer.gate_optimizer={before}, or start a new run from its weights: "
            f"--set name=NEW --init-from {path}"
        )


def _rate_notes(saved_recipe: dict[str, Any], present: Recipe, step: int) -> list[str]:
    try:
        recipe = Recipe.model_validate(saved_recipe)
    except ValidationError:  # of a version with other keys, which are named as changed
        return []
    return rate_changes(recipe, present, step)


def _recipe_changes(saved_recipe: dict[str, Any], recipe: Recipe) -> list[str]:
    saved = flatten(saved_recipe)
    present = flatten(recipe.model_dump(mode="json"))
    return [
        f"{_CHANGED}{key} {saved.get(key)} → {present.get(key)}"
        for key in sorted(saved.keys() | present.keys())
        if saved.get(key) != present.get(key)
    ]


def _cause(changes: list[str], begins: str | tuple[str, ...]) -> str:
    """The changes of some keys, from `_recipe_changes`, for the end of an error message."""
    found = [change.removeprefix(_CHANGED) for change in changes if change.startswith(begins)]
    return f" ({_CHANGED}{', '.join(found)})" if found else ""


def _rng_state() -> dict[str, Tensor]:
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return rng


def _set_rng_state(rng: dict[str, Tensor]) -> None:
    torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])
