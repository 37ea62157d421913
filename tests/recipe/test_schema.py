"""Recipes: every bundled one loads, says what the paper says, and refuses what is wrong."""

import json
import re

import pytest
import torch
import yaml

import results
from sparsellm.model import build_model
from sparsellm.paths import bundled
from sparsellm.recipe import Recipe, bundled_recipes, load_recipe
from sparsellm.recipe.estimate import (
    active_parameters,
    count_parameters,
    estimate_memory,
    executed_flops_per_token,
    summary,
    train_flops_per_token,
)
from sparsellm.recipe.families import ARCHITECTURES


@pytest.mark.parametrize("name", bundled_recipes())
def test_bundled_recipe_loads_and_round_trips(name, tmp_path):
    recipe = load_recipe(name)
    assert recipe.name == name.rsplit("/", 1)[-1]
    saved = tmp_path / "recipe.yaml"
    saved.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(str(saved)) == recipe


@pytest.mark.parametrize("name", ["0.5b", "debug", "pilot"])
def test_recipes_without_a_base_state_every_key(name):
    content = yaml.safe_load((bundled("recipes") / f"{name}.yaml").read_text(encoding="utf-8"))
    resolved = load_recipe(name).model_dump(mode="json")
    optional = {"files", "validation_files", "text_field", "document_separator", "on_mismatch"}
    for section, values in resolved.items():
        if isinstance(values, dict):
            assert values.keys() - content[section].keys() <= optional, section


@pytest.mark.parametrize(
    ("name", "layers", "steps", "billion_tokens", "billion_parameters"),
    [
        ("0.5b", 8, 10_000, 10.49, 0.51),
        ("1b", 18, 20_000, 20.97, 1.03),
        ("1.5b", 28, 30_000, 31.46, 1.54),
        ("2b", 38, 40_000, 41.94, 2.06),
    ],
)
def test_sizes_are_those_of_table_2(name, layers, steps, billion_tokens, billion_parameters):
    recipe = load_recipe(name)
    m, o = recipe.model, recipe.optimizer
    assert (m.hidden_size, m.intermediate_size, m.num_hidden_layers) == (2048, 5632, layers)
    assert (m.num_attention_heads, m.num_key_value_heads, m.context_length) == (32, 32, 2048)
    assert (recipe.train.steps, recipe.train.global_batch_tokens) == (steps, 1_048_576)
    assert (o.learning_rate, o.weight_decay, o.beta1, o.beta2) == (1e-3, 0.1, 0.9, 0.95)
    assert (o.eps, o.warmup_steps, o.clip_norm) == (1e-8, 600, 1.0)
    assert (m.rms_norm_eps, m.initializer_range, m.tie_word_embeddings) == (1e-5, 0.02, True)
    assert recipe.padded_vocab_size == 50_304
    tokens = steps * recipe.train.global_batch_tokens / 1e9
    assert tokens == pytest.approx(billion_tokens, abs=0.005)
    assert count_parameters(recipe).total / 1e9 == pytest.approx(billion_parameters, abs=0.01)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 2**64),
        ("data.num_workers", 10**6),
        ("model.vocab_multiple", 10**12),
        ("model.num_hidden_layers", 10**8),
        ("model.initializer_range", 10.0),
    ],
)
def test_a_value_beyond_reason_is_refused_before_anything_is_built(key, value):
    with pytest.raises(
        ValueError, match=rf"key '{key}': must be less than or equal to \d+ \(got {value}\)"
    ):
        load_recipe("debug", [f"{key}={value}"])


# On what memory depends, of the case of a record.
MEMORY_KEYS = ("recipe", "gpus", "config", "global_batch_tokens", "micro_batch_size", "precision")
MEMORY_KEYS += ("vocab_size",)


