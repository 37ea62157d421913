"""The data loader's rate, the time to its first micro-batch, and the memory of a worker.

The rate is in tokens per second, from shards on disk to micro-batches in this process, as one rank
of a run has it. The time to the first micro-batch is measured for a fresh and a resumed loader.

The rate to exceed: an H100 consumes about 100,000 GPT-2 tokens per second at 0.5B (paper: 97.3 per
millisecond).
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import psutil

from sparsellm.bench.record import Measurement
from sparsellm.data.loader import TokenLoader
from sparsellm.data.text.corpus import load_corpora
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.paths import usable_cores
from sparsellm.recipe import Recipe, load_recipe


def measure(options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """Measures each number of workers: tokens per second, seconds to a micro-batch, memory.

    Raises:
        ValueError, FileNotFoundError: corpus, files or tokenizer do not exist, or one is damaged.
    """
    for workers in options.num_workers:
        recipe = load_recipe(options.recipe, [*options.overrides, f"data.num_workers={workers}"])
        case = {
            "corpus": recipe.data.corpus,
            "tokenizer": recipe.data.tokenizer,
            "context_length": recipe.model.context_length,
            "micro_batch_size": recipe.micro_batch_sequences,
            "num_workers": workers,
            "cores": usable_cores(),
        }
        figures = _figures(recipe, options.seconds)
        yield [Measurement("loader", case, *figure) for figure in figures]


def _figures(recipe: Recipe, seconds: float) -> list[tuple[str, float, str]]:
    """Metric, value and unit of each figure."""
    corpora = load_corpora(recipe.data)
    for corpus in corpora:
        assert corpus.fingerprint  # reads the beginning of each file, which training does once
    batch, length = recipe.micro_batch_sequences, recipe.model.context_length
    workers = recipe.data.num_workers
    new_loader = partial(
        TokenLoader,
        corpora,
        load_tokenizer(recipe.data.tokenizer),
        context_length=length,
        micro_batch_size=batch,
        seed=0,
        rank=0,
        world_size=1,
        num_workers=workers,
    )
    began = time.perf_counter()
    with closing(new_loader()) as loader:
        next(loader)
        first = time.perf_counter() - began
        # Use up the prefetched micro-batches: those made before the clock starts must not count.
        for _ in range(16 * workers):
            next(loader)
        began, tokens = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            next(loader)
            tokens += batch * length
        sizes = [psutil.Process(pid).memory_full_info().uss for pid in loader.worker_pids]
        state = loader.state_dict()
    began = time.perf_counter()
    with closing(new_loader()) as loader:
        loader.load_state_dict(state)
        next(loader)
        resumed = time.perf_counter() - began
    rate = tokens / elapsed
    found = [
        ("throughput", rate, "tokens/s"),
        ("throughput_per_worker", rate / max(workers, 1), "tokens/s"),
        ("first_batch", first, "s"),
        ("first_batch_resumed", resumed, "s"),
    ]
    if sizes:
        found.append(("memory_per_worker", statistics.fmean(sizes) / 2**20, "MiB"))
    return found
