"""Trains a mixture of experts beside the sweep `frontier`: what its reader would ask for.

    python benchmarks/mixture_of_experts.py --experts 32 --active 8 --set train.steps=450 \\
        --record benchmarks/results.jsonl

The blocks are Mixtral's of stock transformers: a router, experts with SiLU that are multiplied by
grouped matrix products, and the usual loss that balances them. Everything else is that of the
recipe's own runs: tokens, held-out text, optimizer, schedule, loss, compiled blocks. So loss and
time can be compared. The experts together have ``model.intermediate_size`` neurons.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.func import functional_call
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from sparsellm.bench.record import Measurement, append, row
from sparsellm.data.held_out import validation_batches
from sparsellm.data.loader import TokenLoader
from sparsellm.data.text.corpus import load_corpora
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.ffn.kernels.compiler.compile import compile_seconds
from sparsellm.recipe import Recipe, load_recipe
from sparsellm.training.objective import build_loss
from sparsellm.training.optimization.optimizer import build_optimizer
from sparsellm.training.optimization.schedule import is_due, learning_rate
from sparsellm.training.run import build_accelerator
from sparsellm.training.validation import ValidationSet

BALANCE = 0.01  # weight of the loss that balances experts (Switch Transformer, arXiv 2101.03961)


class Sums(NamedTuple):
    """Of one micro-batch."""

    cross_entropy_sum: Tensor  # () fp32, nats
    balance: Tensor  # () fp32, 1 where all experts are chosen equally often


class MoEObjective(nn.Module):
    """The model with its loss; called as `sparsellm.training.objective.Objective` is."""

    def __init__(self, recipe: Recipe, experts: int, active: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = MixtralForCausalLM(moe_config(recipe, experts, active)).float()
        self.loss_function = build_loss(recipe.runtime)
        self.block = torch.compile(moe_block) if recipe.runtime.compile else moe_block

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Sums:
        """int64 token ids."""
        backbone = self.model.model
        x_BTC = backbone.embed_tokens(inputs_BT)
        if torch.is_autocast_enabled(x_BTC.device.type):
            x_BTC = x_BTC.to(torch.get_autocast_dtype(x_BTC.device.type))
        position_ids = torch.arange(x_BTC.shape[1], device=x_BTC.device)[None]
        rotary = backbone.rotary_emb(x_BTC, position_ids)
        router_logits = []
        for layer in backbone.layers:
            x_BTC, logits_ME = self.block(layer, x_BTC, rotary)
            router_logits.append(logits_ME)
        config = backbone.config
        balance = load_balancing_loss_func(
            tuple(router_logits), config.num_local_experts, config.num_experts_per_tok
        )
        head = (backbone.norm, x_BTC.flatten(0, 1), self.model.lm_head)
        return Sums(self.loss_function(*head, targets_BT.flatten()), balance)


def moe_config(recipe: Recipe, experts: int, active: int) -> MixtralConfig:
    """The recipe's shape, with its neurons shared out among the experts.

    Raises:
        ValueError: they cannot be.
    """
    shape = recipe.model
    if shape.intermediate_size % experts or not 0 < active <= experts:
        raise ValueError(
            f"model.intermediate_size {shape.intermediate_size} must be a multiple of --experts "
            f"{experts}, and --active {active} at most as many"
        )
    return MixtralConfig(
        vocab_size=recipe.padded_vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size // experts,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        max_position_embeddings=shape.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.rms_norm_eps,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=shape.tie_word_embeddings,
        num_local_experts=experts,
        num_experts_per_tok=active,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )


def moe_block(layer: Any, x_BTC: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One block of the model, and its router's logits (tokens, experts)."""
    attended, _ = layer.self_attn(
        layer.input_layernorm(x_BTC), position_embeddings=rotary, attention_mask=None
    )
    x_BTC = x_BTC + attended
    x_MC = layer.post_attention_layernorm(x_BTC).flatten(0, 1)
    logits_ME, weights_MA, index_MA = layer.mlp.gate(x_MC)
    # Autocast does not cover grouped products, and its norms return fp32.
    x_MC = x_MC.to(x_BTC.dtype)
    weights = {name: p.to(x_BTC.dtype) for name, p in layer.mlp.experts.named_parameters()}
    y_MC = functional_call(layer.mlp.experts, weights, (x_MC, index_MA, weights_MA))
    return x_BTC + y_MC.view_as(x_BTC), logits_ME


