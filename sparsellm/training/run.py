"""A `Run` is what one rank holds while it trains: built here, saved to and restored from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from pydantic import ValidationError
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import MixedPrecisionPolicy

from sparsellm import __version__
from sparsellm.data import (
    Corpus,
    DataStateMismatch,
    TokenLoader,
    load_corpora,
    load_tokenizer,
    merge,
    validation_batches,
)
from sparsellm.ffn.module import SparseFFN
from sparsellm.model import HFModel, build_model, prepare_blocks
from sparsellm.recipe import Recipe
from sparsellm.runs import checkpoint, state
from sparsellm.runs.lineage import Lineage
from sparsellm.runs.pretrained import read_weights
from sparsellm.runs.saver import Saver
from sparsellm.strict import flatten, parse_yaml
from sparsellm.training.distributed import checkpoint_group, from_first_rank, together
from sparsellm.training.kernel_policy import (
    described_costs,
    kernels_state,
    restore_kernels,
    set_up_kernels,
)
from sparsellm.training.micro_batch import MicroBatch, first_micro_batch
from sparsellm.training.objective import Objective
from sparsellm.training.optimizer import build_optimizer
from sparsellm.training.peers import RankActivity
from sparsellm.training.schedule import rate_change
from sparsellm.training.spikes import MovingAverages
from sparsellm.training.statistics import SparsityStats
from sparsellm.training.target import TargetController
from sparsellm.training.validation import ValidationSet

_CHANGED = "changed since the checkpoint: "
# Keys that decide what function the same weights are.
_MODEL_KEYS = ("model.", "ffn.activation ", "ffn.gated ", "data.tokenizer ")
_CHANGED_MODEL = tuple(f"{_CHANGED}{key}" for key in _MODEL_KEYS)


@dataclass
class Run:
    """One rank's state; `step` and `tokens` advance with every optimizer step."""

    recipe: Recipe
    accelerator: Accelerator
    model: HFModel  # unwrapped: parameters by Hugging Face's names
    objective: torch.nn.Module  # what is called: `Objective`, wrapped by DDP or FSDP2
    optimizer: torch.optim.Optimizer
    loader: TokenLoader
    micro_batch: MicroBatch
    validation: dict[str, ValidationSet]  # by corpus; empty where there is no validation
    stats: SparsityStats
    saver: Saver
    group: ProcessGroup | None  # of CPU processes, for checkpoints; None for one process
    target: TargetController | None = None
    step: int = 0
    tokens: int = 0  # that all ranks have trained on
    activity: RankActivity = field(default_factory=RankActivity)
    between_steps: bool = True  # weights, optimizer and statistics are those after `step`
    skipped: int = 0  # steps that were not taken: not finite, or a spike
    skipped_in_a_row: int = 0
    averages: MovingAverages = field(default_factory=MovingAverages)  # of the steps taken
    origin: dict[str, Any] | None = None  # name, step and tokens of the run it was initialised from

    @property
    def rounds(self) -> int:
        """Micro-batches that a rank runs in a step."""
        present = self.recipe.with_micro_batch(self.micro_batch.size)
        return present.accumulation_steps(self.accelerator.num_processes)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that a rank runs at once."""
        return self.micro_batch.size * self.recipe.model.context_length

    @property
    def ffns(self) -> list[SparseFFN]:
        """The FFN of each layer."""
        return [layer.mlp for layer in self.model.model.layers]

    @property
    def compute_dtype(self) -> torch.dtype:
        """In which the blocks compute; parameters and gradients are fp32."""
        return torch.bfloat16 if self.recipe.runtime.precision == "bf16" else torch.float32

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.recipe.run_path / "checkpoints"


class _OneVoice(Accelerator):
    """Where accelerate would print once per node, one rank of all prints."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_main_process:
            print(*args, **kwargs)


def build_accelerator(recipe: Recipe) -> Accelerator:
    """bf16 autocast over fp32 weights; without CUDA, CPU processes over gloo."""
    bf16 = recipe.runtime.precision == "bf16"
    accelerator = _OneVoice(
        mixed_precision="bf16" if bf16 else "no",
        cpu=not torch.cuda.is_available(),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(minutes=recipe.runtime.timeout_minutes)),
        ],
    )
    if accelerator.is_fsdp2 and bf16:
        # accelerate's default also reduces gradients and casts every module's outputs, our loss
        # sums among them, to bf16: 2 digits. DDP has fp32 for both.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    return accelerator