def test_memory_is_estimated_as_it_was_measured():
    newest = {
        json.dumps([r["case"].get(key) for key in MEMORY_KEYS]): r  # later records replace earlier
        for r in results.read_records(results.RECORDS)
        if (r["bench"], r["metric"]) == ("train", "memory_GiB") and r["case"]["kernels"] == "dense"
    }
    measured = list(newest.values())
    assert {r["case"]["config"] for r in measured} == {"single", "ddp8", "fsdp2"}
    for r in measured:
        case = r["case"]
        if case["config"] == "ddp8" and r["commit"] in {"27db605", "318fe62"}:
            continue  # gradients still lay beside DDP's buckets
        keys = ("global_batch_tokens", "micro_batch_size")
        bytes_ = ["data.corpus=sample", "data.tokenizer=bytes"] if "vocab_size" in case else []
        sizes = [f"train.{key}={case[key]}" for key in keys]
        overrides = [f"runtime.precision={case['precision']}"] if "precision" in case else []
        recipe = load_recipe(case["recipe"], [*bytes_, *sizes, *overrides])
        assert recipe.padded_vocab_size == case.get("vocab_size", 50_304)
        shards = case["gpus"] if case["config"] == "fsdp2" else 1
        estimate = estimate_memory(recipe, shards).total / 2**30
        # Allocator and communication come on top.
        assert 0.93 * r["value"] < estimate < r["value"], case


def test_memory_of_replicated_shards_is_that_of_one_group_of_them():
    recipe = load_recipe("8b")
    node, nodes = estimate_memory(recipe, 8), estimate_memory(recipe, 8, 64)
    assert nodes == node  # 8 × 8 GPUs still accumulate whole gradients over several rounds
    assert nodes.total / 2**30 < 70 < estimate_memory(recipe).total / 2**30  # of 80 GB; not DDP
    once = load_recipe("8b", ["train.global_batch_tokens=262144"])
    assert estimate_memory(once, 8, 64).gradients == node.gradients // 8  # one round: sharded
    assert "memory per GPU, HSDP 8 × 8   68.1 GiB" in summary(recipe, 64)


@pytest.mark.parametrize("l1", ["4e-3", "0"])
@pytest.mark.parametrize(("optimizer", "by_adamw"), [("null", True), ("adamw", True), ("muon", 0)])
def test_memory_of_gates_is_that_of_the_optimizer_that_updates_them(l1, optimizer, by_adamw):
    overrides = [f"sparsity.l1_coefficient={l1}", f"optimizer.gate_optimizer={optimizer}"]
    recipe = load_recipe("debug", ["optimizer.name=muon", *overrides])
    counted, gates = count_parameters(recipe), 4 * 128 * 352
    of_adamw = counted.embedding + counted.vectors + (gates if by_adamw else 0)
    assert estimate_memory(recipe).optimizer == 4 * (counted.total + of_adamw)


def test_memory_of_a_micro_batch_that_grows_is_shown_per_sequence():
    chosen = estimate_memory(load_recipe("2b", ["train.micro_batch_size=4"])).total / 2**30
    shown = summary(load_recipe("2b"), 8)
    assert "8 GPUs × 64 sequences × 2048 tokens, as many at once as fit" in shown
    [fixed, each] = re.findall(r"DDP +([\d.]+) GiB \(.*\) and ([\d.]+) for each sequence", shown)[0]
    assert float(fixed) + 4 * float(each) == pytest.approx(chosen, abs=0.3)


@pytest.mark.parametrize(
    "name", ["0.5b", "8b", "debug", "ablations/non-gated", "ablations/dense-silu"]
)
def test_counts_equal_the_built_model(name):
    check_counts(load_recipe(name))


