"""How many columns of an activation pattern a layer keeps for its backward pass.

The capacity costs memory. A pattern that does not fit costs time, since backward recomputes it, but
never changes a result. All values are plain numbers: nothing here waits for a GPU.
"""

from __future__ import annotations

from collections import deque

_LATELY = 16  # steps whose largest pattern must fit
_ROOM = 1.25  # columns reserved for each that the largest recent pattern needed
_CLOSE = 1.1  # with less room than this the capacity grows, before a pattern overflows
_ROUND = 1024  # columns
_STEP = 1.2  # between one size and the next: few sizes, so that freed memory fits again

# After so many steps of a run its capacities have shrunk to what is needed: the first step of
# `auto` is dense, and the first smaller capacity is that of the step after the observations.
SHRUNK_STEPS = _LATELY + 2


class Capacity:
    """The columns reserved for one layer. It begins above the worst case, which cannot overflow.

    It begins one column above. Exactly the worst case is for CUDA graphs, which cannot check
    whether a pattern fits, and torch would compile another graph for it (`Columns.needed`).

    Args:
        worst: columns of a pattern in which every neuron fires, ``blocks * N``.
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
        wanted = min(size_for(_ROOM * max(self._largest)), self._most)
        full = len(self._largest) == _LATELY
        if (wanted > self.columns and _CLOSE * largest > self.columns) or (
            wanted < self.columns and full
        ):
            self.columns = wanted
            self._largest.clear()

    def scaled(self, worst: int) -> Capacity:
        """A capacity for micro-batches of another size: as many columns per token."""
        other = Capacity(worst)
        if self.columns < self._most:  # otherwise too few steps have been observed
            other.columns = min(size_for(self.columns * worst / self.worst), other._most)
        return other


def size_for(columns: float) -> int:
    """The smallest of the sizes that holds so many: about powers of 1.2, multiples of 1024."""
    size = _ROUND
    while size < columns:
        size = -int(-size * _STEP // _ROUND) * _ROUND
    return size
