"""One step: for what the host waits."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from sparsellm.processes.signals import StopRequest
from sparsellm.training.run import build_run, close_run
from sparsellm.training.step import train_step


class _SingleValues(TorchDispatchMode):
    """Counts the values that the host reads one by one, each of which waits for the device."""

    def __init__(self):
        super().__init__()
        self.read = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.read += operator.name() == "aten::_local_scalar_dense"
        return operator(*args, **(kwargs or {}))


def test_a_step_reads_its_sums_at_once_and_nothing_else(tiny):
    run = build_run(
        tiny("logging.every_steps=100", "sparsity.target_nnz=8", "runtime.compile=false")
    )
    try:
        train_step(run, StopRequest())  # is logged
        with _SingleValues() as values:
            train_step(run, StopRequest())
    finally:
        close_run(run)
    assert values.read == 0


@pytest.mark.parametrize("order", ["none", "auto"])
def test_unions_depend_on_the_micro_batch_only_through_the_order_of_its_tokens(tiny, order):
    own = ["model.context_length=64", "train.global_batch_tokens=512", "ffn.kernels=sparse"]
    own += ["validation.every_steps=0", "runtime.compile=false", f"runtime.token_order={order}"]
    found = []
    for size in (1, 8):
        run = build_run(tiny(*own, f"train.micro_batch_size={size}"))
        try:
            found.append(train_step(run, StopRequest()).reading.kernels.union_mean)
        finally:
            close_run(run)
    assert (found[0] == found[1]) == (order == "none")
