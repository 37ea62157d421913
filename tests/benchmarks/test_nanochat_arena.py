"""What the arena reads, cuts and moves; the run itself needs nanochat's checkout."""

import argparse

import pytest
import torch
from torch import nn

import nanochat_arena as arena
from sparsellm import SparsityController

STEP = (
    "step 00012/00030 (40.00%) | loss: 7.632167 | lrm: 0.33 | dt: 2428.91ms | tok/sec: 1,421 | "
    "bf16_mfu: 0.00 | epoch: 1 pq: 0 rg: 2 | total time: 0.08m | eta: 0.7m"
)


def options(**values):
    defaults = {"ffn": "relu2", "target": 5.0, "l1": 1e-3, "pattern_rate": None, "seed": 1}
    return argparse.Namespace(**{**defaults, "kernels": "auto", **values})


def test_the_numbers_of_the_script_become_records():
    log = arena.Log()
    log.read("Step 00000 | Validation bpb: 3.352165")
    for _ in range(14):
        log.read(STEP)
    log.read("Step 00014 | Validation bpb: 3.341524")
    log.read("Padding vocab_size from 100 to 128 for efficiency")
    rows = arena.measurements(
        arena.Arm(options(ffn="stock", target=None), fp8=False),
        ["--depth=12", "--num-iterations=14"],
        log,
    )
    first, last, rate = rows
    assert (first.metric, first.value, first.case["all_seconds"]) == ("val_bpb", 3.352165, 0)
    assert (last.value, last.case["step"], last.case["depth"]) == (3.341524, 14, 12)
    assert last.case["all_seconds"] == pytest.approx(14 * 2.42891, abs=0.1)
    assert last.case["train_seconds"] == pytest.approx(3 * 2.42891, abs=0.1)  # without 11 steps
    assert (rate.metric, rate.value) == ("tokens_per_second", 1421)


@pytest.mark.parametrize(("ffn", "matrices"), [("relu2", 2), ("gated-relu", 3)])
def test_both_ffns_have_the_parameters_and_names_of_the_hosts(ffn, matrices):
    arm = arena.Arm(options(ffn=ffn), fp8=False)
    built = arm.build_ffn(nn.Linear, argparse.Namespace(n_embd=768))
    names = [name for name, _ in built.named_children()]
    assert names[-2:] == ["c_fc", "c_proj"]
    assert len(names) == matrices
    assert sum(p.numel() for p in built.parameters()) == 8 * 768**2
    model = nn.Module()
    model.transformer = nn.ModuleDict({"wte": nn.Embedding(4, 768), "h": built})
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    arm.control(model, optimizer)
    assert isinstance(arm.controller, SparsityController)
    x = model.transformer.wte(torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]]))
    loss = arm.add_l1(built, (), built(x).square().mean())
    loss.backward()
    optimizer.step()  # the hook calls controller.step()
    assert arm.controller.num_steps == 1
    with torch.no_grad():
        assert arm.add_l1(built, (), built(x).mean()) is None


def test_the_weights_of_the_pattern_move_to_adamw():
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    groups = [{"kind": "muon", "params": [a, b], "lr": 0.02}, {"kind": "muon", "params": [a]}]
    arm = arena.Arm(options(pattern_rate=1e-3), fp8=False)
    muon, adamw = arena.regrouped(groups[:1], {id(a)}, arm)
    assert (muon["params"], muon["lr"]) == ([b], 0.02)
    assert (adamw["kind"], adamw["params"], adamw["lr"]) == ("adamw", [a], 1e-3)


@pytest.mark.parametrize(
    ("ffn", "name"), [("stock", "c_fc"), ("relu2", "c_fc"), ("gated-relu", "c_gate")]
)
def test_the_pattern_is_decided_by_the_gate_or_by_the_first_layer(ffn, name):
    layers = nn.ModuleDict({key: nn.Linear(2, 2) for key in ("c_gate", "c_fc", "c_proj")})
    layers = argparse.Namespace(**layers)
    arm = arena.Arm(options(ffn=ffn, target=None), fp8=False)
    assert arm.pattern_weight(layers) is getattr(layers, name).weight


def test_long_documents_are_cut_at_words_without_loss():
    text = "word " * 1000 + "end"
    parts = list(arena.pieces(text, 64))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 64
    assert all(part.endswith(" ") for part in parts[:-1])
    assert "".join(arena.pieces("x" * 200, 64)) == "x" * 200
