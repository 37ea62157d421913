"""`sparsellm` with a part of the GPU's memory: ``limited_memory.py KNOWN USABLE train …``.

The estimate of a step's memory is told of KNOWN bytes; the process can allocate USABLE.
"""

import sys

import torch

from sparsellm.cli import main
from sparsellm.training import micro_batch

if __name__ == "__main__":
    gpu = torch.device("cuda", 0)
    known_memory, usable = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.set_per_process_memory_fraction(usable / micro_batch.device_memory(gpu), gpu)
    micro_batch.device_memory = lambda device: known_memory
    sys.exit(main(sys.argv[3:]))
