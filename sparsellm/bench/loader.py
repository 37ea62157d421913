"""Tokens a second out of the data loader: shards on disk to packed micro-batches in this process.

To beat: eight H100s eat about 780,000 GPT-2 tokens a second at 0.5B (paper: 97.3 a millisecond
each); the loader should make ten times that on the 16 cores of one GPU machine.
"""

from __future__ import annotations

import os
import time

from sparsellm.bench.record import Measurement
from sparsellm.data import TokenLoader, load_corpus, load_tokenizer


def run(
    *,
    corpus: str,
    files: list[str] | None,
    tokenizer: str,
    num_workers: int,
    context_length: int,
    micro_batch_size: int,
    seconds: float,
) -> list[Measurement]:
    """Measures for ``seconds`` after the prefetch queues were filled and emptied once."""
    loader = TokenLoader(
        load_corpus(corpus, files=files, validation_files=[] if files else None),
        load_tokenizer(tokenizer),
        context_length=context_length,
        micro_batch_size=micro_batch_size,
        seed=0,
        rank=0,
        world_size=1,
        num_workers=num_workers,
    )
    # What was made before the clock starts must not count: hand out every prefetched batch.
    for _ in range(1 + 8 * num_workers):
        next(loader)
    began, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        tokens += next(loader).shape[0] * context_length
    loader.close()
    rate = tokens / elapsed
    case = {
        "corpus": corpus,
        "tokenizer": tokenizer,
        "num_workers": num_workers,
        "context_length": context_length,
        "micro_batch_size": micro_batch_size,
        "cores": os.cpu_count(),
    }
    per_worker = rate / max(num_workers, 1)
    return [
        Measurement("loader", case, "throughput", rate, "tokens/s"),
        Measurement("loader", case, "throughput_per_worker", per_worker, "tokens/s"),
    ]
