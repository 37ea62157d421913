"""Trains a mixture of experts beside the recipe's own models: what its reader would ask for.

    python benchmarks/mixture_of_experts.py --recipe small --experts 32 --active 8 --seeds 0 1 \\
        --set optimizer.name=muon --set optimizer.learning_rate=4e-3 --set train.steps=450 \\
        --set optimizer.gate_learning_rate=2.5e-4 --set model.intermediate_size=11264 \\
        --record benchmarks/results.jsonl

The blocks are Mixtral's of stock transformers (moe_model.py): a router, experts with SiLU that are
multiplied by grouped matrix products, and the usual loss that balances them. Everything else is
that of the recipe's own runs: tokens, held-out text, optimizer, schedule, loss, compiled blocks. So
loss and time can be compared. The experts together have ``model.intermediate_size`` neurons.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from moe_model import Mixture, MoEObjective, build_moe_optimizer
from sparsellm.arguments import positive_int
from sparsellm.bench.record import Measurement, append, row
from sparsellm.data.held_out import validation_batches
from sparsellm.data.loader import TokenLoader
from sparsellm.data.text.corpus import load_corpora
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.device import check_fp8
from sparsellm.ffn.kernels.compiler.compile import compile_seconds
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.training.optimization.schedule import is_due, learning_rate
from sparsellm.training.run import build_accelerator
from sparsellm.training.validation import ValidationSet


class Trained(NamedTuple):
    """After a step."""

    step: int
    gpu_seconds: float  # of training until then, without compilation and validation
    validation_loss: float
    busiest_share: float  # see `MoEObjective.busiest_share`


def train(recipe: Recipe, mixture: Mixture) -> list[Trained]:
    """Trains on one device; what it was at each validation."""
    torch.set_float32_matmul_precision("high")
    accelerator = build_accelerator(recipe)
    device, size = accelerator.device, recipe.train.micro_batch_size
    if not isinstance(size, int):
        raise ValueError("train.micro_batch_size: a mixture of experts needs a number")
    if recipe.runtime.precision == "fp8":
        check_fp8("runtime.precision", device)
        print(
            f"FP8 for attention and head; experts in bf16, since torch {torch.__version__} offers "
            "no grouped product in FP8 with a derivative"
        )
    corpora, tokenizer = load_corpora(recipe.data), load_tokenizer(recipe.data.tokenizer)
    shape = {"context_length": recipe.model.context_length, "micro_batch_size": size}
    shape |= {"rank": 0, "world_size": 1}
    held_out = ValidationSet(
        validation_batches(corpora[0], tokenizer, **shape, num_tokens=recipe.validation.tokens),
        size,
        device,
    )
    objective = MoEObjective(recipe, mixture).to(device)
    optimizer, expert_matrices = build_moe_optimizer(objective, recipe, mixture)
    rounds = recipe.accumulation_steps(1)
    validations, seconds = [], 0.0
    workers = recipe.data.num_workers
    loader = TokenLoader(corpora, tokenizer, **shape, seed=recipe.seed, num_workers=workers)
    began, compiled = time.perf_counter(), compile_seconds()
    for step in range(1, recipe.train.steps + 1):
        for _ in range(rounds):
            tokens_BT1 = next(loader).to(device)
            _backward(accelerator, objective, tokens_BT1, recipe, mixture.balance / rounds)
        nn.utils.clip_grad_norm_(objective.parameters(), recipe.optimizer.clip_norm)
        for group in optimizer.param_groups:
            rate = learning_rate(recipe.optimizer, step - 1, recipe.train.steps)
            group["lr"] = rate * group.get("lr_scale", 1.0)
        expert_matrices.take_gradients()
        optimizer.step()
        objective.zero_grad(set_to_none=True)
        if is_due(step, recipe.validation.every_steps) or step == recipe.train.steps:
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds += time.perf_counter() - began - (compile_seconds() - compiled)
            loss, _ = held_out.loss(objective, accelerator)
            validations.append(Trained(step, seconds, loss, objective.busiest_share()))
            print(f"step {step}: {loss:.4f} after {seconds:.1f} s", flush=True)
            began, compiled = time.perf_counter(), compile_seconds()
    loader.close()
    return validations


def _backward(
    accelerator: Accelerator,
    objective: nn.Module,
    tokens_BT1: Tensor,
    recipe: Recipe,
    balance: float,
) -> None:
    with accelerator.autocast():
        sums = objective(tokens_BT1[:, :-1], tokens_BT1[:, 1:])
    loss = sums.cross_entropy_sum / recipe.train.global_batch_tokens
    (loss + balance * sums.balance).backward()


def figures(recipe: Recipe, mixture: Mixture, bench: str) -> list[Measurement]:
    """Trains, and returns what is recorded of it."""
    optimizer, rate = recipe.optimizer, recipe.optimizer.learning_rate
    case: dict[str, Any] = {
        "layers": recipe.model.num_hidden_layers,
        "hidden_size": recipe.model.hidden_size,
        "intermediate_size": recipe.model.intermediate_size,
        "experts": mixture.experts,
        "active_experts": mixture.active,
        "balance": mixture.balance,
        "learning_rate": rate,
        "activation": "silu",
        "gated": True,
        "l1_coefficient": 0.0,
        "target_nnz": None,
        "precision": recipe.runtime.precision,
        "seed": recipe.seed,
    }
    words = ["moe", f"{mixture.active}-of-{mixture.experts}"]
    if optimizer.name != "adamw":
        case["optimizer"] = optimizer.name
        words.append(optimizer.name)
    words.append(f"{rate:g}")
    if optimizer.name != "adamw" and recipe.gates_by_adamw:
        case["gate_learning_rate"] = optimizer.gate_peak
        words.append(f"gates-{optimizer.gate_peak:g}")
    if optimizer.normalize_neurons:
        case["normalize_neurons"] = True
        words.append("normalized")
    if mixture.router_learning_rate is not None:
        case["router_learning_rate"] = mixture.router_learning_rate
        words.append(f"router-{mixture.router_learning_rate:g}")
    case["run"] = "-".join([*words, f"seed{recipe.seed}"])
    measurements = []
    for at in train(recipe, mixture):
        at_step = case | {"step": at.step, "tokens": at.step * recipe.train.global_batch_tokens}
        for metric, value, unit in (
            ("validation_loss", at.validation_loss, "nats per token"),
            ("gpu_seconds", at.gpu_seconds, "s of training until then, of all GPUs"),
            ("busiest_share", at.busiest_share, "of tokens chose the most used expert, mean over "
             "layers"),
        ):  # fmt: skip
            measurements.append(Measurement(bench, at_step, metric, value, unit))
    return measurements


def main(words: list[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Trains a mixture of experts.")
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED")
    parser.add_argument("--experts", type=positive_int, default=32)
    parser.add_argument("--active", type=positive_int, default=8, help="of the experts, per token")
    text = "weight of the balancing loss (default: 0.01)"
    parser.add_argument("--balance", type=float, default=0.01, help=text)
    text = "peak learning rate of the routers (default: that of the gates)"
    parser.add_argument("--router-learning-rate", type=float, help=text)
    text = "how transformers multiplies experts (default: grouped_mm)"
    parser.add_argument("--implementation", default="grouped_mm", help=text)
    text = "sweep beside which the runs are recorded (default: fair-small)"
    parser.add_argument("--sweep", default="fair-small", help=text)
    parser.add_argument("--record", type=Path, metavar="FILE", help="append to FILE")
    options = parser.parse_args(words)
    mixture = Mixture(
        options.experts,
        options.active,
        options.balance,
        options.router_learning_rate,
        options.implementation,
    )
    for seed in options.seeds:
        recipe = load_recipe(options.recipe, [*options.set, f"seed={seed}"])
        measurements = figures(recipe, mixture, f"sweep_{options.sweep}")
        print(row(measurements[-3:]))
        if options.record:
            append(measurements, options.record)


if __name__ == "__main__":
    main()
