"""What the choice between dense and sparse is measured with."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from sparsellm.ffn.costs import LinearLayers, _dense_step
from sparsellm.ffn.inference_path.discover import Projections
from sparsellm.ffn.types import FFNWeights

M, K, N = 4, 8, 16
PLAIN = Projections(None, nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False))


class DoubledLinear(nn.Linear):
    """A host's own class, with a setting of its own."""

    factor = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


def _weights():
    torch.manual_seed(0)
    return FFNWeights(None, torch.randn(N, K), torch.randn(K, N))


def _host_layers():
    layers = Projections(None, DoubledLinear(K, N, bias=False), DoubledLinear(N, K, bias=False))
    for layer in layers.present:
        layer.factor = 2.0
        layer.register_forward_pre_hook(lambda *_: 1 / 0)
    return layers


def test_dense_is_measured_with_the_linear_layers_of_the_host():
    host, w = _host_layers(), _weights()
    before = [layer.weight for layer in host.present]
    layers = LinearLayers.like(host).with_weights(w)
    x_MK = torch.randn(M, K)
    assert layers[0] is None
    assert torch.equal(layers[1](x_MK), 2 * x_MK @ w.up_NK.t())
    assert all(layer.weight is weight for layer, weight in zip(host.present, before, strict=True))
    _dense_step(x_MK, layers, torch.randn(M, K), torch.ones(()), compiled=False)()


def test_layers_of_one_class_are_measured_once_and_keep_no_weights():
    one, other = LinearLayers.like(_host_layers()), LinearLayers.like(_host_layers())
    assert one == other
    assert hash(one) == hash(other)
    assert one != LinearLayers.like(PLAIN)
    assert not [p for layer in one.layers[1:] for p in layer.parameters()]


def test_parametrized_layers_are_measured_as_plain_ones():
    up = parametrizations.weight_norm(nn.Linear(K, N, bias=False))
    w = _weights()
    layers = LinearLayers.like(PLAIN._replace(up=up)).with_weights(w)
    x_MK = torch.randn(M, K)
    assert torch.equal(layers[1](x_MK), x_MK @ w.up_NK.t())
