"""FP8 on a GPU against float64 of the same e4m3 numbers, and quantisation to the bit."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8_sums
import sparsellm
from gpu.conditions import each, named, need_kernels, poisoned, relative
from gpu.union_cases import CASES, FUZZ, dense, inputs_of, poisoned_union
from sparsellm.ffn.fp8 import quantise_into, quantised_rows
from sparsellm.ffn.inference_path.linears import put_back, use_fp8
from sparsellm.ffn.kernels import twell, union
from sparsellm.ffn.kernels.quantise import quantise_rows
from sparsellm.ffn.quantised import E4M3, QuantisedRows, dequantised, scaled_product
from sparsellm.ffn.shared_linear import SharedLinear, fp8_weight
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import ELEMENTS

pytestmark = pytest.mark.gpu
# FP8 multiplies rows of a multiple of 16 numbers.
GATES = [case for case in (*CASES, *FUZZ) if case.k % 16 == 0 and case.n % 16 == 0]


def product64(x: QuantisedRows, w: QuantisedRows) -> torch.Tensor:
    return dequantised(x).double() @ dequantised(w).double().t()


@pytest.mark.parametrize("element", ELEMENTS)
def test_quantised_rows_are_those_of_plain_torch(element):
    need_kernels()
    for m, k in [(1, 8), (7, 64), (300, 200), (1000, 2048), (65, 5120)]:
        with named(m, k):
            _check_quantised_rows(m, k, element)


def _check_quantised_rows(m, k, element):
    x = torch.randn(m, k, device="cuda") * torch.randn(m, 1, device="cuda").exp()
    x[m // 2] = 0
    if m > 5:
        x[1, 3], x[2, 5], x[3, 7] = 1000, float("inf"), float("nan")
    x = x.to(element)
    row = torch.randperm(m, device="cuda").int()
    for order in (None, row):
        actual = quantise_rows(x, order)
        expected = quantised_rows(x.cpu() if order is None else x.cpu()[order.cpu()])
        for tensor, other in zip(actual, expected, strict=True):
            same_nan = tensor.cpu().float().isnan() == other.float().isnan()
            assert same_nan.all()
            finite = ~other.float().isnan()
            assert torch.equal(tensor.cpu().float()[finite], other.float()[finite])
    memory = quantised_rows(torch.ones_like(x))
    quantise_into(memory, x)
    for tensor, other in zip(memory, quantised_rows(x), strict=True):
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))  # NaN equals itself
    assert actual.values_MK.dtype == E4M3


@pytest.mark.usefixtures("architecture")
@each(GATES)
def test_gates_are_the_product_of_the_e4m3_numbers(case):
    t = inputs_of(case)
    x, w = quantised_rows(t.x_MK), quantised_rows(t.w_gate_NK)
    exact = product64(x, w) + (0 if t.b_gate_N is None else t.b_gate_N.double())
    # Tensor cores keep about 13 bits of a sum of e4m3 products (fast accumulation).
    slack = 2.0**-7 * (case.threshold + exact.abs().mean())
    actual = poisoned_union(case.m, case.n)
    of_gate = t.weights(case.threshold)._replace(quantised=w)
    union.gate_union(t.x_MK, of_gate, actual)
    gate = dense(actual, case.m, case.n)
    is_close = (exact - case.threshold).abs() <= slack
    active = torch.where(is_close, gate != 0, exact > case.threshold)
    assert relative(gate, torch.where(active, exact, 0)) < 6e-3

    if case.m <= 10_000:
        packed = twell.empty_twell(case.m, case.n, t.x_MK.device)
        packed.word.fill_(0x7FC0_FFFF)
        twell.gate_twell(t.x_MK, of_gate, packed)
        by_token = (gate != 0).sum(1)
        tiles = -(-case.n // 256)
        counts = packed.word.view(case.m, tiles, -1)[:, :, 0].sum(1)
        assert torch.equal(counts.long(), by_token)


def test_sums_of_positive_numbers_are_right_without_fast_accumulation():
    need_kernels()
    generator = torch.Generator("cuda").manual_seed(0)
    shape = {"device": "cuda", "generator": generator, "dtype": torch.bfloat16}
    x, w = (quantised_rows(torch.rand(rows, 5632, **shape)) for rows in (512, 1024))
    exact = product64(x, w)
    bias = {
        fast: float((scaled_product(x, w, torch.bfloat16, fast_accumulation=fast) / exact).mean())
        for fast in (True, False)
    }
    assert bias[False] == pytest.approx(1, abs=2e-3), bias
    assert bias[True] < 1 + 2e-3, bias
    if torch.cuda.get_device_capability()[0] == 9:  # of Hopper's sums, about 13 bits are kept
        assert 0.7 < bias[True] < 0.99, bias


def test_the_measured_gates_are_those_of_the_kernel():
    need_kernels()
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(rows, 256, device="cuda", generator=generator) for rows in (300, 528))
    x, w = x.bfloat16(), quantised_rows((w - 0.15).bfloat16())
    x += 1  # so that few neurons are active
    token, neuron, gate = fp8_sums.active_gates(x, w)
    exact = product64(quantised_rows(x), w)
    assert relative(gate, exact[token, neuron]) < 6e-3
    packed = torch.zeros_like(exact, dtype=torch.bool)
    packed[token, neuron] = True
    tiles = torch.nn.functional.pad(exact > 0, (0, 768 - 528)).view(300, 3, 256)
    fits = (tiles.sum(2) < 28).repeat_interleave(256, 1)[:, :528]
    slack = 2.0**-7 * exact.abs().mean()
    assert int(fits.sum()) > 10_000
    assert torch.equal(packed & fits & (exact > slack), (exact > slack) & fits)


@pytest.mark.usefixtures("architecture")
@pytest.mark.parametrize("format", ["union", "twell"])
@pytest.mark.parametrize("gated", [True, False])
def test_training_equals_float64_at_the_gates_own_values(gated, format):
    for shape in [(70, 64, 272), (1000, 256, 1040), (2048, 1024, 2816)]:
        for room in ("all", "little"):
            with named(shape, room):
                _check_training(shape, gated, format, room)


def _check_training(shape, gated, format, room):
    m, k, n = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    with torch.device("cuda"):
        module = SparseFFN(k, n, gated=gated, kernels="sparse")
    for parameter in module.parameters():
        parameter.data = randn(*parameter.shape) / parameter.shape[1] ** 0.5
    # x has a mean of 1: neurons are active for a token in 60, a few for every other token.
    module.pattern_weight.data[n // 64 :] -= 3.0 / k
    module = module.to(torch.bfloat16)
    module.use_fp8()
    module.use_format(format)
    x, dy = (randn(m, k) + 1).bfloat16().requires_grad_(), randn(m, k).bfloat16()
    blocks = -(-m // 64)
    capacity = {"union": blocks * n, "twell": m}[format] if room == "all" else 1
    with poisoned():
        y, stats = module.compute(x, capacity)
        actual = torch.autograd.grad(
            (y, stats.l1_sum), [x, *module.parameters()], (dy, torch.tensor(0.1, device="cuda"))
        )

    weights = {name: p.detach().double() for name, p in module.named_parameters()}
    first = module.pattern_weight.detach()
    value = product64(quantised_rows(x), quantised_rows(first))
    inputs = [x.detach().double().requires_grad_(), *(w.requires_grad_() for w in weights.values())]
    up = inputs[0] @ weights["up_proj.weight"].t()
    exact = inputs[0] @ weights["gate_proj.weight" if gated else "up_proj.weight"].t()
    gate = torch.where(value > 0, exact + (value - exact).detach(), 0)
    h = gate * up if gated else gate
    expected_y = h @ weights["down_proj.weight"].t()
    expected = torch.autograd.grad((expected_y * dy.double()).sum() + 0.1 * h.abs().sum(), inputs)
    # Of TwELL, tokens that overflow are dense products of bf16: as exact, but other values. And
    # sums within tensor cores are short: a few gates that are nearly zero fire on one side alone,
    # which changes y by nothing, and gradients by what those of their neurons would be.
    most = {"y": 2e-2 if format == "union" else 5e-2}
    counted, right = int(stats.nnz_M.sum()), int((value > 0).sum())
    assert abs(counted - right) < 0.02 * right + 9, (counted, right)
    errors = {"y": relative(y.detach(), expected_y.detach())}
    names = ["x", *dict(module.named_parameters())]
    errors |= {
        name: relative(tensor, other)
        for name, tensor, other in zip(names, actual, expected, strict=True)
    }
    assert all(error < most.get(name, 6e-2) for name, error in errors.items()), errors


@pytest.mark.parametrize(("gated", "element"), zip((True, False), ELEMENTS, strict=True))
@torch.inference_mode()
def test_accelerated_prefill_and_decoding_are_off_by_fp8_rounding(gated, element):
    need_kernels()
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = SparseFFN(512, 2048, gated=gated).to(element).eval()
        x = torch.randn(300, 512).to(element)
    module.pattern_weight.sub_(0.3 / 512**0.5 * module.pattern_weight.abs().mean())
    dense = module(x).double()
    done = sparsellm.accelerate(module, kernels="sparse", precision="fp8")
    assert done.accelerated == [""], done
    off = relative(module(x), dense)
    assert 2e-3 < off < 6e-2
    decoded = relative(module(x[:40]), dense[:40])
    assert 2e-3 < decoded < off  # the tokens are exact there
    graph = torch.cuda.CUDAGraph()
    eager = module(x)
    with torch.cuda.graph(graph):
        captured = module(x)
    graph.replay()
    assert torch.equal(captured, eager)
    assert torch.equal(torch.compile(module)(x), eager)


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_layer_equals_float64_of_its_e4m3_numbers(compiled, gradient):
    need_kernels()
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(528, 256, device="cuda", generator=generator) / 16
    layer = SharedLinear(torch.nn.Parameter(weight), fp8=True, fp8_gradient=gradient)
    x = torch.randn(300, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(300, 528, device="cuda", generator=generator).bfloat16()
    with torch.autocast("cuda", torch.bfloat16):
        y = (torch.compile(layer) if compiled else layer)(x)
    y.backward(dy)
    *w, by_column, scale = fp8_weight(weight.bfloat16())
    assert relative(y.detach(), product64(quantised_rows(x.detach()), QuantisedRows(*w))) < 5e-3
    dx = dy.double() @ weight.bfloat16().double()
    if gradient:
        dx = product64(quantised_rows(dy), QuantisedRows(by_column, scale))
    assert relative(x.grad, dx) < 5e-3
    assert relative(layer.weight.grad, dy.double().t() @ x.detach().double()) < 5e-3


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_layer_of_attention_equals_float64_of_its_e4m3_numbers(bias, element):
    need_kernels()
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = torch.nn.Linear(256, 528, bias=bias).to(element).eval()
        x = torch.randn(3, 100, 256).to(element)
    actual = layer(x)
    use_fp8(layer)
    for compute in (layer, torch.compile(layer, fullgraph=True)):
        expected = product64(quantised_rows(x.flatten(0, 1)), quantised_rows(layer.weight))
        if bias:
            expected += layer.bias.double()
        assert relative(compute(x).flatten(0, 1), expected) < 5e-3
        few = x[0, :64].double() @ dequantised(quantised_rows(layer.weight)).double().t()
        if bias:
            few += layer.bias.double()
        assert relative(compute(x[0, :64]), few) < torch.finfo(element).eps
    put_back(layer)
    assert torch.equal(layer(x), actual)


def test_an_outlier_does_not_lose_the_other_numbers_of_its_row():
    need_kernels()
    x, w = torch.randn(64, 2048, device="cuda"), torch.randn(512, 2048, device="cuda")
    w[:, 5] = 0  # what the outlier multiplies
    x[3, 5] = 1000
    rows = quantised_rows(x.bfloat16()), quantised_rows(w.bfloat16())
    exact = x.double() @ w.double().t()
    error = (product64(*rows) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error[3] < 1.5 * error.median() < 0.06


def test_a_model_in_fp8_takes_less_memory_than_in_bf16_and_is_saved_and_trained(tmp_path):
    need_kernels()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        hidden_act="relu",
    )
    model = LlamaForCausalLM(config).bfloat16().eval().cuda()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.arange(2 * 100, device="cuda").view(2, 100) % 512
    expected = model(tokens).logits.detach()
    sparsellm.accelerate(model, precision="fp8")
    with torch.no_grad():
        for length in (100, 20):
            model(tokens[:, :length])  # cuBLAS and kernels reserve workspaces
    sparsellm.restore(model)
    in_bf16 = torch.cuda.memory_allocated()
    done = sparsellm.accelerate(model, precision="fp8")
    moved = [model.get_parameter(name) for name in done.on_cpu]
    assert len(moved) == 4 * 5 + 1
    assert {parameter.device.type for parameter in moved} == {"cpu"}
    saved = in_bf16 - torch.cuda.memory_allocated()
    numbers, rows = sum(p.numel() for p in moved), sum(len(p) for p in moved)
    assert numbers - 4 * rows - 1024 * len(moved) <= saved <= numbers
    with torch.no_grad():
        # Rounding the same layers' weights and tokens to e4m3 in plain torch gives 0.116.
        assert relative(model(tokens).logits, expected) < 0.13
        assert relative(model(tokens[:, :20]).logits, expected[:, :20]) < 0.13
        assert saved == in_bf16 - torch.cuda.memory_allocated()
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(again[name], tensor.cpu()) for name, tensor in state.items())
    assert relative(model(tokens).logits.detach(), expected) < 1e-2  # by its own forward
    assert {parameter.device.type for parameter in moved} == {"cuda"}
    sparsellm.restore(model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
