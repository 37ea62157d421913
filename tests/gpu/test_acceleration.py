"""`sparsellm.accelerate` on whole models on a GPU."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

import sparsellm
from gpu.conditions import named
from sparsellm.ffn.types import ELEMENTS
from tests.ffn.small_models import small_model
from tests.ffn.test_accelerate import FAMILIES, TOKENS, check_decoding_and_training
from tests.ffn.test_accelerate_forms import OPT, K, _mlp, drelu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sparse_kernels")]


def _on_gpu(family, options, element=torch.bfloat16):
    return small_model(family, **options).to(element).cuda()


def _error(actual: torch.Tensor, right: torch.Tensor) -> float:
    return float((actual.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize(("family", "options"), FAMILIES)
@torch.inference_mode()
def test_every_family_gives_its_own_logits(family, options):
    tokens, long = TOKENS.cuda(), torch.arange(300, device="cuda").view(6, 50) % 128
    for element in ELEMENTS:
        model = _on_gpu(family, options, element)
        exact = copy.deepcopy(model).double()(tokens).logits
        plain, plain_long = model(tokens).logits, model(long).logits
        for kernels in ("auto", "sparse", "dense"):
            with named(element, kernels):
                done = sparsellm.accelerate(model, kernels=kernels)
                assert len(done.accelerated) == 2
                assert not done.left_alone
                # 40 tokens take the decode kernels, 300 the union's.
                margin = torch.finfo(element).eps / 8
                assert _error(model(tokens).logits, exact) < 2 * _error(plain, exact) + margin
                assert _error(model(long).logits, plain_long) < 3.8 * torch.finfo(element).eps
                sparsellm.restore(model)


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_every_family_decodes_and_trains_as_it_does(family, options):
    # Of the backward passes of attention, this one gives the same bits each time.
    with sdpa_kernel(SDPBackend.MATH):
        check_decoding_and_training(_on_gpu(family, options), TOKENS.cuda())


@pytest.mark.parametrize("element", ELEMENTS)
@torch.inference_mode()
def test_generate_with_a_cache_gives_the_same_text(element):
    model = _on_gpu(*FAMILIES[0], element)
    prompt = TOKENS[:1].cuda()
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(prompt, **options)
    done = sparsellm.accelerate(model, kernels="sparse")
    actual = model.generate(prompt, **options)
    assert len(done.accelerated) == 2
    # Ties may break another way once rounded; most of the text is the same.
    assert (plain == actual).double().mean() > 0.8


@torch.inference_mode()
def test_under_torch_compile_whole_and_static():
    model = _on_gpu(*FAMILIES[0])
    sparsellm.accelerate(model, kernels="sparse")
    tokens = TOKENS.cuda()
    eager = model(tokens, use_cache=False).logits
    for mode in ("default", "reduce-overhead"):
        torch.compiler.reset()
        compiled = torch.compile(model, mode=mode, fullgraph=True)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            actual = compiled(tokens, use_cache=False).logits
            assert _error(actual, eager) < 2e-2


def test_the_saved_model_is_plain_and_memory_holds_no_copy_of_w_down(tmp_path):
    model = _on_gpu(*FAMILIES[0])
    keys = list(model.state_dict())
    sparsellm.accelerate(model)  # compares outputs: cuBLAS reserves its workspace
    sparsellm.restore(model)
    before = torch.cuda.memory_allocated()
    sparsellm.accelerate(model)
    assert torch.cuda.memory_allocated() <= before
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert list(again.state_dict()) == keys
    sparsellm.restore(model)
    assert torch.cuda.memory_allocated() <= before


@torch.inference_mode()
def test_several_models_side_by_side():
    models = [_on_gpu(*family) for family in FAMILIES]
    plain = [model(TOKENS.cuda()).logits for model in models]
    for model in models:
        sparsellm.accelerate(model, kernels="sparse")
    for _ in range(2):
        for model, logits in zip(models, plain, strict=True):
            assert _error(model(TOKENS.cuda()).logits, logits) < 3e-2


@torch.inference_mode()
def test_inputs_that_are_not_contiguous():
    model = _on_gpu(*FAMILIES[0])
    mlp = model.model.layers[0].mlp
    x = torch.randn(64, 300, device="cuda").bfloat16().t()
    right = mlp(x)
    sparsellm.accelerate(model, kernels="sparse")
    assert _error(mlp(x), right) < 2e-2


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_drelu_equals_its_own_forward(bias):
    mlp = _mlp(drelu, bias=bias).cuda()
    for num_tokens in (1, 40, 300):  # the decode kernels', and the union's
        x = torch.randn(num_tokens, K, device="cuda").bfloat16()
        exact = copy.deepcopy(mlp).double()(x.double())
        plain = mlp(x)
        for kernels in ("auto", "sparse", "dense"):
            with named(num_tokens, kernels):
                assert sparsellm.accelerate(mlp, kernels=kernels).accelerated == [""]
                assert _error(mlp(x), exact) < 2 * _error(plain, exact) + 1e-3
                sparsellm.restore(mlp)


@torch.inference_mode()
def test_opt_whose_ffn_is_part_of_its_layer():
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**OPT)).cuda().eval()
    for parameter in model.parameters():
        parameter.copy_(0.2 * torch.randn_like(parameter))
    model.bfloat16()
    tokens = TOKENS.cuda() % 100 + 3
    exact = copy.deepcopy(model).double()(tokens).logits
    plain = model(tokens).logits
    assert len(sparsellm.accelerate(model, kernels="sparse").accelerated) == 2
    assert _error(model(tokens).logits, exact) < 2 * _error(plain, exact) + 1e-3
    eager = model(tokens, use_cache=False).logits
    compiled = torch.compile(model)
    assert _error(compiled(tokens, use_cache=False).logits, eager) < 2e-2
    options = {"max_new_tokens": 24, "do_sample": False}
    actual = model.generate(tokens[:1], **options)
    sparsellm.restore(model)
    # bf16 ties may break another way; most of the text is the same.
    assert (model.generate(tokens[:1], **options) == actual).double().mean() > 0.8
