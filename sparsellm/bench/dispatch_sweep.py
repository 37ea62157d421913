"""The union above which dense training is faster: measured, and predicted by ``ffn.kernels: auto``.

One FFN is run forward and backward on patterns of rising density. Dense and sparse are timed as in
`ffn_train`, and compared with the times that a run predicts for the same unions from its measured
costs (`kernels.training_costs.measure_costs`). The union is the number of neurons that fire for at
least one of 64 neighbouring tokens. The predicted dense time includes the statistics; the measured
one does not.

Records: ``ms`` and ``predicted_ms`` are times of the sparse path, with the dense time as baseline
and ``ratio`` baseline over value. A layer on the sparse path leaves it above ``leave_union``; a
layer on the dense path returns to sparse below ``return_union`` (0: never sparse, N: always).
``crossover_union`` of each pattern is where both were measured to take the same time. M tokens, K
hidden_size, N intermediate_size.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sparsellm.bench.ffn_cases import Case, Inputs, Shape, grid
from sparsellm.bench.ffn_records import case_key
from sparsellm.bench.ffn_sweep import Measured, Skipped
from sparsellm.bench.ffn_train import FFNTrainBench, sides_of
from sparsellm.bench.record import Measurement
from sparsellm.ffn.dispatch import LEAVE, RETURN, Costs

NNZ = (8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)  # and half of all neurons

Points = dict[str, list[tuple[float, float]]]  # pattern → (union, sparse time over dense time)


def sweep(num_neurons: int) -> list[str]:
    """The non-zeros per token to measure, in the notation of `ffn_cases.grid`."""
    return [*(str(nnz) for nnz in NNZ if nnz < num_neurons // 2), "50%"]


def run(
    shape: Shape,
    tokens: int,
    device: torch.device,
    *,
    patterns: Iterable[str],
    nnz: Iterable[str],
    seconds: float,
) -> Iterator[list[Measurement] | Skipped]:
    """Yields the predicted switching points, each measured point, and each pattern's crossover.

    Args:
        shape: shape of the FFN.
        tokens: M, the tokens of a micro-batch.
        device: a CUDA device.
        patterns: ``uniform``, ``skewed`` or both.
        nnz: as returned by `sweep`.
        seconds: seconds of timing per point.

    Raises:
        ValueError: the sparse kernels are not available here, or a number of non-zeros is invalid.
    """
    cases = grid([tokens], [shape], patterns, nnz)
    bench = _DispatchBench(device, seconds, shape, tokens)
    key = {"M": tokens, "K": shape.hidden_size, "N": shape.intermediate_size, "gated": shape.gated}
    yield [
        Measurement("dispatch", key, metric, switch_union(bench.costs, share, key["N"]), "neurons")
        for metric, share in (("leave_union", LEAVE), ("return_union", RETURN))
    ]
    points: Points = defaultdict(list)
    for found in bench.run(cases):
        yield found
        if isinstance(found, list):
            times = found[0]
            points[times.case["pattern"]].append((times.case["union_64"], _share(times)))
    crossings = {pattern: crossover(sorted(of)) for pattern, of in points.items()}
    measured = [
        Measurement("dispatch", key | {"pattern": pattern}, "crossover_union", union, "neurons")
        for pattern, union in crossings.items()
        if union is not None
    ]
    if measured:
        yield measured


class _DispatchBench(FFNTrainBench):
    def __init__(self, device: torch.device, seconds: float, shape: Shape, tokens: int) -> None:
        super().__init__(device, seconds)
        self.costs = _costs(shape, tokens, device)

    def measure(self, case: Case, inputs: Inputs, extra: dict[str, Any]) -> Iterator[Measured]:
        steps, _ = self.checked_steps(case, inputs)
        ms = {name: of.forward + of.backward for name, of in self.timed(steps).items()}
        key = case_key(case, inputs, extra)
        pairs = {
            "ms": (ms["ours"], ms["dense_compiled"]),
            "predicted_ms": (self.costs.sparse(inputs.union_64), self.costs.dense),
        }
        found = [
            Measurement("dispatch", key, metric, sparse, "ms", dense, dense / sparse)
            for metric, (sparse, dense) in pairs.items()
        ]
        yield found, sides_of(steps)


def _costs(shape: Shape, tokens: int, device: torch.device) -> Costs:
    """The costs that a run with this micro-batch measures when it starts."""
    try:
        from sparsellm.ffn.kernels.training_costs import measure_costs

        return measure_costs(tokens, *shape, True, torch.empty(0, device=device).get_device())
    except (RuntimeError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the costs of M {tokens} {shape} cannot be measured: {reason}") from error


def switch_union(costs: Costs, share: float, num_neurons: int) -> float:
    """The union, from 0 to N, at which sparse is predicted to take this share of the dense time."""
    room = share * costs.dense - costs.fixed
    if room <= 0:
        return 0.0
    return min(room / costs.per_neuron, num_neurons) if costs.per_neuron else float(num_neurons)


def crossover(points: list[tuple[float, float]]) -> float | None:
    """The union above which sparse takes longer, interpolated; None if no crossover is seen.

    Args:
        points: union, and sparse time over dense time, sorted by union.
    """
    for (left, faster), (right, slower) in itertools.pairwise(points):
        if faster < 1 <= slower:
            return left + (right - left) * (1 - faster) / (slower - faster)
    return None


HEADING = (
    f"{'pattern':>8} {'nnz':>6} {'union 64':>9} {'of N':>5} | {'sparse ms':>9} {'dense':>8} "
    f"{'share':>5} | {'predicted':>9} {'dense':>8} {'share':>5}  auto"
)


def rows(found: list[Measurement]) -> list[str]:
    """A table line for a point; sentences for the switching points and crossovers."""
    case, metrics = found[0].case, {m.metric: m for m in found}
    if "leave_union" in metrics:
        leave, back = metrics["leave_union"].value, metrics["return_union"].value
        gated = "" if case["gated"] else " non-gated"
        return [
            f"M {case['M']} {case['K']}/{case['N']}{gated}: auto leaves the sparse path above a "
            f"union of {leave:,.0f} neurons and returns to it below {back:,.0f}",
            HEADING,
        ]
    if "crossover_union" in metrics:
        return [f"{m.case['pattern']}: equal times at a union of {m.value:,.0f}" for m in found]
    share = _share(metrics["predicted_ms"])
    path = "as before"  # the layer stays on its path
    if not RETURN <= share <= LEAVE:
        path = "dense" if share > LEAVE else "sparse"
    point = f"{case['pattern']:>8} {case['nnz']:>6} {case['union_64']:>9,.1f}"
    times = (
        f"{m.value:>9.4f} {m.baseline:>8.4f} {_share(m):>5.2f}"
        for m in (metrics["ms"], metrics["predicted_ms"])
    )
    return [f"{point} {case['union_64'] / case['N']:>5.0%} | {' | '.join(times)}  {path}"]


def _share(times: Measurement) -> float:
    """Sparse time over dense time."""
    assert times.baseline is not None
    return times.value / times.baseline