@pytest.mark.parametrize("family", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_counts_of_every_family_equal_the_built_model(family):
    gated = str(family.gated).lower()
    check_counts(load_recipe("debug", [f"model.family={family.name}", f"ffn.gated={gated}"]))


def check_counts(recipe):
    with torch.device("meta"):
        model = build_model(recipe, eos_token_id=0)
    counted = count_parameters(recipe)
    assert counted.total == sum(p.numel() for p in model.parameters())
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    matrices = sum(m.weight.numel() for m in linears)  # the tied output matrix among them
    attention = 12 * recipe.model.num_hidden_layers * recipe.model.hidden_size
    assert train_flops_per_token(recipe) == 6 * matrices + attention * recipe.model.context_length


@pytest.mark.parametrize("gated", [True, False])
def test_executed_flops_are_those_of_the_gate_and_of_what_fires(gated):
    shape = f"ffn.gated={str(gated).lower()}"
    recipe = load_recipe("debug", [shape])
    layers, k, n = 4, recipe.model.hidden_size, recipe.model.intermediate_size
    assert recipe.model.num_hidden_layers == layers
    dense, nnz_L = train_flops_per_token(recipe), [0.0, 10.0, 20.0, float(n)]
    matrices = 3 if gated else 2
    ffn = 6 * matrices * k * n
    left = [2 * k * n + (3 * matrices - 1) * 2 * k * nnz for nnz in nnz_L]
    flops = executed_flops_per_token(recipe, nnz_L, [True] * layers)
    assert flops == dense - layers * ffn + sum(left)
    assert left[-1] == ffn  # where every neuron is active
    assert executed_flops_per_token(recipe, nnz_L, [False] * layers) == dense
    again = load_recipe("debug", [shape, "runtime.activation_checkpointing=true"])
    blocks = dense - 6 * recipe.padded_vocab_size * k
    forward = (blocks - layers * ffn) / 3
    forward += sum(2 * k * n + (matrices - 1) * 2 * k * nnz for nnz in nnz_L)
    assert executed_flops_per_token(again) == dense + blocks / 3
    assert executed_flops_per_token(again, nnz_L, [True] * layers) == flops + forward


@pytest.mark.parametrize("size", ["0.5b", "1b", "1.5b", "2b"])
def test_of_four_times_the_neurons_a_token_uses_few(size):
    recipe = load_recipe(size, ["model.intermediate_size=22528", "sparsity.target_nnz=60"])
    # Whatever is active, the gate is used whole.
    layers, k, n = recipe.model.num_hidden_layers, recipe.model.hidden_size, 22_528
    expected = count_parameters(recipe).total - layers * 2 * k * (n - 60)
    assert active_parameters(recipe, 60) == expected
    assert f"# active parameters            {expected:,} for a token" in summary(recipe, 8)
    assert active_parameters(recipe, n) == count_parameters(recipe).total
    assert "active" not in summary(load_recipe(size, ["sparsity.target_nnz=null"]), 8)


def test_a_section_states_what_differs_as_in_a_file():
    recipe, plain = load_recipe("debug", ["train={steps: 3}"]), load_recipe("debug")
    assert (recipe.train.steps, plain.train.steps) == (3, 120)
    assert recipe.train.micro_batch_size == plain.train.micro_batch_size
    recipe = load_recipe("debug", ["sparsity={target_nnz: 30}"])  # all of its keys have defaults
    assert recipe.sparsity.l1_coefficient == plain.sparsity.l1_coefficient > 0


def test_switches_are_found_by_their_keys():
    fields = {"head_dim": 16, "attention_bias": True, "max_position_embeddings": 512}
    recipe = load_recipe("debug", [f"model.huggingface={json.dumps(fields)}"])
    assert recipe.model.huggingface == fields


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=true", r"key 'train.steps': must be a number, not true or false"),
        ("sparsity.target_nnz=on", r"key 'sparsity.target_nnz': must be a number, not true"),
        ("train.stepss=5", r"unknown key 'train.stepss'; nearest valid key: 'train.steps'"),
        ("l1_coefficient=1e-4", r"nearest valid key: 'sparsity.l1_coefficient'"),
        ("train.learning_rate=1", r"nearest valid key: 'optimizer.learning_rate'"),
        ("foo=1", r"unknown key 'foo'; nearest valid keys: ('[\w.]+'(, |$)){3}"),
        ("optimizer.foo=1", r"nearest valid keys: ('optimizer\.\w+'(, |$)){3}"),
        ("train.micro_batch_size=3", r"global_batch_tokens 8192 must be a multiple"),
        ("model.hidden_size=100", r"=100: model.hidden_size 100 must .* \(RoPE rotates pairs\)$"),
        ("model.huggingface={head_dim: 7}", r"\}: model.huggingface.head_dim 7 .* pairs\)$"),
        ("ffn.activation=gelu", r"key 'ffn.activation': must be 'relu' or 'relu2' or .*'silu'"),
        ("train.steps", r"section.key=value"),
        ("name=a/b", r"key 'name'"),
        ("sparsity.target_schedule=[[0.2, true]]", r"target_schedule': must be a number, not true"),
        ("data.corpus={a: true}", r"key 'data.corpus': must be text, or the share of each"),
        ("data.corpus={1: 0.5}", r"5}: key 'data.corpus': must be text, or the share of each"),
        ("model.huggingface.max_position_embeddings=128", r"length 256 must not exceed .*128"),
        ("model.huggingface.sliding_window=64", r"256 must not exceed .*sliding_window 64"),
        ("model.huggingface.head_dim=7", r"model\.huggingface\.head_dim 7 must be even"),
        (
            "model.huggingface.rope_parameters={rope_theta: 1}",
            r"must be given as model\.rope_theta",
        ),
        (
            "model.huggingface={layer_types: [full_attention, linear_attention]}",
            r"key 'model\.huggingface\.layer_types\.1': .*'full_attention' or 'sliding_attention'",
        ),
        (
            "model.huggingface={layer_types: [sliding_attention], sliding_window: 256}",
            r"layer_types has sliding_attention, which needs .*use_sliding_window: true",
        ),
        (
            "model.huggingface.use_sliding_window=true",
            r"use_sliding_window: true needs model\.huggingface\.sliding_window",
        ),
        ("model.huggingface.attention_dropout=1", r"attention_dropout': .*less than 1"),
        ("model.huggingface.mlp_bias=true", r"unknown key 'model\.huggingface\.mlp_bias'"),
        (
            "model.huggingface.head_dim=x",
            r"'model\.huggingface\.head_dim': must be a valid integer",
        ),
        (
            "ffn={activation: silu, kernels: sparse}",
            r": sparse needs ffn.activation: relu or relu2",
        ),
        ("optimizer.decay_steps=10", r"optimizer.decay_steps needs optimizer.schedule: wsd"),
        ("optimizer.normalize_neurons=true", r"needs optimizer.name: muon .*; set it to false"),
        ("model.vocab_size=200", r"vocab_size 200 is less than the 257 ids .* bytes"),
        ("model.family=gpt", r"model.family': must be null or 'llama'"),
        ("model.family=arcee", r"model.family: arcee needs ffn.gated: false"),
    ],
)
def test_wrong_override_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("debug", [override]).padded_vocab_size  # noqa: B018


