"""What an FFN records of a forward pass in training."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from sparsellm.ffn.types import FFNStats


class Recorded(NamedTuple):
    """A forward pass in training."""

    stats: FFNStats
    dtype: torch.dtype  # in which it computed
    compiled: bool
    node: Node | None  # of the output, in autograd's graph; None in compiled code
    passes: int  # since something last asked, this one included; 1 in compiled code


def recording(x: Tensor, y: Tensor, stats: FFNStats, before: Recorded | None) -> Recorded:
    """The record of a forward pass from x to y.

    A pass before that nothing has asked about is another pass of the model, such as a warm-up,
    unless x was computed from its output: then the model calls the FFN twice in one pass.

    Raises:
        ValueError: it does. Only eager code is checked.
    """
    compiled = torch.compiler.is_compiling()
    # Compiled code that asked would be compiled once more, for the other answer.
    if not compiled and before is not None and _reaches(x.grad_fn, before.node):
        raise ValueError(
            "this SparseFFN was called twice in one forward pass, but L1 and statistics count only "
            "the last call: use a separate FFN for each call"
        )
    if compiled:
        return Recorded(stats, y.dtype, compiled, None, passes=1)
    return Recorded(stats, y.dtype, compiled, y.grad_fn, 1 + (before.passes if before else 0))


def _reaches(start: Node | None, end: Node | None) -> bool:
    """Whether a backward pass from ``start`` comes through ``end``."""
    nodes, reached = [start], {start}
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node is end:
            return True
        inputs = {following for following, _ in node.next_functions} - reached
        reached |= inputs
        nodes.extend(inputs)
    return False


def recomputing() -> bool:
    """Whether a backward pass is under way: activation checkpointing runs the forward again.

    In a compiled graph torch decides what is recomputed, and repeats no side effect.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks
