"""Checkpoints from a GPU: what is saved is what was there, though training goes on at once."""

from dataclasses import replace

import pytest
import torch
from runs.test_checkpoint import _snapshot

from sparsellm.runs import checkpoint, saver

pytestmark = pytest.mark.gpu


def test_the_step_after_changes_nothing_that_is_saved(tmp_path):
    keeper = saver.Saver(tmp_path, keep=3)
    model = {f"w{i}": torch.randn(4096, 1024 + i, device="cuda") for i in range(4)}
    moments = {f"exp_avg.{name}": torch.randn_like(tensor) for name, tensor in model.items()}
    moments |= {f"step.{name}": torch.zeros((), device="cuda") for name in model}
    for step in (1, 2, 3):  # the host's memory of the first save is used again
        for tensor in (*model.values(), *moments.values()):
            torch.cuda._sleep(10_000_000)  # still running when the save begins
            tensor.add_(step)
        expected = {name: tensor.clone() for name, tensor in (model | moments).items()}
        keeper.begin(replace(_snapshot(step), model=model, optimizer=moments))
        for tensor in (*model.values(), *moments.values()):
            tensor.mul_(0.5)
        path = keeper.wait()
        saved = checkpoint.read_kind(path, "model") | checkpoint.read_kind(path, "optimizer")
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], tensor.cpu()) for name, tensor in expected.items())
    keeper.close()
