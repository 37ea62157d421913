"""Trains inside nanochat's training script, unedited, with its FFN or with ours.

nanochat is no part of this project: clone https://github.com/karpathy/nanochat at 92d63d4 (July
2026). The FFN is exchanged in memory; tokenizer, data loader, attention, optimizer, schedule,
precision and evaluation stay nanochat's own. First data and tokenizer, for which rustbpe must be
installed:

    python benchmarks/nanochat_arena.py CHECKOUT --base DIR --prepare a.parquet b.parquet

then an arm per process, on one GPU:

    python benchmarks/nanochat_arena.py CHECKOUT --base DIR --ffn relu2 --target 5 \\
        --record benchmarks/results.jsonl -- --depth=12 --num-iterations=1000

What follows ``--`` goes to ``scripts.base_train``. Each evaluation is a record of ``val_bpb``. Its
case has two times of training until then, both without evaluations: ``train_seconds``, as nanochat
counts them, without the first ten steps; and ``all_seconds``, with these and all compilation.
"""

import argparse
import importlib.util
import os
import re
import runpy
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from sparsellm import SparseFFN, SparsityController
from sparsellm.bench.record import Measurement, append, row
from sparsellm.ffn.dispatch import Kernels

COMMIT = "92d63d4"  # that this was written for
MOST_TOKENS = 2048  # of a document: longer ones would be cut, and their rest not trained on
ROWS_OF_A_GROUP = 512
DOCUMENTS_OF_A_SHARD = 8_192
VALIDATION_EVERY = 40  # one document in so many
PRINT_EVERY = 50  # steps
FIRST_STEPS = 10  # that nanochat leaves out of its training time
# FlashAttention-3, which sliding windows need, is fetched from the net, as are CORE's tasks.
OFFLINE = ["--window-pattern=L", "--core-metric-every=-1", "--sample-every=-1"]
_STEP = re.compile(r"step (\d+)/\d+ .*\| dt: ([\d.]+)ms \| tok/sec: ([\d,]+)")
_EVALUATION = re.compile(r"Step (\d+) \| Validation bpb: ([\d.]+)")


@dataclass
class Log:
    """What the script prints of its steps."""

    seconds: list[float] = field(default_factory=list)  # of each step
    rates: list[int] = field(default_factory=list)  # tokens/s of each step
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # steps done, bits per byte

    def read(self, line: str) -> None:
        """Takes the numbers of a line."""
        if match := _STEP.match(line):
            self.seconds.append(float(match[2]) / 1000)
            self.rates.append(int(match[3].replace(",", "")))
        elif match := _EVALUATION.match(line):
            self.evaluations.append((int(match[1]), float(match[2])))


class ArenaFFN(SparseFFN):
    """Evaluates in bf16, as nanochat does under ``--fp8``."""

    trains_in_fp8 = False

    def train(self, mode: bool = True) -> Self:
        """As of any module."""
        self.fp8 = mode and self.trains_in_fp8
        return super().train(mode)

    def use_fp8(self) -> None:
        """In training."""
        super().use_fp8()
        self.trains_in_fp8 = True


