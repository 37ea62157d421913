"""From a corpus (``data/*.yaml``) to packed micro-batches of tokens, resumable to the token.

corpus.py names the shards, readers.py reads their documents (retry.py: over a network),
tokenizer.py encodes them, stream.py orders and packs them for one consumer, loader.py runs
consumers in the processes of workers.py. Imports only `paths` and `strict`.
"""

from sparsellm.data.corpus import load_corpus
from sparsellm.data.loader import DataStateMismatch, TokenLoader, validation_batches
from sparsellm.data.tokenizer import load_tokenizer

__all__ = [
    "DataStateMismatch",
    "TokenLoader",
    "load_corpus",
    "load_tokenizer",
    "validation_batches",
]
