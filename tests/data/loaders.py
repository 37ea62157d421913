"""Loaders of token sequences for tests."""

from typing import Any

from sparsellm.data.loader import TokenLoader
from sparsellm.data.text.corpus import Corpus
from sparsellm.data.tokenizer import load_tokenizer


def token_loader(
    corpora: tuple[Corpus, ...], tokenizer: str = "bytes", **options: Any
) -> TokenLoader:
    """The loader of a single rank with seed 0 and no workers, unless ``options`` say otherwise."""
    defaults = {"seed": 0, "rank": 0, "world_size": 1, "num_workers": 0}
    return TokenLoader(corpora, load_tokenizer(tokenizer), **(defaults | options))
