"""The controller in a loop of one's own: L1, counts, λ, kernels, state, and forgotten calls."""

import copy
import math
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparsellm import SparseFFN, SparsityController
from sparsellm.ffn.dispatch import Costs
from sparsellm.sparsity.target import TargetController

K, N, L, LAMBDA = 16, 96, 3, 2e-3


class Model(nn.Module):
    """Residual FFNs under norms; ``run`` calls a block, as activation checkpointing does."""

    def __init__(self, kernels="dense", gated=True, activation="relu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(K) for _ in range(L))
        self.ffns = nn.ModuleList(
            SparseFFN(K, N, gated=gated, activation=activation, kernels=kernels) for _ in range(L)
        )
        self.checkpointed = False

    def block(self, i, x):
        return x + self.ffns[i](self.norms[i](x))

    def forward(self, x):
        for i in range(L):
            if self.checkpointed:
                x = checkpoint(self.block, i, x, use_reentrant=False)
            else:
                x = self.block(i, x)
        return x


def batches(count=1):
    """(2, 20, K) each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 20, K, generator=generator) for _ in range(count)]


def controlled(model, **settings):
    """A controller with an optimizer that changes nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return SparsityController(model, optimizer, **{"l1_coefficient": LAMBDA, **settings}), optimizer


def by_hand(model, x_BTK):
    """Loss, Σ|h| (without a gate Σ relu(z)) of each layer and all gates, in plain torch."""
    l1, gates = [], []
    for norm, ffn in zip(model.norms, model.ffns, strict=True):
        normed = norm(x_BTK)
        first = ffn.gate_proj if ffn.gated else ffn.up_proj
        z = first(normed).relu()
        gate = z.square() if ffn.activation == "relu2" else z
        h = gate * ffn.up_proj(normed) if ffn.gated else gate
        x_BTK = x_BTK + ffn.down_proj(h)
        l1.append((h if ffn.gated else z).abs().sum())
        gates.append(gate.detach().flatten(0, 1))
    return x_BTK.square().mean(), torch.stack(l1), gates


def gradients(model):
    by_name = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return by_name


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kernels", ["dense", "sparse"])
@pytest.mark.parametrize(("gated", "activation"), [(True, "relu"), (False, "relu2")])
def test_the_l1_term_is_that_of_the_formula(gated, activation, kernels, checkpointed):
    model = Model(kernels, gated, activation)
    [x] = batches()
    loss, l1_L, _ = by_hand(model, x)
    expected_l1 = LAMBDA * l1_L.sum() / (40 * L)
    (loss + expected_l1).backward()
    expected = gradients(model)
    model.checkpointed = checkpointed
    controller, _ = controlled(model)
    y = model(x)
    l1 = controller.l1_loss()
    assert (l1.shape, l1.dtype) == ((), torch.float32)
    torch.testing.assert_close(l1, expected_l1)
    (y.square().mean() + l1).backward()
    torch.testing.assert_close(gradients(model), expected)
    # What checkpointing computed again is neither counted nor kept in memory.
    assert all(ffn.recorded is None for ffn in model.ffns)


def test_micro_batches_add_up_to_the_whole_batch():
    model, parts = Model("sparse"), batches(4)
    controller, optimizer = controlled(model)
    (model(torch.cat(parts)).square().mean() + controller.l1_loss()).backward()
    expected = gradients(model)
    optimizer.step()
    controller.step()
    whole = controller.statistics()
    for x in parts:
        ((model(x).square().mean() + controller.l1_loss()) / 4).backward()
    torch.testing.assert_close(gradients(model), expected)
    optimizer.step()
    controller.step()
    parts_statistics = controller.statistics()
    assert parts_statistics.num_tokens == whole.num_tokens == 160
    for name in ("nnz_mean", "nnz_p50", "nnz_p99", "nnz_max"):
        assert getattr(parts_statistics, name) == getattr(whole, name)
    # Where the loss is a sum divided by all tokens of the step, so is the term.
    for x in parts:
        (model(x).square().sum() / (160 * K) + controller.l1_loss(num_tokens=160)).backward()
    torch.testing.assert_close(gradients(model), expected)


def test_statistics_are_those_counted_by_hand():
    model = Model("sparse")
    with torch.no_grad():
        for ffn in model.ffns:
            ffn.gate_proj.weight[: N // 4].zero_()  # these are never active
    controller, optimizer = controlled(model, dead_window_tokens=80)
    assert controller.statistics() is None
    active = []
    for x in batches(2):
        _, l1_L, gates = by_hand(model, x)
        nnz = torch.stack([(gate != 0).sum(1) for gate in gates])
        active.append(torch.stack([(gate != 0).any(0) for gate in gates]))
        model(x)
        controller.l1_loss()
        optimizer.step()
        controller.step()
    statistics = controller.statistics()
    assert (statistics.step, statistics.num_tokens, statistics.sparse) == (2, 40, [True] * L)
    assert statistics.l1 == pytest.approx(l1_L.sum().item() / (40 * L), rel=1e-5)
    assert statistics.nnz_mean == pytest.approx(nnz.double().mean(1).tolist())
    assert statistics.nnz_max == nnz.max(1).values.tolist()
    assert statistics.nnz_p50 == nnz.sort(1).values[:, 19].tolist()
    assert statistics.nnz_p99 == nnz.max(1).values.tolist()
    silent = ~(active[0] | active[1])
    assert silent.any()
    assert statistics.dead_fraction == pytest.approx(silent.double().mean(1).tolist())
    assert torch.equal(torch.stack(list(controller.dead_neurons().values())), silent)
    # One block of 40 tokens.
    assert statistics.union_mean == pytest.approx(active[1].sum(1).tolist())
    assert list(controller.ffns) == ["ffns.0", "ffns.1", "ffns.2"]


def train(model, controller, optimizer, xs):
    """λ of each step."""
    readings = []
    for x in xs:
        loss = model(x).square().mean() + controller.l1_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        readings.append(controller.statistics().l1_coefficient)
    return readings


SETTINGS = {"target_nnz": 8.0, "warmup_steps": 3, "l1_zero_steps": 2}


@pytest.mark.parametrize("per_layer", [False, True])
def test_lambda_moves_as_the_target_controller_does(per_layer):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {**SETTINGS, "target_nnz": N / 2}  # near it, so that layers differ
    controller = SparsityController(
        model, optimizer, l1_coefficient=LAMBDA, target_per_layer=per_layer, **settings
    )
    alone = TargetController(controller._settings, L, warmup_steps=3)
    for step, x in enumerate(batches(6)):
        [l1_L] = train(model, controller, optimizer, [x])
        assert l1_L == alone.l1_by_layer(step)
        assert (step < 2) == (l1_L == [0.0] * L)
        statistics = controller.statistics()
        alone.observe(step, statistics.nnz_mean)
        assert statistics.target_error == alone.error
    assert (len(set(l1_L)) > 1) == per_layer


def begin(kernels="sparse", *costs):
    """A model that AdamW trains to a target."""
    model = Model(kernels)
    for ffn in model.ffns:
        ffn.use_kernels(kernels, *costs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"l1_coefficient": LAMBDA, "dead_window_tokens": 120, **SETTINGS}
    return model, SparsityController(model, optimizer, **settings), optimizer


def test_a_resumed_loop_goes_on_to_the_same_bits(tmp_path):
    xs = batches(8)
    model, controller, optimizer = begin()
    train(model, controller, optimizer, xs[:4])
    parts = {"model": model, "optimizer": optimizer, "controller": controller}
    torch.save({k: v.state_dict() for k, v in parts.items()}, tmp_path / "state.pt")
    expected = train(model, controller, optimizer, xs[4:])
    resumed = dict(zip(("model", "controller", "optimizer"), begin(), strict=True))
    for name, state in torch.load(tmp_path / "state.pt", weights_only=True).items():
        resumed[name].load_state_dict(state)
    assert train(*resumed.values(), xs[4:]) == expected
    assert resumed["controller"].statistics() == controller.statistics()
    for a, b in zip(model.parameters(), resumed["model"].parameters(), strict=True):
        assert torch.equal(a, b)
    other = SparsityController(
        model, optimizer, target_nnz=8, l1_coefficient=1, target_per_layer=True
    )
    with pytest.raises(ValueError, match="with another target_per_layer"):
        other.load_state_dict(controller.state_dict())
    state = controller.state_dict()
    other = SparsityController(model, optimizer, l1_coefficient=1.0)
    with pytest.raises(ValueError, match=r"has moved λ to (\S+): .* l1_coefficient=\1 and load"):
        other.load_state_dict(state)
    other.load_state_dict({**state, "target": None})
    assert other.num_steps == 8
    other = SparsityController(model.ffns[:2], optimizer)
    with pytest.raises(
        ValueError, match=r"belongs to the FFNs ffns.0 and 2 more; the model has 0 and"
    ):
        other.load_state_dict(controller.state_dict())
    wider = nn.ModuleDict(
        {"ffns": nn.ModuleList(SparseFFN(K, N + 8, gated=True) for _ in range(L))}
    )
    other = SparsityController(
        wider, torch.optim.SGD(wider.parameters()), target_nnz=8, l1_coefficient=1
    )
    with pytest.raises(ValueError, match=r"with up to 96 neurons; the model has up to 104"):
        other.load_state_dict(controller.state_dict())
    with pytest.raises(ValueError, match=r"is not what SparsityController.state_dict\(\) returned"):
        other.load_state_dict(model.state_dict())


def test_the_state_goes_through_a_distributed_checkpoint(tmp_path):
    xs = batches(6)
    model, controller, optimizer = begin("auto", Costs(dense=1.0, fixed=0.1, per_neuron=0.001))
    train(model, controller, optimizer, xs[:4])
    dcp.save({"model": model, "controller": controller}, checkpoint_id=tmp_path)
    resumed, other, _ = begin("auto")
    dcp.load({"model": resumed, "controller": other}, checkpoint_id=tmp_path)
    assert str(other.state_dict()) == str(controller.state_dict())
    assert [ffn.path for ffn in resumed.ffns] == ["sparse"] * L
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, controller, still, xs[4:])
    train(resumed, other, still, xs[4:])
    assert other.statistics() == controller.statistics()


def test_a_state_of_the_middle_of_a_step_repeats_it_also_in_a_run_that_goes_back():
    xs = batches(8)
    model, controller, optimizer = begin()
    train(model, controller, optimizer, xs[:4])
    model(xs[4])
    controller.l1_loss()
    parts = {"model": model, "optimizer": optimizer, "controller": controller}
    saved = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def repeated():
        for name, part in parts.items():
            part.load_state_dict(copy.deepcopy(saved[name]))
        return train(model, controller, optimizer, xs[4:]), controller.statistics()

    first = repeated()
    assert first[1].step == 8
    model(xs[0])
    controller.l1_loss()
    assert repeated() == first  # λ and counts, whatever came in between
    model(xs[0])
    controller.l1_loss()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call it once after every optimizer.step\(\)"):
        controller.state_dict()


def test_a_forgotten_or_repeated_call_names_the_remedy():
    model, [x] = Model(), batches()
    controller, optimizer = controlled(model)
    with pytest.raises(RuntimeError, match="needs a forward pass before it"):
        controller.l1_loss()
    with pytest.raises(RuntimeError, match="called twice after one optimizer step, or without"):
        controller.step()
    model(x)
    controller.l1_loss()
    with pytest.raises(RuntimeError, match=r"call it once after each, in training mode"):
        controller.l1_loss()
    optimizer.step()
    model(x)
    with pytest.raises(RuntimeError, match=r"call it once after every optimizer.step\(\)"):
        controller.l1_loss()
    controller.step()
    with pytest.raises(RuntimeError, match="called twice after one optimizer step"):
        controller.step()
    controller.l1_loss()  # of the forward pass above
    model.eval()(x)
    with torch.no_grad():
        model.train()(x)
    with pytest.raises(RuntimeError, match="and with gradients"):
        controller.l1_loss()


def test_a_model_that_does_not_fit_names_the_remedy():
    optimizer = torch.optim.SGD(Model().parameters())
    with pytest.raises(ValueError, match=r"no SparseFFN: .* sparsellm.replace_ffns\(model\)"):
        SparsityController(nn.Linear(2, 2), optimizer)
    with pytest.raises(ValueError, match="a λ to start from"):
        SparsityController(Model(), optimizer, target_nnz=30)
    for name, value in (
        ("l1_coefficient", -1),
        ("l1_coefficient", math.inf),
        ("l1_coefficient", "1e-3"),  # as YAML reads it
        ("target_nnz", "30"),
        ("target_nnz", True),
        ("target_nnz", 0.02),  # a share
        ("warmup_steps", -1),
    ):
        reason = f"{name} {value!r} must be a number of at least [01], and finite"
        with pytest.raises(ValueError, match=reason):
            SparsityController(Model(), optimizer, **{name: value})
    with pytest.raises(ValueError, match=r"target_nnz 96 must be below the 96 neurons of ffns.0"):
        SparsityController(Model(), optimizer, target_nnz=N, l1_coefficient=1e-3)
    for other in (None, [], [None], Model().parameters()):
        with pytest.raises(ValueError, match=r"^optimizer .*: give the torch.optim.Optimizer that"):
            SparsityController(Model(), other)
    with pytest.warns(
        UserWarning, match=r"^optimizer holds none of the model's parameters\. Unless"
    ):
        SparsityController(Model(), optimizer)
    with pytest.raises(ValueError, match=r"ffns.0 has silu, .* activation='relu' or 'relu2'"):
        SparsityController(Model(activation="silu"), optimizer, target_nnz=3, l1_coefficient=1e-3)
    model, [x] = Model(), batches()
    controller, _ = controlled(model)
    for state in (None, {}, {"paths": {}}):
        with pytest.raises(ValueError, match=r"what SparsityController.state_dict\(\) returned"):
            controller.load_state_dict(state)
    model(x)
    with pytest.raises(ValueError, match="num_tokens 0 must be a number of at least 1"):
        controller.l1_loss(num_tokens=0)
    controller.l1_loss()
    model.ffns[0](x)
    with pytest.raises(RuntimeError, match=r"ffns.1 and 1 more took no part"):
        controller.l1_loss()
    for i, ffn in enumerate(model.ffns):
        ffn(x[:, i:])
    with pytest.raises(ValueError, match=r"ffns.0 has computed 40 tokens and ffns.2 36: give"):
        controller.l1_loss()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kernels", ["dense", "sparse"])
def test_an_ffn_called_twice_in_a_pass_is_refused_and_a_pass_without_l1_is_not(
    kernels, checkpointed
):
    model, [x] = Model(kernels), batches()
    model.checkpointed = checkpointed
    controller, _ = controlled(model)
    model(x)
    expected = controller.l1_loss()
    model(x)  # a warm-up
    handle = model.norms[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a pass that ended early
        model(x)
    handle.remove()
    model(x)
    with pytest.warns(UserWarning, match=r"made 3 forward passes .* only the last one is counted"):
        torch.testing.assert_close(controller.l1_loss(), expected)
    model.ffns[2] = model.ffns[0]
    with pytest.raises(ValueError, match=r"called twice in one forward pass.* separate FFN"):
        model(x)


def test_a_model_is_copied_between_a_forward_pass_and_its_l1():
    model, [x] = Model(), batches()
    controller, _ = controlled(model)
    model(x)
    average = copy.deepcopy(model)
    (model(x).square().mean() + controller.l1_loss()).backward()
    torch.testing.assert_close(average(x), model(x))
    assert average.ffns[0].up_proj.weight is not model.ffns[0].up_proj.weight


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kernels", ["dense", "sparse"])
def test_a_step_without_tokens_has_no_l1_and_moves_nothing(kernels):
    xs, empty = batches(6), torch.zeros(2, 0, K)
    readings = []
    for with_empty in (False, True):
        model = Model(kernels)
        controller, optimizer = controlled(model, target_nnz=40, dead_window_tokens=80)
        coefficients = train(model, controller, optimizer, xs[:3])
        if with_empty:
            model(empty)
            l1 = controller.l1_loss()
            l1.backward()
            assert (l1.item(), model.ffns[0].gate_proj.weight.grad.abs().max().item()) == (0, 0)
            optimizer.zero_grad()
            controller.step()
            statistics = controller.statistics()
            assert (statistics.num_tokens, statistics.l1, statistics.nnz_mean) == (0, 0, [0] * L)
        coefficients += train(model, controller, optimizer, xs[3:])
        readings.append((coefficients, controller.statistics().dead_fraction))
    assert readings[0] == readings[1]


def test_no_l1_costs_no_gradient():
    model, [x] = Model("sparse"), batches()
    controller, _ = controlled(model, l1_zero_steps=1)
    model(x)
    l1 = controller.l1_loss()
    assert not l1.requires_grad
    assert l1 == 0


def test_layers_choose_kernels_by_what_was_counted_alone_or_together():
    for together in (False, True):
        model = Model("auto")
        for ffn in model.ffns:
            ffn.use_kernels("auto", Costs(dense=1.0, fixed=0.1, per_neuron=0.01))
        with torch.no_grad():  # the first layer is never active
            model.ffns[0].gate_proj.weight.zero_()
        controller, optimizer = controlled(model, switch_together=together)
        train(model, controller, optimizer, batches(2))
        unions = controller.statistics().union_mean
        assert unions[0] == 0
        assert min(unions[1:]) > 90  # neurons: sparse takes as long as dense
        assert sum(unions) / L < 82  # at which it returns to sparse
        expected = ["sparse"] * L if together else ["sparse", "dense", "dense"]
        assert [ffn.path for ffn in model.ffns] == expected
        saved = copy.deepcopy(controller.state_dict())
        model = Model("auto")
        controlled(model)[0].load_state_dict(saved)
        assert [ffn.path for ffn in model.ffns] == expected


class Around(nn.Module):
    """A low-rank adapter around a linear layer, as PEFT's."""

    def __init__(self, base_layer) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.a = nn.Linear(base_layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, base_layer.out_features, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


class Within(nn.Linear):
    """The same as a subclass, as loralib's."""

    def __init__(self, base_layer) -> None:
        super().__init__(base_layer.in_features, base_layer.out_features, bias=False)
        self.weight = base_layer.weight
        self.a = nn.Parameter(torch.randn(2, self.in_features))
        self.b = nn.Parameter(torch.randn(self.out_features, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.a.t() @ self.b.t()


@pytest.mark.parametrize("adapter", [Around, Within])
def test_adapters_run_dense_since_the_kernels_would_leave_them_out(adapter):
    model, plain = Model("auto"), Model("auto")
    for ffn in (*plain.ffns, *model.ffns):
        ffn.use_kernels("auto", Costs(dense=1.0, fixed=0.1, per_neuron=0.0))
    controller, optimizer = controlled(plain)
    train(plain, controller, optimizer, batches(2))
    assert [ffn.path for ffn in plain.ffns] == ["sparse"] * L
    model.ffns[1].up_proj = adapter(model.ffns[1].up_proj)
    other, optimizer = controlled(model)
    other.load_state_dict(controller.state_dict())
    train(model, other, optimizer, batches(2))
    assert [ffn.path for ffn in model.ffns] == ["dense"] * L
    reason = f"ffns.1.up_proj is a {adapter.__name__}.* would use the weight alone"
    assert re.match(reason, other.dense_because)
    model.ffns[1].use_kernels("sparse")
    with pytest.raises(ValueError, match=reason + ": build its FFN with kernels='auto'"):
        controlled(model)


class TrainedCopy(nn.Module):
    """A frozen module and the copy that is trained and called, as PEFT's `modules_to_save`."""

    def __init__(self, module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})
        module.requires_grad_(False)

    def forward(self, x):
        return self.modules_to_save["default"](x)


@pytest.mark.parametrize("around", [lambda ffn: ffn, nn.Sequential])
def test_of_an_ffn_with_a_trained_copy_only_the_copy_counts(around):
    model, plain = Model(), Model()
    for i, ffn in enumerate(model.ffns):
        model.ffns[i] = TrainedCopy(around(ffn))
    results = []
    for each in (model, plain):
        controller, optimizer = controlled(each)
        train(each, controller, optimizer, batches(2))
        results.append(controller.statistics())
    assert results[0] == results[1]


def test_ffns_that_only_a_wrappers_name_tells_apart_all_count():
    model = nn.Module()
    model.module, model.ffns = Model(), Model().ffns  # `module` is also what DDP calls its model
    controller, _ = controlled(model)
    assert list(controller.ffns) == [
        *(f"module.ffns.{i}" for i in range(L)),
        *(f"ffns.{i}" for i in range(L)),
    ]


@pytest.mark.parametrize("adapter", [Around, Within])
def test_an_adapter_that_comes_later_is_not_left_out(adapter):
    model = Model("sparse")
    controlled(model)
    model.ffns[1].up_proj = adapter(model.ffns[1].up_proj)
    [x] = batches()
    with pytest.raises(ValueError, match=rf"up_proj is a {adapter.__name__}.* use_kernels.'dense'"):
        model(x)
    with pytest.raises(ValueError, match=r"use_kernels.'dense'"):
        torch.compile(model.ffns[1], backend="eager")(x)
    model.ffns[1].use_kernels("dense")
    ffn = model.ffns[1]
    expected = ffn.down_proj(F.relu(ffn.gate_proj(x)) * ffn.up_proj(x))
    torch.testing.assert_close(ffn(x), expected)


def test_layers_that_switch_together_try_the_sparse_path_once_at_the_start():
    """So that the graph of a compiled model is there when they switch."""
    model = Model("auto")
    for ffn in model.ffns:
        ffn.use_kernels("auto", Costs(dense=1.0, fixed=0.1, per_neuron=0.05))
    controller, optimizer = controlled(model, switch_together=True)
    sparse = []
    for x in batches(4):
        train(model, controller, optimizer, [x])
        sparse.append(controller.statistics().sparse)
    assert sparse == [[False] * L, [True] * L, [False] * L, [False] * L]


class Embedded(Model):
    """With an embedding below."""

    def __init__(self, kernels) -> None:
        super().__init__(kernels)
        self.embedding = nn.Embedding(7, K)

    def forward(self, ids):
        return super().forward(self.embedding(ids))


@pytest.mark.parametrize("kernels", ["dense", "sparse"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_tokens_sorted_by_id_give_the_same_numbers_and_smaller_unions(kernels, checkpointed):
    ids = torch.randint(7, (4, 256), generator=torch.Generator().manual_seed(3))
    losses, by_order, unions = [], [], []
    for is_sorted in (False, True):
        model = Embedded(kernels)
        with torch.no_grad():  # few neurons are active for an id, each for few ids
            for ffn in model.ffns:
                ffn.gate_proj.weight[::2] -= 0.4
        model.checkpointed = checkpointed
        controller, optimizer = controlled(model, embedding=model.embedding if is_sorted else None)
        loss = model(ids).square().mean() + controller.l1_loss()
        loss.backward()
        losses.append(loss.item())
        by_order.append(gradients(model))
        optimizer.step()
        controller.step()
        unions.append(controller.statistics().union_mean)
        model.eval()
        with torch.no_grad():
            assert model(ids[:1]).shape == (1, 256, K)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(*by_order, rtol=1e-4, atol=1e-6)
    for in_text_order, in_token_order in zip(*unions, strict=True):
        assert in_token_order < 0.8 * in_text_order


def test_an_embedding_that_is_not_called_is_a_warning():
    model = Embedded("dense")
    ids = torch.randint(7, (4, 64), generator=torch.Generator().manual_seed(3))
    controller, _ = controlled(model, embedding=nn.Embedding(7, K))
    model(ids)
    with pytest.warns(UserWarning, match="256 tokens, and `embedding` was not called with their"):
        controller.l1_loss()
    assert not controller._call.ordered  # for which `auto` measures costs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)
        controller.l1_loss()  # once
        controller, _ = controlled(model, embedding=model.embedding)
        model(ids)
        controller.l1_loss()
        assert controller._call.ordered


@pytest.mark.parametrize("kernels", ["dense", "sparse"])
def test_what_is_computed_before_a_checkpointed_backward_pass_may_be_other_tokens(kernels):
    """Activation checkpointing then repeats the forward pass without its order."""
    first, second = torch.randint(7, (2, 4, 64), generator=torch.Generator().manual_seed(3))
    model, plain = Embedded(kernels), Embedded(kernels)
    model.checkpointed = True
    controller, _ = controlled(model, embedding=model.embedding)
    plain_controller, _ = controlled(plain)
    loss = model(first).square().mean() + controller.l1_loss()
    model.eval()
    with torch.no_grad():
        model(second)
    model.train()
    loss.backward()
    losses = [model(ids).square().mean() + controller.l1_loss() for ids in (first, second[:3])]
    sum(losses).backward()
    for ids in (first, first, second[:3]):
        (plain(ids).square().mean() + plain_controller.l1_loss()).backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)


def test_the_embedding_may_be_called_by_keyword_and_refuses_ids_first():
    model = Embedded("dense")
    controlled(model, embedding=model.embedding)
    ids = torch.randint(7, (1, 20))
    for controller_number in range(2):
        assert len(model.embedding._forward_hooks) == 1, controller_number
        controlled(model, embedding=model.embedding)
    order = model.ffns[0].training_order
    model.embedding(ids)
    token_M = order.of(20, torch.device("cpu")).token_M
    model.embedding(ids.flip(1))
    assert not torch.equal(order.of(20, torch.device("cpu")).token_M, token_M)
    model.embedding(input=ids)
    assert torch.equal(order.of(20, torch.device("cpu")).token_M, token_M)
    with pytest.raises(IndexError, match="index out of range in self"):
        model.embedding(ids + 7)
    for other in (model.ffns[0].up_proj, model.embedding.weight, "embedding"):
        with pytest.raises(ValueError, match="give the module that is called with the token ids"):
            controlled(model, embedding=other)


def test_what_keeps_it_from_the_target_is_a_warning():
    model = Model()
    with torch.no_grad():  # no neuron is active
        for ffn in model.ffns:
            ffn.gate_proj.weight.zero_()
    controller, optimizer = controlled(model, target_nnz=30)
    with pytest.warns(UserWarning, match=r"start over with a lower l1_coefficient, such as 2e-05"):
        train(model, controller, optimizer, batches(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, controller, optimizer, batches(1))


@pytest.mark.parametrize("tokens", [torch.float32, torch.bfloat16])
def test_it_computes_in_the_type_of_its_tokens(tokens):
    for kernels in ("dense", "sparse"):
        ffn = SparseFFN(K, N, gated=True, kernels=kernels)
        with pytest.raises(ValueError, match=r"x \(2, 16\) is torch.int64: an FFN computes on emb"):
            ffn(torch.ones(2, K, dtype=torch.int64))
        x = batches()[0].to(tokens).requires_grad_()
        y = ffn(x)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype) == (tokens, tokens)
        assert ffn.up_proj.weight.grad.dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert ffn(x).dtype == torch.bfloat16


@pytest.mark.parametrize("gated", [True, False])
def test_tokens_of_another_width_are_named(gated):
    ffn = SparseFFN(K, N, gated=gated, kernels="sparse")
    with pytest.raises(ValueError, match="x has 9 features, and the FFN takes 16"):
        ffn(torch.randn(2, 3, 9))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compiled_whole_it_is_one_graph_for_all_capacities():
    """And the same numbers; capacities change after 16 steps and a growth."""
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    graphs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = Embedded("sparse")
        controller, optimizer = controlled(model, target_nnz=8.0, embedding=model.embedding)
        optimizer.param_groups[0]["lr"] = 0.1
        run = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        capacities, losses = set(), []
        generator = torch.Generator().manual_seed(4)
        for _ in range(20):
            ids = torch.randint(7, (2, 20), generator=generator)
            loss = run(ids).square().mean() + controller.l1_loss()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            controller.step()
            capacities.add(int(model.ffns[0]._columns[0]))
        graphs.append((losses, controller.statistics()))
        assert len(capacities) > 1
    assert len(compiles) == 1
    assert graphs[0][0] == pytest.approx(graphs[1][0])
    assert graphs[0][1].nnz_mean == pytest.approx(graphs[1][1].nnz_mean)
