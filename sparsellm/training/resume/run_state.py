"""The state of a run in a checkpoint: saved, restored, and initialised from other weights."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsellm import __version__
from sparsellm.data.position import DataStateMismatch, merge
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.processes.distributed import together
from sparsellm.recipe.changes import CHANGED, CHANGED_DATA, CHANGED_MODEL, cause_in, recipe_changes
from sparsellm.recipe.vocabulary import HF_PREFIX, tokenizer_folder
from sparsellm.runs import checkpoint, state
from sparsellm.runs.history import parent_of
from sparsellm.runs.huggingface import hf_files
from sparsellm.runs.huggingface.find import find_checkpoint, weights_id
from sparsellm.runs.huggingface.pretrained import read_weights
from sparsellm.runs.huggingface.recipe_of import load_recipe_of
from sparsellm.runs.telemetry.records import Parent
from sparsellm.sparsity.target import final_l1
from sparsellm.training.counting.kernel_policy import kernels_state, restore_kernels
from sparsellm.training.optimization.schedule import rate_changes
from sparsellm.training.resume.resumable import check_resumable, saved_recipe
from sparsellm.training.run import Run


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
                "init_from": asdict(run.origin) if run.origin else None,
                "parent": asdict(run.parent) if run.parent else None,
                **({"teacher": run.teacher.name} if run.teacher else {}),
                "kernels": kernels_state(run.ffns, accelerator.device),
                "target": run.target.state_dict() if run.target else None,
                "micro_batch": run.micro_batch.state_dict(),
            },
            recipe_yaml=recipe.to_yaml(),
            data=run.loader.state_dict(run.data_position),
            rng=_rng_state(),
            files=run.carried,
        )
    )


def first_state(run: Run, resume_from: Path | None, init_from: Path | None) -> None:
    """Restores or initialises the run, without changing its folder."""
    say = run.accelerator.print
    run.activity.begin("loading", run.step)
    # Dropout draws from this state: other numbers on each rank, whatever the process drew before.
    torch.manual_seed((run.recipe.seed * 1_000_003 + run.accelerator.process_index) % 2**63)
    with together(run.accelerator.device):
        if run.accelerator.is_main_process:
            weights_source = resume_from or init_from
            source = find_checkpoint(weights_source) if weights_source else None
            run.carried = _carried_files(run.recipe.data.tokenizer, source)
    if resume_from is not None:
        say(f"resuming from {resume_from}")
        for note in restore_run(run, resume_from):
            say(f"  {note}")
    elif init_from is not None:
        say("\n  ".join(initialise_run(run, init_from)))


def _carried_files(tokenizer: str, source: Path | None) -> dict[str, bytes]:
    """`hf_files.carried_files` of a run that begins with the weights of ``source``."""
    folder = _carried_tokenizer(tokenizer, source)
    if source is None or (settings := hf_files.source_of(source)) is None:
        return hf_files.carried_files(folder, None)
    theirs = load_recipe_of(source).data.tokenizer
    same_ids = (
        theirs == tokenizer or load_tokenizer(theirs).identity == load_tokenizer(tokenizer).identity
    )
    return hf_files.carried_files(folder, settings, same_ids=same_ids)


def _carried_tokenizer(name: str, source: Path | None) -> Path | None:
    """The folder of the files that go with a run's tokenizer, if there is one.

    Of a tokenizer of ours, these are the files beside the weights that the run begins with, which
    may have a chat template.
    """
    if name.startswith(HF_PREFIX):
        return tokenizer_folder(name)
    if source is None or (folder := hf_files.tokenizer_of(source)) is None:
        return None
    return folder if load_recipe_of(source).data.tokenizer == name else None


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
    run.origin = Parent(
        name=weights.recipe.name,
        step=weights.trainer["step"],
        tokens=weights.trainer["tokens"],
        path=str(weights.path.resolve()),
        id=weights_id(weights.path),
    )
    changes = recipe_changes(weights.recipe, run.recipe)
    return [
        f"weights of {weights.path}; the optimizer and the data begin at step 0",
        *(note for note in changes if note.startswith(CHANGED_MODEL)),
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
    check_resumable(path, run.recipe)
    before = saved_recipe(path)
    changes = recipe_changes(before, run.recipe)
    run.changes = [change.removeprefix(CHANGED) for change in changes]
    notes = changes + rate_changes(before, run.recipe, saved.step)
    try:
        with together(accelerator.device):
            state.restore(run.model, run.optimizer, path)
    except ValueError as error:
        raise ValueError(f"{error}{cause_in(changes, CHANGED_MODEL)}") from error
    run.stats.load_state_dict(checkpoint.read_kind(path, checkpoint.STATS))
    run.step, run.tokens = saved.step, saved.trainer["tokens"]
    run.skips.load_state_dict(saved.trainer)
    origin = saved.trainer.get("init_from")
    run.origin = Parent(**origin) if origin else None
    if path.resolve().parent == run.checkpoints.resolve():
        run.parent = parent_of(path)
    else:
        place = str(path.resolve())
        run.parent = Parent(before.name, run.step, run.tokens, place, saved.manifest.id)
    run.saver.ancestors = saved.manifest.branch
    restore_kernels(run.ffns, saved.trainer.get("kernels"), accelerator.device)
    run.micro_batch.saved = saved.trainer.get("micro_batch")
    notes += _restore_target(run, saved.trainer.get("target"), changes)
    states = checkpoint.data_states(path)
    try:
        notes += run.loader.load_state_dict(merge(states))
    except DataStateMismatch as mismatch:
        if run.recipe.data.on_mismatch == "refuse":
            raise DataStateMismatch(
                f"{mismatch}{cause_in(changes, CHANGED_DATA)}. Train as it was then, or let the "
                "data stream start over with --set data.on_mismatch=restart"
            ) from None
        run.loader.restart(states)
        notes.append(f"the data stream starts over from its beginning: {mismatch}")
    run.repeating = run.loader.repeating
    if saved.rng:  # else there were fewer ranks: this one keeps its own
        _set_rng_state(saved.rng)
    return notes


def _restore_target(run: Run, saved: dict[str, Any] | None, changes: list[str]) -> list[str]:
    """Restores the controller's state, if there is any; returns what λ does that was not planned.

    ``saved`` may be None: the checkpoint's run had no target.
    """
    target, initial = run.target, run.recipe.sparsity.l1_coefficient
    if target is None:
        return [] if saved is None else [_end_of_target(saved, initial)]
    if saved is None or not target.load_state_dict(saved):
        return [f"λ starts anew from sparsity.l1_coefficient {initial:g}"]
    change = target.target_change(run.step)
    notes = [] if change is None else [change]
    if cause_in(changes, f"{CHANGED}sparsity.l1_coefficient "):
        notes.append("λ goes on as the controller left it, whatever sparsity.l1_coefficient is now")
    return notes


def _end_of_target(saved: dict[str, Any], initial: float) -> str:
    last = final_l1(saved)
    return (
        f"λ is adjusted no more: it changes from {last:.3g} to sparsity.l1_coefficient "
        f"{initial:g}; to hold it, --set sparsity.l1_coefficient={last:.3g}"
    )


def _rng_state() -> dict[str, Tensor]:
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return rng


def _set_rng_state(rng: dict[str, Tensor]) -> None:
    torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])
