"""Chooses sparse kernels or dense GEMMs for a layer's call, from measured costs, without waiting.

The sparse kernels write the mean union of their token blocks to one word of pinned host memory; the
host reads its present value. A layer that runs dense tries the sparse kernels now and then, to see
whether they have become faster. The result is equally correct.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakValueDictionary

import torch

from sparsellm.ffn.types import Format

Kernels = Literal["auto", "sparse", "dense"]
Path = Literal["sparse", "dense"]

# Of the dense path's milliseconds: a layer leaves the sparse path where that is predicted to take
# more than the first, and returns to it below the second. Predictions are off by a few percent.
DENSE_ABOVE, SPARSE_BELOW = 0.97, 0.92
_FIRST_PROBE, _LAST_PROBE = 16, 256  # dense calls between two probes, doubled each time
_NUM_BUCKETS = 32


class Measured(NamedTuple):
    """What determines the cost of an FFN's call; equal calls are measured once."""

    num_tokens: int
    k: int
    n: int
    gated: bool
    format: Format
    device_index: int
    element: torch.dtype = torch.bfloat16
    fp8: bool = False


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a call of one FFN at one shape, in training with its backward pass."""

    dense: float
    fixed: float  # sparse, if no neuron is active
    # Sparse, for each neuron in the mean union of a block; in TwELL, for each active for a token.
    per_neuron: float

    def sparse(self, num_neurons: float) -> float:
        """Milliseconds that the sparse kernels would take."""
        return self.fixed + self.per_neuron * num_neurons

    def choose(self, present: Path, num_neurons: float) -> Path:
        """The faster path; the present one where the two are nearly as fast."""
        share = self.sparse(num_neurons) / self.dense
        if share > DENSE_ABOVE:
            return "dense"
        return "sparse" if share < SPARSE_BELOW else present


@dataclass
class _State:
    costs: Costs
    path: Path = "sparse"
    interval: int = _FIRST_PROBE
    until_probe: int = _FIRST_PROBE

    def update(self, num_neurons: int) -> None:
        """Chooses the path for what the kernels observed; below 0, they have observed nothing."""
        if num_neurons < 0:
            return
        before, self.path = self.path, self.costs.choose(self.path, num_neurons)
        if (before, self.path) == ("sparse", "dense"):
            self.interval = self.until_probe = _FIRST_PROBE

    def next_call_runs_dense(self) -> bool:
        """Counts a call of a layer that runs dense, except the call that tries sparse."""
        if self.path == "sparse" or self.until_probe <= 1:
            return False
        self.until_probe -= 1
        return True


class Dispatch:
    """The choices of one FFN, by magnitude of the number of tokens.

    Args:
        kernels: ``auto``, or the path to be taken always.
        pinned: there is a GPU, which writes what it observes to pinned memory.
        format: of the sparse kernels.

    Raises:
        ValueError: ``kernels`` or ``format`` is unknown.
    """

    def __init__(self, kernels: Kernels, pinned: bool, format: Format = "union") -> None:
        check_choice("kernels", kernels, Kernels)
        check_choice("format", format, Format)
        self.kernels: Kernels = kernels
        self.format: Format = format
        pinned = pinned and torch.cuda.is_available()  # it may have been saved where a GPU is
        # Words for the kernels to write, by magnitude; -1 before they do.
        self.observed = torch.full(
            (_NUM_BUCKETS,), -1, dtype=torch.int32, device="cpu", pin_memory=pinned
        )
        self._words = self.observed.numpy()
        self._states: dict[int, _State] = {}
        self.handle = next(_next_handle)  # never 0; see `by_handle`
        _by_handle[self.handle] = self

    def __reduce__(self) -> tuple[object, ...]:
        """A copy has its own words, since a GPU writes to the original's words."""
        return Dispatch, (self.kernels, self.observed.is_pinned(), self.format)

    def word(self, num_tokens: int) -> int:
        """Address of the word that the kernels write for this many tokens."""
        return self.observed.data_ptr() + 4 * bucket_of(num_tokens)

    def choose(self, num_tokens: int, costs: Callable[[], Costs], *, frozen: bool = False) -> Path:
        """The path of this call.

        Args:
            num_tokens: M.
            costs: measures them; called once for each magnitude of M.
            frozen: a CUDA graph is being captured: returns the present path and does not probe.
        """
        if self.kernels != "auto":
            return self.kernels
        bucket = bucket_of(num_tokens)
        state = self._states.get(bucket)
        if state is None and frozen:
            return "sparse"
        if state is None:
            state = self._states[bucket] = _State(costs())
        state.update(int(self._words[bucket]))
        if frozen:
            return state.path
        if state.next_call_runs_dense():
            return "dense"
        if state.path == "dense":
            state.interval = state.until_probe = min(2 * state.interval, _LAST_PROBE)
        return "sparse"

    def stays_dense(self, num_tokens: int) -> bool:
        """Whether `choose` would return dense. If so, this counts as that call."""
        bucket = bucket_of(num_tokens)
        state = self._states.get(bucket)
        if state is None or state.path == "sparse":
            return False
        state.update(int(self._words[bucket]))
        return state.next_call_runs_dense()

    def paths(self) -> dict[int, Path]:
        """The present path of each magnitude, by its largest number of tokens."""
        return {1 << bucket: state.path for bucket, state in sorted(self._states.items())}


def bucket_of(num_tokens: int) -> int:
    """The magnitude of a number of tokens: b for 2^(b-1) < M ≤ 2^b."""
    return min((num_tokens - 1).bit_length(), _NUM_BUCKETS - 1)


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raises ValueError if a value is none of the choices of a `Literal`."""
    if value not in get_args(choices):
        raise ValueError(f"{name} {value!r} must be one of {', '.join(get_args(choices))}")


# Operators take only numbers and tensors, so a dispatch is passed to them by its handle. Whoever
# holds the dispatch keeps it alive.
_by_handle: WeakValueDictionary[int, Dispatch] = WeakValueDictionary()
_next_handle = itertools.count(1)


def by_handle(handle: int) -> Dispatch | None:
    """The dispatch of a handle; None for 0, which means that the path is always sparse."""
    return _by_handle[handle] if handle else None
