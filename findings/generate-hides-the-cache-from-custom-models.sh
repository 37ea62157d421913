#!/bin/sh
# Question: transformers 5.24 renames `past_key_values` to `cache`, and deprecates the old name until 5.40. A custom
#   causal model takes `past_key_values` and, as is usual, `**kwargs`. Does `generate` still give the same text?
# Guess: yes, with a warning. A deprecated name keeps working.
# Seen (torch 2.13.0, transformers 5.24.0): the first token is right, all others are wrong. `generate` passes the cache
#   as `cache`, which `**kwargs` swallows, and from the second token on only the last token. So each token depends on
#   one other token. Only calls by the old name are translated, and a model's own forward is not one of them. With
#   use_cache=False, and with transformers 5.23.0, the text is right. A forward without `**kwargs` raises a TypeError.
# Hurts: everyone who generates with, or evaluates, a model whose forward is its own (trust_remote_code, research
#   models): texts and scores of generative benchmarks become nonsense after a minor update. Losses stay right.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0
fi
"$PYTHON" -W ignore - <<'PY'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast


class Custom(LlamaForCausalLM):
    """Computes what a Llama does, in a forward of its own."""

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, use_cache=None, **kwargs):
        out = self.model(
            input_ids, attention_mask=attention_mask, past_key_values=past_key_values, use_cache=use_cache
        )
        logits = self.lm_head(out.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, initializer_range=0.3, pad_token_id=0, eos_token_id=None, bos_token_id=1,
)
stock, custom = LlamaForCausalLM(config).eval(), Custom(config).eval()
custom.load_state_dict(stock.state_dict())
prompt = torch.randint(1, 97, (1, 12))
options = {"max_new_tokens": 10, "do_sample": False}
expected = stock.generate(prompt, **options)[0, 12:].tolist()
cached = custom.generate(prompt, **options)[0, 12:].tolist()
uncached = custom.generate(prompt, use_cache=False, **options)[0, 12:].tolist()
sums = [float(model(prompt).logits.abs().sum()) for model in (stock, custom)]
print(f"transformers {transformers.__version__}")
print(f"stock:                    {expected}")
print(f"custom:                   {cached}")
print(f"custom, use_cache=False:  {uncached}")
assert abs(sums[0] - sums[1]) < 1e-2, "the models are not the same"
assert uncached == expected and cached[0] == expected[0], "the behaviour has changed"
assert cached[1:] != expected[1:], "the behaviour has changed"
PY
