"""How exact the sums in FP8 products of a trained model are, with and without fast accumulation.

    python benchmarks/fp8_sums.py runs/pilot --record benchmarks/results.jsonl

A forward and backward pass over held-out text gives the real inputs of every FP8 product: outputs,
and gradients of inputs. Each is compared with the sum of the same e4m3 products in fp64, so that
neither quantisation nor weights count, by kind of layer over all layers:

- ``mean``: the mean error over the mean magnitude;
- ``bias``: the same, with errors counted in the direction of the exact value: below 0 it is too
  small;
- ``rms``: the norm of the errors over that of the exact values.

Results are in bf16, as in training; ``rounded`` is the exact sum in bf16. ``gate_kernel`` are the
gates that the sparse path computes, where they are active. ``loss`` is that of the same held-out
text in FP8, with dense FFNs; there ``rounded`` has sums in fp32. The baseline of fast accumulation
is the figure without it.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.analyze.activity import held_out_corpora, held_out_tokens
from sparsellm.arguments import positive_int
from sparsellm.bench.record import Measurement, append, row
from sparsellm.device import check_fp8, pick_device
from sparsellm.ffn import shared_linear
from sparsellm.ffn.formats import pack_twell
from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.quantised import QuantisedRows, dequantised, fp32_product, scaled_product
from sparsellm.ffn.shared_linear import SharedLinear
from sparsellm.ffn.step_shared import Fills
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import FFNWeights
from sparsellm.model import prepare_blocks
from sparsellm.recipe.sections import RuntimeConfig
from sparsellm.runs.huggingface.find import find_checkpoint
from sparsellm.runs.huggingface.pretrained import Pretrained, load_pretrained
from sparsellm.training.objective import IGNORED_TARGET, LossSums, Objective

Product = Callable[[QuantisedRows, QuantisedRows, torch.dtype], Tensor]

RUNTIME = RuntimeConfig(precision="fp8", compile=False, token_order="none")


def _rounded_product(x: QuantisedRows, w: QuantisedRows, dtype: torch.dtype) -> Tensor:
    return fp32_product(dequantised(x), w, dtype)


ACCUMULATIONS: dict[str, Product] = {
    "plain": partial(scaled_product, fast_accumulation=False),
    "fast": scaled_product,
    "rounded": _rounded_product,
}
ROWS = 1024  # compared at once, in fp64


class Key(NamedTuple):
    """Which products are counted together."""

    layer: str  # such as ``down_proj``
    result: str  # ``output``, or ``gradient`` of the input
    accumulation: str


class Errors:
    """Sums over the entries of products, on their device."""

    def __init__(self) -> None:
        self.terms = 0  # of each sum, K
        self._sums: Tensor | float = 0.0

    def add(self, actual: Tensor, exact: Tensor, terms: int) -> None:
        """Counts entries, if there are any; ``exact`` is fp64."""
        if not actual.numel():
            return
        error = actual.double() - exact
        signed = error * exact.sign()
        sums = (error, signed, exact.abs(), error.square(), exact.square())
        self.terms, self._sums = terms, self._sums + torch.stack([part.sum() for part in sums])

    def figures(self) -> dict[str, float]:
        """By metric."""
        assert isinstance(self._sums, Tensor)
        error, signed, magnitude, error2, exact2 = self._sums.tolist()
        rms = math.sqrt(error2 / exact2)
        return {"mean": error / magnitude, "bias": signed / magnitude, "rms": rms}


def main(words: list[str] | None = None) -> None:
    """Prints the figures of every checkpoint, and records them with ``--record``."""
    parser = argparse.ArgumentParser(description="Errors of sums in FP8 products.")
    parser.add_argument("checkpoint", type=Path, nargs="+", help="a run or checkpoint")
    parser.add_argument("--data", nargs="+", metavar="GLOB", help="text; default: held-out text")
    text = "sequences whose products are compared (default: 2)"
    parser.add_argument("--sequences", type=positive_int, default=2, help=text)
    text = "sequences over which the loss is computed (default: 32)"
    parser.add_argument("--loss-sequences", type=positive_int, default=32, help=text)
    parser.add_argument("--record", type=Path, metavar="FILE", help="append to FILE")
    options = parser.parse_args(words)
    device = pick_device(None)
    check_fp8("benchmarks/fp8_sums.py", device)
    for path in options.checkpoint:
        pretrained = load_pretrained(find_checkpoint(path), device, torch.float32)
        for measurements in measure(pretrained, options):
            print(row(measurements), flush=True)
            if options.record:
                append(measurements, options.record)


def measure(pretrained: Pretrained, options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """The errors of one model's products, by kind, and its losses."""
    recipe = pretrained.recipe
    corpora = held_out_corpora(recipe, options.data)
    batches = partial(held_out_tokens, pretrained, corpora)
    length = recipe.model.context_length
    prepare_blocks(pretrained.model, RUNTIME)
    objective = Objective(pretrained.model, RUNTIME)
    case = {
        "recipe": recipe.name,
        "layers": recipe.model.num_hidden_layers,
        "activation": recipe.ffn.activation,
        "step": pretrained.trainer["step"],
    }
    token_BT = next(batches(options.sequences * length, options.sequences))
    counted = errors_of(objective, token_BT.to(pretrained.model.device))
    for key, errors in counted.items():
        plain = counted.get(key._replace(accumulation="plain"))
        baseline = plain.figures() if plain and key.accumulation == "fast" else {}
        of = case | key._asdict() | {"terms": errors.terms}
        yield [
            Measurement("fp8_sums", of, metric, value, "relative", baseline.get(metric))
            for metric, value in errors.figures().items()
        ]
    all_batches = list(batches(options.loss_sequences * length, options.sequences))
    losses = {name: loss(objective, all_batches, by) for name, by in ACCUMULATIONS.items()}
    for name, value in losses.items():
        of = case | {"accumulation": name, "tokens": sum(map(torch.numel, all_batches))}
        plain_loss = losses["plain"] if name == "fast" else None
        yield [Measurement("fp8_sums", of, "loss", value, "nats per token", plain_loss)]


