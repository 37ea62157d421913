#!/bin/sh
# Question: a Llama is pruned to 1:4 (one of four weights is left) by llm-compressor, SparseGPTModifier(sparsity=0.75,
#   mask_structure="1:4") or WandaPruningModifier with the same arguments. How many weights are left?
# Guess: a quarter. N:M sparsity leaves N of M weights, in NVIDIA's 2:4 as in the papers on N:M; or the two arguments are
#   checked against each other.
# Seen (llm-compressor 0.14.0.1, torch 2.14.0): three quarters. N is the number of weights that are removed, and sparsity
#   has no effect beside a mask_structure: 0.75 with "2:4" removes half, and 0.25 with "1:4" the same as 0.75. With 2:4,
#   by far the most common, the two meanings agree. There is no message.
# Hurts: whoever compares 1:4, 1:8 or 4:16 with the literature, or trusts the sparsity that was asked for.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.14.0 numpy==2.4.6 transformers==5.17.0 datasets==5.2.0 \
    accelerate==1.15.0 compressed-tensors==0.19.0 llmcompressor==0.14.0.1
fi
cd "$dir"
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from loguru import logger
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, TOKENS, ROWS = 256, 64, 32
torch.manual_seed(0)
logger.remove()  # llm-compressor's, which has a line per matrix
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=4)
)  # fmt: skip
model.save_pretrained("model")
words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained("model")
rows = torch.randint(0, VOCABULARY, (ROWS, TOKENS)).tolist()
data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * TOKENS] * ROWS})
left = {}
for modifier in (SparseGPTModifier, WandaPruningModifier):
    for sparsity, structure in ((0.75, "1:4"), (0.25, "1:4"), (0.75, "2:4"), (0.75, "3:4")):
        pruned = oneshot(
            model="model", dataset=data, max_seq_length=TOKENS, num_calibration_samples=ROWS,
            recipe=[modifier(sparsity=sparsity, mask_structure=structure, ignore=["re:.*lm_head"])],
        )  # fmt: skip
        layers = [module for module in pruned.model.modules() if isinstance(module, torch.nn.Linear)]
        counts = torch.cat([(layer.weight.view(-1, 4) != 0).sum(1) for layer in layers])
        assert counts.min() == counts.max()
        left[modifier, sparsity, structure] = int(counts[0])
        print(f'{modifier.__name__}(sparsity={sparsity}, mask_structure="{structure}"): {counts[0]} of 4 weights are left')
for modifier in (SparseGPTModifier, WandaPruningModifier):
    seen = [left[modifier, *key] for key in ((0.75, "1:4"), (0.25, "1:4"), (0.75, "2:4"), (0.75, "3:4"))]
    assert seen == [3, 3, 2, 1], "the behaviour has changed"
PY
