"""Generated tokens per second of whole models: ours against transformers' two ways, on one GPU.

The configurations compute the same weights in bf16, greedily, by ``model.generate``: transformers'
class as it is (eager) and with its static cache, which it compiles (static), and ours. Weights are
random; one column of every gate is fitted so that the asked number of neurons is active for a token
on average. Throughput is that of the tokens after the first. Calls of the configurations alternate;
values are medians.
"""

import argparse
import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel as HFModel

from sparsellm.bench.compare import gpu
from sparsellm.bench.model_forward import MAX_DIFFERENCE
from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import spread
from sparsellm.decoding.sample import Sequences, use_fast_generation
from sparsellm.ffn.inference_path.accelerate import accelerate_whole, restore
from sparsellm.model import model_config, use_sparse_ffn
from sparsellm.recipe import Recipe, load_recipe

_CHECKED_TOKENS = 8  # whose logits are compared
_STATIC = {"cache_implementation": "static"}


def measure(
    options: argparse.Namespace, device: torch.device | None = None
) -> Iterator[list[Measurement]]:
    """Measures every recipe, precision, batch and prompt length that the options name.

    Raises:
        ValueError: there is no GPU, the kernels do not support an FFN, or the results are wrong.
    """
    device = device or gpu(options.benchmark)
    for name in options.recipe:
        recipe = load_recipe(name)
        with torch.no_grad():
            yield from _of_recipe(options, recipe, device)


def _of_recipe(
    options: argparse.Namespace, recipe: Recipe, device: torch.device
) -> Iterator[list[Measurement]]:
    stock = _stock_model(recipe, device)
    nnz = fit_gates(stock, options.nnz, _ids(recipe, 4, 256, device))
    ours = _same_weights(stock)
    for precision in options.precision:
        accelerate_whole(ours, kernels="auto", token_order="auto", precision=precision)
        use_fast_generation(ours)
        unshared = _unshared(ours, stock, device), _unshared(stock, ours, device)
        for prompt in options.prompt:
            for batch in options.batch:
                ids = _ids(recipe, batch, prompt, device)
                # Checked at each length and batch: they run by different kernels.
                difference = _difference(stock, ours, ids)
                if not difference <= MAX_DIFFERENCE[precision]:
                    raise ValueError(
                        f"the logits differ from dense by {difference:.1%}; wrong results are not "
                        "timed"
                    )
                case = {
                    "recipe": recipe.name,
                    "weights": "random, fitted gates",
                    "measured_nnz": nnz,
                    "precision": precision,
                    "batch": batch,
                    "prompt": prompt,
                    "new_tokens": options.new_tokens,
                }
                configurations = {
                    "ours": partial(ours.generate, ids),
                    "static": partial(stock.generate, ids, **_STATIC),
                    "eager": partial(stock.generate, ids),
                }
                _forget_longest_cache(stock)
                timings = _timed(configurations, batch, options, device)
                yield [
                    *_records(case, timings, unshared),
                    Measurement("generation", case, "difference", difference, "relative to dense"),
                ]
        restore(ours)


