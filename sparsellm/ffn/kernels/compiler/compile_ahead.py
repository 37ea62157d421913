"""Compiles the kernels of training in a thread, while the model is built.

Otherwise the first call of each kernel compiles it: one after the other, and all ranks of a node
wait for the same one. Here each rank compiles its share. NVRTC runs beside Python.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from sparsellm.ffn.kernels.compiler import debug
from sparsellm.ffn.kernels.compiler.compile import device_code, included, sources
from sparsellm.ffn.kernels.compiler.compile_cache import cache_folder
from sparsellm.ffn.kernels.compiler.gpu_architecture import architecture_of
from sparsellm.ffn.types import Format

# Files of cuda/ beside the gate's, those first that take longest to compile.
_OF_FORMAT: dict[Format, tuple[str, ...]] = {
    "union": (
        *("weight_grad", "union_down", "columns_grad", "columns_down", "union_up", "group_columns"),
        *("union_entries", "column_units", "union_columns", "fill_pieces"),
    ),
    "twell": (
        *("dense_rows_grad", "dense_rows", "hybrid_grad", "twell_ffn", "hybrid_forward"),
        *("hybrid_weight_grad", "hybrid_rows", "hybrid_count", "hybrid_place"),
    ),
}
_OF_BOTH = ("transpose", "quantise_rows", "sort_tokens")


def compile_ahead(
    format: Format | None,
    device_index: int,
    activation: str,
    *,
    fp8: bool,
    further: Sequence[str] = (),
) -> None:
    """Starts to compile this rank's share of what training needs; see `compile.kernel_for`.

    A source that does not compile is reported where its kernel is first called.

    Args:
        format: of the FFNs; None: they are dense.
        device_index: of the GPU.
        activation, fp8: of the FFNs.
        further: files of ``cuda/common``, by their stem.
    """
    # Debugging reports each source once. Without a folder each call would compile it again.
    if debug.knobs() or cache_folder() is None:
        return
    folder = architecture_of(device_index).folder
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share = training_sources(format, folder, further)[rank::num_ranks]

    def run() -> None:
        with contextlib.suppress(ImportError):  # which the kernel's first call reports
            import cupy  # noqa: F401  # takes a while, also on a rank without a share
        for path in share:
            if not threading.main_thread().is_alive():  # the run has failed
                return
            with contextlib.suppress(RuntimeError, ValueError):
                device_code(
                    *(path, folder, device_index, torch.bfloat16),
                    activation=activation if _reads_activation(path, folder) else "relu",
                    fp8=fp8 and path.stem == f"gate_{format}",
                )

    threading.Thread(target=run, name="compile_ahead").start()


def training_sources(format: Format | None, folder: str, further: Sequence[str] = ()) -> list[Path]:
    """The files that training in a format needs, for an architecture by the name of its folder."""
    paths = {path.stem: path for path in sources().values()}
    stems = (*_OF_FORMAT[format], *_OF_BOTH, *further) if format else further
    # An architecture computes the gate by kernels of its own, or packs a dense product's.
    gate = [paths[f"{kind}_{format}"] for kind in ("gate", "pack") if format]
    return [
        *(path for path in gate if path.parent.name == folder),
        *(paths[stem] for stem in dict.fromkeys(stems)),
    ]


def _reads_activation(path: Path, folder: str) -> bool:
    return any(header.name == "activation.cuh" for header in included(path, folder))
