"""What `export` and `import` refuse before they load torch."""

import re
from pathlib import Path

from sparsellm.arguments import check_out
from sparsellm.runs.huggingface import hf_folder
from sparsellm.runs.huggingface.find import find_checkpoint

_SHARD_SIZE = re.compile(r"\d+(\.\d+)?(KB|MB|GB)")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")


def check_export(
    source: Path, folder: Path, max_shard_size: str, license_name: str | None = None
) -> None:
    """Checks the arguments of `save_export.export`.

    Raises:
        FileNotFoundError, ValueError: one is wrong; the message says which, and the remedy.
    """
    if not _SHARD_SIZE.fullmatch(max_shard_size):
        raise ValueError(f"--max-shard-size {max_shard_size!r}: write it as 4GB or 500MB")
    if license_name is not None and not _LICENSE.fullmatch(license_name):
        raise ValueError(
            f"--license {license_name!r}: give the hub's identifier in lower case, such as "
            "apache-2.0, mit or other"
        )
    _check_new(folder, "DIR")
    find_checkpoint(source)


def check_import(source: Path, run_path: Path) -> None:
    """Checks the arguments of `save_export.import_export`.

    Raises:
        FileNotFoundError, ValueError: as `check_export`.
    """
    _check_new(run_path, "RUN_DIR")
    if not hf_folder.is_hugging_face(hf_folder.local_copy(source)):
        raise ValueError(
            f"{source} is not an exported folder: it has no {hf_folder.CONFIG_FILE}; give one that "
            "`sparsellm export` wrote, or another of Hugging Face's"
        )


def _check_new(folder: Path, option: str) -> None:
    """Raises ValueError if ``folder`` is a file, has any, or cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; give a new folder, or delete it first")
    check_out(folder, is_folder=True, option=option)
