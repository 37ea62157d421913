"""The data loader's rate, the time to its first micro-batch, and the memory of a worker.

The rate is in tokens per second, from shards on disk to micro-batches in this process. The time to
the first micro-batch is measured for a fresh and for a resumed loader.

The rate to exceed: eight H100s consume about 780,000 GPT-2 tokens per second at 0.5B (paper: 97.3
per millisecond each); the loader should deliver ten times that on the 16 cores of one GPU machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from threading import BrokenBarrierError
from typing import Any

import psutil

from sparsellm.bench.record import Found, Measurement
from sparsellm.cores import usable_cores
from sparsellm.data.corpus import Corpus, load_corpora
from sparsellm.data.loader import TokenLoader
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.recipe import Recipe, load_recipe

Figures = dict[str, float]  # of one rank


def measure(options: argparse.Namespace) -> Iterator[Found]:
    """Measures each number of workers, in ``--num-ranks`` processes at once.

    A case has the tokens per second of all ranks together and of one worker, the seconds until the
    slowest rank has its first micro-batch, fresh and resumed, and the private memory of a worker.

    Raises:
        ValueError, FileNotFoundError: corpus, files or tokenizer do not exist, or a rank failed.
    """
    recipe, ranks = load_recipe(options.recipe, options.overrides), options.num_ranks
    corpora = load_corpora(**recipe.data.sources())
    load_tokenizer(recipe.data.tokenizer)  # raises here, once
    for workers in options.num_workers:
        if workers < 0:
            raise ValueError(f"--num-workers {workers}: give 0 (ranks tokenise themselves) or more")
        found = _of_ranks(recipe, corpora, ranks, workers, options.seconds)
        rate = sum(rank["rate"] for rank in found)
        figures = [
            ("throughput", rate, "tokens/s"),
            ("throughput_per_worker", rate / (ranks * max(workers, 1)), "tokens/s"),
            ("first_batch", max(rank["first"] for rank in found), "s"),
            ("first_batch_resumed", max(rank["resumed"] for rank in found), "s"),
        ]
        if workers:
            memory = statistics.fmean(rank["memory"] for rank in found)
            figures.append(("memory_per_worker", memory, "MiB"))
        case = {
            "corpus": recipe.data.corpus,
            "tokenizer": recipe.data.tokenizer,
            "context_length": recipe.model.context_length,
            "micro_batch_size": recipe.micro_batch_sequences,
            "num_workers": workers,
            "num_ranks": ranks,
            "cores": usable_cores(),
        }
        yield [Measurement("loader", case, *figure) for figure in figures]


def _of_ranks(
    recipe: Recipe, corpora: tuple[Corpus, ...], num_ranks: int, workers: int, seconds: float
) -> list[Figures]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    shared = context.Barrier(num_ranks), results, seconds
    ranks = [
        context.Process(target=_measure, args=(_arguments(recipe, corpora, rank), *shared))
        for rank in (
            {"rank": rank, "world_size": num_ranks, "num_workers": workers}
            for rank in range(num_ranks)
        )
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise ValueError("a rank of the loader benchmark failed; its message is above")
    found = [results.get() for _ in ranks]
    for error in found:
        if isinstance(error, Exception):  # the first error: the others follow from it
            raise error
    return found


def _arguments(recipe: Recipe, corpora: tuple[Corpus, ...], rank: dict[str, int]) -> dict[str, Any]:
    """Of a rank's `TokenLoader`, but for the tokenizer, which each process loads."""
    return {
        "corpora": corpora,
        "tokenizer": recipe.data.tokenizer,
        "context_length": recipe.model.context_length,
        "micro_batch_size": recipe.micro_batch_sequences,
        "seed": 0,
        **rank,
    }


def _measure(arguments: dict[str, Any], barrier: Any, results: Any, seconds: float) -> None:
    """Measures one rank, and puts its figures or its error into ``results``."""
    arguments["tokenizer"] = load_tokenizer(arguments["tokenizer"])
    try:
        for corpus in arguments["corpora"]:
            assert corpus.fingerprint  # reads the beginning of each file, which training does once
        barrier.wait()
        began = time.perf_counter()
        loader = TokenLoader(**arguments)
        # A process started by multiprocessing joins its workers before `atexit` handlers run.
        with closing(loader):
            next(loader)
            figures = {"first": time.perf_counter() - began}
            figures |= _rate(loader, arguments, seconds, barrier)
        barrier.wait()  # all ranks keep the machine busy until the last has measured
        began = time.perf_counter()
        resumed = TokenLoader(**arguments)
        with closing(resumed):
            resumed.load_state_dict(loader.state_dict())
            next(resumed)
            figures["resumed"] = time.perf_counter() - began
        results.put(figures)
    except (ValueError, OSError, BrokenBarrierError) as error:
        results.put(error)
        barrier.abort()  # the other ranks must not wait for this one


def _rate(loader: TokenLoader, arguments: dict[str, Any], seconds: float, barrier: Any) -> Figures:
    a_batch = arguments["micro_batch_size"] * arguments["context_length"]
    # Use up the prefetched micro-batches: those made before the clock starts must not count.
    for _ in range(16 * arguments["num_workers"]):
        next(loader)
    barrier.wait()
    began, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        next(loader)
        tokens += a_batch
    sizes = [psutil.Process(pid).memory_full_info().uss for pid in loader.worker_pids]
    barrier.wait()
    return {"rate": tokens / elapsed, "memory": statistics.fmean(sizes) / 2**20 if sizes else 0.0}
