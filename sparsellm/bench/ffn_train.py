"""Forward and backward of one FFN in training at a given pattern: dense compiled, and ours.

"Ours" is a layer on the sparse path: `SparseFFN` with its statistics and the L1 term, and with the
capacity for its pattern on which a run would settle (`capacity`). Dense is the plain formula under
torch.compile, without statistics and L1, which is the fastest dense case. Both compute the
gradients of x and of every weight by autograd, all in bf16.

Forward and backward are timed separately, each queued behind other work on the GPU
(`timing.other_work`). This is as in a model, where the host launches ahead and knows by the
backward whether the pattern fitted. All calls use the same weights: with 2,048 tokens or more they
are read so often that a warm cache makes no difference.

In token order the time of ours includes the costs outside the FFN (`order_costs`).

`ffn_records` explains the figures. Shapes: M tokens, K hidden_size, N intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsellm.bench import memory, timing
from sparsellm.bench.ffn_cases import DECODE_TOKENS, TOKENS, Case, Inputs
from sparsellm.bench.ffn_records import StepTimes, case_key, format_key, train_records
from sparsellm.bench.ffn_sides import (
    Sides,
    dense_weights,
    new_ffn,
    refuse_if_off,
    relative_difference,
    state_of,
)
from sparsellm.bench.ffn_sweep import FFNBench, Measured, Skipped
from sparsellm.bench.order_costs import norm_ms
from sparsellm.bench.record import Measurement
from sparsellm.ffn.module import SparseFFN
from sparsellm.ffn.training_ops import sparse_ffn_of_rows
from sparsellm.ffn.types import FFNWeights, Format, TokenOrder

TRAIN_TOKENS = tuple(tokens for tokens in TOKENS if tokens > DECODE_TOKENS)
MAX_DIFFERENCE = 0.03  # of y or a gradient, relative to dense; a third of it is bf16 rounding
L1_COEFFICIENT = 0.1  # ∇y is N(0, 1): large enough for the check to see the L1 term
SETTLING_STEPS = 64  # observations until `Capacity` no longer changes


@dataclass(frozen=True)
class Step:
    """One implementation of forward and backward; a call runs both."""

    forward: Callable[[], tuple[Tensor, ...]]
    inputs: list[Tensor]  # x and the weights
    d_outputs: tuple[Tensor, ...]  # gradients with respect to what `forward` returns

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of `inputs`."""
        return torch.autograd.grad(outputs, self.inputs, self.d_outputs)

    def __call__(self) -> tuple[Tensor, ...]:
        return self.backward(self.forward())


def run(
    cases: Iterable[Case],
    device: torch.device,
    *,
    traces: Path | None,
    seconds: float,
    with_energy: bool,
    ids: Path | None = None,
    formats: Sequence[Format] = ("union",),
) -> Iterator[list[Measurement] | Skipped]:
    """Measures case by case; each yielded result is final.

    Args:
        cases: from `ffn_cases.grid`.
        device: a CUDA device; on a CPU, memory is not measured.
        traces: a file of `analyze.trace`, for the pattern ``trace``.
        seconds: seconds of timing per side.
        with_energy: whether to measure millijoules per token too, for a few cases.
        ids: file of the traces' token ids, see `FFNBench`.
        formats: sparse formats, measured one after the other, each beside dense.

    Raises:
        FileNotFoundError: the trace file does not exist.
        ValueError: the file is not a trace, or the GPU is older than Ampere or has no energy
            counter.
    """
    bench = FFNTrainBench(device, seconds, traces, with_energy, ids)
    bench.formats = formats
    yield from bench.run(cases)


