"""Looks at the text of a run before torch is loaded, which takes seconds."""

from itertools import islice

from sparsellm.data.held_out import validated
from sparsellm.data.lanes import ENOUGH_DOCUMENTS
from sparsellm.data.text.blocks import texts_in_order
from sparsellm.data.text.corpus import Corpus, hub_sources, load_corpora
from sparsellm.data.text.shards import Shard
from sparsellm.data.tokenizer import Tokenizer, load_tokenizer
from sparsellm.recipe.sections import DataConfig
from sparsellm.words import counted


def check_text(data: DataConfig, context_length: int, validates: bool) -> list[str]:
    """Raises early what would keep a run from reading its text; returns what to tell of the text.

    Text on the hub or at an address is not looked at.

    Raises:
        FileNotFoundError, ValueError: as `load_corpora`, `load_tokenizer` and, if the run
            ``validates``, `validated`; or one of the first documents cannot be read.
    """
    if hub_sources(data.corpus) or any("://" in file for file in data.files or ()):
        return []
    corpora, tokenizer = load_corpora(data), load_tokenizer(data.tokenizer)
    if any("://" in shard.url for c in corpora for shard in (*c.train, *c.validation)):
        return []
    if validates:
        validated(corpora, tokenizer, context_length)
    return [line for corpus in corpora for line in _lines_about(corpus, tokenizer)]


def _lines_about(corpus: Corpus, tokenizer: Tokenizer) -> list[str]:
    """The number of documents, if there are few, and a warning of a separator within them."""
    count = 0
    lines: list[str] = []
    eot = tokenizer.decode([tokenizer.eot_id])
    for shard in corpus.train:
        number, times = _look_into(shard, eot, ENOUGH_DOCUMENTS - count)
        count += number
        if times and not lines:
            remedy = "divide such rows beforehand"
            if shard.format == "sources":
                remedy = f"set data.document_separator={eot} (of a mixture, in the corpus's YAML)"
            lines.append(
                f"warning: corpus {corpus.name}: {shard.url} holds {eot} {times:,} times; the "
                "tokenizer ends documents with it, but inside of a text it is ordinary characters. "
                f"If it stands between documents, {remedy}"
            )
        if count >= ENOUGH_DOCUMENTS:
            return lines
    documents = counted(count, "document")
    held_out = sum(_look_into(s, eot, ENOUGH_DOCUMENTS)[0] for s in corpus.validation)
    if held_out:
        documents += f" to train on, {held_out:,} held out"
    if corpus.train[0].divided:
        documents += " (of the one that is divided, its end)"
    return [f"corpus {corpus.name}: {documents}", *lines]


def _look_into(shard: Shard, eot: str, most: int) -> tuple[int, int]:
    """Documents with text, counted up to ``most``, and how often they spell out ``eot``."""
    count = times = 0
    for content in islice(texts_in_order((shard,)), most):
        count += 1
        times += content.count(eot) if isinstance(content, str) else 0
    return count, times