class Trained(NamedTuple):
    """After a step."""

    step: int
    gpu_seconds: float  # of training until then, without compilation and validation
    validation_loss: float


def train(recipe: Recipe, experts: int, active: int) -> list[Trained]:
    """Trains on one device; what it was at each validation."""
    torch.set_float32_matmul_precision("high")
    accelerator = build_accelerator(recipe)
    device, size = accelerator.device, recipe.train.micro_batch_size
    assert isinstance(size, int), "train.micro_batch_size: a number"
    corpora, tokenizer = (
        load_corpora(recipe.data),
        load_tokenizer(recipe.data.tokenizer),
    )
    shape = {"context_length": recipe.model.context_length, "micro_batch_size": size}
    shape |= {"rank": 0, "world_size": 1}
    held_out = ValidationSet(
        validation_batches(corpora[0], tokenizer, **shape, num_tokens=recipe.validation.tokens),
        size,
        device,
    )
    objective = MoEObjective(recipe, experts, active).to(device)
    optimizer = build_optimizer(objective, recipe)
    rounds = recipe.accumulation_steps(1)
    validations, seconds = [], 0.0
    workers = recipe.data.num_workers
    loader = TokenLoader(corpora, tokenizer, **shape, seed=recipe.seed, num_workers=workers)
    began, compiled = time.perf_counter(), compile_seconds()
    for step in range(1, recipe.train.steps + 1):
        for _ in range(rounds):
            _backward(accelerator, objective, next(loader).to(device), recipe, rounds)
        nn.utils.clip_grad_norm_(objective.parameters(), recipe.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe.optimizer, step - 1, recipe.train.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if is_due(step, recipe.validation.every_steps) or step == recipe.train.steps:
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds += time.perf_counter() - began - (compile_seconds() - compiled)
            validations.append(Trained(step, seconds, held_out.loss(objective, accelerator)[0]))
            loss = validations[-1].validation_loss
            print(f"step {step}: {loss:.4f} after {seconds:.1f} s", flush=True)
            began, compiled = time.perf_counter(), compile_seconds()
    loader.close()
    return validations


def _backward(
    accelerator: Accelerator, objective: nn.Module, tokens_BT1: Tensor, recipe: Recipe, rounds: int
) -> None:
    with accelerator.autocast():
        sums = objective(tokens_BT1[:, :-1], tokens_BT1[:, 1:])
    loss = sums.cross_entropy_sum / recipe.train.global_batch_tokens
    (loss + BALANCE / rounds * sums.balance).backward()


def main(words: list[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Trains a mixture of experts.")
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--active", type=int, default=8, help="of the experts, per token")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append to FILE")
    options = parser.parse_args(words)
    recipe = load_recipe(options.recipe, options.set)
    rate = recipe.optimizer.learning_rate
    case = {
        "run": f"moe-{options.active}-of-{options.experts}-{rate:g}-seed{recipe.seed}",
        "layers": recipe.model.num_hidden_layers,
        "hidden_size": recipe.model.hidden_size,
        "intermediate_size": recipe.model.intermediate_size,
        "experts": options.experts,
        "active_experts": options.active,
        "learning_rate": rate,
        "activation": "silu",
        "gated": True,
        "l1_coefficient": 0.0,
        "target_nnz": None,
        "precision": recipe.runtime.precision,
        "seed": recipe.seed,
    }
    figures = []
    for at in train(recipe, options.experts, options.active):
        at_step = case | {"step": at.step, "tokens": at.step * recipe.train.global_batch_tokens}
        unit = "s of training until then, of all GPUs"
        figures += [
            Measurement(
                "sweep_frontier", at_step, "validation_loss", at.validation_loss, "nats per token"
            ),
            Measurement("sweep_frontier", at_step, "gpu_seconds", at.gpu_seconds, unit),
        ]
    print(row(figures[-2:]))
    if options.record:
        append(figures, options.record)


if __name__ == "__main__":
    main()
