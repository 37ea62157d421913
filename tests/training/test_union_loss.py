"""The term that makes neighbouring tokens share neurons: value, gradient, splits, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsellm.ffn.reference import block_norm_sum
from sparsellm.ffn.types import BLOCK_TOKENS
from sparsellm.recipe_sections import UNION_TOKENS
from sparsellm.training.run import build_run, close_run
from sparsellm.training.signals import StopRequest
from sparsellm.training.step import train_step


def test_it_is_the_norm_of_every_column_of_a_block():
    h = torch.randn(150, 7, dtype=torch.float64).relu().requires_grad_()
    expected = sum(block.norm(dim=0).sum() for block in h.split(64))
    found = block_norm_sum(h)
    torch.testing.assert_close(found, expected)
    found.backward()
    assert torch.isfinite(h.grad).all()  # also where a column is all zero
    alone = torch.zeros(64, 2, requires_grad=True)
    with torch.no_grad():
        alone[3, 0], alone[:16, 1] = 5.0, 5.0
    block_norm_sum(alone).backward()
    # One token alone is pressed as by L1; sixteen that fire alike a quarter as hard each.
    assert alone.grad[3, 0] == 1
    torch.testing.assert_close(alone.grad[:16, 1], torch.full((16,), 0.25))
    assert UNION_TOKENS == BLOCK_TOKENS


def _tokens(run) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    size = run.recipe.model.context_length + 1
    return torch.randint(257, (4, size), generator=generator)


class _Fixed:
    def __init__(self, run):
        self._parts = iter(_tokens(run).split(run.recipe.train.micro_batch_size))

    def close(self):
        pass

    def __next__(self):
        return next(self._parts)


def _gradient(recipe):
    run = build_run(recipe)
    run.loader.close()
    run.loader = _Fixed(run)
    run.optimizer = torch.optim.SGD(run.objective.parameters())
    before = [p.detach().clone() for p in run.model.parameters()]
    totals = train_step(run, StopRequest())
    lr = totals.values["learning_rate"]
    found = [(b - p.detach()) / lr for b, p in zip(before, run.model.parameters(), strict=True)]
    close_run(run)
    return torch.cat([g.flatten() for g in found])


def test_its_gradient_does_not_depend_on_the_split(tiny):
    common = ["model.context_length=64", "optimizer.clip_norm=1e6", "validation.every_steps=0"]
    common += ["train.global_batch_tokens=256", "sparsity.union_coefficient=0.5"]
    whole = _gradient(tiny(*common, "train.micro_batch_size=4"))
    parts = _gradient(tiny(*common, "train.micro_batch_size=1"))
    without = _gradient(tiny(*common, "train.micro_batch_size=4", "sparsity.union_coefficient=0"))
    torch.testing.assert_close(parts, whole, rtol=2e-4, atol=2e-6)
    assert (whole - without).norm() > 1e-3 * whole.norm()


def test_what_it_cannot_do_is_refused(tiny):
    wanted = ["sparsity.union_coefficient=0.1", "model.context_length=64"]
    with pytest.raises(ValueError, match=r"set ffn.kernels to auto or dense"):
        tiny(*wanted, "ffn.kernels=sparse")
    with pytest.raises(ValueError, match="a multiple of 64, not 32"):
        tiny(wanted[0])
