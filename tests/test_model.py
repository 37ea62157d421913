"""The model is Hugging Face's, name for name and number for number."""

import functools
import sys

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from sparsellm.ffn.activations import ACTIVATIONS
from sparsellm.ffn.token_order import token_order
from sparsellm.model import (
    build_model,
    build_zero_model,
    model_config,
    prepare_blocks,
)
from sparsellm.recipe.families import ARCHITECTURES
from sparsellm.recipe.sections import RuntimeConfig
from sparsellm.runs.huggingface.hf_tokenizer import write_tokenizer
from sparsellm.training import objective
from sparsellm.training.objective import IGNORED_TARGET, Objective, build_loss, total_loss

VARIANTS = {
    **{name: [f"ffn.activation={name}"] for name in ACTIVATIONS},
    **{
        name: [f"model.family={name}", f"ffn.gated={str(family.gated).lower()}"]
        for name, family in ARCHITECTURES.items()
    },
    "non-gated": ["ffn.gated=false"],
    "head_dim, biases, llama3's RoPE": [
        "model.huggingface.head_dim=6",
        "model.huggingface.attention_bias=true",
        "model.huggingface.max_position_embeddings=64",
        "model.huggingface.rope_parameters={rope_type: llama3, factor: 4.0, low_freq_factor: 1.0, "
        "high_freq_factor: 4.0, original_max_position_embeddings: 16}",
    ],
    "grouped heads, untied": ["model.num_key_value_heads=1", "model.tie_word_embeddings=false"],
}


def _stock(model):
    """Stock transformers built from our model's configuration and weights."""
    stock = type(model)(model.config)  # transformers' own class
    assert type(stock).__module__.startswith("transformers.models.")
    stock.load_state_dict(model.state_dict(), strict=True)
    return stock


def _tokens(recipe, batch=3):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(257, (batch, recipe.model.context_length + 1), generator=generator)


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_stock_transformers(tiny, overrides):
    recipe = tiny(*overrides)
    model = build_model(recipe, eos_token_id=256).eval()
    stock = _stock(model).eval()
    tokens = _tokens(recipe)[:, :-1]
    further = {"output_hidden_states": True, "output_attentions": True}
    for each in (model, stock):
        each.set_attn_implementation("eager")  # which alone has attentions to give
    with torch.no_grad():
        ours, theirs = model(tokens, **further), stock(tokens, **further)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=0)
    assert len(ours.hidden_states) == recipe.model.num_hidden_layers + 1
    torch.testing.assert_close(ours.hidden_states, theirs.hidden_states, rtol=0, atol=0)
    torch.testing.assert_close(ours.attentions, theirs.attentions, rtol=0, atol=0)
    assert model.config.hidden_act == recipe.ffn.activation


@pytest.mark.parametrize("build", [build_model, build_zero_model])
def test_a_model_larger_than_the_memory_is_refused_before_it_is_built(tiny, build):
    recipe = tiny("model.num_hidden_layers=10000", "model.intermediate_size=1000000000")
    with pytest.raises(
        ValueError, match=r"has 960,000,041,610,272 parameters: 3,576,279 GiB in fp32"
    ):
        build(recipe, eos_token_id=256)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.hidden_size=33", "model.huggingface.head_dim=8"], "33.* is not a multiple of"),
        (["model.family=qwen3", "model.huggingface.layer_types=[full_attention]"], "num_hidden_"),
        (["model.family=smollm3", "model.huggingface.no_rope_layers=[1]"], "out of range"),
        (["model.huggingface.rope_parameters={rope_type: yarn}"], "'yarn'.* {'factor'}"),
    ],
)
def test_what_transformers_refuses_is_a_mistake_in_the_recipe(tiny, overrides, reason):
    with pytest.raises(ValueError, match=rf"^model: .*Config refuses .*{reason}.*; change model"):
        build_zero_model(tiny(*overrides), eos_token_id=256)