def _stock_model(recipe: Recipe, device: torch.device) -> HFModel:
    """transformers' own model of a recipe, with random weights in bf16."""
    config = model_config(recipe, recipe.padded_vocab_size - 1)
    config.eos_token_id = None  # all configurations generate as many tokens as they are asked for
    torch.manual_seed(recipe.seed)
    with device:
        model = getattr(transformers, recipe.architecture.model_class)(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False
    stock: HFModel = model.to(device).eval()
    return stock


def _same_weights(stock: HFModel) -> HFModel:
    """Our model, which shares the tensors of another one."""
    with torch.device("meta"):
        model = type(stock)(stock.config)
    model.load_state_dict(stock.state_dict(), assign=True)
    model.tie_weights()
    model.model.rotary_emb = copy.deepcopy(stock.model.rotary_emb)
    model.generation_config = copy.deepcopy(stock.generation_config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    ours: HFModel = use_sparse_ffn(model).eval()
    return ours


def fit_gates(model: HFModel, nnz: float, ids_BT: Tensor) -> float:
    """Shifts every gate so that ``nnz`` neurons are active per token on average; returns the mean.

    The first hidden feature is the same positive number for every token, and no layer changes it;
    its column of the gate is a threshold, layer by layer.
    """
    base = model.model
    base.embed_tokens.weight.normal_()
    base.embed_tokens.weight[:, 0] = 8.0
    active: list[Tensor] = []

    def fit(ffn: Any, arguments: tuple[Tensor, ...]) -> None:
        x_MK = arguments[0].flatten(0, -2)
        first_NK = getattr(ffn, "gate_proj", ffn.up_proj).weight
        first_NK[:, 0] = 0
        z_MN = (x_MK @ first_NK.t()).float()
        num = max(round(nnz * len(x_MK)), 1)
        largest = (z_MN / x_MK[:, :1].float()).flatten().topk(num).values
        first_NK[:, 0] = -largest[-1].to(first_NK.dtype)
        active.append((x_MK @ first_NK.t() > 0).sum() / len(x_MK))

    for layer in base.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    with ExitStack() as hooks:
        for layer in base.layers:
            hooks.enter_context(layer.mlp.register_forward_pre_hook(fit))
        model(ids_BT, use_cache=False)
    return float(torch.stack(active).mean())


def _ids(recipe: Recipe, batch: int, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(recipe.padded_vocab_size, (batch, length), generator=generator).to(device)


def _difference(stock: HFModel, ours: HFModel, ids_BT: Tensor) -> float:
    """Relative difference of the logits of a prompt's last tokens, which ours computes singly."""
    start = ids_BT.shape[1] - _CHECKED_TOKENS
    sequences = Sequences(ours, ids_BT[:, :start], None, ids_BT.shape[1] + 1)
    our_logits = [sequences.prompt_logits()]
    for token_B in ids_BT[:, start:].unbind(1):
        sequences.append(token_B)
        our_logits.append(sequences.step().clone())
    expected = stock(ids_BT, use_cache=False, logits_to_keep=_CHECKED_TOKENS + 1).logits.float()
    error = torch.stack(our_logits, 1).float() - expected
    return float(error.norm() / expected.norm())


def _timed(
    configurations: Mapping[str, Callable[..., Any]],
    batch: int,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """Throughputs, milliseconds of the first token and peak memory of every configuration."""
    timings: dict[str, dict[str, Any]] = {
        name: {"throughputs": [], "first": []} for name in configurations
    }
    for generate in configurations.values():  # compiles
        for num in (1, options.new_tokens + 1):
            _seconds(generate, num, device)
    for name, generate in configurations.items():
        gc.collect()  # so that no side's peak holds another one's memory
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _seconds(generate, options.new_tokens + 1, device)
        timings[name]["peak"] = _peak(device)
    for _ in range(options.repeats):
        for name, generate in configurations.items():
            first = _seconds(generate, 1, device)
            rest = _seconds(generate, options.new_tokens + 1, device) - first
            timings[name]["throughputs"].append(batch * options.new_tokens / rest)
            timings[name]["first"].append(1e3 * first)
    return timings


def _seconds(generate: Callable[..., Any], num_tokens: int, device: torch.device) -> float:
    began = time.perf_counter()
    generate(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _forget_longest_cache(model: HFModel) -> None:
    """transformers makes every static cache as long as the longest of a model's earlier calls."""
    vars(model).pop("_previous_max_cache_length", None)


def _unshared(model: nn.Module, other: nn.Module, device: torch.device) -> int:
    """Bytes on a device that hold parameters and buffers of a model, and none of the other one."""
    held = _storages(other, device).keys()
    sizes = _storages(model, device).items()
    return sum(size for address, size in sizes if address not in held)


def _storages(model: nn.Module, device: torch.device) -> dict[int, int]:
    """Bytes by address."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = [t.untyped_storage() for t in tensors if t.device == device]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _records(
    case: dict[str, Any], timings: dict[str, dict[str, Any]], unshared: tuple[int, int]
) -> list[Measurement]:
    """Ratios are better above 1. ``unshared``: bytes of ours alone, and of stock alone.

    Both models are there while either is measured; its peak is without the other one's bytes.
    """
    records, (of_ours, of_stock) = [], unshared
    for baseline in ("static", "eager"):
        ours, base = timings["ours"], timings[baseline]
        keys = case | {"baseline": baseline}
        throughput, under = spread(ours["throughputs"])
        base_throughput, base_under = spread(base["throughputs"])
        records.append(
            Measurement(
                *("generation", keys, "tokens_per_second", throughput, "tokens/s"),
                *(base_throughput, throughput / base_throughput, under, base_under),
            )
        )
        first, _ = spread(ours["first"])
        base_first, _ = spread(base["first"])
        values = (first, "ms", base_first, base_first / first)
        records.append(Measurement("generation", keys, "first_token_ms", *values))
        peak, base_peak = (ours["peak"] - of_stock) / 2**20, (base["peak"] - of_ours) / 2**20
        ratio = base_peak / peak if peak else None
        records.append(Measurement("generation", keys, "peak_MiB", peak, "MiB", base_peak, ratio))
    return records
