"""A trained model's whole forward on one GPU, and each FFN alone: accelerated against dense.

Both are compiled block by block, as in training: before torch 2.14 a model compiled as a whole gets
an explicit attention mask, which rules out the fused causal attention. They compute in inference
mode, on the same held-out text, which has as many tokens as a micro-batch of the recipe. Logits are
computed for all positions. With ``--layers`` each FFN is measured on the input that it has in the
model: real patterns.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsellm.analyze.activity import held_out_corpora, held_out_tokens, watch_ffns
from sparsellm.bench.compare import compare, gpu
from sparsellm.bench.ffn_run import dense, dense_weights
from sparsellm.bench.patterns import describe
from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import Configuration
from sparsellm.ffn.inference_path.accelerate import accelerate_whole
from sparsellm.model import HFModel, prepare_blocks
from sparsellm.recipe import Recipe
from sparsellm.recipe.sections import RuntimeConfig
from sparsellm.runs.history import records_of, run_of
from sparsellm.runs.huggingface.find import find_checkpoint
from sparsellm.runs.huggingface.pretrained import Pretrained, load_pretrained
from sparsellm.runs.huggingface.recipe_of import load_recipe_of
from sparsellm.runs.telemetry.records import of_kind

# Relative norms for the logits. Rounding adds up over layers; a wrong layer differs far more.
MAX_DIFFERENCE = {"model": 0.1, "fp8": 0.25}
MAX_LAYER_DIFFERENCE = {"model": 0.02, "fp8": 0.1}
_TOKENS = 16_384  # of a forward, where `train.micro_batch_size` is ``auto``


class LayerInput(NamedTuple):
    """The input of an FFN, and the keys of its pattern in a record."""

    x_MK: Tensor
    pattern: dict[str, float]


def measure(
    options: argparse.Namespace, device: torch.device | None = None
) -> Iterator[list[Measurement]]:
    """Measures every checkpoint that the options name; each yielded result is final.

    Raises:
        ValueError: there is no GPU, the kernels do not support an FFN, there is not enough held-out
            text, or the results are wrong.
    """
    device = device or gpu(options.benchmark)
    for path in map(find_checkpoint, options.checkpoints):
        recipe = load_recipe_of(path)
        if not recipe.activation.kernels:
            print(f"skipped: {path}: no kernels compute {recipe.ffn.activation}", flush=True)
            continue
        if options.sequences:
            recipe = recipe.with_micro_batch(options.sequences)
        yield from _of_checkpoint(options, path, recipe, device)


def _of_checkpoint(
    options: argparse.Namespace, path: Path, recipe: Recipe, device: torch.device
) -> Iterator[list[Measurement]]:
    loaded = {name: load_pretrained(path, device, torch.bfloat16) for name in ("dense", "ours")}
    tokens_BT = held_out(loaded["dense"], recipe, options.data).to(device)
    models = {name: pretrained.model for name, pretrained in loaded.items()}
    # Before anything is replaced or compiled: the hooks need the plain model.
    layer_inputs = _layer_inputs(models["dense"], tokens_BT)
    precision, case = options.precision, _case(loaded["dense"], recipe, tokens_BT.numel())
    if precision != "model":
        case["precision"] = precision
    done = accelerate_whole(models["ours"], kernels="auto", token_order="auto", precision=precision)
    for model in models.values():
        prepare_blocks(model, RuntimeConfig(compile=True))
    calls = {name: partial(logits, model, tokens_BT) for name, model in models.items()}
    timing_options: dict[str, Any] = {
        "tokens": case["M"],
        "device": device,
        "seconds": options.seconds,
    }
    means = {
        key: statistics.fmean(pattern[key] for _, pattern in layer_inputs)
        for key in ("measured_nnz", "union_64")
    }
    # Under `accelerate` each block has its own graph, in which its dispatch is a constant.
    # torch runs blocks beyond its limit of eight eagerly, and counts earlier checkpoints' blocks.
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2 * len(layer_inputs) + 8):
        measurements = compare(
            "model_forward",
            case | {"token_order": "auto"} | means,
            *(Configuration({"forward": calls[name]}) for name in ("dense", "ours")),
            results=lambda: [("ours", calls["ours"](), calls["dense"]())],
            most_off=MAX_DIFFERENCE[precision],
            as_throughput=True,
            **timing_options,
        )
    sparse = sum("sparse" in paths.values() for paths in done.paths().values())
    whole = measurements[0].case
    yield [*measurements, Measurement("model_forward", whole, "sparse_layers", sparse, "layers")]
    if options.layers:
        yield from _of_layers(models, layer_inputs, case, precision, timing_options)


def _layer_inputs(model: HFModel, tokens_BT: Tensor) -> list[LayerInput]:
    """What each layer's FFN computes in a forward pass over these tokens."""
    layer_inputs: list[LayerInput] = []

    def keep(layer: int, x_MK: Tensor, w_NK: Tensor) -> None:
        nnz, union_64 = describe(x_MK, w_NK)
        layer_inputs.append(LayerInput(x_MK, {"measured_nnz": nnz, "union_64": union_64}))

    with watch_ffns(model, keep), torch.inference_mode():
        logits(model, tokens_BT)
    return layer_inputs


