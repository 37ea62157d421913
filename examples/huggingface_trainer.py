"""Sparse training by Hugging Face Trainer: ``python examples/huggingface_trainer.py TEXT_FILE``."""

import sys
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import sparsellm


class Sparsity(TrainerCallback):
    """The controller's calls, in step with the Trainer."""

    def __init__(self, **settings):
        self.settings = settings

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.controller = sparsellm.SparsityController(model, optimizer, **self.settings)
        if state.global_step:  # the Trainer resumes
            saved = torch.load(self.file(args, state), weights_only=True)
            self.controller.load_state_dict(saved)

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.controller.step()

    def on_save(self, args, state, control, **kwargs):
        saved = self.controller.state_dict()  # the same on all ranks
        if state.is_world_process_zero:
            torch.save(saved, self.file(args, state))

    @staticmethod
    def file(args, state):
        """Beside what the Trainer saves after this step."""
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "sparsity.pt"


class SparseTrainer(Trainer):
    """Adds the L1 term to the loss that is trained on."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            l1 = sparsity.controller.l1_loss()
            # The Trainer divides by the accumulation steps only what it has not normalised.
            normalised = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            loss = loss + (l1 / self.current_gradient_accumulation_steps if normalised else l1)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args):
        """Sends the sparsity along with the loss, to whatever ``report_to`` names."""
        if "loss" in logs:
            nnz = sparsity.controller.statistics().nnz_mean
            logs["nnz_mean"] = sum(nnz) / len(nnz)
        super().log(logs, *args)


def blocks(path, length=64):
    """The bytes of a file, as tokens, in blocks."""
    ids = torch.tensor(list(Path(path).read_bytes()))
    ids = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": block, "labels": block} for block in ids]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, hidden_act="relu", **shape)
    model = LlamaForCausalLM(config)
    print(sparsellm.replace_ffns(model))
    sparsity = Sparsity(target_nnz=24, l1_coefficient=1e-3, warmup_steps=10)
    arguments = TrainingArguments(
        output_dir=sys.argv[2] if len(sys.argv) > 2 else "runs/huggingface_trainer",
        max_steps=60,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=10,
        logging_steps=20,
        save_steps=30,
        report_to="none",
    )
    SparseTrainer(model, arguments, train_dataset=blocks(sys.argv[1]), callbacks=[sparsity]).train()
    statistics = sparsity.controller.statistics()
    print(f"neurons active for a token, by layer: {statistics.nnz_mean}")
