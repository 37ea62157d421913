"""What a step's micro-batches share under FSDP2: made once the weights have been gathered.

At the beginning of a step a rank has only shards. FSDP2 gathers a block's weights before its first
forward pass, and, with ``fsdp_reshard_after_forward: false``, keeps them until the step's last
backward pass. In between, they are as good as a rank's own, so that they too are quantised and
transposed once per step, not in every forward and backward pass. Their gradients stay with FSDP2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparsellm.ffn.shared_linear import SharedLinear
from sparsellm.ffn.step_shared import Fills
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import StepShared


class GatheredSharing:
    """Prepares the shared weights of modules before their first forward pass of a step.

    Args:
        dtype: in which a step computes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._is_step = False
        self._prepared: dict[nn.Module, StepShared | None] = {}  # in this step

    def watch(self, module: nn.Module, parts: Sequence[SparseFFN | SharedLinear]) -> None:
        """Adds a module that FSDP2 gathers as a whole; its hook, which gathers, comes first."""

        def prepare(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if not self._is_step:
                return None
            if module not in self._prepared:
                self._prepared[module] = self._prepare(parts)
            shared = self._prepared[module]
            # Passed here and not by the caller: FSDP2's hook casts arguments to the type in which
            # the module computes, FP8 weights and their scales, too.
            return None if shared is None else (args, kwargs | {"shared": shared})

        module.register_forward_pre_hook(prepare, with_kwargs=True)

    def _prepare(self, parts: Sequence[SparseFFN | SharedLinear]) -> StepShared | None:
        """Returns what the FFN, if it is on its sparse path, takes as an argument."""
        fills = Fills()
        for part in parts:
            part.begin_step(self._dtype, accumulate=False, fills=fills)
        fills.fill()
        for part in parts:
            if isinstance(part, SparseFFN):
                shared, part.step_shared = part.step_shared, None
                return shared
        return None

    def begin_step(self) -> None:
        """From now on until `end_step`, what is gathered stays gathered."""
        self._is_step = True

    def end_step(self) -> None:
        """Weights may change again."""
        self._is_step = False
        self._prepared.clear()
