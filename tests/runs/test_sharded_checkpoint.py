"""Checkpoints of several ranks: each writes its part, and any number of ranks reads them."""

import math
from pathlib import Path

import pytest
import torch
from warm import ranks

from runs import checkpoint_worker
from sparsellm.runs import checkpoint, state
from sparsellm.runs.tensor_files import stored_parts

WORKER = Path(__file__).with_name("checkpoint_worker.py")


@pytest.mark.slow
def test_ranks_and_shardings_read_one_anothers_checkpoints(tmp_path):
    ranks(4, str(WORKER), str(tmp_path))
    expected = checkpoint_worker.build()
    checkpoint_worker.train(*expected, steps=3)
    for name, num_ranks in (("replicated", 4), ("sharded", 4), ("hsdp", 4), ("two", 2)):
        path = tmp_path / name / "step_00000003"
        assert checkpoint.load(path).manifest.world_size == num_ranks
        # Each rank has its part of the bytes, and none lies twice.
        sizes = [file.stat().st_size for file in path.glob("optimizer-*-of-*.safetensors")]
        assert 1 < len(sizes) <= num_ranks
        assert not (path / "optimizer.safetensors").exists()
        stored = [p for file in path.glob("model-*") for p in stored_parts(file)]
        assert sum(math.prod(part.shape) for part in stored) == 6 * 7 + 7 + 7 * 3 + 3
        alone = checkpoint_worker.build()
        state.restore(*alone, path)
        for one, other in zip(
            *(checkpoint_worker.wholes(*p) for p in (expected, alone)), strict=True
        ):
            assert torch.equal(one, other)
        for key, tensor in checkpoint.read_kind(path, "model").items():
            assert torch.equal(tensor, expected[0].state_dict()[key])
    assert sorted(p.name for p in (tmp_path / "sharded").iterdir()) == ["latest", "step_00000003"]
