"""The beginning of a step: its first forward pass, which is queued before the last step is read.

The host must read a step's sums before it can log them and adapt λ. That read waits for the GPU,
and the host then needs 4 to 5 ms until the next forward pass runs. So the loop has `train_step`
queue the next step's first forward pass before it waits: the GPU is idle for 2.8% of a step of the
recipe `small` instead of 6.7% (one H200, micro-batch 32, steps of 86 and 89 ms, commit d8526f9).

The update of weights and statistics is queued by then, and λ enters only after the forward pass.
What the sums decide about kernels takes effect one step later (`adapt_kernels`).

It is not done where something happens between the two steps that needs the model or its memory, or
changes it: see `may_begin_next`.
"""

from __future__ import annotations

from collections.abc import Iterator

from sparsellm.training.accumulation import accumulation
from sparsellm.training.kernel_policy import choose_kernels
from sparsellm.training.measure import Due, is_due
from sparsellm.training.objective import LossSums
from sparsellm.training.run import Run
from sparsellm.training.started import Begun, MicroBatchReader, StepStart
from sparsellm.training.step_sums import StepSums


def begin_next(run: Run) -> None:
    """Begins the step after the one of which the update has just been queued."""
    position = run.loader.bookmark()
    start: StepStart | Exception
    try:
        start = start_step(run, run.step + 2)
    except Exception as error:
        start = error
    run.begun = Begun(position, start)


def the_started(run: Run) -> StepStart:
    """The step that has begun, or begins now.

    Raises:
        Exception: whatever kept it from beginning.
    """
    begun, run.begun = run.begun, None
    if begun is None:
        return start_step(run, run.step + 1)
    if isinstance(begun.start, Exception):
        raise begun.start
    return begun.start


def start_step(run: Run, step: int) -> StepStart:
    """Begins ``step``: 1 is the first."""
    adapt_kernels(run)
    shape = (run.micro_batch.size, run.recipe.model.context_length + 1)
    sums = StepSums(run.ffns, run.micro_batch_tokens, run.accelerator.device)
    reader, rounds = MicroBatchReader(run.loader, shape, step), accumulation(run, run.rounds)
    next(rounds)
    return StepStart(rounds, reader, sums, forward(run, reader))


def adapt_kernels(run: Run) -> None:
    """Chooses each layer's kernels by the steps that have been read since the last choice."""
    for step in run.readings:
        choose_kernels(run.ffns, step, run.recipe.train.global_batch_tokens)
    run.readings.clear()


def micro_batches(run: Run, start: StepStart) -> Iterator[LossSums]:
    """The sums of each micro-batch, whose backward pass must follow at once."""
    yield start.first
    for _ in start.rounds:
        yield forward(run, start.reader)


def forward(run: Run, reader: MicroBatchReader) -> LossSums:
    """Forward of the next micro-batch; the sums of this rank, with their graph."""
    accelerator = run.accelerator
    run.activity.begin("reading data", reader.step - 1)
    tokens_BT1 = reader.next().to(accelerator.device, non_blocking=True)
    run.activity.begin("computing", reader.step - 1)
    with accelerator.autocast():
        sums: LossSums = run.objective(tokens_BT1[:, :-1], tokens_BT1[:, 1:])
    return sums


def may_begin_next(run: Run) -> bool:
    """Whether the step after the one that comes next may begin within it; alike on all ranks.

    Not where anything is saved or measured between the two, where neurons are re-initialised, or
    where the size of micro-batches may change.
    """
    recipe, step = run.recipe, run.step + 1
    return (
        step < recipe.train.steps
        and not is_due(step, recipe.checkpoint.every_steps)
        and not Due.after(recipe, step)
        and not recipe.sparsity.reinit_rate
        and recipe.train.micro_batch_size != "auto"
    )
