"""Watches the steps of a loop's optimizers, to notice a forgotten `SparsityController.step`."""

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from sparsellm.sparsity.over_ranks import warn_on_first_rank


class OptimizerSteps:
    """Watches the optimizers of a model.

    Args:
        model: the model, or the part of it that has the FFNs.
        optimizer: one, or several; accelerate's wrapper of one is an optimizer too.

    Raises:
        ValueError: it is no optimizer.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
    ) -> None:
        self._begun = False
        self._forgotten = False
        optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        # accelerate wraps an optimizer; the one inside makes the steps.
        optimizers = [getattr(each, "optimizer", each) for each in optimizers]
        if not optimizers or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
            raise ValueError(
                f"optimizer {optimizer!r}: give the torch.optim.Optimizer that trains the model, "
                "or a list of them"
            )
        _check_parameters(model, optimizers)
        this = weakref.ref(self)  # optimizers outlive a controller
        for each in optimizers:
            each.register_step_post_hook(lambda *_: _note_step(this))

    def begin(self) -> None:
        """At a first micro-batch: optimizer steps before it are none of a loop that uses L1."""
        self._begun = True

    def followed(self) -> None:
        """The controller's `step` has followed, or the loop goes on from a saved state."""
        self._begun = self._forgotten = False

    def check(self) -> None:
        """Raises RuntimeError if an optimizer has made a step that nothing has followed."""
        if self._forgotten:
            raise RuntimeError(
                "an optimizer has made a step, and controller.step() was not called after it: call "
                "it once after every optimizer.step(), on all ranks"
            )


def _note_step(steps: "weakref.ref[OptimizerSteps]") -> None:
    this = steps()
    if this is not None and this._begun:
        this._forgotten = True


def _check_parameters(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    if trained.isdisjoint(map(id, model.parameters())):
        # No error: it may hold fp32 copies of them, or shards of its own.
        warn_on_first_rank(
            "optimizer holds none of the model's parameters. Unless it trains copies of them, make "
            "it of model.parameters(), after replace_ffns and fully_shard",
            stacklevel=5,
        )