def errors_of(objective: Objective, token_BT: Tensor) -> dict[Key, Errors]:
    """Of the products of a forward and backward pass over these tokens."""
    errors: dict[Key, Errors] = defaultdict(Errors)
    product_of = _begin_step(objective)

    def compare(x: QuantisedRows, w: QuantisedRows, dtype: torch.dtype) -> Tensor:
        layer, result = product_of[w.values_MK.data_ptr()]
        products = {by: ACCUMULATIONS[by](x, w, dtype) for by in ("plain", "fast")}
        for rows, exact_mN in _exact(x, w):
            parts = {by: product[rows] for by, product in products.items()}
            parts["rounded"] = exact_mN.to(dtype)
            for by, part in parts.items():
                errors[Key(layer, result, by)].add(part, exact_mN, w.values_MK.shape[1])
        return products["fast"]

    with _products_by(compare), _gates_to(objective, errors[Key("gate_kernel", "output", "fast")]):
        _forward(objective, token_BT).cross_entropy_sum.backward()
    for _, linear in _linears(objective):
        linear.end_step()
    objective.zero_grad()
    return {key: errors[key] for key in sorted(errors) if errors[key].terms}


@torch.no_grad()
def loss(objective: Objective, batches: list[Tensor], product: Product) -> float:
    """Cross-entropy in nats per token."""
    total, count = 0.0, 0
    with _products_by(product):
        for token_BT in batches:
            sums = _forward(objective, token_BT.to(objective.model.device))
            total += float(sums.cross_entropy_sum)
            count += token_BT[:, 1:].numel()
    return total / count


def _forward(objective: Objective, token_BT: Tensor) -> LossSums:
    targets_BT = F.pad(token_BT[:, 1:], (0, 1), value=IGNORED_TARGET)
    with torch.autocast(token_BT.device.type, torch.bfloat16):
        sums: LossSums = objective(token_BT, targets_BT)
    return sums