@pytest.mark.parametrize(
    "overrides",
    [
        "optimizer.decay_steps=10 optimizer.schedule=wsd",
        "optimizer.decay_steps=1000 optimizer.schedule=constant",
        "sparsity.l1_zero_steps=1000 sparsity.l1_coefficient=0 sparsity.target_nnz=null",
        "optimizer.normalize_neurons=true optimizer.name=muon",
    ],
)
def test_what_fits_or_has_no_effect_is_accepted(overrides):
    load_recipe("debug", overrides.split())


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("llama", "sliding_window=256"),
        ("mistral", "attention_bias=true"),
        ("qwen2", "attention_bias=false"),
        ("qwen3", "no_rope_layers=[1, 1, 1, 0]"),
    ],
)
def test_a_field_that_the_family_does_not_read_is_refused(family, field):
    key = field.partition("=")[0]
    with pytest.raises(ValueError, match=rf"\.{key} has no effect on model\.family: {family}; lea"):
        load_recipe("debug", [f"model.family={family}", f"model.huggingface.{field}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("ffn.ramp_steps=121", r"ffn.ramp_steps 121 must not exceed train.steps 120"),
        ("sparsity.l1_zero_steps=121", r"sparsity.l1_zero_steps 121 must not exceed"),
        (
            "sparsity.target_nnz=null sparsity.l1_zero_steps=60 sparsity.l1_ramp_steps=61",
            r"sparsity.l1_zero_steps 60 \+ sparsity.l1_ramp_steps 61 must not exceed",
        ),
        (
            "sparsity.reinit_rate=0.1 sparsity.dead_window_tokens=983041",
            r"sparsity.dead_window_tokens 983041, and the run has 983040 tokens in all: lower",
        ),
    ],
)
def test_what_a_run_would_not_complete_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("debug", overrides.split())
    # One less is right.
    *fixed, last = overrides.split()
    key, value = last.split("=")
    load_recipe("debug", [*fixed, f"{key}={int(value) - 1}"])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("[[2, 30]]", "target_schedule.0.0': must be less than 1 (got 2)"),
        ("[[0.2, 30], [0.6]]", "target_schedule.1': must have another value (got [0.6])"),
        ("[[0.2, 30, 4]]", "target_schedule.0': must have at most 2 items, not 3 (got [0.2, 30, 4"),
        ("[0.2]", "target_schedule.0': must be a list (got 0.2)"),
    ],
)
def test_a_wrong_item_of_a_list_is_named_with_its_line(tmp_path, schedule, message):
    file, text = tmp_path / "mine.yaml", "base: debug\nsparsity:\n  target_nnz: 3\n"
    file.write_text(f"{text}  target_schedule: {schedule}")
    message = f"key 'sparsity.{message}"
    with pytest.raises(ValueError, match=rf"mine.yaml, line 4: {re.escape(message)}"):
        load_recipe(str(file))
    # A value from --set is in no line.
    file.write_text(f"{text}  target_schedule: [[0.2, 30], [0.6, 20]]")
    for override in (f".target_schedule={schedule}", f"={{target_schedule: {schedule}}}"):
        with pytest.raises(ValueError, match=re.escape(f"{override}: {message}")):
            load_recipe(str(file), [f"sparsity{override}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  stepz: 3", r", line 3: unknown key 'train.stepz'.*'train.steps'"),
        ("train.steps: 3", ", line 2: key 'train.steps': write it as `steps` within .* `train:`"),
        ("seed: 1\nseed: 2", r".*line 3.*'seed' occurs twice"),
        ("model:\n  hidden_size: 100", ", line 3: model.hidden_size 100 must be an even multiple"),
        (
            "seed: 1\nmodel:\n  family: arcee",
            ", line 4: model.family: arcee needs ffn.gated: false",
        ),
        (
            "train:\n  steps: 1\n  global_batch_tokens: 3",
            ", line 4: train.global_batch_tokens 3 must be",
        ),
        ("sparsity: {target_nnz: 352}", ", line 2: sparsity.target_nnz 352 must be below .* 352"),
    ],
)
def test_wrong_keys_of_a_file_are_named_with_their_line(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: debug\n{text}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"mine.yaml{message}"):
        load_recipe(str(path))