def test_a_tokenizer_that_is_gone_is_no_mistake_of_the_configuration(tiny, tmp_path):
    write_tokenizer("bytes", tmp_path, 64)
    recipe = tiny(f"data.tokenizer=hf:{tmp_path}")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        model_config(recipe, eos_token_id=0)


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_objective_and_its_gradients_equal_stock_cross_entropy(tiny, overrides):
    recipe = tiny(*overrides)
    model = build_model(recipe, eos_token_id=256)
    stock = _stock(model)
    tokens = _tokens(recipe)
    sums = Objective(model, recipe.runtime)(tokens[:, :-1], tokens[:, 1:])
    num_targets = tokens[:, 1:].numel()
    total_loss(sums, 0.0, num_targets, world_size=1).backward()
    expected = stock(tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(sums.cross_entropy_sum / num_targets, expected)
    ours = dict(model.named_parameters())
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_transformers_gradient_checkpointing_is_refused(tiny):
    """Its switch would do nothing for these blocks; a stock model with these weights has it."""
    model = build_model(tiny(), eos_token_id=256)
    with pytest.raises(ValueError, match=r"not support (gradient|activation) checkpoint"):
        model.gradient_checkpointing_enable()
    _stock(model).gradient_checkpointing_enable()


def test_statistics_are_those_of_the_activations(tiny):
    recipe = tiny()
    model = build_model(recipe, eos_token_id=256)
    gates = []
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_hook(
            lambda _, __, x, ffn=layer.mlp: gates.append(
                (torch.relu(ffn.gate_proj(x)), ffn.up_proj(x))
            )
        )
    tokens = _tokens(recipe)
    sums = Objective(model, recipe.runtime)(tokens[:, :-1], tokens[:, 1:])
    for index, (gate, up) in enumerate(gates):
        assert torch.equal(sums.nnz_LBT[index], (gate != 0).sum(-1, dtype=torch.int32))
        assert torch.equal(sums.active_LN[index], (gate != 0).sum((0, 1), dtype=torch.int32))
        torch.testing.assert_close(sums.l1_sum_L[index], (gate * up).abs().sum())


def _loss_and_gradients(recipe, runtime, kernels="auto"):
    model = build_model(recipe, eos_token_id=256).train()
    prepare_blocks(model, runtime)
    for layer in model.model.layers:
        layer.mlp.use_kernels(kernels)
    tokens = _tokens(recipe)
    sums = Objective(model, runtime)(tokens[:, :-1], tokens[:, 1:])
    loss = total_loss(sums, 0.1, tokens[:, 1:].numel(), world_size=1)
    loss.backward()
    return sums, {name: p.grad for name, p in model.named_parameters()}


def test_activation_checkpointing_changes_nothing(tiny):
    recipe = tiny()
    plain, gradients = _loss_and_gradients(recipe, recipe.runtime)
    runtime = recipe.runtime.model_copy(update={"activation_checkpointing": True})
    recomputed, same = _loss_and_gradients(recipe, runtime)
    for a, b in zip(plain, recomputed, strict=True):
        # The statistics too: the second forward is not counted.
        assert (a is None and b is None) or torch.equal(a, b)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, same[name]), name


# The graphs that are compiled; machine code for them takes a third of a minute.
GRAPHS = "aot_eager_decomp_partition"


@pytest.mark.slow
@pytest.mark.parametrize("backend", [GRAPHS, pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_compute_the_same(tiny, monkeypatch, checkpointing, backend):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    recipe = tiny()
    plain, gradients = _loss_and_gradients(recipe, recipe.runtime)
    runtime = RuntimeConfig(
        precision="fp32", compile=True, activation_checkpointing=checkpointing, loss="torch"
    )
    compiled, same = _loss_and_gradients(recipe, runtime)
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a, b)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, same[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_order_of_tokens_changes_nothing(tiny, monkeypatch, compiled, checkpointing):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=GRAPHS))
    recipe = tiny()  # of so few neurons all are active in every block, in any order
    plain, gradients = _loss_and_gradients(recipe, recipe.runtime, "sparse")
    changes = {"compile": compiled, "activation_checkpointing": checkpointing}
    runtime = recipe.runtime.model_copy(update={"token_order": "auto", **changes})
    orders = []
    monkeypatch.setattr(
        objective, "token_order", lambda *ids: orders.append(token_order(*ids)) or orders[-1]
    )
    ordered, same = _loss_and_gradients(recipe, runtime, "sparse")
    (order,) = orders
    assert not torch.equal(order.token_M, torch.arange(len(order.token_M)))
    for a, b in zip(plain, ordered, strict=True):
        torch.testing.assert_close(a, b)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, same[name], rtol=1e-4, atol=1e-6)


def test_without_a_sparse_layer_tokens_are_not_sorted(tiny, monkeypatch):
    monkeypatch.delattr(objective, "token_order")
    recipe = tiny("runtime.token_order=auto")
    _loss_and_gradients(recipe, recipe.runtime, "dense")


@pytest.fixture
def graphs(monkeypatch):
    """Those that torch compiles, which are run as they are."""
    captured = []

    def backend(graph, _inputs):
        captured.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return captured


