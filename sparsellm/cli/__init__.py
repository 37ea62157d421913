"""The ``sparsellm`` command: parser, `train` and `recipe`; each folder declares its own commands.

A command imports what it needs when it runs: `sparsellm --help` is quick.
"""

from sparsellm.cli.command import main, make_parser

__all__ = ["main", "make_parser"]
