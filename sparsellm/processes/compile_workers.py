"""The processes in which torch compiles kernels: started early, and divided among ranks."""

import os

import torch
import torch._inductor.config as inductor

from sparsellm.paths import usable_cores

_MOST = 32  # torch's own limit


def start_compile_workers() -> None:
    """Starts this rank's compile workers while it reads data and builds the model.

    torch starts them at its first compilation, and compiles in the rank's own process until they
    have imported torch, which takes seconds. It also starts one per core for every rank of a node.
    Where TORCHINDUCTOR_COMPILE_THREADS says how many there are, it holds. Without a GPU nothing is
    started.
    """
    if not torch.cuda.is_available():
        return
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        inductor.compile_threads = min(max(usable_cores() // ranks, 1), _MOST)
    from torch._inductor import async_compile

    # Private to torch. A version without it starts the workers later.
    if warm := getattr(async_compile, "maybe_warm_pool", None):
        warm()