class Arm:
    """One configuration of the comparison.

    Args:
        options: of the command line.
        fp8: the script computes its linear layers in FP8.
    """

    def __init__(self, options: argparse.Namespace, *, fp8: bool) -> None:
        self.ffn: str = options.ffn
        self.target: float | None = options.target
        self.l1: float = options.l1
        self.kernels: Kernels = options.kernels if self.target else "dense"
        self.pattern_rate: float | None = options.pattern_rate
        self.seed: int = options.seed
        self.fp8 = fp8
        self.precision = "bfloat16"  # of the activations, unless the script says another
        self.controller: SparsityController | None = None

    @property
    def gated(self) -> bool:
        """With a gate, at the parameters of the FFN without one."""
        return self.ffn == "gated-relu"

    def build_ffn(self, linear: Callable[..., nn.Linear], config: Any) -> SparseFFN:
        """Ours, by the names and of the linear class of the script's."""
        width = config.n_embd
        neurons = round(8 * width / 3 / 128) * 128 if self.gated else 4 * width
        return ArenaFFN(
            width,
            neurons,
            activation="relu" if self.gated else "relu2",
            gated=self.gated,
            kernels=self.kernels,
            linear=linear,
            names=("c_gate", "c_fc", "c_proj") if self.gated else ("c_fc", "c_proj"),
        )

    def pattern_weight(self, ffn: Any) -> nn.Parameter:
        """Of the layer that decides which neurons are active, in our FFN or in nanochat's own."""
        weight: nn.Parameter = (ffn.c_gate if self.gated else ffn.c_fc).weight
        return weight

    def control(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Makes the model sparse from here on, if there is a target."""
        if self.target is None:
            return
        ffns = [module for module in model.modules() if isinstance(module, SparseFFN)]
        for ffn in ffns:
            if self.fp8:
                ffn.use_fp8()
        # c_proj is zero at first: only L1 has a gradient in c_fc then, and Muon makes a full update
        # of any gradient.
        self.controller = SparsityController(
            model,
            optimizer,
            target_nnz=ffns[0].intermediate_size * self.target / 100,
            l1_coefficient=self.l1,
            l1_zero_steps=10,
            warmup_steps=40,
            embedding=model.transformer.wte,
            switch_together=True,
        )
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        assert self.controller is not None
        self.controller.step()
        if self.controller.num_steps % PRINT_EVERY:
            return
        numbers = self.controller.statistics()
        assert numbers is not None
        print(
            f"step {numbers.step}: λ {numbers.l1_coefficient[0]:.2e}, active "
            f"{statistics.fmean(numbers.nnz_mean):.0f}, unions "
            f"{[round(union) for union in numbers.union_mean]}, dead "
            f"{statistics.fmean(numbers.dead_fraction):.1%}, {sum(numbers.sparse)} layers sparse",
            flush=True,
        )

    def add_l1(self, module: nn.Module, inputs: object, loss: torch.Tensor) -> torch.Tensor | None:
        """A forward hook of the compiled model."""
        if self.controller is None or not (torch.is_grad_enabled() and loss.requires_grad):
            return None
        return loss + self.controller.l1_loss()

    def case(self) -> dict[str, Any]:
        """What distinguishes its records."""
        return {
            "ffn": self.ffn,
            "target_percent": self.target or 100,
            "precision": "fp8" if self.fp8 else self.precision,
            "seed": self.seed,
            **({"initial_l1": self.l1} if self.target else {}),
            **({"kernels": self.kernels} if self.target and self.kernels != "auto" else {}),
            **({"pattern_rate": self.pattern_rate} if self.pattern_rate else {}),
        }


def install(arm: Arm, log: Log) -> None:
    """Exchanges what an arm needs in nanochat's modules, before its script imports them."""
    from nanochat import common, gpt  # type: ignore[import-not-found]

    arm.precision = str(common.COMPUTE_DTYPE).removeprefix("torch.")
    print_line, begin = common.print0, common.compute_init

    def print_and_read(text: str = "", **options: Any) -> None:
        log.read(text)
        print_line(text, **options)

    def seeded_begin(*arguments: Any) -> Any:
        place = begin(*arguments)
        torch.manual_seed(42 + arm.seed)
        return place

    common.print0, common.compute_init = print_and_read, seeded_begin
    set_up = gpt.GPT.setup_optimizer

    def set_up_and_control(model: Any, **rates: Any) -> Any:
        patterns = {id(arm.pattern_weight(block.mlp)) for block in model.transformer.h}
        build = gpt.MuonAdamW
        if arm.pattern_rate is not None:
            gpt.MuonAdamW = lambda groups: build(list(regrouped(groups, patterns, arm)))
        optimizer = set_up(model, **rates)
        gpt.MuonAdamW = build
        arm.control(model, optimizer)
        return optimizer

    gpt.GPT.setup_optimizer = set_up_and_control
    if arm.ffn != "stock":
        _exchange_ffns(arm, gpt)


def _exchange_ffns(arm: Arm, gpt: Any) -> None:
    initialise, compile_any = gpt.GPT.init_weights, torch.compile

    def initialise_gates_too(model: Any) -> None:
        initialise(model)
        bound = 0.4 * (3 / model.config.n_embd) ** 0.5  # as of c_fc
        for block in model.transformer.h if arm.gated else ():
            nn.init.uniform_(block.mlp.c_gate.weight, -bound, bound)

    def compile_and_add(model: Any = None, **options: Any) -> Any:
        compiled: Any = compile_any(model, **options)
        if isinstance(model, gpt.GPT):
            compiled.register_forward_hook(arm.add_l1)
        return compiled

    gpt.MLP = partial(arm.build_ffn, gpt.Linear)
    gpt.GPT.init_weights = initialise_gates_too
    torch.compile = compile_and_add  # type: ignore[assignment]
    torch._dynamo.config.capture_scalar_outputs = True  # capacities, without another graph


def regrouped(
    groups: list[dict[str, Any]], patterns: set[int], arm: Arm
) -> Iterator[dict[str, Any]]:
    """The optimizer's groups, with the weights that decide the pattern trained by AdamW."""
    moved = []
    for group in groups:
        moved += [p for p in group["params"] if id(p) in patterns]
        remaining = [p for p in group["params"] if id(p) not in patterns]
        if remaining:
            yield {**group, "params": remaining}
    yield {
        "kind": "adamw",
        "params": moved,
        "lr": arm.pattern_rate,
        "betas": (0.8, 0.95),
        "eps": 1e-10,
        "weight_decay": 0.0,
    }


def stand_in(*names: str) -> None:
    """Empty modules for what the script imports and does not use here."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)


def train(checkout: Path, arm: Arm, words: list[str], log: Log) -> None:
    """Runs the script."""
    stand_in("wandb", "rustbpe")
    install(arm, log)
    sys.argv = [str(checkout / "scripts" / "base_train.py"), *OFFLINE, *words]
    runpy.run_module("scripts.base_train", run_name="__main__")


def measurements(arm: Arm, words: list[str], log: Log) -> list[Measurement]:
    """One of each evaluation, and the rate of the last quarter of the steps."""
    arguments = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    case = {
        "depth": int(arguments.get("depth", 20)),
        "iterations": int(arguments.get("num-iterations", -1)),
        "batch_tokens": round(log.rates[-1] * log.seconds[-1] / 64) * 64,
        **arm.case(),
    }
    records = []
    for steps, bits in log.evaluations:
        times = {
            "train_seconds": round(sum(log.seconds[FIRST_STEPS + 1 : steps]), 1),
            "all_seconds": round(sum(log.seconds[:steps]), 1),
        }
        records.append(
            Measurement("arena", {**case, "step": steps, **times}, "val_bpb", bits, "bits/byte")
        )
    last = log.rates[-max(len(log.rates) // 4, 1) :]
    rate = float(statistics.median(last))
    records.append(Measurement("arena", case, "tokens_per_second", rate, "tokens/s"))
    if arm.controller is not None:
        numbers = arm.controller.statistics()
        assert numbers is not None
        nnz = statistics.fmean(numbers.nnz_mean)
        dead = statistics.fmean(numbers.dead_fraction)
        records.append(Measurement("arena", case, "dead_fraction", dead, "fraction"))
        union = statistics.fmean(numbers.union_mean)
        neurons = next(iter(arm.controller.ffns.values())).intermediate_size
        records.append(Measurement("arena", case, "active_percent", 100 * nnz / neurons, "%"))
        records.append(Measurement("arena", case, "union_percent", 100 * union / neurons, "%"))
        share = statistics.fmean(numbers.sparse)
        records.append(Measurement("arena", case, "sparse_layers", 100 * share, "%"))
    return records


def prepare(paths: list[Path], most_bytes: int, words: list[str]) -> None:
    """Writes nanochat's shards from the ``text`` of Parquet files, and trains its tokenizer.

    Documents are split at about 2,048 tokens. One in forty is for validation, which is the last
    shard.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from nanochat.dataset import DATA_DIR  # type: ignore[import-not-found]

    folder = Path(DATA_DIR)
    folder.mkdir(parents=True, exist_ok=True)
    written = 0

    def write(name: str, texts: list[str]) -> int:
        rows = len(texts) // ROWS_OF_A_GROUP * ROWS_OF_A_GROUP or len(texts)
        table = pa.table({"text": texts[:rows]})
        path = folder / f"{name}.parquet"
        pq.write_table(
            table, path, row_group_size=ROWS_OF_A_GROUP, compression="zstd", compression_level=12
        )
        print(f"{path}: {rows:,} documents, {path.stat().st_size / 1e6:.1f} MB", flush=True)
        return path.stat().st_size

    training: list[str] = []
    validation: list[str] = []
    shards = 0
    for number, text in enumerate(documents(paths)):
        (validation if number % VALIDATION_EVERY == 0 else training).append(text)
        if len(training) == DOCUMENTS_OF_A_SHARD:
            written += write(f"shard_{shards:05d}", training)
            training, shards = [], shards + 1
            if written > most_bytes:
                break
    if training:
        write(f"shard_{shards:05d}", training)
    write("shard_99999", validation)
    sys.argv = ["tok_train", *words]
    runpy.run_module("scripts.tok_train", run_name="__main__")


def documents(paths: list[Path]) -> Iterator[str]:
    """The texts, file by file in turn, in pieces that end at a line or a word."""
    import pyarrow.parquet as pq

    most = MOST_TOKENS * 4  # bytes; a token is some four
    readers = [pq.ParquetFile(path).iter_batches(256, columns=["text"]) for path in paths]
    while readers:
        for reader in list(readers):
            batch = next(reader, None)
            if batch is None:
                readers.remove(reader)
                continue
            for text in batch.column("text").to_pylist():
                yield from pieces(text, most)


def pieces(text: str, most: int) -> Iterator[str]:
    """A text in parts of at most so many characters."""
    while len(text) > most:
        end = max(text.rfind("\n", most // 2, most), text.rfind(" ", most // 2, most)) + 1 or most
        yield text[:end]
        text = text[end:]
    if text.strip():
        yield text


def main(words: list[str] | None = None) -> None:
    """Prepares, or trains and records one arm."""
    words = sys.argv[1:] if words is None else words
    split = words.index("--") if "--" in words else len(words)
    arguments, script_arguments = words[:split], words[split + 1 :]
    parser = argparse.ArgumentParser(description="Trains inside nanochat's training script.")
    parser.add_argument("checkout", type=Path, help=f"of nanochat, at {COMMIT}")
    parser.add_argument("--base", type=Path, required=True, help="nanochat's folder of data")
    parser.add_argument("--prepare", type=Path, nargs="+", metavar="PARQUET", help="and exit")
    parser.add_argument("--most-megabytes", type=int, default=10_000, help="of training shards")
    parser.add_argument("--ffn", choices=("stock", "relu2", "gated-relu"), default="stock")
    parser.add_argument("--target", type=float, help="percent of active neurons; else dense")
    parser.add_argument(
        "--l1", type=float, default=2e-4, help="initial L1 coefficient (default: %(default)s)"
    )
    parser.add_argument(
        "--pattern-rate",
        type=float,
        help="train c_fc, or the gate, by AdamW at this rate; c_fc of nanochat's own FFN, too",
    )
    parser.add_argument("--kernels", choices=("auto", "dense", "sparse"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="append to FILE")
    options = parser.parse_args(arguments)
    if options.target is not None and options.ffn == "stock":
        parser.error("--target needs --ffn relu2 or gated-relu: nanochat's own FFN is dense")
    checkout = options.checkout.resolve()
    if not (checkout / "scripts" / "base_train.py").is_file():
        parser.error(f"{checkout} is no checkout of nanochat: it has no scripts/base_train.py")
    os.environ["NANOCHAT_BASE_DIR"] = str(options.base.resolve())
    sys.path.insert(0, str(checkout))
    if options.prepare:
        prepare(
            [p.resolve() for p in options.prepare], options.most_megabytes * 10**6, script_arguments
        )
        return
    arm, log, command = Arm(options, fp8="--fp8" in script_arguments), Log(), sys.argv
    train(checkout, arm, script_arguments, log)
    sys.argv = command
    records = measurements(arm, script_arguments, log)
    for record in records:
        print(row([record]))
    if options.record:
        append(records, options.record)


if __name__ == "__main__":
    main()