def _find_corpora(recipe: Recipe) -> tuple[Corpus, ...]:
    """With what it takes a look at every file for: the other ranks have it from the first."""
    corpora = load_corpora(**recipe.data.sources())
    for corpus in corpora:
        _ = corpus.fingerprint, corpus.witness
    return corpora


def build_run(
    recipe: Recipe, accelerator: Accelerator | None = None, activity: RankActivity | None = None
) -> Run:
    """Everything at step 0, on this rank's device."""
    accelerator = accelerator or build_accelerator(recipe)
    recipe.accumulation_steps(accelerator.num_processes)  # raises before anything is built
    micro_batch = first_micro_batch(recipe, accelerator)
    corpora = from_first_rank(lambda: _find_corpora(recipe), accelerator.device)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    shape = {
        "context_length": recipe.model.context_length,
        "micro_batch_size": micro_batch.size,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
    }
    loader = TokenLoader(
        corpora, tokenizer, **shape, seed=recipe.seed, num_workers=recipe.data.num_workers
    )
    validation = {}
    if recipe.validation.every_steps:
        # Of a mixture those that have held-out text, in proportion to their weights.
        held_out = [corpus for corpus in corpora if corpus.validation] or corpora[:1]
        for corpus in held_out:
            share = corpus.weight / sum(other.weight for other in held_out)
            wanted = round(recipe.validation.tokens * share)
            validation[corpus.name] = ValidationSet(
                validation_batches(corpus, tokenizer, **shape, num_tokens=wanted),
                micro_batch.size,
                accelerator.device,
            )

    model = build_model(recipe, tokenizer.eot_id).to(accelerator.device)
    model.train()
    for layer in model.model.layers:
        layer.mlp.block_norms = recipe.sparsity.union_coefficient > 0
    prepare_blocks(model, recipe.runtime)
    objective = Objective(model, recipe.runtime)
    objective.compiles_each_size = (
        recipe.train.micro_batch_size == "auto" and recipe.runtime.compile
    )
    objective, optimizer = accelerator.prepare(
        objective, build_optimizer(objective, recipe.optimizer)
    )
    group = checkpoint_group()
    run = Run(
        activity=activity or RankActivity(),
        recipe=recipe,
        accelerator=accelerator,
        model=accelerator.unwrap_model(objective).model,
        objective=objective,
        optimizer=optimizer.optimizer,
        loader=loader,
        micro_batch=micro_batch,
        validation=validation,
        stats=SparsityStats(
            recipe.model.num_hidden_layers,
            recipe.model.intermediate_size,
            recipe.model.context_length,
            recipe.sparsity.dead_window_tokens,
            accelerator.device,
        ),
        target=(
            TargetController(
                recipe.sparsity, recipe.model.num_hidden_layers, recipe.optimizer.warmup_steps
            )
            if recipe.sparsity.target_nnz
            else None
        ),
        saver=Saver(recipe.run_path / "checkpoints", recipe.checkpoint.keep, group=group),
        group=group,
    )
    sized = recipe.with_micro_batch(micro_batch.size)
    if why_dense := set_up_kernels(sized, run.ffns, accelerator.device):
        accelerator.print(f"ffn.kernels: FFNs train by dense products: {why_dense}")
    elif measured := described_costs(run.ffns):
        accelerator.print(measured)
    return run


