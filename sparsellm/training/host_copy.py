"""Values on their way from the device to the host, which waits for them only when it reads them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Begins to copy tensors of one device, each into pinned memory."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[Tensor]:
        """The copies; waits for what was queued before them, and not for what came after."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies
