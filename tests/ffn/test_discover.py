"""`sparsellm.accelerate` computes nothing else than the model, whatever it is and becomes."""

import copy

import accelerate
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from transformers import OPTConfig, OPTForCausalLM

import sparsellm
from sparsellm.ffn import dispatch
from tests.ffn.small_models import small_model
from tests.ffn.test_accelerate import TOKENS
from tests.ffn.test_accelerate_forms import (
    OPT,
    FATReLU,
    GatedMLP,
    K,
    N,
    _mlp,
    _operators,
    _tokens,
    relu_gate,
)


class Scaled(GatedMLP):
    """With a factor that is one as long as nothing trains it."""

    def __init__(self) -> None:
        super().__init__(relu_gate)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.factor * super().forward(x)


class Adapted(nn.Linear):
    """A LoRA that is zero as long as nothing trains it."""

    def __init__(self) -> None:
        super().__init__(K, N)
        self.a, self.b = nn.Parameter(torch.randn(4, K)), nn.Parameter(torch.zeros(N, 4))

    def forward(self, x):
        return super().forward(x) + x @ self.a.t() @ self.b.t()


class LearnedThreshold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(0.25))

    def forward(self, x):
        return torch.where(x > self.threshold, x, 0)


class ShiftsTokens(GatedMLP):
    """Like RWKV's channel mix: a token sees its predecessor in the sequence."""

    def forward(self, x):
        if x.ndim == 3:
            x = torch.cat([x[:, :1], x[:, :-1]], dim=1)
        return super().forward(x)


class Matrices(GatedMLP):
    """Treats the tokens of a matrix in another way than those of sequences."""

    def forward(self, x):
        return super().forward(x.flip(0) if x.ndim == 2 else x)


class NeedsMask(GatedMLP):
    def forward(self, x, mask):
        return super().forward(x) * mask


class ReturnsTuple(GatedMLP):
    def forward(self, x):
        return super().forward(x), None


class RescaledLayer(nn.Module):
    """Computes the FFN itself, with a factor between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(K, N), nn.Linear(N, K), nn.LayerNorm(K)
        self.activation_fn, self.factor = nn.ReLU(), 1.0

    def forward(self, x):
        return x + self.fc2(self.activation_fn(self.fc1(self.norm(x)) * self.factor))


class ReadsTwice(RescaledLayer):
    """What reads the activation too has hardly any weight."""

    def forward(self, x):
        h = self.activation_fn(self.fc1(self.norm(x)))
        return x + self.fc2(h) + 0.02 * h.mean(dim=-1, keepdim=True)


def _with(change) -> GatedMLP:
    mlp = _mlp(relu_gate)
    change(mlp)
    return mlp.bfloat16().eval()


def _leaky(_, gate, up):
    return F.leaky_relu(gate, 0.005) * up


def _cut(_, gate, up):
    return torch.where(gate > 0.005, gate, 0) * up


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Scaled, r"its Scaled has a tensor that the formula does not use \(factor\)"),
        (
            lambda: _with(lambda mlp: setattr(mlp, "up_proj", Adapted())),
            "its up_proj is a Adapted, not an nn.Linear",
        ),
        (
            lambda: _with(lambda mlp: parametrizations.weight_norm(mlp.up_proj)),
            "its up_proj is a ParametrizedLinear, not an nn.Linear",
        ),
        (lambda: _with(lambda mlp: mlp.act_fn.register_forward_hook(print)), "its ReLU has hooks"),
        (
            lambda: _with(lambda mlp: setattr(mlp.up_proj, "forward", mlp.gate_proj.forward)),
            "its Linear has its own forward",
        ),
        (
            lambda: _with(lambda mlp: mlp.act_fn.register_buffer("seen", torch.zeros(3))),
            r"its ReLU has a tensor that the formula does not use \(seen\)",
        ),
        (
            lambda: nn.ModuleDict(
                {
                    "fc1": nn.Linear(K, N),
                    "activation_fn": LearnedThreshold(),
                    "fc2": nn.Linear(N, K),
                }
            ),
            r"its LearnedThreshold has a tensor that the formula does not use \(threshold\)",
        ),
        (lambda: ShiftsTokens(relu_gate), "does not compute"),
        (lambda: Matrices(relu_gate), "does not compute"),
        (lambda: GatedMLP(lambda *args: 1.01 * relu_gate(*args)), "differs by 1.00%"),
        (lambda: GatedMLP(_leaky), "does not compute"),
        (lambda: GatedMLP(_cut), "does not compute"),
        (lambda: GatedMLP(lambda act, gate, up: act(up) * gate), r"compute relu\(gate\) \* up"),
        (lambda: GatedMLP(lambda act, gate, up: act(gate).square() * up), "does not compute"),
        (lambda: GatedMLP(lambda act, gate, up: act(gate) * up.clamp(-2, 2)), "does not compute"),
        (
            lambda: _with(lambda mlp: mlp.down_proj.weight.zero_()),
            "gives zero for every token",
        ),
        (lambda: NeedsMask(relu_gate), "its forward needs further arguments: mask$"),
        (
            lambda: ReturnsTuple(relu_gate),
            r"its forward returns a tuple for tokens of \(2, 6, 32\)$",
        ),
        (RescaledLayer, "does more than up, activation, down in a row"),
        (ReadsTwice, "its layer's output would change"),
        (lambda: nn.TransformerEncoderLayer(K, 2, N), "there is no forward to replace"),
    ],
)
def test_what_is_something_else_or_could_become_it_is_left_alone(module, reason):
    torch.manual_seed(0)
    mlp = module().bfloat16().requires_grad_(False).eval()
    before = {name: set(vars(part)) for name, part in mlp.named_modules()}
    done = sparsellm.accelerate(mlp)
    assert list(done.left_alone) == [""]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(done.left_alone[""])
    assert {name: set(vars(part)) for name, part in mlp.named_modules()} == before
    assert all(parameter.dtype == torch.bfloat16 for parameter in mlp.parameters())


def _old_weight_norm(mlp):
    torch.nn.utils.weight_norm(mlp.up_proj)
    mlp.up_proj.weight_g.mul_(0.5)


def _new_weight_norm(mlp):
    parametrizations.weight_norm(mlp.up_proj)
    mlp.up_proj.parametrizations.weight.original0.mul_(0.5)


def _adapter(mlp):
    mlp.up_proj = Adapted().bfloat16().requires_grad_(False)
    mlp.up_proj.b.add_(1)


def _other_weight(mlp):
    mlp.down_proj.weight = nn.Parameter(-mlp.down_proj.weight, requires_grad=False)


def _linear_of_its_own(mlp):
    mlp.up_proj.forward = lambda x: -F.linear(x, mlp.up_proj.weight)


@pytest.mark.parametrize(
    "change",
    [
        _old_weight_norm,
        _new_weight_norm,
        _adapter,
        _other_weight,
        _linear_of_its_own,
        lambda mlp: setattr(mlp.act_fn, "threshold", 0.75),
        lambda mlp: setattr(mlp, "act_fn", nn.Identity()),
        lambda mlp: setattr(mlp, "formula", lambda _, gate, up: gate + up),
        lambda mlp: mlp.up_proj.register_forward_hook(lambda _, args, actual: -actual),
        lambda mlp: mlp.act_fn.register_forward_pre_hook(lambda _, args: (-args[0],)),
    ],
)
@torch.no_grad()
def test_what_changes_after_it_was_taken_is_followed(change):
    mlp, x = _mlp(relu_gate, activation=FATReLU(0.25)), _tokens(2, 20)
    accelerated = mlp(x)
    assert sparsellm.accelerate(mlp, kernels="sparse").accelerated == [""]
    mlp(x)
    change(mlp)
    twin = copy.deepcopy(mlp)
    actual = mlp(x), twin(x)
    for module, y in zip((mlp, twin), actual, strict=True):
        sparsellm.restore(module)
        torch.testing.assert_close(y, module(x), rtol=2e-2, atol=2e-2)
    assert (actual[0] - accelerated).norm() > 0.1 * accelerated.norm()


@pytest.mark.parametrize("change", ["fc1", "activation_fn", "hook"])
def test_what_changes_in_a_layer_is_followed(change):
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**OPT)).bfloat16().eval().requires_grad_(False)
    layer, x = model.model.decoder.layers[0], 5 * _tokens(2, 9)
    accelerated = layer(x)
    assert len(sparsellm.accelerate(model, kernels="sparse").accelerated) == 2
    if change == "fc1":
        layer.fc1 = Adapted().bfloat16().requires_grad_(False)
    elif change == "activation_fn":
        layer.activation_fn = nn.Identity()
    else:
        layer.fc1.register_forward_hook(lambda _, args, actual: -actual)
    actual = layer(x)
    sparsellm.restore(model)
    torch.testing.assert_close(actual, layer(x), rtol=2e-2, atol=2e-2)
    assert not torch.equal(actual, accelerated)


class DropsActivations(GatedMLP):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


def test_what_a_training_module_does_more_is_done():
    mlp, x = _with(lambda mlp: setattr(mlp, "__class__", DropsActivations)), _tokens(8)
    assert "1 FFNs accelerated" in str(sparsellm.accelerate(mlp, kernels="sparse"))
    assert "sparse_ffn" in _operators(mlp, x)
    mlp.train()
    torch.manual_seed(1)
    actual = mlp(x)
    assert "run their own forward until model.eval()" in str(sparsellm.accelerate(mlp))
    assert str(sparsellm.accelerate(mlp.float())).startswith("0 FFNs accelerated\n")
    sparsellm.restore(mlp.bfloat16())
    torch.manual_seed(1)
    assert torch.equal(actual, mlp(x))


def _gradients(model: nn.Module, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    actual = model(*inputs)
    (
        actual if isinstance(actual, torch.Tensor) else actual.logits
    ).float().square().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_one_trainable_tensor_of_an_ffn_has_its_gradient(part, kind):
    mlp, x = _mlp(relu_gate, bias=True), _tokens(20)
    mlp.get_submodule(part).get_parameter(kind).requires_grad_()
    right = _gradients(mlp, x)
    assert sparsellm.accelerate(mlp).accelerated == [""]
    actual = _gradients(mlp, x)
    assert list(actual) == list(right) == [f"{part}.{kind}"]
    assert torch.equal(actual[f"{part}.{kind}"], right[f"{part}.{kind}"])


def test_one_trainable_matrix_in_a_layer_has_its_gradient():
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**OPT)).bfloat16().eval().requires_grad_(False)
    trained = model.model.decoder.layers[0].fc2.weight.requires_grad_()
    right = _gradients(model, TOKENS)
    assert len(sparsellm.accelerate(model).accelerated) == 2
    actual = _gradients(model, TOKENS)
    assert len(actual) == 1
    assert torch.equal(trained.grad, next(iter(right.values())))


def _hidden_size(model: nn.Module) -> int:
    return model.get_input_embeddings().embedding_dim


@pytest.mark.parametrize("in_layer", [False, True])
def test_a_saved_model_can_be_loaded(in_layer, tmp_path):
    if in_layer:
        torch.manual_seed(0)
        model = OPTForCausalLM(OPTConfig(**OPT)).bfloat16().eval()
    else:
        model = small_model()
    done = sparsellm.accelerate(model, kernels="sparse")
    with torch.no_grad():
        for parameter in model.parameters():  # W_d was transposed before this
            parameter.mul_(2)
    torch.save(model, tmp_path / "model.pt")
    with torch.no_grad():
        right = model(TOKENS).logits
        sparsellm.restore(model)
        plain = model(TOKENS).logits
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(loaded(TOKENS).logits, right)
        layer = dict(loaded.named_modules())[done.accelerated[0]]
        assert "sparse_ffn" in _operators(layer, torch.randn(1, 9, _hidden_size(loaded)).bfloat16())
        sparsellm.restore(loaded)
        assert torch.equal(loaded(TOKENS).logits, plain)
    assert not any("sparsellm" in name for name, _ in loaded.named_buffers())


def test_a_dispatch_saved_beside_a_gpu_is_loaded_without_one():
    new, arguments = dispatch.Dispatch("sparse", False, "twell").__reduce__()
    saved_on_a_gpu = (arguments[0], True, arguments[2])
    loaded = new(*saved_on_a_gpu)
    assert (loaded.kernels, loaded.format) == ("sparse", "twell")


@pytest.mark.parametrize("offload", [accelerate.cpu_offload, lambda model: model.to("meta")])
def test_an_offloaded_model_is_left_alone(offload):
    model = small_model()
    right = model(TOKENS).logits
    offload(model)
    done = sparsellm.accelerate(model)
    assert not done.accelerated
    assert len(done.left_alone) == 2
    if model.device.type == "cpu":
        torch.testing.assert_close(model(TOKENS).logits, right)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_default_device_does_not_matter(device):
    mlp = _mlp(relu_gate)
    with torch.device(device):
        assert sparsellm.accelerate(mlp).accelerated == [""]
