"""A `Run` is what one rank holds while it trains: built and closed here, saved by run_state.py."""

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from sparsellm.data.held_out import validated, validation_batches
from sparsellm.data.loader import Bookmark, TokenLoader
from sparsellm.data.text.corpus import Corpus, load_corpora
from sparsellm.data.tokenizer import Tokenizer, load_tokenizer
from sparsellm.device import check_fp8
from sparsellm.ffn.kernels.compiler.compile import compile_seconds
from sparsellm.ffn.shared_linear import SharedLinear, shared_linears
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.model import HFModel, build_model, build_zero_model, prepare_blocks
from sparsellm.processes import ranks
from sparsellm.processes.compile_workers import start_compile_workers
from sparsellm.processes.consensus import compare_files
from sparsellm.processes.distributed import RankActivity, together
from sparsellm.recipe import Recipe
from sparsellm.runs.saver import Saver
from sparsellm.runs.telemetry.metrics_log import MetricsLog
from sparsellm.runs.telemetry.records import Parent, Record
from sparsellm.sparsity.counts import NeuronActivity
from sparsellm.sparsity.target import TargetController
from sparsellm.training.counting.counters import SkippedSteps, StepReading
from sparsellm.training.counting.kernel_policy import (
    compile_kernels_ahead,
    described_costs,
    set_up_kernels,
)
from sparsellm.training.counting.layout import CounterLayout
from sparsellm.training.gathered import GatheredSharing
from sparsellm.training.micro_batch import MicroBatch, first_micro_batch
from sparsellm.training.next_step import QueuedStep
from sparsellm.training.objective import Objective
from sparsellm.training.optimization.optimizer import build_optimizer
from sparsellm.training.optimization.schedule import decay_start
from sparsellm.training.teacher import Teacher
from sparsellm.training.validation import ValidationSet


@dataclass
class Run:
    """The state of one rank; `step` and `tokens` advance with every optimizer step."""

    recipe: Recipe
    accelerator: Accelerator
    objective: torch.nn.Module  # what is called: `Objective`, wrapped by DDP or FSDP2
    optimizer: torch.optim.Optimizer
    loader: TokenLoader
    micro_batch: MicroBatch
    validation: dict[str, ValidationSet]  # by corpus; empty where there is no validation
    stats: NeuronActivity
    saver: Saver
    target: TargetController | None = None
    teacher: Teacher | None = None  # of `train.distillation`
    step: int = 0
    tokens: int = 0  # that all ranks have trained on
    saved_step: int = 0  # of the last checkpoint, which it may have resumed from
    activity: RankActivity = field(default_factory=RankActivity)
    between_steps: bool = True  # weights, optimizer and statistics are those after `step`
    skips: SkippedSteps = field(default_factory=SkippedSteps)
    queued: QueuedStep | None = None  # the next step, see next_step.py
    readings: list[StepReading] = field(default_factory=list)  # since kernels were last chosen
    compiled_before: float = field(default_factory=compile_seconds)  # by this process
    origin: Parent | None = None  # of the weights of step 0
    parent: Parent | None = None  # checkpoint of another run that this run goes on from
    changes: list[str] = field(default_factory=list)  # of the recipe since that checkpoint
    repeating: set[str] = field(default_factory=set)  # corpora whose text is read again
    carried: dict[str, bytes] = field(default_factory=dict)  # by the main rank, see hf_files.py
    log: MetricsLog | None = None  # of the main rank, while it trains

    def write(self, record: Record) -> None:
        """Logs a record; the main rank does."""
        if self.log is not None:
            self.log.write(record)

    def say_saved(self) -> None:
        """Waits for the save in progress, if there is one, and says where it lies."""
        if path := self.saver.wait():
            self.accelerator.print(f"saved {path}")

    @cached_property
    def model(self) -> HFModel:
        """The model within the objective: parameters by Hugging Face's names."""
        objective: Objective = self.accelerator.unwrap_model(self.objective)
        return objective.model

    @cached_property
    def layout(self) -> CounterLayout:
        """The layout of each step's counters."""
        num_corpora = len(self.loader.corpus_names)
        return CounterLayout(self.recipe, self.accelerator.device, num_corpora)

    @property
    def data_position(self) -> Bookmark:
        """The position in the data after the last step."""
        return self.queued.position if self.queued else self.loader.position

    @cached_property
    def ffns(self) -> list[SparseFFN]:
        """The FFN of each layer."""
        return [layer.mlp for layer in self.model.model.layers]

    @cached_property
    def sharing(self) -> list[SparseFFN | SharedLinear]:
        """The modules that prepare weights for all micro-batches of a step."""
        model = self.model
        with_linears = [*(layer.self_attn for layer in model.model.layers), model]
        return [
            *self.ffns,
            *(linear for module in with_linears for linear in shared_linears(module)),
        ]

    @cached_property
    def gathered(self) -> GatheredSharing | None:
        """Prepares gathered weights where FSDP2 keeps them for a whole step; None elsewhere."""
        if not isinstance(self.objective, FSDPModule):
            return None
        if self.accelerator.state.fsdp_plugin.reshard_after_forward:
            return None
        gathered, model = GatheredSharing(self.compute_dtype), self.model
        for layer in model.model.layers:
            gathered.watch(layer, [layer.mlp, *shared_linears(layer.self_attn)])
        gathered.watch(self.objective, shared_linears(model))
        return gathered

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The type in which the blocks compute; parameters and gradients are fp32."""
        return torch.float32 if self.recipe.runtime.precision == "fp32" else torch.bfloat16

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.recipe.run_path / "checkpoints"


class _MainRankPrints(Accelerator):
    """Prints on the main rank only, where accelerate would print once per node."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_main_process:
            print(*args, **kwargs)


