"""`sparsellm` whose sweeps fork their workers from this process, in which torch is imported."""

import multiprocessing
import sys

from sparsellm.cli import main

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: context
    sys.exit(main(sys.argv[1:]))
