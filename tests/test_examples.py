"""The examples of training in other loops run with the stock libraries and make FFNs sparse."""

import gc
import importlib
import json
import re
import runpy
import shutil

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from warm import ranks

import sparsellm

EXAMPLES = ROOT / "examples"


def num_active(output):
    """Neurons active for a token at the end, mean of the layers."""
    [numbers] = re.findall(r"^neurons active for a token, by layer: (\[.*\])$", output, re.M)
    return sum(json.loads(numbers)) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "num_ranks", "num_neurons"),
    [("huggingface_trainer", 1, 256), ("accelerate_loop", 1, 256), ("ddp", 2, 256)],
)
def test_an_example_trains_towards_its_target(example, num_ranks, num_neurons, tmp_path):
    out = tmp_path / "out"
    program = (str(EXAMPLES / f"{example}.py"), str(ROOT / "README.md"), str(out))
    result = ranks(num_ranks, *program)
    # It begins at half of them, with a target of 24.
    assert 10 < num_active(result.stdout) < num_neurons / 4
    if example == "huggingface_trainer":
        saved = torch.load(out / "checkpoint-30" / "sparsity.pt", weights_only=True)
        assert saved["num_steps"] == 30
        assert saved["target"]["log_l1"] != [0.0]
        assert saved["neurons"]["silent_tokens_LN"].shape == (2, num_neurons)
        state = json.loads((out / "checkpoint-60" / "trainer_state.json").read_text())
        logged = [entry["nnz_mean"] for entry in state["log_history"] if "loss" in entry]
        assert len(logged) == 3
        assert logged[-1] < logged[0]
    if example == "accelerate_loop":
        assert list(out.glob("custom_checkpoint_0.*"))


@pytest.mark.parametrize("example", EXAMPLES.glob("*.py"), ids=lambda path: path.stem)
def test_without_a_file_an_example_says_how_to_start_it(example, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(example)])
    with pytest.raises(SystemExit, match=f"{example.name} TEXT_FILE"):
        runpy.run_path(str(example), run_name="__main__")


def test_ddps_model_is_gone_before_the_process_group(process_group, monkeypatch):
    """Else a rank may wait for ever at its end; see the fixture `process_group`."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example, left = importlib.import_module("ddp"), []

    def leave():
        # `isinstance` would ask a dead weak proxy of another test for its class, which raises.
        left.append(DistributedDataParallel not in map(type, gc.get_objects()))

    with monkeypatch.context() as patch:  # the fixture joins and leaves
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", leave)
        example.main(ROOT / "README.md")
    assert left == [True]


def test_a_resumed_trainer_goes_on_with_the_controllers_state(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("huggingface_trainer")

    def train(**resume):
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=256, num_attention_heads=2, hidden_act="relu", **shape)
        model = LlamaForCausalLM(config)
        sparsellm.replace_ffns(model)
        example.sparsity = example.Sparsity(target_nnz=4, l1_coefficient=1e-3)
        arguments = TrainingArguments(
            tmp_path, max_steps=4, save_steps=2, report_to="none", per_device_train_batch_size=4
        )
        data = example.blocks(ROOT / "LICENSE", length=16)
        example.SparseTrainer(
            model, arguments, train_dataset=data, callbacks=[example.sparsity]
        ).train(**resume)
        return example.sparsity.controller.state_dict()

    expected = train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert str(train(resume_from_checkpoint=True)) == str(expected)
    assert expected["num_steps"] == 4


def test_the_examples_are_listed_in_the_documentation():
    text = (ROOT / "docs" / "own-trainer.md").read_text(encoding="utf-8")
    assert {f.name for f in EXAMPLES.glob("*.py")} <= set(re.findall(r"examples/(\w+\.py)", text))
