"""Tokens a second out of the data loader: shards on disk to packed micro-batches in this process.

To beat: eight H100s eat about 780,000 GPT-2 tokens a second at 0.5B (paper: 97.3 a millisecond
each); the loader should make ten times that on the 16 cores of one GPU machine.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

from sparsellm.bench.record import Measurement
from sparsellm.data import TokenLoader, load_corpus, load_tokenizer

Options = dict[str, Any]


def run(
    *,
    corpus: str,
    files: list[str] | None,
    tokenizer: str,
    num_workers: int,
    num_ranks: int,
    context_length: int,
    micro_batch_size: int,
    seconds: float,
) -> list[Measurement]:
    """Measures ``num_ranks`` processes at once, each with ``num_workers``, for ``seconds``.

    Returns:
        tokens/s of all together, and of one worker.
    """
    options = {
        "corpus": corpus,
        "tokenizer": tokenizer,
        "context_length": context_length,
        "micro_batch_size": micro_batch_size,
        "num_workers": num_workers,
        "num_ranks": num_ranks,
    }
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    barrier = context.Barrier(num_ranks)
    ranks = [
        context.Process(target=_measure, args=(options, files, rank, seconds, barrier, results))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise ValueError("a rank of the loader benchmark failed; its message is above")
    rate = sum(results.get() for _ in ranks)
    case = options | {"cores": os.cpu_count()}
    per_worker = rate / (num_ranks * max(num_workers, 1))
    return [
        Measurement("loader", case, "throughput", rate, "tokens/s"),
        Measurement("loader", case, "throughput_per_worker", per_worker, "tokens/s"),
    ]


def _measure(  # noqa: PLR0917 - Process passes them by position
    options: Options,
    files: list[str] | None,
    rank: int,
    seconds: float,
    barrier: Any,
    results: Any,
) -> None:
    """One rank: tokens a second that it hands out, put into ``results``."""
    held_out: list[str] | None = [] if files else None
    loader = TokenLoader(
        load_corpus(options["corpus"], files=files, validation_files=held_out),
        load_tokenizer(options["tokenizer"]),
        context_length=options["context_length"],
        micro_batch_size=options["micro_batch_size"],
        seed=0,
        rank=rank,
        world_size=options["num_ranks"],
        num_workers=options["num_workers"],
    )
    # What was made before the clock starts must not count: hand out every prefetched batch.
    for _ in range(1 + 8 * options["num_workers"]):
        next(loader)
    barrier.wait()
    began, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        tokens += next(loader).shape[0] * options["context_length"]
    results.put(tokens / elapsed)
    barrier.wait()  # until the last has measured, all load the machine
    loader.close()
