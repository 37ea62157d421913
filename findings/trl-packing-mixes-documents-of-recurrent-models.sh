#!/bin/sh
# Question: TRL 1.16 drops 1.15's warnings about packing without FlashAttention, and its batches now say where documents
#   begin in three ways: `position_ids`, `cu_seq_lens_q` and `seq_idx`. With `SFTConfig(packing=True)`, does each document
#   of a batch have the loss that it has alone, for recurrent and hybrid models too?
# Guess: yes, or an error says that the model cannot do it, as Falcon-H1 and Qwen3-Next do on a CPU.
# Seen (torch 2.13.0, transformers 5.24.0, trl 1.16.0): yes for a Llama. Jamba and MiniMax take all of these arguments, but
#   do not hand them to their recurrent layers: each document but the first goes on from the state at the end of the one
#   before it, and its loss is 0.3 to 0.8 nats per token off, to either side. TRL logs nothing. (1.15.0 computes the same,
#   but it warns.)
# Hurts: everyone who fine-tunes such models with packing: they learn from, and are evaluated on, documents that begin in
#   the middle of another one, and the loss does not show it.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 trl==1.16.0
fi
DIR=$dir "$PYTHON" -W ignore - <<'PY'
import logging
import os

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, JambaConfig, LlamaConfig, MiniMaxConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

warned = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("trl").addHandler(handler)
base = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": 1}
attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
configs = {
    "Llama": LlamaConfig(**base, **attention),
    "Jamba": JambaConfig(**base, **attention, attn_layer_period=2, attn_layer_offset=1, num_experts=2),
    "MiniMax": MiniMaxConfig(**base, **attention, head_dim=16, block_size=8, num_local_experts=2),
}
words = Tokenizer(models.WordLevel({str(i): i for i in range(97)}, unk_token="0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")
generator = torch.Generator().manual_seed(0)
documents = [torch.randint(2, 97, (length,), generator=generator).tolist() for length in (9, 12, 11)]
args = SFTConfig(
    output_dir=os.environ["DIR"], packing=True, max_length=32, per_device_train_batch_size=1, max_steps=1,
    use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
)  # fmt: skip
print(f"transformers {transformers.__version__}, trl {trl.__version__}")


def loss(logits, ids):
    return float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]))


for name, config in configs.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    dataset = Dataset.from_dict({"input_ids": documents})
    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    batch = dict(next(iter(trainer.get_train_dataloader())))
    del batch["labels"]
    assert {"position_ids", "cu_seq_lens_q", "seq_idx"} <= set(batch), "the batches have changed"
    ids, bounds = batch["input_ids"][0], batch["cu_seq_lens_q"].tolist()
    model.eval()
    with torch.no_grad():
        packed = model(**batch, use_cache=False).logits[0]
        differences = []
        for first, end in zip(bounds, bounds[1:]):
            alone = model(ids[None, first:end], use_cache=False).logits[0]
            differences.append(loss(packed[first:end], ids[first:end]) - loss(alone, ids[first:end]))
    print(f"{name:8} loss packed minus alone, by document: {[round(difference, 3) for difference in differences]}")
    assert abs(differences[0]) < 1e-4, "the first document differs as well"
    assert (max(map(abs, differences)) > 0.05) == (name != "Llama"), "the behaviour has changed"
packing = [message for message in warned if "pack" in message.lower() or "padding-free" in message.lower()]
print(f"warnings about packing: {packing}")
assert not packing, "the behaviour has changed"
PY