def test_all_wrong_keys_are_named_at_once():
    with pytest.raises(ValueError, match=r"(?s)train\.stepz.*sparsity\.l2") as error:
        load_recipe("debug", ["train.stepz=1", "sparsity.l2=0"])
    assert len(str(error.value).splitlines()) == 2


def test_exponents_without_a_point_are_numbers():
    # YAML 1.1 reads 1e-3 as text; a person means a number.
    assert load_recipe("debug", ["optimizer.learning_rate=1e-3"]).optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(("written", "read"), [("010", "8"), ("-017", "-15"), ("1:30", "90")])
def test_a_number_that_yaml_reads_in_another_base_is_refused(tmp_path, written, read):
    path = tmp_path / "own.yaml"
    path.write_text(f"base: debug\nname: own\nseed: {written}\n")
    with pytest.raises(
        ValueError, match=rf"own.yaml.*line 3: YAML reads {written} as {read}: write"
    ):
        load_recipe(str(path))
    with pytest.raises(ValueError, match=rf"YAML reads {written} as {read}: write"):
        load_recipe("debug", [f"seed={written}"])


def test_no_such_recipe_lists_the_bundled():
    with pytest.raises(FileNotFoundError, match=r"no bundled recipe of that name.*0\.5b"):
        load_recipe("0.7b")
    for path in ("recipes/debug.yml", "/elsewhere/recipes/debugg.yaml"):
        with pytest.raises(FileNotFoundError, match=r"did you mean 'debug'\?"):
            load_recipe(path)


def test_the_folder_of_a_run_names_its_recipe(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(FileNotFoundError, match=f"did you mean '{tmp_path}/recipe.yaml'"):
        load_recipe(str(tmp_path))


@pytest.mark.parametrize("base", ["{0}/b.yaml", "../{0.name}/b.yaml", "link/b.yaml"])
def test_base_cycle_is_refused(tmp_path, base):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "a.yaml").write_text(f"base: {base.format(tmp_path)}\n", encoding="utf-8")
    (tmp_path / "b.yaml").write_text(f"base: ../{tmp_path.name}/a.yaml\n", encoding="utf-8")
    with pytest.raises(ValueError, match="leads back to itself through"):
        load_recipe(str(tmp_path / "a.yaml"))