def build_accelerator(recipe: Recipe) -> Accelerator:
    """bf16 autocast over fp32 weights; without CUDA, CPU processes over gloo."""
    bf16 = recipe.runtime.precision != "fp32"
    mixed_precision = "bf16" if bf16 else "no"
    _forget_earlier_run(mixed_precision)
    accelerator = _MainRankPrints(
        mixed_precision=mixed_precision,
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


def _forget_earlier_run(mixed_precision: str) -> None:
    """Lets a process train several runs: accelerate keeps the precision of the first.

    Raises:
        ValueError: an earlier run has closed the process group of several ranks.
    """
    if not AcceleratorState._shared_state:
        return
    if ranks.several() and not dist.is_initialized():
        raise ValueError(
            "these ranks have trained a run already, and cannot meet again: start a script with "
            "`accelerate launch` once for each run"
        )
    if AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state()


def build_run(
    recipe: Recipe,
    accelerator: Accelerator | None = None,
    activity: RankActivity | None = None,
    *,
    random_weights: bool = True,
) -> Run:
    """Builds a run at step 0, on this rank's device.

    Without ``random_weights`` the weights are zero, which takes no time; for a run that loads its
    weights.
    """
    accelerator = accelerator or build_accelerator(recipe)
    recipe.accumulation_steps(accelerator.num_processes)  # raises before anything is built
    if recipe.runtime.precision == "fp8":
        check_fp8("runtime.precision", accelerator.device)
    if recipe.runtime.compile:
        start_compile_workers()
    compile_kernels_ahead(recipe, accelerator.device)
    micro_batch = first_micro_batch(recipe, accelerator)
    corpora = _find_corpora(recipe, accelerator)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    compare_files(corpora, tokenizer, accelerator)
    loader, validation = _build_loaders(recipe, corpora, tokenizer, micro_batch.size, accelerator)
    objective, optimizer = _build_objective(
        recipe,
        tokenizer.eot_id,
        accelerator,
        random_weights=random_weights,
        sizes_change=recipe.ffn.kernels != "dense" and micro_batch.size < micro_batch.largest,
    )
    run = Run(
        activity=activity or RankActivity(),
        recipe=recipe,
        accelerator=accelerator,
        objective=objective,
        optimizer=optimizer,
        loader=loader,
        micro_batch=micro_batch,
        validation=validation,
        stats=NeuronActivity(
            recipe.model.num_hidden_layers,
            recipe.model.intermediate_size,
            recipe.sparsity.dead_window_tokens,
            accelerator.device,
        ),
        target=_build_target(recipe),
        saver=_build_saver(recipe, accelerator),
    )
    sized = recipe.with_micro_batch(micro_batch.size)
    if why_dense := set_up_kernels(sized, run.ffns, accelerator.device):
        accelerator.print(f"ffn.kernels: FFNs train with dense kernels: {why_dense}")
    elif measured := described_costs(run.ffns):
        accelerator.print(measured)
    return run


def _find_corpora(recipe: Recipe, accelerator: Accelerator) -> tuple[Corpus, ...]:
    """The corpora with their fingerprints, which the first rank sends to the others."""
    corpora: tuple[Corpus, ...] = ()
    with together(accelerator.device):
        if accelerator.is_main_process:
            corpora = load_corpora(recipe.data)
            for corpus in corpora:
                _ = corpus.fingerprint, corpus.witness, corpus.held_out
    [corpora] = broadcast_object_list([corpora])
    return corpora


def _build_loaders(
    recipe: Recipe,
    corpora: tuple[Corpus, ...],
    tokenizer: Tokenizer,
    sequences: int,
    accelerator: Accelerator,
) -> tuple[TokenLoader, dict[str, ValidationSet]]:
    """This rank's micro-batches of so many sequences, and its held-out ones by corpus."""
    length = recipe.model.context_length
    position = {
        "context_length": length,
        "micro_batch_size": sequences,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
    }
    seed, num_workers = recipe.seed, recipe.data.num_workers
    loader = TokenLoader(corpora, tokenizer, **position, seed=seed, num_workers=num_workers)
    validation: dict[str, ValidationSet] = {}
    if not recipe.validation.every_steps:
        return loader, validation
    # The corpora of a mixture that have held-out text share the tokens, by their weights.
    held_out = validated(corpora, tokenizer, length, warns=accelerator.is_main_process)
    for corpus in held_out:
        share = corpus.weight / sum(other.weight for other in held_out)
        num_tokens = round(recipe.validation.tokens * share)
        batches = validation_batches(corpus, tokenizer, **position, num_tokens=num_tokens)
        validation[corpus.name] = ValidationSet(batches, sequences, accelerator.device)
    return loader, validation


def _build_objective(
    recipe: Recipe,
    eot_id: int,
    accelerator: Accelerator,
    *,
    random_weights: bool,
    sizes_change: bool,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model with its losses on this rank's device, wrapped by DDP or FSDP2; its optimizer."""
    build = build_model if random_weights else build_zero_model
    with accelerator.device:
        model = build(recipe, eot_id)
    model.train()
    for layer in model.model.layers:
        layer.mlp.has_l1 = recipe.sparsity.l1_coefficient > 0
    prepare_blocks(model, recipe.runtime, sizes_change=sizes_change)
    objective = Objective(model, recipe.runtime)
    objective.sizes_change = sizes_change and recipe.runtime.compile
    objective, optimizer = accelerator.prepare(objective, build_optimizer(objective, recipe))
    return objective, optimizer.optimizer


def _build_target(recipe: Recipe) -> TargetController | None:
    if not recipe.sparsity.target_nnz:
        return None
    steps, schedule = recipe.train.steps, recipe.sparsity.target_schedule
    return TargetController(
        recipe.sparsity,
        recipe.model.num_hidden_layers,
        recipe.optimizer.warmup_steps,
        earlier_targets=[(round(share * steps), target) for share, target in schedule],
    )


def _build_saver(recipe: Recipe, accelerator: Accelerator) -> Saver:
    group = None
    if accelerator.num_processes > 1:
        # A thread saves while training goes on. Ranks wait in it for the slowest disk; one that is
        # gone closes its connections.
        group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
    milestone = decay_start(recipe.optimizer, recipe.train.steps)
    folder = recipe.run_path / "checkpoints"
    return Saver(folder, recipe.checkpoint.keep, group=group, milestone=milestone)


def resize(run: Run, sequences: int) -> None:
    """Sets how many sequences a rank computes at once. Called between two steps; the data of the
    steps stays the same."""
    run.micro_batch.size, run.micro_batch.calm_steps = sequences, 0
    run.loader.resize(sequences)


def close_run(run: Run) -> None:
    """Ends the data workers, the save in progress and the process group."""
    run.queued = None
    run.loader.close()
    run.saver.close()
    # The wrapper is deleted before the process group: if DDP's reducer were the group's last owner,
    # it would join gloo's threads while holding the GIL, for which one of them may be waiting.
    del run.objective
    run.accelerator.free_memory()
    run.accelerator.end_training()