def begin_save(run: Run) -> None:
    """Begins a checkpoint of the run as it is after `run.step` steps, from all ranks together.

    Returns once the tensors are copied to host memory; `run.saver` goes on in the background.

    Raises:
        CheckpointError: the save before has failed.
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
                "skipped": run.skipped,
                "skipped_in_a_row": run.skipped_in_a_row,
                "averages": run.averages.state_dict(),
                "world_size": accelerator.num_processes,
                "sparsellm": __version__,
                "torch": torch.__version__,
                "init_from": run.origin,
                "kernels": kernels_state(run.ffns, accelerator.device),
                "target": run.target.state_dict() if run.target else None,
                "micro_batch": run.micro_batch.state_dict(),
            },
            recipe_yaml=recipe.to_yaml(),
            rank=checkpoint.RankState(data=run.loader.state_dict(), rng=_rng_state()),
        )
    )


def resize(run: Run, sequences: int) -> None:
    """Between two steps: the next ones run so many sequences at once. Their data is the same."""
    run.micro_batch.size, run.micro_batch.calm_steps = sequences, 0
    run.loader.resize(sequences)


def save_run(run: Run) -> Path:
    """Writes a checkpoint and waits until it is published.

    Raises:
        CheckpointError: some rank could not write.
    """
    begin_save(run)
    path = run.saver.wait()
    assert path is not None
    return path


def initialise_run(run: Run, path: Path) -> list[str]:
    """Gives a run at step 0 the weights of a checkpoint, run or exported folder; nothing else.

    Returns what they are and where the recipe's model differs from theirs, as sentences.

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
    """Sets the run to a checkpoint's state; returns what the recipe changed since, as sentences.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is damaged, or of another model.
        DataStateMismatch: the data stream cannot continue with this corpus, seed or tokenizer, and
            `data.on_mismatch` is `refuse`.
    """
    accelerator = run.accelerator
    with together(accelerator.device):
        saved = checkpoint.load(path, accelerator.process_index, accelerator.num_processes)
    if not saved.has_optimizer:
        raise ValueError(
            f"{path} has weights and no optimizer state (it was imported) and cannot be resumed; "
            f"start a new run from it: --set name=NEW --init-from {path}"
        )
    notes = _recipe_changes(_saved_recipe(saved), run.recipe)
    notes += _rate_notes(saved, run.recipe)
    state.restore(run.model, run.optimizer, path, run.group)
    run.stats.load_state_dict(checkpoint.read_kind(path, checkpoint.STATS))
    run.step, run.tokens = saved.step, saved.trainer["tokens"]
    run.skipped = saved.trainer.get("skipped", 0)
    run.skipped_in_a_row = saved.trainer.get("skipped_in_a_row", 0)
    if averages := saved.trainer.get("averages"):  # earlier versions saved none
        run.averages.load_state_dict(averages)
    run.origin = saved.trainer.get("init_from")
    run.saver.lineage = Lineage.of(saved.manifest)
    restore_kernels(run.ffns, saved.trainer.get("kernels"), accelerator.device)
    run.micro_batch.saved = saved.trainer.get("micro_batch")
    saved_target = saved.trainer.get("target")
    if run.target and not (saved_target and run.target.load_state_dict(saved_target)):
        notes.append(
            f"λ starts anew from sparsity.l1_coefficient {run.recipe.sparsity.l1_coefficient:g}"
        )
    try:
        notes += run.loader.load_state_dict(merge(checkpoint.data_states(path)))
    except DataStateMismatch as mismatch:
        if run.recipe.data.on_mismatch == "refuse":
            raise DataStateMismatch(
                f"{mismatch}. Train as it was then, or let the data stream start over with "
                "--set data.on_mismatch=restart"
            ) from None
        notes.append(f"the data stream starts over from its beginning: {mismatch}")
    if saved.rank.rng:  # else there were fewer ranks: this one keeps its own
        _set_rng_state(saved.rank.rng)
    return notes


def close_run(run: Run) -> None:
    """Ends the data workers, the save in progress and the process group."""
    run.loader.close()
    run.saver.close()
    # The wrapper goes before the process group does: where DDP's reducer is the group's last owner
    # it joins gloo's threads while it holds the GIL, which one of them may be waiting for.
    del run.objective
    run.accelerator.free_memory()
    run.accelerator.end_training()


def _rate_notes(saved: checkpoint.SavedState, present: Recipe) -> list[str]:
    try:
        recipe = Recipe.model_validate(_saved_recipe(saved))
    except ValidationError:  # of a version with other keys, which are named as changed
        return []
    change = rate_change(recipe, present, saved.step)
    return [] if change is None else [change]


def _saved_recipe(saved: checkpoint.SavedState) -> dict[str, Any]:
    source = str(saved.path / checkpoint.RECIPE_FILE)
    content = parse_yaml(saved.recipe_yaml, source)
    if not isinstance(content, dict):
        raise ValueError(f"{source} is damaged: no `key: value` lines; {checkpoint.REMEDY}")
    return content


def _recipe_changes(saved_recipe: dict[str, Any], recipe: Recipe) -> list[str]:
    saved = flatten(saved_recipe)
    present = flatten(recipe.model_dump(mode="json"))
    return [
        f"{_CHANGED}{key} {saved.get(key)} → {present.get(key)}"
        for key in sorted(saved.keys() | present.keys())
        if saved.get(key) != present.get(key)
    ]


def _rng_state() -> dict[str, Tensor]:
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return rng


def _set_rng_state(rng: dict[str, Tensor]) -> None:
    torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])
