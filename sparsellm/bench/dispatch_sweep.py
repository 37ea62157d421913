"""From which union on training is faster dense: as measured, and as ``ffn.kernels: auto`` predicts.

One FFN, forward and backward, at patterns of rising density: both sides as in `ffn_train`, beside
what `kernels.training_costs.measure_costs` makes a run expect at their unions (neurons that 64
neighbouring tokens fire between them). The prediction's dense computes statistics, the one measured
here does not.

Records: ``ms`` and ``predicted_ms`` of sparse, their baselines dense, ``ratio`` baseline over
value; ``leave_union`` and ``return_union``: a layer on the sparse path leaves it above, and one on
the dense path returns below (0: never sparse, N: always); ``crossover_union`` of each pattern,
where as measured both take the same. M tokens, K hidden_size, N intermediate_size.
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

Points = dict[str, list[tuple[float, float]]]  # by pattern: union, sparse over dense


def sweep(num_neurons: int) -> list[str]:
    """The non-zeros a token to go through, as `ffn_cases.grid` takes them."""
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
    """The costs' predictions, then each point, then where each pattern crosses over.

    Args:
        shape: of the FFN.
        tokens: M, of a micro-batch.
        device: a CUDA device.
        patterns: ``uniform``, ``skewed`` or both.
        nnz: as `sweep`.
        seconds: of timing, each.

    Raises:
        ValueError: no such sparse kernels here, or non-zeros that cannot be.
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
    """What a run of this micro-batch measures as it starts."""
    try:
        from sparsellm.ffn.kernels.training_costs import measure_costs

        return measure_costs(tokens, *shape, True, torch.empty(0, device=device).get_device())
    except (RuntimeError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the costs of M {tokens} {shape} cannot be measured: {reason}") from error


def switch_union(costs: Costs, share: float, num_neurons: int) -> float:
    """The union at which sparse is predicted to take this share of dense, within 0 to N."""
    room = share * costs.dense - costs.fixed
    if room <= 0:
        return 0.0
    return min(room / costs.per_neuron, num_neurons) if costs.per_neuron else float(num_neurons)


def crossover(points: list[tuple[float, float]]) -> float | None:
    """The union from which on sparse takes longer, between two points; None where it is not seen.

    Args:
        points: union and sparse over dense, by rising union.
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
    """A line of the table for a point; sentences for what stands before and after them."""
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
        return [f"{m.case['pattern']}: equal at a union of {m.value:,.0f}" for m in found]
    share = _share(metrics["predicted_ms"])
    path = "as before"  # the path that the layer is on
    if not RETURN <= share <= LEAVE:
        path = "dense" if share > LEAVE else "sparse"
    point = f"{case['pattern']:>8} {case['nnz']:>6} {case['union_64']:>9,.1f}"
    times = (
        f"{m.value:>9.4f} {m.baseline:>8.4f} {_share(m):>5.2f}"
        for m in (metrics["ms"], metrics["predicted_ms"])
    )
    return [f"{point} {case['union_64'] / case['N']:>5.0%} | {' | '.join(times)}  {path}"]


def _share(times: Measurement) -> float:
    """Sparse over dense."""
    assert times.baseline is not None
    return times.value / times.baseline
