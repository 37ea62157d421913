"""From a corpus (``data/*.yaml``) to packed micro-batches of tokens, resumable to the token.

corpus.py, shards.py and stdlib.py name the shards; readers.py opens them, and parquet.py,
json_lines.py, table_stream.py and token_shards.py read their documents by blocks (block_types.py;
text_files.py and retry.py: over a network; blocks.py: a cache); tokenizer.py encodes them;
stream.py orders and packs them for one lane; lanes.py numbers the sequences of all lanes;
workers.py makes them in processes; loader.py gives them to a rank; position.py is the saved state;
witness.py notices edits; held_out.py reads validation text. Imports only `paths` and `strict`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsellm.data.corpus import Corpus, load_corpora, load_corpus
    from sparsellm.data.held_out import validation_batches
    from sparsellm.data.loader import TokenLoader
    from sparsellm.data.position import DataStateMismatch, merge
    from sparsellm.data.tokenizer import load_tokenizer

__all__ = [
    "Corpus",
    "DataStateMismatch",
    "TokenLoader",
    "load_corpora",
    "load_corpus",
    "load_tokenizer",
    "merge",
    "validation_batches",
]

_MODULES = {
    "Corpus": "corpus",
    "load_corpora": "corpus",
    "load_corpus": "corpus",
    "validation_batches": "held_out",
    "TokenLoader": "loader",
    "DataStateMismatch": "position",
    "merge": "position",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    """Imports names of `__all__` on first use: `sparsellm --help` needs no pyarrow."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