def test_a_mapping_that_is_a_value_replaces_that_of_the_base(tmp_path):
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text(
        "base: debug\n"
        "data: {corpus: {a: 0.7, b: 0.3}, num_workers: 2}\n"
        "model: {huggingface: {head_dim: 32, rope_parameters: {rope_type: linear, factor: 2.0}}}\n"
    )
    child.write_text(
        "base: base.yaml\n"
        "data: {corpus: {c: 1}}\n"
        "model: {huggingface: {rope_parameters: {rope_type: dynamic}}}\n"
    )
    recipe = load_recipe(str(child))
    assert recipe.data.corpus == {"c": 1}
    assert recipe.data.num_workers == 2  # a section is merged by key
    assert recipe.model.huggingface == {"rope_parameters": {"rope_type": "dynamic"}}
    changes = ["data.corpus={c: 1}", "model.huggingface={rope_parameters: {rope_type: dynamic}}"]
    assert load_recipe(str(base), changes) == recipe


def test_ablation_differs_from_its_base_only_where_it_says():
    base, ablation = load_recipe("1.5b"), load_recipe("ablations/reinit")
    same = ablation.model_copy(
        update={"name": base.name, "description": base.description, "sparsity": base.sparsity}
    )
    assert same == base
    assert ablation.sparsity.reinit_rate == 0.1


def test_accumulation_covers_the_global_batch_exactly():
    recipe = load_recipe("0.5b")
    for world_size in (1, 2, 4, 8, 32):
        per_step = recipe.accumulation_steps(world_size) * world_size
        per_step *= recipe.train.micro_batch_size * recipe.model.context_length
        assert per_step == 1_048_576
    with pytest.raises(ValueError, match=r"3 ranks .* change micro_batch_size"):
        recipe.accumulation_steps(3)


def test_every_key_has_a_description():
    def undescribed(model, prefix=""):
        for name, field in model.model_fields.items():
            nested = hasattr(field.annotation, "model_fields")
            if nested:
                yield from undescribed(field.annotation, f"{name}.")
            elif not field.description:
                yield prefix + name

    assert list(undescribed(Recipe)) == []


@pytest.mark.parametrize("l1", ["1e-3", "0"])
def test_gates_have_a_learning_rate_of_their_own_only_beside_muon(l1):
    gate_rate, muon = "optimizer.gate_learning_rate=1e-3", "optimizer.name=muon"
    dense_or_sparse = f"sparsity.l1_coefficient={l1}"
    assert load_recipe("debug", [gate_rate, muon, dense_or_sparse]).optimizer.gate_peak == 1e-3
    eighth = load_recipe("debug", [muon, dense_or_sparse, "optimizer.learning_rate=8e-3"])
    assert eighth.optimizer.gate_peak == 1e-3
    refused = r"{} needs optimizer.name: muon.*optimizer.learning_rate.*; set it to null"
    for key in (gate_rate, "optimizer.gate_optimizer=muon", "optimizer.gate_optimizer=adamw"):
        with pytest.raises(ValueError, match=refused.format(key.split("=")[0])):
            load_recipe("debug", [key, dense_or_sparse])
    with pytest.raises(ValueError, match=r"gate_learning_rate needs .*gate_optimizer: adamw"):
        load_recipe("debug", [gate_rate, muon, dense_or_sparse, "optimizer.gate_optimizer=muon"])


def test_adamw_updates_gates_beside_muon_but_not_the_up_projection_of_a_dense_model():
    def by_adamw(*overrides):
        return load_recipe("debug", ["optimizer.name=muon", *overrides]).gates_by_adamw

    dense, flat = "sparsity.l1_coefficient=0", "ffn.gated=false"
    assert all((by_adamw(), by_adamw(dense), by_adamw(flat)))
    assert not by_adamw(dense, flat)
    assert by_adamw(dense, flat, "optimizer.gate_optimizer=adamw")
    assert not by_adamw("optimizer.gate_optimizer=muon")


def test_an_embedding_is_as_large_as_asked():
    assert load_recipe("debug", ["model.vocab_size=257"]).padded_vocab_size == 257


def test_the_model_family_is_that_of_the_kind_of_ffn():
    assert load_recipe("debug").architecture.name == "llama"
    assert load_recipe("ablations/non-gated").architecture.name == "arcee"
