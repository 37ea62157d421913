"""``sparsellm export`` and ``sparsellm import``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_export_parsers(commands: Any) -> None:
    """Adds both to the ``sparsellm`` command."""
    export = commands.add_parser("export", help="a checkpoint for stock transformers")
    export.add_argument("source", type=Path, metavar="CHECKPOINT", help="or a run folder")
    export.add_argument("folder", type=Path, metavar="DIR", help="new folder to write")
    export.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="default: bf16")
    export.add_argument(
        "--max-shard-size", default="4GB", metavar="SIZE", help="of a weight file (default: 4GB)"
    )
    export.set_defaults(run=_export)

    back = commands.add_parser(
        "import",
        help="an exported folder as a checkpoint again",
        description="Writes a run folder with one checkpoint: weights in fp32, no optimizer "
        "state. `sparsellm train --init-from RUN_DIR` trains on from it.",
    )
    back.add_argument("source", type=Path, metavar="DIR", help="exported folder")
    back.add_argument("run_path", type=Path, metavar="RUN_DIR", help="new run folder to write")
    back.add_argument("--recipe", help="name or file (default: the one in DIR)")
    back.set_defaults(run=_import)


def _export(options: argparse.Namespace) -> None:
    from sparsellm.export.write import export

    found = export(options.source, options.folder, options.dtype, options.max_shard_size)
    print(f"exported {found} to {options.folder} ({options.dtype})")


def _import(options: argparse.Namespace) -> None:
    from sparsellm.export.importer import import_export

    written, dtypes = import_export(options.source, options.run_path, options.recipe)
    widened = "" if dtypes == ["F32"] else f", widened from {', '.join(dtypes)}"
    print(f"imported {options.source} to {written} (fp32{widened}; no optimizer state)")
    print(f"train on: sparsellm train --recipe RECIPE --set name=NEW --init-from {written}")
