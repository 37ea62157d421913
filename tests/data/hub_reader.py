"""Prints 40 sequences of a corpus and the numbers of its shards: ``hub_reader.py CORPUS``."""

import json
import logging
import sys

from sparsellm.data.stream import Cursor, LaneConfig, pack
from sparsellm.data.text.blocks import BlockCache
from sparsellm.data.text.corpus import load_corpus
from sparsellm.data.tokenizer import load_tokenizer

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    corpus = load_corpus(sys.argv[1])
    config = LaneConfig(corpus.train, 0, 1, seed=3)
    stream = pack(config, BlockCache(), load_tokenizer("bytes"), 16, Cursor())
    sequences = [next(stream)[0].tolist() for _ in range(40)]
    print(json.dumps([len(corpus.train), len(corpus.validation), sequences]))
