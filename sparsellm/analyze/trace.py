"""Activation traces: which neurons were active for which token, one `Trace` per layer.

A trace file (``.npz``) holds for each layer l ``count{l}``, the non-zeros of each token, and
``idx{l}``, the column indices of all tokens in a row, ascending within a token. Tokens are in
order: row = sequence * context_length + position. ``ids`` (older files lack it) are the tokens'
ids, (sequences, context_length). Kernel benchmarks read it as their real input.
"""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.runs.files import replacing

UINT16_MAX_NEURONS = 65_536


@dataclass(frozen=True)
class Trace:
    """One layer's pattern over M tokens and N neurons, in compressed rows."""

    count_M: NDArray[np.unsignedinteger]  # non-zeros of each token
    index: NDArray[np.unsignedinteger]  # (Σ count,) columns, ascending within a token
    num_neurons: int  # N

    @property
    def num_tokens(self) -> int:
        """M."""
        return len(self.count_M)

    def pattern(self, device: torch.device | None = None) -> Tensor:
        """(M, N) bool: which neurons were active for which tokens."""
        rows = np.repeat(np.arange(self.num_tokens), self.count_M)
        at = torch.from_numpy(np.stack([rows, self.index.astype(np.int64)])).to(device)
        pattern_MN = torch.zeros(self.num_tokens, self.num_neurons, dtype=torch.bool, device=device)
        pattern_MN[at[0], at[1]] = True
        return pattern_MN


def pattern_trace(active_MN: Tensor) -> Trace:
    """The trace of a pattern, which may be on any device."""
    num_neurons = active_MN.shape[1]
    # The smallest type that holds a column index, and a count up to and including N.
    dtype = np.uint16 if num_neurons < UINT16_MAX_NEURONS else np.uint32
    # `nonzero` lists row by row, columns ascending.
    return Trace(
        active_MN.sum(1).cpu().numpy().astype(dtype),
        active_MN.nonzero()[:, 1].cpu().numpy().astype(dtype),
        num_neurons,
    )


def save_traces(path: Path, traces: list[Trace], ids_BT: NDArray[np.integer] | None = None) -> None:
    """Writes a trace file, .npz; the ids of its tokens with it, if they are given."""
    arrays: dict[str, NDArray] = {} if ids_BT is None else {"ids": ids_BT.astype(np.int32)}
    for layer, trace in enumerate(traces):
        arrays[f"count{layer}"] = trace.count_M
        arrays[f"idx{layer}"] = trace.index
    with replacing(path) as partial:
        np.savez_compressed(partial, allow_pickle=False, **arrays)


def load_traces(path: Path, num_neurons: int) -> tuple[list[Trace], NDArray[np.int64] | None]:
    """The layers of a trace file, and its token ids, (sequences, context_length), if it has any.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a trace file, an index is not below ``num_neurons``, or the ids are
            not those of its tokens.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such trace file; `sparsellm analyze` writes them")
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"one array": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged, or not a NumPy file ({error})") from error
    # Files come from elsewhere too: nothing is taken on trust.
    names = arrays.keys() - {"ids"}
    layers = range(sum(name.startswith("count") for name in names))
    if not layers or names != {f"{kind}{layer}" for kind in ("count", "idx") for layer in layers}:
        raise ValueError(f"{path} is not a trace file: it holds {sorted(names)[:4]}")
    traces = [Trace(arrays[f"count{i}"], arrays[f"idx{i}"], num_neurons) for i in layers]
    for layer, trace in enumerate(traces):
        if len(trace.index) != trace.count_M.sum(dtype=np.int64):
            raise ValueError(f"{path}: idx{layer} does not have Σ count{layer} entries")
        if len(trace.index) and trace.index.max() >= num_neurons:
            raise ValueError(
                f"{path}: idx{layer} names neuron {trace.index.max()} of {num_neurons}; "
                "give the width that it was recorded with"
            )
    ids = arrays.get("ids")
    if ids is not None and (ids.ndim != 2 or ids.size != traces[0].num_tokens):
        raise ValueError(
            f"{path}: ids {ids.shape} are not (sequences, context_length) of a trace of "
            f"{traces[0].num_tokens:,} tokens"
        )
    return traces, None if ids is None else ids.astype(np.int64)
