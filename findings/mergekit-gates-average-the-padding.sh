#!/bin/sh
# Question: mergekit-moe builds a mixture of experts from dense models. With gate_mode "hidden_avg", the router's row for an
#   expert is the mean hidden state of the expert's prompts. Two prompts have lengths of 4 and 40 words. Is the row made of
#   the words of both?
# Guess: yes. The batch is padded, but its attention mask goes along, and gate_mode "cheap_embed" leaves the padding out.
# Seen (mergekit 0.1.5, transformers 5.24.0): no. The mean is over all positions of the padded batch, so 36 of the 41
#   states of the short prompt are those of padding tokens. On a small random Llama, the rows point elsewhere: the cosine
#   with the mean of the two prompts, each alone, is 0.5 to 0.8 by layer. "hidden", which takes the last position, is
#   right, since padding is on the left.
# Hurts: routers of merged experts, the more the longer one prompt is than the others: the rows of all experts get a common
#   part, the state of padding (the beginning token), and choose by it. Give prompts of one length, or use "hidden".
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 mergekit==0.1.5 transformers==5.24.0 numpy==2.4.6
fi
"$PYTHON" -W ignore - "$dir" <<'PY'
import logging
import sys
from importlib.metadata import version

import torch
import transformers
from mergekit.common import ModelReference
from mergekit.moe.config import Expert
from mergekit.moe.router import get_gate_params, get_hidden_states, tokenize_prompts
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cosine_similarity
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.disable(logging.WARNING)
words = [f"w{i}" for i in range(95)]
plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", "<s>", *words])}, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", bos_token="<s>")
tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.bos_token  # as mergekit-moe sets them
torch.manual_seed(0)
sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(sys.argv[1] + "/model")
model = LlamaForCausalLM.from_pretrained(sys.argv[1] + "/model", dtype=torch.bfloat16).eval()
reference = ModelReference.parse(sys.argv[1] + "/model")
long = " ".join(words[10:50])


def cosines(mode, short):
    """By layer, the cosine of the row of the prompts `short` and `long` with the mean of what each gives alone."""
    expert = Expert(source_model=reference, positive_prompts=[short, long])
    rows = get_gate_params(reference, tokenizer, [expert], mode=mode, device="cpu")[:, 0].float()
    average = mode == "hidden_avg"
    alone = [get_hidden_states(model, tokenize_prompts([prompt], tokenizer), average).float() for prompt in (short, long)]
    return cosine_similarity(rows, sum(alone), dim=-1)


print("mergekit", version("mergekit"), "transformers", transformers.__version__)
for mode in ("hidden_avg", "hidden"):
    for length in (40, 4):
        seen = cosines(mode, " ".join(words[50 : 50 + length]))
        print(f"{mode}, prompts of {length} and 40 words: cosines {[round(x, 3) for x in seen.tolist()]}")
        if mode == "hidden_avg" and length == 4:
            assert seen.max() < 0.9, "the behaviour has changed"
        else:
            assert seen.min() > 0.99
PY
