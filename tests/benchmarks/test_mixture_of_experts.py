"""The frontier's mixture of experts computes what stock transformers does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mixture_of_experts import MoEObjective, moe_config

CHANGES = ("model.intermediate_size=64", "runtime.compile=false")


@pytest.mark.parametrize("autocast", [False, True])
def test_loss_and_balance_are_those_of_the_stock_model(tiny, autocast):
    recipe = tiny(*CHANGES)
    objective = MoEObjective(recipe, experts=8, active=2)
    tokens_BT1 = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        sums = objective(tokens_BT1[:, :-1], tokens_BT1[:, 1:])
    stock = objective.model(tokens_BT1[:, :-1], output_router_logits=True)
    right = F.cross_entropy(
        stock.logits.flatten(0, 1), tokens_BT1[:, 1:].flatten(), reduction="sum"
    )
    tolerance = 1e-2 if autocast else 1e-5
    assert float(sums.cross_entropy_sum.detach()) == pytest.approx(float(right), rel=tolerance)
    assert float(sums.balance.detach()) == pytest.approx(float(stock.aux_loss), rel=3 * tolerance)
    (sums.cross_entropy_sum + sums.balance).backward()
    assert all(p.grad is not None and p.grad.any() for p in objective.parameters())


def test_experts_share_the_neurons_evenly(tiny):
    assert moe_config(tiny(*CHANGES), 8, 2).intermediate_size == 8
    for experts, active in ((7, 2), (8, 0), (8, 9)):
        with pytest.raises(ValueError, match="--experts"):
            moe_config(tiny(*CHANGES), experts, active)
