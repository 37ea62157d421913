"""`sparsellm` on devices of little memory: ``small_memory.py SEQUENCES train …``.

Ranks begin with one sequence; later the first has room for any number, the second for SEQUENCES.
"""

import os
import sys

from sparsellm.cli import main
from sparsellm.training import micro_batch

TOTAL = 1000


def _used(device: object) -> tuple[int, int]:
    room = int(sys.argv[1]) if os.environ["RANK"] == "1" else 100
    return 0, 1 if room > 1 else TOTAL


if __name__ == "__main__":
    micro_batch.device_memory = lambda device: TOTAL
    micro_batch.memory_used = _used
    sys.exit(main(sys.argv[2:]))
