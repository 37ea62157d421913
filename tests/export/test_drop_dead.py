"""Dead neurons left out of an export: which ones, how exactly, and what is said of it."""

import dataclasses
import json

import pytest
import torch
from conftest import save_run
from hypothesis import given, strategies as st
from runs.hf_models import change, short_text, write_chat_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sparsellm import accelerate
from sparsellm.analyze.activity import held_out_tokens
from sparsellm.data.text.corpus import load_corpus
from sparsellm.export.drop_dead import DropDead, choose_remaining, drop_dead_neurons
from sparsellm.export.save_export import export, import_export
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe import load_recipe
from sparsellm.runs import state
from sparsellm.runs.huggingface.pretrained import load_pretrained
from sparsellm.training import loop
from sparsellm.training.run import build_run, close_run
from sparsellm.training.step import train_step

NEURONS = 384
TOKENS = 1024
LIVING = (130, 77)  # neurons of each layer that are active; the first decides: 256
DROPPED = NEURONS - 256


def _checkpoint(recipe, living=LIVING):
    """A checkpoint whose layers have so many living neurons, and which ones they are.

    Element 0 of every token's state is 1 and stays it, so that after the norm it is positive: the
    gate's weight for it decides whether a neuron is always active or never is.
    """
    run = build_run(recipe)
    train_step(run, StopRequest())
    generator = torch.Generator().manual_seed(3)
    alive = [torch.randperm(NEURONS, generator=generator)[:count] for count in living]
    with torch.no_grad():
        run.model.model.embed_tokens.weight[:, 0] = 1
        for layer, alive_A in zip(run.model.model.layers, alive, strict=True):
            layer.self_attn.o_proj.weight[0] = 0
            ffn = layer.mlp
            ffn.up_proj.weight.normal_(generator=generator).mul_(0.3)
            ffn.down_proj.weight.normal_(generator=generator).mul_(0.003)
            ffn.down_proj.weight[0] = 0
            # Dead ones are further from being active the higher their number.
            ffn.pattern_weight[:, 0] = -torch.linspace(2, 9, NEURONS)
            ffn.pattern_weight[:, 1:] *= 1e-3
            ffn.pattern_weight[alive_A, 0] = 2
    path = save_run(run)
    close_run(run)
    return path, [set(alive_A.tolist()) for alive_A in alive]


@torch.no_grad()
def _logits(model, tokens_BT):
    return model(tokens_BT).logits.float()


def _measured_tokens(pretrained):
    corpus = load_corpus(pretrained.recipe.data.corpus)
    return torch.cat(list(held_out_tokens(pretrained, [corpus], TOKENS, 4)))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "non-gated"])
def test_the_measured_text_gives_the_same_logits(tiny, tmp_path, gated):
    wide = tiny(f"model.intermediate_size={NEURONS}", f"ffn.gated={str(gated).lower()}")
    path, alive = _checkpoint(wide)
    whole = load_pretrained(path)
    tokens_BT = _measured_tokens(whole)
    expected = _logits(whole.model, tokens_BT)
    out = tmp_path / "out"
    source, report = export(path, out, "fp32", drop_dead=DropDead(TOKENS, device="cpu"))
    assert source == path
    assert (report.tokens, report.num_dropped) == (TOKENS, DROPPED) == (tokens_BT.numel(), 128)

    stock = AutoModelForCausalLM.from_pretrained(out)
    assert type(stock).__name__ == ("LlamaForCausalLM" if gated else "ArceeForCausalLM")
    for narrow in (stock, load_pretrained(out).model):
        # Sums over 256 of 384 numbers, of which the others are zeros: fp32 rounding.
        torch.testing.assert_close(_logits(narrow, tokens_BT), expected, rtol=1e-5, atol=1e-5)
    # The text would show it if a living neuron were missing.
    with torch.no_grad():
        whole.model.model.layers[0].mlp.down_proj.weight[:, min(alive[0])] = 0
    assert (_logits(whole.model, tokens_BT) - expected).abs().max() > 1e-3

    # Every living neuron stays; of the silent ones those nearest to being active; in order.
    weights, before = load_file(out / "model.safetensors"), load_file(path / "model.safetensors")
    for layer, (neurons, layer_report) in enumerate(zip(alive, report.layers, strict=True)):
        silent = [n for n in range(NEURONS) if n not in neurons]
        assert (layer_report.fired, layer_report.silent, layer_report.kept) == (
            len(neurons),
            len(silent),
            256,
        )
        assert layer_report.dropped == silent[-DROPPED:]
        assert layer_report.nearest_dropped < -2
        remaining = sorted({*range(NEURONS)} - {*layer_report.dropped})
        name = f"model.layers.{layer}.mlp"
        for matrix in ("gate_proj", "up_proj")[not gated :]:
            key = f"{name}.{matrix}.weight"
            assert torch.equal(weights[key], before[key][remaining])
        key = f"{name}.down_proj.weight"
        assert torch.equal(weights[key], before[key][:, remaining])
    other_keys = [key for key in before if ".mlp." not in key]
    assert all(torch.equal(weights[key], before[key]) for key in other_keys)

    # Recipe, configuration and numbers agree.
    assert AutoConfig.from_pretrained(out).intermediate_size == 256
    recipe = load_recipe(str(out / "sparsellm_recipe.yaml"))
    assert recipe.model.intermediate_size == 256
    assert recipe.model_copy(update={"model": wide.model}) == wide
    numel = [sum(t.numel() for t in tensors.values()) for tensors in (before, weights)]
    content = json.loads((out / "drop_dead.json").read_text())
    assert content["parameters_saved"] == numel[0] - numel[1]
    assert content["bytes_saved"] == 4 * (numel[0] - numel[1])
    assert (content["intermediate_size_before"], content["intermediate_size"]) == (NEURONS, 256)
    assert (content["tokens"], content["corpus"], content["dtype"]) == (TOKENS, "sample", "fp32")
    assert content["rate_bound_95"] == pytest.approx(3 / TOKENS)
    assert content["gate_gemm_saved"] == pytest.approx(1 / 3)
    assert [layer["kept"] for layer in content["layers"]] == [256, 256]
    assert content["layers"][1]["dropped"] == report.layers[1].dropped


