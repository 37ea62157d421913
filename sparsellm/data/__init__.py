"""From a corpus (``data/*.yaml``) to packed micro-batches of tokens, resumable to the token.

corpus.py and shards.py name the shards; readers.py opens them, and parquet.py, json_lines.py,
table_stream.py and token_shards.py read their documents by blocks (block_types.py; files.py and
retry.py: over a network; blocks.py: a cache); tokenizer.py encodes them; stream.py orders and packs
them for one lane; lanes.py numbers the sequences of all lanes; workers.py makes them in processes;
loader.py hands them to a rank; position.py is what is saved; witness.py notices edits; held_out.py
reads validation text. Imports only `paths` and `strict`.
"""

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
