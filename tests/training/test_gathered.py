"""What micro-batches share reaches every forward pass of a step as it was made."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.training.gathered import GatheredSharing


class Block(nn.Module):
    """Takes what is shared as an argument, as a decoder layer does."""

    def __init__(self):
        super().__init__()
        self.mlp = SparseFFN(16, 128, gated=True, kernels="sparse")
        self.mlp.use_fp8()
        self.received = []

    def forward(self, x, *, shared=None):
        self.received.append(shared)
        return self.mlp.compute(x, self.mlp.capacity_for(len(x)), None, shared)[0]


def test_fsdp2_does_not_cast_what_is_shared(process_group):
    block = Block()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(block, mesh=DeviceMesh("cpu", [0]), mp_policy=policy, reshard_after_forward=False)
    sharing = GatheredSharing(torch.bfloat16)
    sharing.watch(block, [block.mlp])
    x = torch.randn(64, 16)
    sharing.begin_step()
    for last in (False, True):
        block.set_reshard_after_backward(last)
        block(x, shared=block.mlp.step_shared).sum().backward()
    sharing.end_step()
    with torch.no_grad():
        block(x, shared=block.mlp.step_shared)
    first, second, after = block.received
    for shared in (first, second):
        rows = shared.weights.quantised
        assert (rows.values_MK.dtype, rows.scale_M.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert shared.weights.up_NK.dtype == torch.bfloat16
    assert first.weights.quantised.values_MK is second.weights.quantised.values_MK
    assert after is None
