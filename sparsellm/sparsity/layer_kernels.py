"""How the FFNs of a controller compute their next step: capacities, and dense or sparse kernels.

L layers.
"""

from dataclasses import astuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.dispatch import Costs, Measured
from sparsellm.ffn.training_path.adapters import beyond_weight
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.sparsity.counts import StepNumbers
from sparsellm.sparsity.kernel_choice import mean_costs, reason_against_kernels
from sparsellm.sparsity.over_ranks import Group, any_rank

_NEVER = 2**62  # columns: a capacity that nothing overflows


class Call(NamedTuple):
    """A forward pass in training, as far as its costs depend on it."""

    num_tokens: int
    dtype: torch.dtype  # in which the FFNs computed
    compiled: bool
    ordered: bool  # the FFNs' tokens were sorted, see `TrainingOrder`
    device: torch.device


class LayerKernels:
    """Chooses for all layers, alike on all ranks.

    Args:
        ffns: by their names.
        switch_together: under ``auto`` all run dense or all sparse.
        group: the ranks.

    Raises:
        ValueError: FFNs that always run sparse have linear layers that are more than their weight.
    """

    def __init__(self, ffns: dict[str, SparseFFN], *, switch_together: bool, group: Group) -> None:
        self._ffns, self._group = ffns, group
        self._switch_together = switch_together
        # Why ``auto`` runs no sparse kernels here.
        self.dense_because = _more_than_weights(ffns)
        if self.dense_because is not None:
            for ffn in ffns.values():
                if ffn.kernels == "auto":
                    ffn.use_kernels("auto")  # without costs that were measured before
        self._costs_known = False
        self._capacities: tuple[int, ...] = ()

    @property
    def sparse(self) -> list[bool]:
        """Which layers compute with the sparse kernels."""
        return [ffn.path == "sparse" for ffn in self._ffns.values()]

    def room(self, tokens: int, device: torch.device) -> Tensor:
        """(L,) int64: columns that each layer's pattern had room for in this micro-batch."""
        with torch.enable_grad():
            columns = [
                ffn.capacity_for(tokens) if ffn.format == "union" else None
                for ffn in self._ffns.values()
            ]
        capacities = tuple(_NEVER if count is None else count for count in columns)
        if capacities != self._capacities:
            self._capacities = capacities
            self._capacity_L = torch.tensor(capacities).to(device, non_blocking=True)
        return self._capacity_L

    def choose(self, steps: list[StepNumbers]) -> None:
        """Capacities and paths of the next step, by steps that were read since the last choice."""
        for numbers in steps:
            union_L, nnz_L = numbers.union_L, numbers.nnz_L
            if self._switch_together:
                union_L = [sum(union_L) / len(union_L)] * len(union_L)
                nnz_L = [sum(nnz_L) / len(nnz_L)] * len(nnz_L)
            for ffn, largest, union, nnz in zip(
                self._ffns.values(), numbers.largest_union_L, union_L, nnz_L, strict=True
            ):
                ffn.observe_union(largest)
                ffn.update_kernels(union, nnz)

    def begin_sparse(self) -> None:
        """After the first step: where layers switch together, both graphs are compiled early."""
        if self._switch_together:
            for ffn in self._ffns.values():
                if ffn.kernels == "auto" and ffn.costs is not None:
                    ffn.path = "sparse"

    def measure(self, call: Call) -> None:
        """Lets ``auto`` choose: measures each shape on this GPU, if its kernels run there.

        Only the first call does, and none if the costs were restored. All ranks call it.
        """
        ffns = [ffn for ffn in self._ffns.values() if ffn.kernels == "auto"]
        done, self._costs_known = self._costs_known, True
        if done or self.dense_because or call.device.type != "cuda" or not ffns:
            return
        for ffn in ffns:
            n, k = ffn.pattern_weight.shape
            reason = reason_against_kernels(k, n, call.device)
            if call.dtype != torch.bfloat16:
                reason = f"the tokens are {call.dtype}; the sparse kernels train in torch.bfloat16"
            # Ranks may have different GPUs, and must run the same path.
            if any_rank(reason is not None, call.device, self._group):
                self.dense_because = reason or "another rank cannot run the sparse kernels"
                return
            shape = Measured(
                call.num_tokens, k, n, ffn.gated, ffn.format, call.device.index or 0, fp8=ffn.fp8
            )
            costs = mean_costs(
                shape,
                call.device,
                compiled=call.compiled,
                ordered=call.ordered,
                projections=ffn.projections,
                group=self._group,
            )
            ffn.use_kernels("auto", costs)

    def state_dict(self) -> dict[str, Any]:
        """Paths and the numbers of `Costs`, by the names of the FFNs."""
        costs = {name: ffn.costs and list(astuple(ffn.costs)) for name, ffn in self._ffns.items()}
        return {"paths": {name: ffn.path for name, ffn in self._ffns.items()}, "costs": costs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict` of a GPU of the same model."""
        if self.dense_because:
            return
        for name, ffn in self._ffns.items():
            if ffn.kernels == "auto" and (costs := state["costs"][name]):
                ffn.use_kernels("auto", Costs(*costs))
                ffn.path = state["paths"][name]
                self._costs_known = True


def _more_than_weights(ffns: dict[str, SparseFFN]) -> str | None:
    """Which linear layer computes more than a product with its weight, such as an adapter; if any.

    The sparse kernels read weights alone.
    """
    for ffn_name, ffn in ffns.items():
        for name in ffn.names:
            layer = beyond_weight(getattr(ffn, name))
            if layer is None:
                continue
            reason = (
                f"{ffn_name}.{name} is {layer}, of which the sparse kernels would use the weight "
                "alone"
            )
            if ffn.kernels == "sparse":
                raise ValueError(
                    f"{reason}: build its FFN with kernels='auto', which runs it dense"
                )
            return reason
    return None
