"""Runs a program under accelerate's FSDP2 where there is no GPU, its ranks talking over gloo.

``accelerate launch --config_file launch/fsdp2.yaml fsdp_on_cpu.py PROGRAM ARGUMENT…``, PROGRAM a
script or ``-m MODULE``. accelerate shards only processes that it takes for GPU processes.
"""

import runpy
import sys

from accelerate import PartialState
from accelerate.utils import DistributedType


def main() -> None:
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
