"""Arguments that several commands have, and checks of them before anything is loaded."""

import argparse
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from sparsellm.paths import REFERENCE_VARIABLE, RUNS_FOLDER, closest, hub_id, may_have_gpu

# Bytes. File systems take 255; while it is written, a file has a longer name.
_LONGEST_NAME = 240


def positive_int(text: str) -> int:
    """A count, as argparse's ``type``.

    Raises:
        argparse.ArgumentTypeError: it is below 1, or not a whole number.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def model_path(text: str) -> Path:
    """A model's folder, or its name on the hub, as argparse's ``type``.

    Raises:
        argparse.ArgumentTypeError: there is no such folder, and it is no name of the hub.
    """
    path = Path(text)
    if path.exists() or hub_id(path):
        return path
    close = closest(path.name, (other.name for other in path.parent.glob("*")))
    meant = f"; did you mean {path.parent / close}?" if close else ""
    if path.parts[:1] == (RUNS_FOLDER,) and not Path(RUNS_FOLDER).exists():
        meant = f": {Path.cwd()} has no folder {RUNS_FOLDER}/; give the path of the run"
    raise argparse.ArgumentTypeError(f"{text}: no such file or folder{meant}")


def add_model(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """The positional argument of commands that read a model."""
    text = (
        "checkpoint, run, exported or Hugging Face folder, or a model on the Hub "
        "(owner/name[@revision])"
    )
    parser.add_argument(name, type=model_path, metavar="MODEL", help=text, **options)


def add_overrides(parser: argparse.ArgumentParser) -> argparse.Action:
    """``--set``, which overrides keys of a recipe."""
    return parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a key of the recipe, such as seed=1 (`sparsellm recipe keys` "
        "describes them); may be repeated",
    )


def check_device(name: str | None) -> None:
    """Checks the value of ``--device`` as far as that needs no PyTorch.

    Raises:
        ValueError: it names no kind of device, or a GPU where there certainly is none.
    """
    if name is None:
        return
    if not re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", name):
        raise ValueError(f"--device {name}: there is no such device; give cpu, cuda or cuda:N")
    if name.startswith("cuda") and not may_have_gpu():
        raise ValueError(f"--device {name}: there is no GPU here; omit --device to use the CPU")


def check_sparse(option: str, remedy: str) -> None:
    """Checks that sparse kernels may run here, as far as that needs no PyTorch.

    Raises:
        ValueError: there certainly is no GPU.
    """
    if not may_have_gpu() and not os.environ.get(REFERENCE_VARIABLE):
        raise sparse_needs_gpu(option, remedy)


def sparse_needs_gpu(option: str, remedy: str) -> ValueError:
    """The error of an option that asks for sparse kernels on a CPU."""
    return ValueError(f"{option} needs a GPU; on a CPU it would be slower than dense: {remedy}")


def check_out(
    path: Path, *, is_folder: bool = False, option: str = "--out", begins: str = ""
) -> None:
    """Checks that an output can be written, before hours of computation.

    Args:
        path: the file, or the folder; neither it nor the folders above need exist.
        is_folder: whether the output is a folder.
        option: the option with which a user names another output.
        begins: the beginning of every file that the command writes. Only such a file is replaced:
            a slip such as ``--out RUN/metrics.jsonl`` would lose a run's records.

    Raises:
        ValueError: it cannot be written; the message says why.
    """
    try:
        why = _obstacle(path, is_folder, begins)
    except OSError as error:  # of a folder above: its name is too long, it may not be searched
        why = error.strerror
    if why:
        kind = "folder" if is_folder else "file"
        raise ValueError(f"{path} cannot be written ({why}); name another {kind}: {option}")


def _obstacle(path: Path, is_folder: bool, begins: str) -> str | None:
    place = path.absolute() if is_folder else path.absolute().parent
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        return "its name is too long"
    if path.is_dir() and not is_folder:
        return "it is a folder"
    if begins and path.exists() and not _is_replaceable(path, begins):
        return "it exists, and this command did not write it"
    existing = next(p for p in (place, *place.parents) if p.exists())
    return _write_obstacle(existing) if existing.is_dir() else f"{existing} is not a folder"


def _is_replaceable(path: Path, begins: str) -> bool:
    """Whether it is a file, not a device, and empty or with that beginning."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(begins.encode())) in (b"", begins.encode())


def _write_obstacle(folder: Path) -> str | None:
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is write-protected"
    try:
        with tempfile.TemporaryFile(dir=folder):  # some file systems refuse what they seem to allow
            return None
    except OSError as error:
        return f"{folder} accepts no files: {error.strerror}"
