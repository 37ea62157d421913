"""Forward and backward of one FFN in training at a given pattern: dense compiled, and ours.

"Ours" is a layer on the sparse path: `SparseFFN` with its statistics and the L1 term, and with the
capacity for its pattern of a run in its steady state (`capacity`). Dense is the plain formula under
torch.compile, without statistics and L1, which is the fastest dense case. Both compute the
gradients of x and of every weight by autograd, all in bf16.

Forwards are queued before their backwards, as by the layers of a model, so that the host knows
before a backward whether the pattern fitted. All calls use the same weights: with 2,048 tokens or
more they are read so often that a warm cache makes no difference. With sorted tokens the time of
ours includes the layer's share of the sort, and copies of x in that order and of its gradient back.
In a model they cost less: the norm before the FFN makes them.

With ``--graph`` both configurations are CUDA graphs, so that the times are those of the kernels
alone. Eager calls take longer, since the host queues their kernels. In a graph there is room for
any pattern.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsellm.bench import timing
from sparsellm.bench.compare import warm_up
from sparsellm.bench.ffn_cases import Layer
from sparsellm.bench.ffn_run import FFNBench, dense_weights, new_ffn
from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import Configuration
from sparsellm.ffn.training_path.capacity import SHRUNK_STEPS
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import BLOCK_TOKENS, TokenOrder

L1_COEFFICIENT = 0.1  # ∇y is N(0, 1): large enough for the check to see the L1 term
AT_ONCE = 4  # forwards before their backwards
_MIB = 2**20


@dataclass(frozen=True)
class Step:
    """One implementation of forward and backward."""

    forward: Callable[[], tuple[Tensor, ...]]
    inputs: list[Tensor]  # x and the weights
    d_outputs: tuple[Tensor, ...]  # gradients with respect to what `forward` returns

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of `inputs`."""
        return torch.autograd.grad(outputs, self.inputs, self.d_outputs)

    def results(self) -> list[Tensor]:
        """What `forward` returns, and the gradients."""
        outputs = self.forward()
        return [*(output.detach() for output in outputs), *self.backward(outputs)]

    def configuration(self) -> Configuration:
        """Both stages, for `timing.sustained`."""
        outputs: deque[tuple[Tensor, ...]] = deque()
        stages = {
            "forward": lambda: outputs.append(self.forward()),
            "backward": lambda: self.backward(outputs.popleft()),
        }
        return Configuration(stages, most_at_once=AT_ONCE)

    def graph(self, device: torch.device) -> Configuration:
        """`configuration`, each stage as a CUDA graph of `AT_ONCE` calls."""
        eager = self.configuration()
        warm_up(eager, device)
        stages = {name: timing.graph([stage] * AT_ONCE) for name, stage in eager.stages.items()}
        return Configuration(stages, calls=AT_ONCE, most_at_once=1)


def measure(
    options: argparse.Namespace, device: torch.device | None = None
) -> Iterator[list[Measurement]]:
    """Measures the cases that the options of `cli.ffn_options` select."""
    bench = FFNBench(options, device)
    yield from bench.run(partial(_train, bench, options.graph))


def _train(bench: FFNBench, graph: bool, layer: Layer, key: dict[str, Any]) -> list[Measurement]:
    steps, results = new_steps(bench, layer, any_pattern=graph)
    configurations = {
        n: step.graph(bench.device) if graph else step.configuration() for n, step in steps.items()
    }
    measurements = bench.compare(
        "ffn_train",
        key | {"path": "sparse"} | ({"launch": "graph"} if graph else {}),
        configurations["dense"],
        configurations["ours"]._replace(charged_ms=bench.sort_share(layer)),
        tokens=len(layer.x_MK),
        results=results,
        most_off=layer.most_off,
        mode=torch.enable_grad,
    )
    if bench.device.type == "cuda" and not graph:
        measurements += memory(steps, measurements[0].case)
    return measurements


def new_steps(
    bench: FFNBench, layer: Layer, *, any_pattern: bool = False
) -> tuple[dict[str, Step], Callable[[], Iterable[tuple[str, Tensor, Tensor]]]]:
    """Both configurations on equal weights, and what compares the outputs and gradients of ours.

    With ``any_pattern`` ours has room for any, else that of a run in its steady state.
    """
    ffn = new_ffn(layer)
    ffn.use_format(layer.format)
    ffn.use_kernels("sparse")
    if layer.fp8:
        ffn.use_fp8()
    x_MK = layer.x_MK.detach().requires_grad_()
    d_l1 = torch.tensor(L1_COEFFICIENT, device=bench.device)
    capacity = -(-len(x_MK) // BLOCK_TOKENS) * len(layer.w_NK)
    if not any_pattern:
        capacity = steady_state_capacity(ffn, x_MK, layer.order)
    inputs, dy_MK = [x_MK, *ffn.parameters()], random_gradient(x_MK)
    compiled, weights = bench.compiled, dense_weights(ffn)
    dense = Step(lambda: (compiled(x_MK, *weights),), inputs, (dy_MK,))
    ours = Step(partial(_with_l1, ffn, x_MK, capacity, layer.order), inputs, (dy_MK, d_l1))
    expected = Step(partial(_with_l1, ffn, x_MK, None), inputs, (dy_MK, d_l1))
    gradients = [f"the gradient of {name}" for name in ("x", *dict(ffn.named_parameters()))]
    names = ["y", "the L1 sum", *gradients]

    def results() -> Iterable[tuple[str, Tensor, Tensor]]:
        return zip(names, ours.results(), expected.results(), strict=True)

    return {"dense": dense, "ours": ours}, results


def random_gradient(like: Tensor) -> Tensor:
    """∇y: N(0, 1), the same every time."""
    generator = torch.Generator(like.device).manual_seed(2)
    return torch.empty_like(like, requires_grad=False).normal_(generator=generator)


def steady_state_capacity(ffn: SparseFFN, x_MK: Tensor, order: TokenOrder | None = None) -> int:
    """The number of columns of a run of such steps in its steady state."""
    with torch.no_grad():
        columns = int(ffn.compute(x_MK, 0, order)[1].union_sum)
    ffn.capacity_for(len(x_MK))  # starts at the worst case
    for _ in range(SHRUNK_STEPS):
        ffn.observe_union(columns)
    capacity = ffn.capacity_for(len(x_MK))
    assert capacity is not None  # the path is sparse
    return capacity


def _with_l1(
    ffn: SparseFFN, x_MK: Tensor, capacity: int | None, order: TokenOrder | None = None
) -> tuple[Tensor, Tensor]:
    y_MK, stats = ffn.compute(x_MK, capacity, order)
    return y_MK, stats.l1_sum


def memory(steps: Mapping[str, Step], case: dict[str, Any]) -> list[Measurement]:
    """``memory_MiB``, kept from forward to backward, and ``peak_MiB``, of both configurations."""
    mib_of = {name: _memory(step) for name, step in steps.items()}
    metrics = zip(("memory_MiB", "peak_MiB"), mib_of["ours"], mib_of["dense"], strict=True)
    return [
        Measurement("ffn_train", case, metric, ours, "MiB", of_dense, of_dense / ours)
        for metric, ours, of_dense in metrics
    ]


def _memory(step: Step) -> tuple[float, float]:
    """MiB kept between the stages, without the outputs, and the peak of outputs and gradients."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = step.forward()
    held = torch.cuda.memory_allocated() - before - sum(output.nbytes for output in outputs)
    gradients = step.backward(outputs)
    peak = torch.cuda.max_memory_allocated() - before
    del gradients  # kept alive until here: they are part of the peak
    return held / _MIB, peak / _MIB
