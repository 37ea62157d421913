"""Sparse training with accelerate: ``accelerate launch examples/accelerate_loop.py TEXT_FILE``."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import sparsellm


def blocks(path, length=64):
    """The bytes of a file, as tokens, in blocks."""
    ids = torch.tensor(list(Path(path).read_bytes()))
    return list(ids[: len(ids) // length * length].view(-1, length))


def main(text, folder):
    """Trains a tiny model on a file for seconds, and saves the state from which it could go on."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, hidden_act="relu", **shape)
    model = LlamaForCausalLM(config)
    accelerator.print(sparsellm.replace_ffns(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(blocks(text), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    controller = sparsellm.SparsityController(
        model, optimizer, target_nnz=24, l1_coefficient=1e-3, warmup_steps=10
    )
    accelerator.register_for_checkpointing(controller)
    while controller.num_steps < 60:
        for ids in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss + controller.l1_loss())
                optimizer.step()
                if accelerator.sync_gradients:
                    controller.step()
                optimizer.zero_grad()
            if controller.num_steps == 60:
                break
    accelerator.save_state(folder)
    statistics = controller.statistics()
    accelerator.print(f"loss {loss:.2f}")
    accelerator.print(f"neurons active for a token, by layer: {statistics.nnz_mean}")
    accelerator.end_training()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "runs/accelerate_loop")
