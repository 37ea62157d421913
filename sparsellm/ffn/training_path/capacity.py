"""How many columns of an activation pattern a layer keeps for its backward pass.

The capacity costs memory. A pattern that does not fit costs time, since backward recomputes it, but
never changes a result. All values are plain numbers: nothing here waits for a GPU.
"""

from __future__ import annotations

from collections import deque

_LATELY = 16  # steps whose largest pattern must fit
_ROOM = 1.25  # columns reserved per column of the largest recent pattern
_CLOSE = 1.1  # with less room than this the capacity grows, before a pattern overflows
_ROUND = 1024  # columns
_STEP = 1.2  # ratio of successive sizes: with few sizes, freed memory fits the next allocation

# After this many steps of a run its capacities have shrunk to what is needed: the first step under
# `auto` is dense, and the capacity first shrinks for the step after the observations.
SHRUNK_STEPS = _LATELY + 2


class Capacity:
    """The columns reserved for one layer. At first these are more than any pattern can need.

    The capacity begins one column above the worst case. A capacity of exactly the worst case is for
    CUDA graphs, which cannot check whether a pattern fits; torch would compile another graph for it
    (`Columns.needed`).

    Args:
        worst: columns of a pattern in which every neuron is active, ``blocks * N``.
    """

    def __init__(self, worst: int) -> None:
        self.worst = worst
        self.columns = self._most = worst + 1
        self._largest: deque[int] = deque(maxlen=_LATELY)

    def observe(self, largest: int) -> None:
        """Called after a step with the columns of its largest pattern on this rank.

        The capacity grows at once if little room was left, and shrinks when all recent patterns
        would have fitted into less.
        """
        self._largest.append(largest)
        columns = min(size_for(_ROOM * max(self._largest)), self._most)
        full = len(self._largest) == _LATELY
        if (columns > self.columns and _CLOSE * largest > self.columns) or (
            columns < self.columns and full
        ):
            self.columns = columns
            self._largest.clear()

    def scaled(self, worst: int) -> Capacity:
        """A capacity for micro-batches of another size: as many columns per token."""
        other = Capacity(worst)
        if self.columns < self._most:  # otherwise too few steps have been observed
            other.columns = min(size_for(self.columns * worst / self.worst), other._most)
        return other


def size_for(columns: float) -> int:
    """The smallest size for so many columns: multiples of 1024, each about 1.2 times the last."""
    size = _ROUND
    while size < columns:
        size = -int(-size * _STEP // _ROUND) * _ROUND
    return size