def _of_layers(
    models: dict[str, HFModel],
    layer_inputs: list[LayerInput],
    case: dict[str, Any],
    precision: str,
    timing_options: dict[str, Any],
) -> Iterator[list[Measurement]]:
    """Each FFN alone, on the input that it has in the model."""
    compiled = torch.compile(dense)
    for number, (x_MK, pattern) in enumerate(layer_inputs):
        ffn, accelerated = (models[name].model.layers[number].mlp for name in ("dense", "ours"))
        arguments = (x_MK, *dense_weights(ffn), ffn.activation)
        yield compare(
            "layer_forward",
            case | {"layer": number} | pattern,
            Configuration({"forward": partial(compiled, *arguments)}),
            Configuration({"forward": partial(accelerated, x_MK)}),
            results=partial(_layer_result, accelerated, arguments),
            most_off=MAX_LAYER_DIFFERENCE[precision],
            **timing_options,
        )


def _layer_result(accelerated: nn.Module, arguments: Any) -> list[tuple[str, Tensor, Tensor]]:
    return [("ours", accelerated(arguments[0]), dense(*arguments))]


def _case(pretrained: Pretrained, recipe: Recipe, num_tokens: int) -> dict[str, Any]:
    path, model = pretrained.path, pretrained.recipe.model
    return {
        "recipe": recipe.name,
        "run": (run_of(path) or path).name,
        "step": pretrained.trainer.get("step"),
        "l1_coefficient": last_l1(path, pretrained),
        "layers": model.num_hidden_layers,
        "K": model.hidden_size,
        "N": model.intermediate_size,
        "gated": pretrained.recipe.ffn.gated,
        "M": num_tokens,
        "context_length": recipe.model.context_length,
    }


def last_l1(path: Path, pretrained: Pretrained) -> float:
    """λ at a checkpoint's step, from its run's records, since a target or a ramp changes it."""
    records = records_of(path, pretrained.trainer["step"])
    until = [line["l1_coefficient"] for line in of_kind(records, "train")]
    return float(until[-1]) if until else pretrained.recipe.sparsity.l1_coefficient


def held_out(pretrained: Pretrained, recipe: Recipe, files: list[str] | None = None) -> Tensor:
    """A micro-batch of these files or of the recipe's validation text: tokens_BT, int64.

    If the recipe's size is ``auto``, it has 16,384 tokens.

    Raises:
        ValueError: there is not enough text.
    """
    length, size = recipe.model.context_length, recipe.micro_batch_sequences
    if recipe.train.micro_batch_size == "auto":
        size = max(_TOKENS // length, 1)
    corpora = held_out_corpora(recipe, files)
    tokens_BT = next(held_out_tokens(pretrained, corpora, size * length, size))
    if len(tokens_BT) < size:
        raise ValueError(
            f"the forward needs {size} sequences of held-out text and there are {len(tokens_BT)}: "
            "give a smaller train.micro_batch_size, or more data.validation_files"
        )
    return tokens_BT


def logits(model: Callable[..., Any], tokens_BT: Tensor) -> Tensor:
    """Logits of all positions, (B, T, vocabulary)."""
    logits_BTV: Tensor = model(tokens_BT, use_cache=False).logits
    return logits_BTV