def _linears(objective: Objective) -> Iterator[tuple[str, SharedLinear]]:
    for name, module in objective.named_modules():
        if isinstance(module, SharedLinear):
            yield name.rpartition(".")[2], module


def _begin_step(objective: Objective) -> dict[int, tuple[str, str]]:
    """Quantises all weights. Layer and result by the address of the weight that is multiplied."""
    fills, product_of = Fills(), {}
    for name, linear in _linears(objective):
        linear.begin_step(torch.bfloat16, False, fills)
        assert linear.ready is not None
        product_of[linear.ready[0].data_ptr()] = (name, "output")
        if linear.fp8_gradient:
            product_of[linear.ready[2].data_ptr()] = (name, "gradient")
    fills.fill()
    return product_of


@contextmanager
def _products_by(product: Product) -> Iterator[None]:
    """Replaces the FP8 products of linear layers."""
    before = shared_linear.scaled_product
    shared_linear.scaled_product = product  # type: ignore[assignment]
    try:
        yield
    finally:
        shared_linear.scaled_product = before


@contextmanager
def _gates_to(objective: Objective, errors: Errors) -> Iterator[None]:
    """Counts the active gates of the sparse path's kernel, wherever a model has a kernel for it."""
    ffns = [module for module in objective.modules() if isinstance(module, SparseFFN)]
    hooks = []
    for ffn in ffns if ffns[0].activation == "relu" else ():
        [linear] = (part for part in ffn.projections if part and part.weight is ffn.pattern_weight)

        def count(linear: SharedLinear, inputs: tuple[Tensor, ...]) -> None:
            x_MK = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).to(torch.bfloat16)
            assert linear.ready is not None
            weight = QuantisedRows(*linear.ready[:2])
            token, neuron, gate = active_gates(x_MK, weight)
            for rows, exact_mN in _exact(quantised_rows(x_MK), weight):
                inside = (token >= rows.start) & (token < rows.stop)
                exact = exact_mN[token[inside] - rows.start, neuron[inside]]
                errors.add(gate[inside], exact, x_MK.shape[1])

        hooks.append(linear.register_forward_pre_hook(count))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def active_gates(x_MK: Tensor, weight: QuantisedRows) -> tuple[Tensor, Tensor, Tensor]:
    """Token, neuron and value of the gates above zero, but for tiles with more than TwELL holds."""
    m, n = len(x_MK), len(weight.values_MK)
    if x_MK.is_cuda:
        from sparsellm.ffn.kernels.twell import empty_twell, gate_twell

        w = FFNWeights(weight.values_MK, weight.values_MK, weight.values_MK.t(), quantised=weight)
        packed = empty_twell(m, n, x_MK.device)
        gate_twell(x_MK, w, packed)
        word_MTW = packed.word
    else:
        word_MTW = pack_twell(scaled_product(quantised_rows(x_MK), weight, x_MK.dtype).relu())
    count_MT, slots = word_MTW[:, :, 0], word_MTW.shape[2] - 1
    used = torch.arange(slots, device=x_MK.device) < count_MT[:, :, None]
    token, tile, slot = (used & (count_MT <= slots)[:, :, None]).nonzero(as_tuple=True)
    word = word_MTW[token, tile, slot + 1]
    return token, (word & 0xFFFF).long(), (word & -0x10000).view(torch.float32)


def _exact(x: QuantisedRows, w: QuantisedRows) -> Iterator[tuple[slice, Tensor]]:
    """Of some rows of ``x Wᵀ`` after another, the exact values in fp64."""
    w_NK, scale_N = w.values_MK.double(), w.scale_M.double()
    for start in range(0, len(x.values_MK), ROWS):
        rows = slice(start, start + ROWS)
        yield rows, (x.values_MK[rows].double() @ w_NK.t()) * x.scale_M[rows, None] * scale_N


if __name__ == "__main__":
    main()
