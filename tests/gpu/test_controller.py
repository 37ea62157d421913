"""`SparsityController` in a loop of one's own: its kernels, sorted tokens, and its choice."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpu.conditions import need_kernels
from sparsellm import SparseFFN, SparsityController
from sparsellm.ffn.dispatch import Costs

pytestmark = pytest.mark.gpu
K, N, VOCABULARY = 512, 2048, 60


class Model(nn.Module):
    """Two residual FFNs over an embedding."""

    def __init__(self, kernels: str, *, gated: bool, activation: str, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, K)
        self.ffns = nn.ModuleList(
            SparseFFN(K, N, activation=activation, gated=gated, kernels=kernels, **options)
            for _ in range(2)
        )
        self.cuda()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids).bfloat16()
        for ffn in self.ffns:
            x = x + ffn(F.rms_norm(x, (K,)))
        return x


def train(model: Model, steps: int, *, is_sorted: bool, **settings):
    """The last step's L1, statistics, and the gradients."""
    ids = torch.randint(VOCABULARY, (8, 1024), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    embedding = model.embedding if is_sorted else None
    controller = SparsityController(
        model, optimizer, l1_coefficient=1e-2, embedding=embedding, **settings
    )
    paths = []
    for _ in range(steps):
        optimizer.zero_grad()
        error = model(ids).float().square().mean()
        l1 = controller.l1_loss()
        (error + l1).backward()
        optimizer.step()
        controller.step()
        paths.append(controller.statistics().sparse)
    gradients = [
        p.grad.float() for ffn in model.ffns for p in ffn.parameters() if p.grad is not None
    ]
    return l1.item(), controller.statistics().union_mean, gradients, paths


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_kernels_and_sorting_change_no_l1_and_no_gradient(gated, activation):
    need_kernels()
    results = [
        train(Model(kernels, gated=gated, activation=activation), 1, is_sorted=is_sorted)
        for kernels, is_sorted in (("dense", False), ("sparse", False), ("sparse", True))
    ]
    l1, unions, gradients, _ = results[0]
    for other_l1, _, other_gradients, _ in results[1:]:
        assert other_l1 == pytest.approx(l1, rel=1e-2)
        for one, other in zip(gradients, other_gradients, strict=True):
            assert (one - other).norm() < 2e-2 * one.norm()
    assert results[1][1] == pytest.approx(unions, rel=1e-2)
    assert all(
        of_sorted < 0.9 * of_text for of_sorted, of_text in zip(results[2][1], unions, strict=True)
    )


def test_layers_that_switch_together_run_sparse_in_the_second_step(monkeypatch):
    need_kernels()
    costs = Costs(dense=1.0, fixed=2.0, per_neuron=0.0)
    monkeypatch.setattr("sparsellm.ffn.costs.measure_training_costs", lambda *_, **__: costs)
    model = Model("auto", gated=True, activation="relu")
    *_, paths = train(model, 3, is_sorted=False, switch_together=True)
    assert paths == [[False, False], [True, True], [False, False]]


class RepeatedLinear(nn.Linear):
    """Takes about eight times as long."""

    def forward(self, x):
        return sum(F.linear(x, self.weight.to(x.dtype)) for _ in range(8)) / 8


def test_dense_costs_are_those_of_the_linear_layers_of_the_host():
    need_kernels()
    costs = []
    for linear in (nn.Linear, RepeatedLinear):
        model = Model("auto", gated=False, activation="relu2", linear=linear)
        train(model, 2, is_sorted=False)
        costs.append(model.ffns[0].costs)
    plain, repeated = costs
    assert repeated.dense > 3 * plain.dense
    assert repeated.fixed < 1.5 * plain.fixed
