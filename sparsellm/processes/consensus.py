"""Checks before the first step: all ranks agree, and no other training uses the run's folder."""

import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import gather_object

import sparsellm
from sparsellm.data.text.corpus import Corpus
from sparsellm.data.text.identity import file_identities
from sparsellm.data.tokenizer import Tokenizer
from sparsellm.ffn.kernels.compiler.gpu_architecture import device_name
from sparsellm.processes.distributed import together
from sparsellm.processes.ranks import leave, tell
from sparsellm.recipe import Recipe
from sparsellm.recipe.keys import flatten
from sparsellm.runs import checkpoint
from sparsellm.runs.history import start_of
from sparsellm.runs.lock import Presence, RunLock
from sparsellm.runs.telemetry import session

_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_MOST_NAMED = 3  # differences


@contextmanager
def locked(run_path: Path, accelerator: Accelerator) -> Iterator[RunLock]:
    """Locks the run's folder for this training; the main rank holds the lock.

    Raises:
        ValueError: another training holds it.
    """

    def end(holder: Presence | None) -> None:
        who = holder.text if holder else "another process"
        tell(f"error: {run_path} was taken over by {who}, while this process stood still; it ends")
        leave(1)

    lock = RunLock(run_path, accelerator.print, end)
    try:
        with together(accelerator.device):
            if accelerator.is_main_process:
                lock.acquire()
        yield lock
    finally:
        lock.release()


def compare_environments(recipe: Recipe, accelerator: Accelerator) -> None:
    """Compares the recipe, the code, its libraries and the GPU model of all ranks.

    A driver or settings of NCCL that differ are a warning: nodes may need settings of their own.

    Raises:
        ValueError: some rank differs; the message says which rank has what.
    """
    environment = {f"the recipe's {key}": str(v) for key, v in flatten(recipe.model_dump()).items()}
    environment |= session.versions("torch", "transformers", "accelerate", "safetensors", "triton")
    environment |= {
        "the device": device_name(accelerator.device),
        "sparsellm": _code_version(),
        "CUDA of torch": str(torch.version.cuda),
        "the number of ranks": str(accelerator.num_processes),
    }
    if torch.cuda.is_available():
        environment["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    _compare(environment, "start all ranks by the same command, code, libraries and kind of GPU")
    if differing := _differing(_node_settings()):
        accelerator.print(
            f"warning: the ranks differ in {_shown(differing)}. Training goes on; where it is slow "
            "or hangs, make them alike"
        )


def compare_files(
    corpora: Sequence[Corpus], tokenizer: Tokenizer, accelerator: Accelerator
) -> None:
    """Compares what the ranks see of the corpora's local files, held-out ones too.

    Raises:
        ValueError: some rank sees another file or tokenizer; the message says which rank sees what.
    """
    if accelerator.num_processes == 1:
        return
    contents, times = file_identities(shard for c in corpora for shard in (*c.train, *c.validation))
    contents["the tokenizer"] = f"{tokenizer.identity}, end of document {tokenizer.eot_id}"
    # Of many files the ranks exchange one hash, and the list only where that differs.
    if _differing({"files": short_hash(contents)}):
        _compare(contents, "give all nodes the same files, on a shared file system or as copies")
    if _differing({"files": short_hash(times)}):
        accelerator.print(
            "warning: for some ranks the files of the corpora were written at other times: edited "
            "or only copied? Their names, sizes, beginnings, middles and ends are the same, and "
            f"the rest is too large to compare: {_shown(_differing(times))}. Training goes on; "
            "copies that keep the time (cp -p, rsync -t) end this warning"
        )


def short_hash(values: dict[str, str]) -> str:
    """A short hash of all keys and values, in their order."""
    return xxhash.xxh3_64_hexdigest(repr(values).encode())


def agreed_checkpoint(
    recipe: Recipe, accelerator: Accelerator, resume_from: Path | None, fresh: bool
) -> Path | None:
    """The checkpoint from which all ranks go on, see `start_of`; None: training begins at step 0.

    Raises:
        FileNotFoundError, ValueError: as `start_of`; or ranks see different checkpoints: the
            message says which rank sees which.
    """
    with together(accelerator.device):
        path = None if fresh else start_of(recipe.run_path, resume_from)
        identity = "none" if path is None else checkpoint.identity(path)
    _compare(
        {"the checkpoint": identity},
        f"{recipe.run_path} must be on a file system that all ranks share",
    )
    return path


def _node_settings() -> dict[str, str]:
    """Settings in which nodes may have to differ."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    if _DRIVER_VERSION.is_file():
        text = _DRIVER_VERSION.read_text(encoding="utf-8", errors="replace")
        settings["the driver"] = " ".join(text.partition("\n")[0].split())
    return settings


def _code_version() -> str:
    package = Path(sparsellm.__file__).parent
    digest = xxhash.xxh3_64()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return f"{sparsellm.__version__} ({digest.hexdigest()[:8]})"


def _compare(rank_values: dict[str, str], remedy: str) -> None:
    if differing := _differing(rank_values):
        raise ValueError(f"the ranks differ in {_shown(differing)}. Nothing was changed; {remedy}")


def _differing(rank_values: dict[str, str]) -> list[str]:
    everyone = gather_object([(socket.gethostname(), rank_values)])
    return differences([values for _, values in everyone], [host for host, _ in everyone])


def _shown(differing: list[str]) -> str:
    more = len(differing) - _MOST_NAMED
    rest = f"; and {more} more" if more > 0 else ""
    return "; ".join(differing[:_MOST_NAMED]) + rest


def differences(values: Sequence[dict[str, str]], hosts: Sequence[str]) -> list[str]:
    """For each key in which ranks differ: which ranks have which value, the most common last."""
    lines = []
    for key in dict.fromkeys(key for rank_values in values for key in rank_values):
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank, rank_values in enumerate(values):
            ranks[rank_values.get(key, "nothing")].append(rank)
        if len(ranks) > 1:
            parts = []
            for value, group in sorted(ranks.items(), key=lambda item: len(item[1])):
                named = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in group)
                parts.append(f"{value} on {named if len(group) <= 4 else f'{len(group)} ranks'}")
            lines.append(f"{key}: {', '.join(parts)}")
    return lines
