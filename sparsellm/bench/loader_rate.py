"""The data loader's rate, the time to its first micro-batch, and the memory of a worker.

The rate is in tokens per second, from shards on disk to micro-batches in this process. The time to
the first micro-batch is measured for a fresh and for a resumed loader.

The rate to exceed: eight H100s consume about 780,000 GPT-2 tokens per second at 0.5B (paper: 97.3
per millisecond each); the loader should deliver ten times that on the 16 cores of one GPU machine.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from contextlib import closing
from threading import BrokenBarrierError
from typing import Any

import psutil

from sparsellm.bench.record import Measurement
from sparsellm.cores import usable_cores
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
    resume_after: int = 0,
) -> list[Measurement]:
    """Measures ``num_ranks`` processes at once, each with ``num_workers``, for ``seconds``.

    Args:
        corpus, files, tokenizer, num_workers, context_length, micro_batch_size: as for training.
        num_ranks: processes.
        seconds: how long the rate is measured.
        resume_after: tokens of all ranks after which the loader is resumed; 0: at the end.

    Returns:
        tokens/s of all ranks together and of one worker, seconds until the slowest rank has its
        first micro-batch, fresh and resumed, and the private memory of a worker in MiB.

    Raises:
        ValueError, FileNotFoundError: corpus, files or tokenizer do not exist, or a rank failed.
    """
    if num_workers < 0:
        raise ValueError(f"--num-workers {num_workers}: give 0 (ranks tokenise themselves) or more")
    found = load_corpora(corpus, files=files or None)
    load_tokenizer(tokenizer)
    case: Options = {
        "corpus": corpus,
        "tokenizer": tokenizer,
        "context_length": context_length,
        "micro_batch_size": micro_batch_size,
        "num_workers": num_workers,
        "num_ranks": num_ranks,
    }
    if resume_after:
        case["resume_after"] = resume_after
    ranks = _run_ranks(case | {"resume_after": resume_after}, found, seconds)
    case["cores"] = usable_cores()
    rate = sum(rank["rate"] for rank in ranks)
    figures = [
        ("throughput", rate, "tokens/s"),
        ("throughput_per_worker", rate / (num_ranks * max(num_workers, 1)), "tokens/s"),
        ("first_batch", max(rank["first"] for rank in ranks), "s"),
        ("first_batch_resumed", max(rank["resumed"] for rank in ranks), "s"),
    ]
    if num_workers:
        memory = statistics.fmean(rank["memory"] for rank in ranks)
        figures.append(("memory_per_worker", memory, "MiB"))
    return [Measurement("loader", case, *figure) for figure in figures]


def _run_ranks(
    options: Options, corpora: tuple[Corpus, ...], seconds: float
) -> list[dict[str, float]]:
    num_ranks = options["num_ranks"]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    barrier = context.Barrier(num_ranks)
    ranks = [
        context.Process(target=_measure, args=(options, corpora, rank, seconds, barrier, results))
        for rank in range(num_ranks)
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


def _measure(  # noqa: PLR0917 - multiprocessing passes them by position
    options: Options,
    corpora: tuple[Corpus, ...],
    rank: int,
    seconds: float,
    barrier: Any,
    results: Any,
) -> None:
    """Measures one rank, and puts its figures or its error into ``results``."""
    tokenizer = load_tokenizer(options["tokenizer"])

    def build() -> TokenLoader:
        return TokenLoader(
            corpora,
            tokenizer,
            context_length=options["context_length"],
            micro_batch_size=options["micro_batch_size"],
            seed=0,
            rank=rank,
            world_size=options["num_ranks"],
            num_workers=options["num_workers"],
        )

    try:
        for corpus in corpora:
            assert corpus.fingerprint  # reads the beginning of each file, which training does once
        barrier.wait()
        began = time.perf_counter()
        loader = build()
        # A process started by multiprocessing joins its workers before `atexit` handlers run.
        with closing(loader):
            next(loader)
            figures = {"first": time.perf_counter() - began}
            figures |= _rate(loader, options, seconds, barrier)
        barrier.wait()  # all ranks keep the machine busy until the last has measured
        began = time.perf_counter()
        resumed = build()
        with closing(resumed):
            resumed.load_state_dict(loader.state_dict())
            next(resumed)
            figures["resumed"] = time.perf_counter() - began
        results.put(figures)
    except (ValueError, OSError, BrokenBarrierError) as error:
        results.put(error)
        barrier.abort()  # the other ranks must not wait for this one


def _rate(loader: TokenLoader, options: Options, seconds: float, barrier: Any) -> dict[str, float]:
    a_batch = options["micro_batch_size"] * options["context_length"]
    # Use up the prefetched micro-batches: those made before the clock starts must not count.
    for _ in range(16 * options["num_workers"]):
        next(loader)
    barrier.wait()
    began, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        next(loader)
        tokens += a_batch
    sizes = [psutil.Process(pid).memory_full_info().uss for pid in loader.worker_pids]
    barrier.wait()
    while sum(loader.tokens().values()) < options["resume_after"]:
        for _ in range(64):
            next(loader)
    barrier.wait()
    return {"rate": tokens / elapsed, "memory": statistics.fmean(sizes) / 2**20 if sizes else 0.0}
