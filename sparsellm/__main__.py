"""``accelerate launch -m sparsellm …`` is the ``sparsellm`` command."""

import sys

from sparsellm.cli import main

if __name__ == "__main__":
    sys.exit(main())