def test_bf16_is_measured_in_bf16_and_every_command_takes_it(tiny, tmp_path, cli_here):
    path, _ = _checkpoint(tiny(f"model.intermediate_size={NEURONS}"))
    out, run, again = (str(tmp_path / name) for name in ("out", "run", "again"))
    measured = ["--drop-dead", "--drop-dead-tokens", str(TOKENS), "--device", "cpu"]
    printed = cli_here("export", path, out, *measured).stdout
    card = (tmp_path / "out" / "README.md").read_text()
    saved = 2 * 3 * 32 * DROPPED
    for text in (printed, card):
        assert "Measured on 1,024 tokens of `sample`, with these weights in bf16\non cpu" in text
        assert "\n| 0 | 130 | 254 | 126 | 128 | -" in text
        assert "\n| 1 | 77 | 307 | 179 | 128 | -" in text
        assert "Width 384 → 256 in every layer: layer 0 decides, 130 of its 384" in text
        assert f"Saved: {saved:,} of " in text
        assert "MiB of weights in bf16, 33.3% of the gate GEMM" in text
        assert "each is active for under 0.0029 of the tokens with 95%" in text
    assert "feedforward width\n256, ReLU" in card
    assert "intermediate_size: 256" in card

    narrow = load_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    whole = load_pretrained(path, dtype=torch.bfloat16)
    tokens_BT = _measured_tokens(whole)
    expected = _logits(whole.model, tokens_BT)
    dense = _logits(narrow.model, tokens_BT)
    spread = expected.max() - expected.min()
    assert (dense - expected).abs().max() < 0.02 * spread  # the order of bf16's sums
    assert len(accelerate(narrow.model).accelerated) == 2
    assert (_logits(narrow.model, tokens_BT) - dense).abs().max() < 0.02 * spread

    cli_here("import", out, run)
    assert "256 neurons per layer" in cli_here("analyze", run, "--tokens", "256").stdout
    error = cli_here("generate", out, "--prompt", "def ", "--max-new-tokens", "2").stderr
    assert " of 256 " in error
    # There is nothing left to drop.
    printed = cli_here("export", run, again, *measured).stdout
    assert "Nothing dropped: layer 0 decides, 130 of its 256" in printed
    for name in ("config.json", "model.safetensors", "sparsellm_recipe.yaml"):
        ours, theirs = (tmp_path / folder / name for folder in ("again", "out"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_the_card_counts_shares_of_the_trained_width(tiny, tmp_path):
    path, _ = _checkpoint(tiny(f"model.intermediate_size={NEURONS}"))
    counts = {key: [130, 77] for key in ("nnz_mean", "nnz_max", "nnz_p99")}
    sparsity = counts | {"dead_fraction": [0.5, 0.5]}
    record = {"kind": "train", "step": 1, "tokens": 1, "loss": 1.0, "sparsity": sparsity}
    record["l1_coefficient"] = 0.0
    (path.parent.parent / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    export(path, tmp_path / "plain")
    export(path, tmp_path / "out", drop_dead=DropDead(TOKENS, device="cpu"))
    cards = [(tmp_path / name / "README.md").read_text() for name in ("plain", "out")]
    sections = [card.split("## Non-zeros per token")[1].split("## Recipe")[0] for card in cards]
    assert "| of 384 |" in sections[0]
    assert sections[0] == sections[1]
    assert "left out" not in cards[0]


def test_a_layer_that_decides_for_all_leaves_the_export_unchanged(tiny, tmp_path, cli_here):
    path, _ = _checkpoint(tiny(f"model.intermediate_size={NEURONS}"), living=(0, 257))
    plain, out = tmp_path / "plain", tmp_path / "out"
    cli_here("export", path, plain)
    arguments = ["--drop-dead", "--drop-dead-tokens", "64"]
    printed = cli_here("export", path, out, *arguments).stdout
    assert (
        "Nothing dropped: layer 1 decides, 257 of its 384 neurons were active; widths are"
        in printed
    )
    names = sorted(file.name for file in plain.iterdir())
    assert names == sorted(file.name for file in out.iterdir())
    assert all((plain / name).read_bytes() == (out / name).read_bytes() for name in names)


def test_what_was_dropped_stays_with_the_model(tiny, tmp_path):
    path, _ = _checkpoint(tiny(f"model.intermediate_size={NEURONS}"))
    once, again, back = (tmp_path / name for name in ("once", "again", "back"))
    measured = DropDead(TOKENS, device="cpu")
    export(path, once, "fp32", drop_dead=measured)
    imported, _ = import_export(once, tmp_path / "run")
    export(once, again, "bf16", drop_dead=measured)  # there is nothing left to drop
    export(imported, back)
    section = _section(once)
    assert "Width 384 → 256" in section
    for folder in (again, back):
        assert (folder / "drop_dead.json").read_bytes() == (once / "drop_dead.json").read_bytes()
        assert _section(folder) == section
    # What is trained on gives other outputs.
    recipe = tiny("model.intermediate_size=256", "train.steps=1", "name=further")
    with StopRequest() as stop:
        loop.train(recipe, stop, init_from=tmp_path / "run")
    export(recipe.run_path, tmp_path / "trained")
    assert not (tmp_path / "trained" / "drop_dead.json").exists()

    report = json.loads((once / "drop_dead.json").read_text())
    report["layers"].pop()
    (again / "drop_dead.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"drop_dead.json is not of this model, of 2 layers of"):
        export(again, tmp_path / "refused")


def test_an_export_that_is_narrowed_again_numbers_neurons_as_they_were_trained(tiny, tmp_path):
    path, _ = _checkpoint(tiny(f"model.intermediate_size={NEURONS}"))
    once, twice = tmp_path / "once", tmp_path / "twice"
    measured = DropDead(TOKENS, device="cpu")
    _, first = export(path, once, "fp32", drop_dead=measured)
    weights = load_file(once / "model.safetensors")
    killed = range(0, 256, 8)
    weights["model.layers.0.mlp.gate_proj.weight"][killed, 0] = -20
    save_file(weights, once / "model.safetensors", {"format": "pt"})
    export(once, twice, "fp32", drop_dead=measured)

    content = json.loads((twice / "drop_dead.json").read_text())
    assert content["earlier"]["layers"] == [layer.model_dump() for layer in first.layers]
    assert (content["intermediate_size_before"], content["intermediate_size"]) == (256, 128)
    before, after = load_file(path / "model.safetensors"), load_file(twice / "model.safetensors")
    for number, layer in enumerate(content["layers"]):
        dropped = {*layer["dropped"], *first.layers[number].dropped}
        remaining = sorted({*range(NEURONS)} - dropped)
        assert len(remaining) == 128
        name = f"model.layers.{number}.mlp.up_proj.weight"
        assert torch.equal(after[name], before[name][remaining])
    section = _section(twice)
    assert section.index("Width 384 → 256") < section.index("Width 256 → 128")


def _section(folder):
    card = (folder / "README.md").read_text()
    return card.partition("## Dead neurons left out")[2].partition("\n## ")[0]


def test_with_all_neurons_dead_128_stay(tiny, tmp_path):
    path, _ = _checkpoint(tiny(f"model.intermediate_size={NEURONS}"), living=(0, 0))
    _, report = export(path, tmp_path / "out", drop_dead=DropDead(TOKENS, device="cpu"))
    assert [(layer.fired, layer.kept) for layer in report.layers] == [(0, 128), (0, 128)]
    assert load_pretrained(tmp_path / "out").recipe.model.intermediate_size == 128


def test_text_of_ones_own_that_ends_early(tiny, tmp_path, cli_here):
    path, _ = _checkpoint(tiny(f"model.intermediate_size={NEURONS}"))
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "x = 1\n" * 20}) + "\n")  # 120 bytes, 3 sequences of 32
    arguments = ["--drop-dead", "--data", str(text), "--micro-batch-size", "2"]
    printed = cli_here("export", path, tmp_path / "out", *arguments).stdout
    sentence = (
        f"96 tokens of `local ({text})` (1,048,576 were asked for: its held-out text ends there)"
    )
    assert sentence in printed
    assert sentence in (tmp_path / "out" / "README.md").read_text()
    content = json.loads((tmp_path / "out" / "drop_dead.json").read_text())
    assert (content["tokens"], content["files"]) == (96, [str(text)])


def test_a_width_that_the_target_forbids_leaves_the_target_out(tiny, tmp_path, cli_here):
    """A recipe's target must be below its width, or no command reads the folder."""
    goal = ["sparsity.target_nnz=300", "sparsity.l1_ramp_steps=0", "sparsity.l1_coefficient=1e-4"]
    path, _ = _checkpoint(tiny(f"model.intermediate_size={NEURONS}", *goal))
    out, tokens = tmp_path / "out", str(TOKENS)
    command = ["export", str(path), str(out), "--drop-dead", "--drop-dead-tokens", tokens]
    assert "has no sparsity.target_nnz (it was 300)" in cli_here(*command, "--device", "cpu").stdout
    assert json.loads((out / "drop_dead.json").read_text())["target_nnz_left_out"] == 300
    recipe = load_pretrained(out).recipe
    assert (recipe.model.intermediate_size, recipe.sparsity.target_nnz) == (256, None)
    assert recipe.sparsity.l1_coefficient == 1e-4
    cli_here("generate", out, "--prompt", "def ", "--max-new-tokens", "2")


def test_a_width_that_an_earlier_target_forbids_leaves_the_schedule_out(tiny, tmp_path, cli_here):
    goal = ["sparsity.target_nnz=100", "sparsity.l1_ramp_steps=0", "sparsity.l1_coefficient=1e-4"]
    goal += ["sparsity.target_schedule=[[0.5, 300]]"]
    path, _ = _checkpoint(tiny(f"model.intermediate_size={NEURONS}", *goal))
    out, tokens = tmp_path / "out", str(TOKENS)
    command = ["export", str(path), str(out), "--drop-dead", "--drop-dead-tokens", tokens]
    cli_here(*command, "--device", "cpu")
    sparsity = load_pretrained(out).recipe.sparsity
    assert (sparsity.target_nnz, sparsity.target_schedule) == (100, [])


def test_a_neuron_that_fires_on_one_corpus_of_a_mixture_alone_stays(tiny, tmp_path):
    path, alive = _checkpoint(tiny(f"model.intermediate_size={NEURONS}"))
    weights = load_file(path / "model.safetensors")
    dead = next(n for n in range(NEURONS) if n not in alive[0])
    # In layer 0 it is active for a token whose embedding has a large element 5: that of "z".
    embedding, gate = "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"
    weights[embedding][ord("z"), 5] = 1000
    weights[gate][dead, 5] = 1
    for name, letter in (("a", "a"), ("b", "z")):
        (tmp_path / f"{name}.txt").write_text(letter * 5000)
        (tmp_path / f"train-{name}.txt").write_text(f"train {letter}" * 9)
        (tmp_path / f"{name}.yaml").write_text(
            f"source: files\nfiles: '{tmp_path}/train-{name}.txt'\n"
            f"validation_files: '{tmp_path}/{name}.txt'\n"
        )
    layer_reports = []
    for order in (("a", "b"), ("b", "a")):
        shares = ", ".join(f"{tmp_path}/{name}.yaml: 1" for name in order)
        recipe = tiny(f"model.intermediate_size={NEURONS}", f"data.corpus={{{shares}}}")
        loaded = load_pretrained(path)
        state.restore_model(loaded.model, weights)
        _, report = drop_dead_neurons(
            dataclasses.replace(loaded, recipe=recipe), "fp32", DropDead(TOKENS, device="cpu")
        )
        assert dead not in report.layers[0].dropped
        assert report.layers[0].fired == len(alive[0]) + 1
        layer_reports.append(report.layers)
    assert layer_reports[0] == layer_reports[1]


def test_a_neuron_that_is_active_after_no_text_alone_stays(tiny, tmp_path):
    """Generation begins with the end-of-document token, which a single document does not have."""
    path, alive = _checkpoint(tiny(f"model.intermediate_size={NEURONS}"))
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "x = 1\n" * 20}) + "\n")
    loaded = load_pretrained(path)
    dead, eot = max(set(range(NEURONS)) - alive[0]), loaded.tokenizer.eot_id
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight[eot, 5] = 1000
        loaded.model.model.layers[0].mlp.pattern_weight[dead, 5] = 1
    _, report = drop_dead_neurons(loaded, "fp32", DropDead(TOKENS, [str(text)], device="cpu"))
    assert report.tokens == 96
    assert dead not in report.layers[0].dropped


