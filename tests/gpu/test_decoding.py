"""The kernels of a decoding step against plain torch, and the step as a CUDA graph."""

import gc
import itertools
from typing import NamedTuple

import pytest
import torch
from runs.hf_models import MODELS, stock_model
from torch import Tensor

import sparsellm
from gpu.conditions import need_kernels, poisoned, relative
from sparsellm.decoding import captured, sample as loop, token_math
from sparsellm.decoding.decoder import Decoder
from sparsellm.decoding.kv_cache import LayerCache, Positions
from sparsellm.decoding.prompt import Prompt
from sparsellm.decoding.sample import use_fast_generation
from sparsellm.decoding.token_math import Heads
from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.kernels import linear
from sparsellm.ffn.quantised import dequantised
from sparsellm.ffn.types import Linear

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def kernels():
    need_kernels()
    from sparsellm.decoding import token_kernels

    return token_kernels


def draws(element=torch.bfloat16):
    """Random numbers of a type, the same every time."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device, generator=generator) * scale).to(element)

    return randn


SIZES = [
    (2048, (2048, 2048, 2048)),
    (2048, (2048, 512, 512)),
    (2048, (50304,)),
    (80, (48, 16, 16)),
    (1040, (8, 72)),
]


@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 17, 33, 64])
def test_linears_equal_float64(kernels, element, fp8, m):
    randn = draws(element)
    for k, sizes in SIZES:
        x, layers, expected = randn(m, k), [], []
        for number, n in enumerate(sizes):
            bias = randn(n) if number % 2 == 0 else None
            weight = randn(n, k, scale=k**-0.5)
            rows = quantised_rows(weight) if fp8 else None
            layers.append(Linear(weight, bias, rows))
            exact = weight.double() if rows is None else dequantised(rows).double()
            expected.append(x.double() @ exact.t() + (0 if bias is None else bias.double()))
        with poisoned():
            actual = linear.linears(x, tuple(layers))
        assert relative(actual, torch.cat(expected, -1)) < torch.finfo(element).eps
        assert torch.equal(linear.linears(x, tuple(layers)), actual)


@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [8, 2048, 5128])
def test_residual_norm_equals_plain_torch(kernels, element, k):
    randn = draws(element)
    for m in (1, 8, 64):
        h, y, weight = randn(m, k), randn(m, k), randn(k)
        for addend in (y, None):
            same = h.clone(), h.clone()
            actual = kernels.residual_norm(same[0], addend, weight, 1e-5)
            expected = token_math.residual_norm(same[1], addend, weight, 1e-5)
            assert torch.equal(*same)
            # The order of the sum of squares differs.
            assert relative(actual, expected) < torch.finfo(element).eps / 4


class Case(NamedTuple):
    m: int
    heads: int
    num_keys: int
    size: int
    capacity: int
    slot: int
    window: int = 0
    norms: bool = False
    rotates: bool = True


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 32, 32, 64, 200, 130),
        Case(8, 32, 32, 64, 2200, 2100),
        Case(3, 8, 2, 128, 300, 299, window=40, norms=True),
        Case(2, 4, 4, 32, 70, 0),
        Case(2, 4, 2, 16, 70, 3, norms=True),
        Case(1, 4, 1, 256, 700, 650, rotates=False),
        Case(64, 32, 32, 64, 150, 140),
        Case(1, 2, 2, 64, 5000, 4999, window=4096),
    ],
    ids=str,
)
def test_attention_equals_plain_torch(kernels, case):
    m, _, num_keys, size, capacity, slot, window, norms, rotates = case
    randn = draws()
    weights = (randn(size), randn(size)) if norms else (None, None)
    heads = Heads(case.heads, num_keys, size, size**-0.5, rotates, window, *weights, 1e-6)
    qkv = randn(m, (case.heads + 2 * num_keys) * size)
    first_M = torch.arange(m, device=qkv.device) % (min(slot, 20) + 1)
    angle_PD = randn(capacity, size // 2).float().repeat(1, 2)
    rotary = angle_PD.cos().bfloat16(), angle_PD.sin().bfloat16()
    keys, values = randn(m, num_keys, capacity, size), randn(m, num_keys, capacity, size)
    cache = LayerCache(keys.clone(), values.clone())
    for memory in cache:  # of padding, and of positions to come
        memory[:, :, slot + 1 :] = torch.nan
        for row, first in enumerate(first_M.tolist()):
            memory[row, :, :first] = torch.nan
    at = Positions(slot - first_M, first_M, slot, rotary)
    actual = kernels.attend(qkv, heads, cache, at)
    plain = LayerCache(keys, values)
    expected = token_math.attend(
        qkv, heads, plain, Positions(slot - first_M, first_M, slot, rotary)
    )
    for ours, theirs in zip(cache, plain, strict=True):  # rounded as in plain torch
        assert torch.equal(ours[:, :, slot], theirs[:, :, slot])
    assert relative(actual, expected) < 5e-3
    for _ in range(5):  # whichever split is the last
        assert torch.equal(kernels.attend(qkv, heads, cache, at), actual)


@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize(
    "shape",  # sequences, tokens, heads, heads of keys, head size
    [(1, 130, 32, 32, 64), (3, 9, 4, 2, 16), (2, 70, 8, 1, 256), (8, 40, 6, 3, 128)],
)
def test_prompts_are_rotated_as_in_plain_torch(kernels, monkeypatch, shape, rotates, element):
    m, t, num, num_keys, size = shape
    randn, capacity = draws(element), t + 3
    heads = Heads(num, num_keys, size, size**-0.5, rotates)
    angle_PD = randn(capacity, size // 2).float().repeat(1, 2)
    rotary = angle_PD.cos().to(element), angle_PD.sin().to(element)
    first_M = torch.arange(m, device=angle_PD.device) * 3
    for side_by_side, padding in itertools.product((True, False), (first_M, 0 * first_M)):
        at = Positions(t - padding, padding, t, rotary)
        prompt = Prompt(torch.Size((m, t)), at, is_padded=bool(padding.any()))
        sizes = [num * size, num_keys * size, num_keys * size]
        qkv = randn(m * t, sum(sizes))
        results = []
        for by_kernel in (True, False):
            monkeypatch.setattr(kernels, "computes", lambda *_, by_kernel=by_kernel: by_kernel)
            parts = qkv.clone().split(sizes, -1)
            q, k, v = parts if side_by_side else [part.contiguous() for part in parts]
            cache = LayerCache(*(qkv.new_zeros(m, num_keys, capacity, size) for _ in range(2)))
            y = prompt.attend(q, k, v, heads, cache)
            results.append((q, *cache, y))
        for actual, expected in zip(*results, strict=True):
            assert torch.equal(actual, expected)


def accelerated(name, precision="model", dtype=torch.bfloat16):
    """A model of transformers on the GPU that decodes by our step, and one that does not."""
    models = []
    for _ in range(2):
        model = stock_model(name).cuda()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        models.append(model)
    sparsellm.accelerate(models[0], precision=precision)
    use_fast_generation(models[0])
    return models


def prompts(batch=3, length=9):
    ids = torch.randint(1, 256, (batch, length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


@pytest.fixture
def graphs(monkeypatch):
    """What has been captured."""
    graph_list = []
    create = captured.Captured.__init__

    def init(self, *arguments):
        create(self, *arguments)
        graph_list.append(self)

    monkeypatch.setattr(captured.Captured, "__init__", init)
    return graph_list


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_gives_the_tokens_of_the_step_that_it_replays(name, graphs):
    model, _ = accelerated(name)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 40}):
        actual = []
        for may_capture in (True, False):
            torch.manual_seed(1)
            with pytest.MonkeyPatch.context() as patch:
                if not may_capture:
                    patch.setattr(captured.Captured, "_capture", lambda *_: None)
                actual.append(model.generate(**prompts(), **options, max_new_tokens=25))
            assert graphs[-1].is_graph == may_capture
        assert torch.equal(*actual)


@pytest.mark.parametrize("name", MODELS)
def test_in_fp32_the_tokens_are_those_of_transformers(name, graphs):
    model, stock = accelerated(name, dtype=torch.float32)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 40}):
        for kwargs in ({"max_new_tokens": 55}, {"max_new_tokens": 30, "eos_token_id": [7, 8, 9]}):
            actual = []
            for each_model in (model, stock):
                torch.manual_seed(1)
                actual.append(each_model.generate(**prompts(), **options, **kwargs))
                actual.append(torch.cuda.get_rng_state())
            assert torch.equal(actual[0], actual[2])
            assert torch.equal(actual[1], actual[3])  # also for the next call
    assert all(graph.is_graph for graph in graphs)


@pytest.mark.parametrize("precision", ["model", "fp8"])
@pytest.mark.parametrize("batch", [1, 8, 20])
def test_logits_are_those_of_the_models_forward(batch, precision, graphs):
    model, stock = accelerated("ReLU, tied", precision)
    tokens = torch.randint(257, (batch, 40), generator=torch.Generator().manual_seed(5)).cuda()
    sequences = loop.Sequences(model, tokens[:, :20], None, 41)
    with torch.no_grad():
        actual = [sequences.prompt_logits()]
        for at in range(20, 40):
            sequences.append(tokens[:, at])
            actual.append(sequences.step().clone())
        expected = stock(tokens).logits[:, 19:]
    assert graphs[-1].is_graph
    assert relative(torch.stack(actual, 1), expected) < (0.02 if precision == "model" else 0.1)


def test_streamed_tokens_are_those_that_are_returned():
    model, _ = accelerated("Llama 3")

    class Pieces(list):
        put, end = list.append, lambda self: self.append("end")

    pieces = Pieces()
    inputs = {key: value[1:2] for key, value in prompts().items()}
    ends = model.generate(**inputs, do_sample=False, max_new_tokens=20)[0, 9 + 11]
    tokens = model.generate(
        **inputs, do_sample=False, max_new_tokens=20, streamer=pieces, eos_token_id=[int(ends)]
    )
    assert pieces[-1] == "end"
    assert [int(piece) for piece in pieces[1:-1]] == tokens[0, 9:].tolist()


def test_the_first_token_is_streamed_before_the_next_one_is_computed(monkeypatch):
    model, _ = accelerated("Llama 3")
    events = []
    compute = Decoder.logits

    def logits(self, *arguments):
        events.append("step")
        return compute(self, *arguments)

    class Pieces:
        def put(self, _):
            events.append("token")

        def end(self):
            events.append("end")

    monkeypatch.setattr(Decoder, "logits", logits)
    inputs = {key: value[1:2] for key, value in prompts().items()}
    model.generate(**inputs, do_sample=False, max_new_tokens=4, streamer=Pieces())
    # The prompt, its first token; then steps, which are queued before the tokens of earlier ones.
    assert events[:4] == ["token", "token", "step", "step"]
    assert events[4:] == ["token"] * 3 + ["end"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_may_be_on_another_gpu_than_the_current_one():
    model, _ = accelerated("Llama 3")
    expected = model.generate(**prompts(), do_sample=False, max_new_tokens=8)
    model.to("cuda:1")
    inputs = {key: value.to("cuda:1") for key, value in prompts().items()}
    assert torch.cuda.current_device() == 0
    actual = model.generate(**inputs, do_sample=False, max_new_tokens=8)
    assert torch.equal(actual.cpu(), expected.cpu())


LONG = 200  # tokens of a prompt, more than the windows and than `decode_linear` takes


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "precision"),
    # In FP8 one family stands for all: they differ in attention.
    [*((name, "model") for name in MODELS), ("ReLU, tied", "fp8")],
)
def test_logits_after_a_prompt_are_those_of_the_models_forward(name, precision, padded):
    model, stock = accelerated(name, precision)
    ids = torch.randint(1, 257, (3, LONG), generator=torch.Generator().manual_seed(2)).cuda()
    mask = positions = None
    if padded:
        mask = (torch.arange(LONG) >= torch.tensor((4, 0, 190))[:, None]).long().cuda()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), poisoned():
        actual = loop.Sequences(model, ids, mask, LONG + 1).prompt_logits()
    with torch.no_grad():
        expected = stock(ids, attention_mask=mask, position_ids=positions).logits[:, -1]
    assert relative(actual, expected) < (0.03 if precision == "model" else 0.1)


def test_memory_does_not_grow_with_every_text():
    """Neither by caches nor by workspaces of cuBLAS, and without Python's garbage collector."""
    model, _ = accelerated("Llama 3")
    allocated = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            model.generate(**prompts(), do_sample=False, max_new_tokens=20)
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert allocated[2:] == [allocated[1]] * 4