class FFNTrainBench(FFNBench):
    """Measures cases as the module's docstring describes."""

    grad_mode = torch.enable_grad
    formats: Sequence[Format] = ("union",)

    def __init__(
        self,
        device: torch.device,
        seconds: float,
        traces: Path | None = None,
        with_energy: bool = False,
        ids: Path | None = None,
    ) -> None:
        super().__init__(device, seconds, traces, with_energy, ids)
        self._norm_ms: dict[tuple[int, int], StepTimes] = {}
        if device.type == "cuda":
            from sparsellm.ffn.kernels.gpu_architecture import unsupported

            if reason := unsupported(device):
                raise ValueError(reason)
        self.lead = timing.other_work(device)

    def measure(self, case: Case, inputs: Inputs, extra: dict[str, Any]) -> Iterator[Measured]:
        for name in self.formats:
            # TwELL packs each token separately: the order of tokens makes no difference to it.
            own = inputs if name == "union" else inputs._replace(order=None)
            yield self._measure(case, own, extra | format_key(name), name)

    def _measure(self, case: Case, inputs: Inputs, extra: dict[str, Any], name: Format) -> Measured:
        steps, difference = self.checked_steps(case, inputs, name)
        times = self.timed(steps)
        times["ours"] = self._with_order(times["ours"], inputs)
        held: dict[str, memory.StepMemory] = {}
        if self.device.type == "cuda":
            held = {name: memory.of_step(s.forward, s.backward) for name, s in steps.items()}
        key = case_key(case, inputs, extra) | {"path": "sparse"}
        return train_records(key, times, held, difference), sides_of(steps)

    def _with_order(self, times: StepTimes, inputs: Inputs) -> StepTimes:
        """Adds the costs of token order outside the FFN, see `order_costs`."""
        if inputs.order is None:
            return times
        m, k = inputs.x_MK.shape
        if (m, k) not in self._norm_ms:
            self._norm_ms[m, k] = norm_ms(inputs.order, k, self.seconds)
        more = self._norm_ms[m, k]
        return StepTimes(
            times.forward + more.forward + self.sort_share(inputs), times.backward + more.backward
        )

    def timed(self, steps: dict[str, Step]) -> dict[str, StepTimes]:
        """Forward and backward times of each side, after warm-up."""
        self.warm_up(sides_of(steps))
        kept: dict[str, tuple[Tensor, ...]] = {}

        def forward(name: str) -> None:
            kept[name] = steps[name].forward()

        def backward(name: str) -> None:
            steps[name].backward(kept.pop(name))

        stages = {
            f"{name} {stage.__name__}": [partial(stage, name)]
            for name in steps
            for stage in (forward, backward)
        }
        ms = timing.interleaved(stages, self.seconds, self.lead)
        return {name: StepTimes(ms[f"{name} forward"], ms[f"{name} backward"]) for name in steps}

    def checked_steps(
        self, case: Case, inputs: Inputs, format: Format = "union"
    ) -> tuple[dict[str, Step], float]:
        """Both sides on equal weights, and the largest difference between ours and dense.

        Raises:
            ValueError: the difference is larger than bf16 rounding explains.
        """
        ffn = new_ffn(case.shape, state_of(case.shape, inputs.w_NK), self.device)
        ffn.use_format(format)
        ffn.use_kernels("sparse")
        x_MK = inputs.x_MK.detach().requires_grad_()
        generator = torch.Generator(self.device).manual_seed(2)
        dy_MK = torch.empty_like(x_MK, requires_grad=False).normal_(generator=generator)
        d_l1 = torch.tensor(L1_COEFFICIENT, device=self.device)
        order = inputs.order
        capacity = settled_capacity(ffn, x_MK, order)
        wanted = [x_MK, *ffn.parameters()]

        ours = Step(partial(_with_l1, ffn, x_MK, capacity, order), wanted, (dy_MK, d_l1))
        expected = Step(partial(_with_l1, ffn, x_MK, None), wanted, (dy_MK, d_l1))
        difference = _checked(ours, expected, ["x", *dict(ffn.named_parameters())])
        if order is not None:  # timed without the scatter, which the preceding norm does in a model
            rows_MK = x_MK.detach()[order.token_M].requires_grad_()
            forward = partial(_of_rows, ffn, rows_MK, capacity, order.token_M)
            ours = Step(forward, [rows_MK, *ffn.parameters()], (dy_MK, d_l1))
        compiled, weights = self.compiled, dense_weights(ffn)
        dense = Step(lambda: (compiled(x_MK, *weights),), wanted, (dy_MK,))
        return {"dense_compiled": dense, "ours": ours}, difference


def sides_of(steps: dict[str, Step]) -> Sides:
    """Forward and backward in one call."""
    return {name: [step] for name, step in steps.items()}


def settled_capacity(ffn: SparseFFN, x_MK: Tensor, order: TokenOrder | None = None) -> int:
    """The number of columns on which a run of such steps would settle."""
    with torch.no_grad():
        columns = int(ffn.compute(x_MK, 0, order)[1].union_sum)
    ffn.capacity_for(len(x_MK))  # starts at the worst case
    for _ in range(SETTLING_STEPS):
        ffn.observe_union(columns)
    capacity = ffn.capacity_for(len(x_MK))
    assert capacity is not None  # the path is sparse
    return capacity


def _with_l1(
    ffn: SparseFFN, x_MK: Tensor, capacity: int | None, order: TokenOrder | None = None
) -> tuple[Tensor, Tensor]:
    y_MK, stats = ffn.compute(x_MK, capacity, order)
    return y_MK, stats.l1_sum


def _of_rows(ffn: SparseFFN, x_MK: Tensor, capacity: int, token_M: Tensor) -> tuple[Tensor, Tensor]:
    gate, up, down = dense_weights(ffn)
    weights = FFNWeights(gate, up, down, None, None, None, 0.0)
    y_MK, stats = sparse_ffn_of_rows(x_MK, weights, capacity, token_M)
    return y_MK, stats.l1_sum


def _checked(ours: Step, expected: Step, names: list[str]) -> float:
    """The largest difference among the outputs and gradients, which ``names`` names."""
    found, wanted = ours.forward(), expected.forward()
    named = ["y", "the L1 sum", *(f"the gradient of {name}" for name in names)]
    pairs = zip(
        named,
        [*(output.detach() for output in found), *ours.backward(found)],
        [*(output.detach() for output in wanted), *expected.backward(wanted)],
        strict=True,
    )
    differences = {what: relative_difference(a, b) for what, a, b in pairs}
    for what, difference in differences.items():
        refuse_if_off(what, difference, MAX_DIFFERENCE)
    return max(differences.values())
