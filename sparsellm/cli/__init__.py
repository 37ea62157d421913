"""The ``sparsellm`` command: parser, `train` and `recipe`; each folder declares its own commands.

May import everything, and imports it when a command runs: `sparsellm --help` is quick.
"""

from sparsellm.cli.command import main, make_parser

__all__ = ["main", "make_parser"]