def test_a_neuron_that_is_active_for_the_beginning_of_a_text_alone_stays(tmp_path):
    """A model from elsewhere, whose tokenizer puts <bos> before every text."""
    folder, out = write_chat_model(tmp_path / "theirs", intermediate_size=256), tmp_path / "out"
    number, bos = 9, 0

    def with_one(name, tensor):
        if name == "model.embed_tokens.weight":
            tensor[:, 5] = -1
            tensor[bos, 5] = 4
        elif name == "model.layers.0.self_attn.o_proj.weight":
            tensor[5] = 0
        elif name.endswith("gate_proj.weight"):
            tensor[::2] = 0
            tensor[1::2, 5] -= 100 * (torch.arange(128) > 40)
            if ".0." in name:
                tensor[number] = 0
                tensor[number, 5] = 50
        return tensor

    change(folder, {"hidden_act": "relu"}, with_one)
    text = short_text(tmp_path)[1].removeprefix("data.files=[").removesuffix("]")
    _, report = export(folder, out, "fp32", drop_dead=DropDead(TOKENS, [text], device="cpu"))
    assert report.num_dropped == 128
    assert number not in report.layers[0].dropped
    stock = [AutoModelForCausalLM.from_pretrained(f) for f in (folder, out)]
    tokens = AutoTokenizer.from_pretrained(out)("the cats", return_tensors="pt").input_ids
    assert tokens[0, 0] == bos
    expected, actual = (_logits(model, tokens) for model in stock)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_mistakes_are_named(tiny, tmp_path, error_of):
    path, _ = _checkpoint(tiny(f"model.intermediate_size={NEURONS}", "ffn.activation=silu"))
    out = str(tmp_path / "out")
    for arguments, message in (
        (["--drop-dead"], "--drop-dead needs ffn.activation: relu or relu2; debug has silu"),
        (["--drop-dead-tokens", "64"], "add --drop-dead, or omit them"),
        (["--drop-dead", "--device", "nowhere"], "device nowhere: "),
    ):
        assert message in error_of("export", path, out, *arguments)
    assert not (tmp_path / "out").exists()


@given(st.integers(1, 3), st.integers(1, 500), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_all_that_fired_stay_and_the_nearest_fill_up(layers, neurons, share, seed):
    generator = torch.Generator().manual_seed(seed)
    active_LN = torch.rand(layers, neurons, generator=generator) < share
    size_LN = torch.randint(1, 9, (layers, neurons), generator=generator).float()
    peak_LN = torch.where(active_LN, size_LN, 1 - size_LN)
    peak_LN[active_LN & (size_LN == 8)] = torch.nan  # overflowed: it is no zero
    remaining_LW = choose_remaining(peak_LN)
    width = remaining_LW.shape[1]
    most = int(active_LN.sum(1).max())
    assert width in {neurons, max(-(-most // 128) * 128, 128)}
    assert most <= width <= neurons
    for remaining_W, active_N, peak_N in zip(remaining_LW, active_LN, peak_LN, strict=True):
        remaining = remaining_W.tolist()
        silent = [n for n in range(neurons) if not active_N[n]]
        nearest = sorted(silent, key=lambda n: (-float(peak_N[n]), n))
        active = active_N.nonzero()[:, 0].tolist()
        assert remaining == sorted(active + nearest[: width - len(active)])
