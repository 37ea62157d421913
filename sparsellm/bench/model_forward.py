"""A trained model's whole forward on one GPU: `sparsellm.accelerate` against dense.

Both are compiled block by block, as in training: before torch 2.14 a model compiled as a whole gets
an explicit attention mask, which rules out the fused causal attention. The two alternate in
inference mode, several calls in a row, on the same held-out text, which has as many tokens as a
micro-batch of the recipe. Logits are computed for all positions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsellm.bench import energy, layer_forward, timing
from sparsellm.bench.ffn_forward import SETTLING_CALLS
from sparsellm.bench.ffn_sides import refuse_if_off, relative_difference
from sparsellm.bench.record import Measurement
from sparsellm.data import load_corpora, load_tokenizer, validation_batches
from sparsellm.ffn.accelerate import TokenOrder, accelerate_whole
from sparsellm.model import prepare_blocks
from sparsellm.recipe import Recipe
from sparsellm.recipe_sections import RuntimeConfig
from sparsellm.runs.pretrained import Pretrained, load_pretrained
from sparsellm.runs.records import METRICS_FILE, read_metrics

# Relative norm for the logits. bf16 rounding adds up over layers; a wrong layer differs far more.
MAX_DIFFERENCE = 0.1
# So many that the host cannot launch all of one side's work while the GPU computes the other's.
IN_A_ROW = 4
_TOKENS = 16_384  # of a forward, where `train.micro_batch_size` is ``auto``
# Precise to a few percent with a counter that is updated every 100 ms (a 2B call takes 61 ms).
SECONDS, ENERGY_SECONDS = 2.0, 6.0


def run(
    path: Path,
    recipe: Recipe,
    device: torch.device,
    with_energy: bool,
    *,
    seconds: float = SECONDS,
    layers: bool = False,
    token_order: TokenOrder = "none",
) -> Iterator[list[Measurement]]:
    """Measures one checkpoint; each yielded result is final. Ratios above 1 are better.

    Args:
        path: checkpoint, run or exported folder.
        recipe: determines the text and the number of tokens.
        device: a CUDA device.
        with_energy: whether to measure millijoules per token too.
        seconds: seconds of timing.
        layers: whether to measure every FFN alone too, see `layer_forward`.
        token_order: token order of the accelerated model; FFNs alone are measured in text order.

    Raises:
        ValueError: the kernels do not support an FFN, there is no held-out text, or the results
            are wrong.
    """
    counter = energy.EnergyCounter(device) if with_energy else None
    tokens_BT = held_out(recipe).to(device)
    loaded = {name: load_pretrained(path, device, torch.bfloat16) for name in ("dense", "ours")}
    models = {name: pretrained.model for name, pretrained in loaded.items()}
    inputs = layer_forward.layer_inputs(
        models["dense"], partial(logits, models["dense"], tokens_BT)
    )
    done = accelerate_whole(models["ours"], kernels="auto", token_order=token_order)
    for model in models.values():
        prepare_blocks(model, RuntimeConfig(compile=True))
    calls = {name: partial(logits, model, tokens_BT) for name, model in models.items()}
    num_tokens = tokens_BT.numel()
    case = _case(loaded["dense"], recipe, num_tokens)
    whole = case | ({"token_order": "auto"} if token_order == "auto" else {})
    whole |= {
        "measured_nnz": statistics.fmean(given.nnz for given in inputs),
        "union_64": statistics.fmean(given.union_64 for given in inputs),
    }
    # Under `accelerate` each block has its own graph, in which its dispatch is a constant.
    # torch runs blocks beyond its limit of eight eagerly, and counts earlier checkpoints' blocks.
    torch._dynamo.reset()
    many_graphs = partial(torch._dynamo.config.patch, recompile_limit=2 * len(inputs) + 8)
    with torch.inference_mode(), many_graphs():
        for _ in range(SETTLING_CALLS):
            calls["ours"]()
        difference = relative_difference(calls["ours"](), calls["dense"]())
        refuse_if_off("ours", difference, MAX_DIFFERENCE)
        sides = {name: [call] for name, call in calls.items()}
        ms = timing.ms_of_a_call(sides, timing.in_a_row, IN_A_ROW, seconds)
    ours, dense = (num_tokens / ms[name] for name in ("ours", "dense"))
    sparse = sum("sparse" in paths.values() for paths in done.paths().values())
    rate = Measurement(
        "model_forward", whole, "tokens_per_ms", ours, "tokens/ms", dense, ours / dense
    )
    yield [
        rate,
        Measurement("model_forward", whole, "sparse_layers", sparse, "layers"),
        Measurement("model_forward", whole, "difference", difference, "relative to dense"),
    ]
    if counter is not None:
        wait = partial(torch.cuda.synchronize, device)
        with torch.inference_mode(), many_graphs():
            millijoules = energy.per_call(calls, ms, counter.read, wait, ENERGY_SECONDS)
        mj, base = (millijoules[name] / num_tokens for name in ("ours", "dense"))
        yield [Measurement("model_forward", whole, "mJ_per_token", mj, "mJ", base, base / mj)]
    if layers:
        for one in layer_forward.run(models["dense"], models["ours"], inputs, case, seconds / 4):
            yield [one]


def _case(pretrained: Pretrained, recipe: Recipe, num_tokens: int) -> dict[str, Any]:
    path, model = pretrained.path, pretrained.recipe.model
    is_checkpoint = path.parent.name == "checkpoints"
    return {
        "recipe": recipe.name,
        "run": path.parent.parent.name if is_checkpoint else path.name,
        "step": pretrained.trainer.get("step"),
        "l1_coefficient": last_l1(path, pretrained.recipe),
        "layers": model.num_hidden_layers,
        "K": model.hidden_size,
        "N": model.intermediate_size,
        "gated": pretrained.recipe.ffn.gated,
        "M": num_tokens,
        "context_length": recipe.model.context_length,
    }


def last_l1(path: Path, recipe: Recipe) -> float:
    """λ at the end of a checkpoint's run, from its records, since a target or a ramp changes it."""
    run_path = path.parent.parent
    if not (run_path / METRICS_FILE).is_file():
        return recipe.sparsity.l1_coefficient
    train = [record for record in read_metrics(run_path) if record["kind"] == "train"]
    return float(train[-1]["l1_coefficient"]) if train else recipe.sparsity.l1_coefficient


def held_out(recipe: Recipe) -> Tensor:
    """A micro-batch of the recipe's validation text: tokens_BT, int64.

    Where its size is ``auto``, 16,384 tokens.

    Raises:
        ValueError: there is not enough text.
    """
    data, size = recipe.data, recipe.micro_batch_sequences
    if recipe.train.micro_batch_size == "auto":
        size = max(_TOKENS // recipe.model.context_length, 1)
    corpus = load_corpora(**data.sources())[0]
    batches = validation_batches(
        corpus,
        load_tokenizer(data.tokenizer),
        context_length=recipe.model.context_length,
        micro_batch_size=size,
        num_tokens=size * recipe.model.context_length,
        rank=0,
        world_size=1,
    )
    tokens_BT1 = next(batches)
    if len(tokens_BT1) < size:
        raise ValueError(
            f"the forward needs {size} sequences of held-out text and there are {len(tokens_BT1)}: "
            "give a smaller train.micro_batch_size, or more data.validation_files"
        )
    return tokens_BT1[:, :-1]


def logits(model: Callable[..., Any], tokens_BT: Tensor) -> Tensor:
    """Logits of all positions, (B, T, vocabulary)."""
    found: Tensor = model(tokens_BT, use_cache=False).logits
    return found
