#!/bin/sh
# Question: a model has trained prompts of PEFT (prefix tuning, prompt tuning). With the newest transformers and PEFT,
#   does `generate` choose the tokens that the model's own logits rank first?
# Guess: yes, as with the versions before.
# Seen (torch 2.13.0, transformers 5.24.0, peft 0.21.2): no. With prefix tuning the text is exactly the base model's: PEFT
#   hands its prefix over as `past_key_values`, which transformers calls `cache` since 5.24; it prints that both are set,
#   and takes its own, empty one. With prompt tuning the first token is right, and later ones are not. A loop over the
#   logits without a cache gives the right text for both; with transformers 5.23.0 so does `generate`.
# Hurts: everyone who serves or evaluates such adapters by generation: trained prompts have no effect or a wrong one,
#   while losses, and scores from log-probabilities, stay right.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2
fi
"$PYTHON" -W ignore - <<'PY'
import peft
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, initializer_range=0.3, pad_token_id=0, eos_token_id=None, bos_token_id=1,
)
prompt = torch.randint(1, 97, (1, 12), generator=torch.Generator().manual_seed(0))
print(f"transformers {transformers.__version__}, peft {peft.__version__}")


def generated(model):
    ids = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False)
    return ids[0, 12:].tolist()


@torch.no_grad()
def by_logits(model):
    """The same tokens without a cache."""
    ids = prompt
    for _ in range(10):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, 12:].tolist()


for kind in (peft.PrefixTuningConfig, peft.PromptTuningConfig):
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).eval()
    without = generated(base)
    assert without == by_logits(base), "the base model itself generates otherwise"
    model = peft.get_peft_model(base, kind(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    for weight in model.prompt_encoder.parameters():
        torch.nn.init.normal_(weight, std=2)  # in place of training
    expected, seen = by_logits(model), generated(model)
    print(f"{kind.__name__}\n  base model:    {without}\n  by its logits: {expected}\n  generate:      {seen}")
    assert expected != without and seen != expected, "the behaviour has changed"
    assert kind is peft.PromptTuningConfig or seen == without, "the behaviour has changed"
PY
