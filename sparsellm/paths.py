"""What this machine has: the folders of plain files (recipes, data, …) of a checkout or an
installed wheel, optional packages, and cores."""

import difflib
import functools
import glob
import importlib.metadata
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

RUNS_FOLDER = "runs"  # `logging.run_dir`, relative to the working directory
# Of NVIDIA's driver, Jetson, Windows' Linux, and AMD's driver.
_GPU_FILES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvgpu*", "/dev/dxg", "/dev/kfd")

# Tests set it: on a CPU the functions of `ffn.reference` then stand in for the sparse kernels.
REFERENCE_VARIABLE = "SPARSELLM_REFERENCE_KERNELS"

BUNDLED_FOLDERS = ("recipes", "cuda", "data", "eval", "launch")


def bundled(folder: str) -> Path:
    """The path of one of the `BUNDLED_FOLDERS`.

    A wheel carries them as ``sparsellm/_bundled/<folder>``; in a checkout (editable install) they
    lie at the repository's root, where users edit them.

    Raises:
        FileNotFoundError: the installation carries no such folder.
    """
    for candidate in (_PACKAGE / "_bundled" / folder, _PACKAGE.parent / folder):
        if folder in BUNDLED_FOLDERS and candidate.is_dir():
            return candidate
    raise FileNotFoundError(
        f"this installation of sparsellm has no folder {folder!r} (it has {BUNDLED_FOLDERS}); "
        "reinstall the wheel, or install a checkout with `pip install -e .`"
    )


def named_file(
    kind: str,
    name_or_path: str,
    folder: Path,
    names: Collection[str] | None = None,
    remedy: str = "",
) -> Path:
    """The YAML file of a path, or of a name in a bundled folder.

    Args:
        kind: what it is in errors, such as ``recipe``.
        name_or_path: name or path of the file; a file with that path comes first.
        folder: has ``<name>.yaml`` for each name.
        names: the bundled names, for the error; None: those of all files in the folder.
        remedy: text for the end of the error.

    Raises:
        FileNotFoundError: neither exists; the message has the nearest name and all names.
    """
    for candidate in (Path(name_or_path), folder / f"{name_or_path}.yaml"):
        if candidate.is_file():
            return candidate
    names = names or sorted(path.stem for path in folder.glob("*.yaml"))
    in_run = Path(name_or_path) / f"{kind}.yaml"  # a run's folder has its recipe
    # The name of a path such as recipes/debug.yml, too.
    close = closest(name_or_path, names) or closest(Path(name_or_path).stem, names)
    close = str(in_run) if in_run.is_file() else close
    meant = f"did you mean {close!r}? " if close else ""
    raise FileNotFoundError(
        f"{kind} {name_or_path!r}: no such file, and no bundled {kind} of that name; "
        f"{meant}bundled are {', '.join(names)}{remedy}"
    )


def closest(name: str, names: Iterable[str]) -> str | None:
    """The one of these names that was probably meant; None if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)), None)


def hub_id(path: Path) -> str | None:
    """``owner/name[@revision]`` of a model on the hub, if the path cannot be a local one.

    ``runs/NAME`` is a run, also in a folder that has none.
    """
    text = path.as_posix()
    first = path.parts[0] if path.parts else "."
    local = path.exists() or first == RUNS_FOLDER or Path(first).exists()
    return None if local or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", text) else text


def how_to_install(extra: str) -> str:
    """The command that installs the requirements of an extra of pyproject.toml.

    It names the requirements, not the extra, so that it works without a published package.
    """
    try:
        stated = importlib.metadata.requires("sparsellm") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder, not installed
        stated = []
    marker = re.compile(rf"extra\s*==\s*['\"]{extra}['\"]")
    requirements = [line.partition(";")[0].strip() for line in stated if marker.search(line)]
    return (
        f"pip install {shlex.join(requirements)}"
        if requirements
        else f"pip install -e '.[{extra}]'"
    )


def how_to_install_cuda(cuda_version: str | None) -> str:
    """As `how_to_install`, for the CUDA kernels with a torch built for ``cuda_version`` (12.8)."""
    return how_to_install("cuda12" if (cuda_version or "").startswith("12.") else "cuda")


@functools.cache
def has_cupy() -> bool:
    """Whether CuPy is installed, by which the CUDA kernels are compiled and launched."""
    return importlib.util.find_spec("cupy") is not None


def may_have_gpu() -> bool:
    """Whether PyTorch might find a GPU here; False only where it certainly finds none.

    It looks for the files of drivers, since asking PyTorch takes seconds.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return sys.platform != "linux" or any(map(glob.glob, _GPU_FILES))


def usable_cores() -> int:
    """The cores that the process is bound to (by ``taskset`` or Slurm, say), else all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