def test_a_block_is_compiled_once_for_all_capacities(tiny, graphs):
    recipe = tiny("runtime.compile=true", "model.num_hidden_layers=1")
    model = build_model(recipe, eos_token_id=256).train()
    prepare_blocks(model, recipe.runtime)
    (layer,), x_BTC = model.model.layers, torch.randn(2, 64, recipe.model.hidden_size)
    layer.mlp.use_kernels("sparse")
    rotary, first = (
        model.model.rotary_emb(x_BTC, torch.arange(64)[None]),
        layer.mlp.capacity_for(128),
    )
    arguments = {"return_stats": True, "position_embeddings": rotary, "attention_mask": None}
    for capacity in (first, 50, 20, first - 2):  # as it begins, shrinks and grows again
        actual, _ = layer(x_BTC, capacity=capacity, **arguments)
        torch.testing.assert_close(actual, layer(x_BTC, capacity=first, **arguments)[0])
    assert len(graphs) == 1


@pytest.mark.usefixtures("process_group")
def test_ddp_does_not_cut_what_is_compiled(tiny, graphs):
    # A gradient of the block is 6 MB, six buckets of DDP's.
    wide = ("model.hidden_size=256", "model.intermediate_size=2048", "runtime.compile=true")
    recipe = tiny(*wide, "model.num_hidden_layers=1")
    model = build_model(recipe, eos_token_id=256).train()
    prepare_blocks(model, recipe.runtime)
    objective = DistributedDataParallel(Objective(model, recipe.runtime), bucket_cap_mb=1)
    tokens = _tokens(recipe)
    sums = objective(tokens[:, :-1], tokens[:, 1:])
    total_loss(sums, 0.1, tokens[:, 1:].numel(), 1).backward()
    assert len(graphs) == 2  # the block and the loss


def test_bf16_keeps_fp32_weights_and_a_bf16_residual_stream(tiny):
    recipe = tiny("runtime.precision=bf16")
    model = build_model(recipe, eos_token_id=256)
    dtypes = []
    model.model.layers[1].register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    tokens = _tokens(recipe)
    with torch.autocast("cpu", torch.bfloat16):
        sums = Objective(model, recipe.runtime)(tokens[:, :-1], tokens[:, 1:])
    total_loss(sums, 0.1, tokens[:, 1:].numel(), 1).backward()
    assert dtypes == [torch.bfloat16]
    assert sums.cross_entropy_sum.dtype == sums.l1_sum_L.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_ignored_targets_add_nothing(tiny):
    recipe = tiny()
    objective = Objective(build_model(recipe, eos_token_id=256), recipe.runtime)
    tokens = _tokens(recipe)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[2] = IGNORED_TARGET
    padded = objective(inputs, targets).cross_entropy_sum
    torch.testing.assert_close(padded, objective(inputs[:2], targets[:2]).cross_entropy_sum)


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_weights_begin_as_those_of_stock_transformers(tiny, overrides):
    model = build_model(tiny(*overrides), eos_token_id=256)
    torch.manual_seed(0)
    stock = type(model)(model.config)
    expected = {**stock.state_dict(), **dict(stock.named_buffers())}
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.dim() < 2:  # norms, biases, frequencies of RoPE
            assert torch.equal(tensors[name], tensor), name
            continue
        assert abs(tensors[name].mean()) < 5 * tensor.std() / tensor.numel() ** 0.5, name
        assert tensors[name].std() / tensor.std() == pytest.approx(1, abs=0.15), name


def test_weights_depend_on_the_seed_alone(tiny):
    torch.manual_seed(1)
    a = build_model(tiny(), eos_token_id=256).state_dict()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))  # the caller's generator was not advanced
    torch.manual_seed(2)
    b = build_model(tiny(), eos_token_id=256).state_dict()
    c = build_model(tiny("seed=1"), eos_token_id=256).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(
        a["model.layers.0.mlp.up_proj.weight"], c["model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.parametrize("change", ["ffn.gated=true", "ffn.gated=false"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_zero_model_becomes_the_model_whose_weights_it_loads(tiny, change, tied):
    recipe = tiny(change, f"model.tie_word_embeddings={tied}")
    model = build_model(recipe, eos_token_id=256).eval()
    before = torch.get_rng_state()
    loaded = build_zero_model(recipe, eos_token_id=256).eval()
    assert torch.equal(before, torch.get_rng_state())
    assert all(not p.any() and p.requires_grad for p in loaded.parameters())
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())
    loaded.load_state_dict(model.state_dict(), strict=True)
    tokens_BT = torch.randint(0, 257, (2, 9))
    assert torch.equal(loaded(tokens_BT).logits, model(tokens_BT).logits)


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        (False, "runtime.loss: liger needs a CUDA device; set runtime.loss=torch"),
        (True, "runtime.loss: liger needs `pip install .*liger"),
    ],
)
def test_liger_without_a_gpu_or_its_package_says_what_to_do(monkeypatch, gpu, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ValueError, match=message):
        build_loss(RuntimeConfig(loss="liger"))
