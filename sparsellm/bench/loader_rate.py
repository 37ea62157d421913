"""Tokens a second out of the data loader: shards on disk to packed micro-batches in this process.

To beat: eight H100s eat about 780,000 GPT-2 tokens a second at 0.5B (paper: 97.3 a millisecond
each); the loader should make ten times that on the 16 cores of one GPU machine.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import closing
from threading import BrokenBarrierError
from typing import Any

from sparsellm.bench.record import Measurement
from sparsellm.data import TokenLoader, load_corpora, load_tokenizer
from sparsellm.data.corpus import Corpus

Options = dict[str, Any]


def run(
    *,
    corpus: str | dict[str, float],
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

    Raises:
        ValueError, FileNotFoundError: no such corpus, files or tokenizer, or what a rank met.
    """
    if num_workers < 0:
        raise ValueError(f"--num-workers {num_workers}: give 0 (ranks tokenise themselves) or more")
    found = load_corpora(corpus, files=files or None)
    load_tokenizer(tokenizer)
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
        context.Process(target=_measure, args=(options, found, rank, seconds, barrier, results))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise ValueError("a rank of the loader benchmark failed; its message is above")
    rates = [results.get() for _ in ranks]
    for error in rates:
        if isinstance(error, Exception):  # the first: the others' follow from it
            raise error
    rate = sum(rates)
    case = options | {"cores": os.cpu_count()}
    per_worker = rate / (num_ranks * max(num_workers, 1))
    return [
        Measurement("loader", case, "throughput", rate, "tokens/s"),
        Measurement("loader", case, "throughput_per_worker", per_worker, "tokens/s"),
    ]


def _measure(  # noqa: PLR0917 - Process passes them by position
    options: Options,
    corpora: tuple[Corpus, ...],
    rank: int,
    seconds: float,
    barrier: Any,
    results: Any,
) -> None:
    """One rank: puts the tokens a second that it hands out, or its error, into ``results``."""
    loader = TokenLoader(
        corpora,
        load_tokenizer(options["tokenizer"]),
        context_length=options["context_length"],
        micro_batch_size=options["micro_batch_size"],
        seed=0,
        rank=rank,
        world_size=options["num_ranks"],
        num_workers=options["num_workers"],
    )
    # A process that multiprocessing started waits for its workers before it runs `atexit`.
    with closing(loader):
        try:
            # What was made before the clock starts must not count: hand out what is prefetched.
            for _ in range(1 + 8 * options["num_workers"]):
                next(loader)
            barrier.wait()
            began, tokens = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - began) < seconds:
                tokens += next(loader).shape[0] * options["context_length"]
            results.put(tokens / elapsed)
            barrier.wait()  # until the last has measured, all load the machine
        except (ValueError, OSError, BrokenBarrierError) as error:
            results.put(error)
            barrier.abort()  # nor do the others wait for this one
