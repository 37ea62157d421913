#!/bin/sh
# Question: a Gemma 2 model is converted for CTranslate2, to score texts on CPUs. Are its scores those of transformers?
# Guess: yes; the converter has a loader for Gemma 2, and refuses models that it has none for.
# Seen (ctranslate2 4.8.5, transformers 5.23.0, fp32, small random models): no. The converter drops the caps of the logits
#   and of the attention scores, the sliding window, and query_pre_attn_scalar (which is not the head's size in the 27B
#   model), all without a message. Without these options, scores agree to 1e-5. With logits up to 21, the cap of 30 alone
#   changes a token's score by 2 nats. It drops Qwen2's sliding window too, and GPT-2's scale_attn_by_inverse_layer_idx,
#   which Stanford's Mistral models have. Greedy text looks fine, since the cap of the logits keeps their order.
# Hurts: log-likelihood benchmarks, perplexity, reranking and sampling of such models; long texts where a window is dropped.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 ctranslate2==4.8.5 numpy==2.4.6
fi
CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail "$dir/log"; exit 1; }
import sys

import ctranslate2
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import Gemma2Config, GPT2Config, Qwen2Config

VOCABULARY, TOKENS = 256, 40
shape = dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4)
llama_like = shape | dict(num_key_value_heads=2)
gemma = llama_like | dict(head_dim=32, sliding_window=64, attn_logit_softcapping=None, final_logit_softcapping=None,
                          query_pre_attn_scalar=32)  # fmt: skip
words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
special = dict(unk_token="0", bos_token="1", eos_token="2", pad_token="0")
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
tokens = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
gpt2 = dict(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, n_embd=128, n_layer=2, n_head=4, n_positions=128)
cases = {  # the options, whether the scores must agree, and how far the weights are scaled
    "Gemma 2 without caps": (Gemma2Config(**gemma), True, 3),
    "Gemma 2, logits capped at 30": (Gemma2Config(**gemma | dict(final_logit_softcapping=30.0)), False, 3),
    "Gemma 2, attention capped at 50": (Gemma2Config(**gemma | dict(attn_logit_softcapping=50.0)), False, 30),
    "Gemma 2, window of 8 tokens": (Gemma2Config(**gemma | dict(sliding_window=8)), False, 3),
    "Gemma 2, query_pre_attn_scalar of 64": (Gemma2Config(**gemma | dict(query_pre_attn_scalar=64)), False, 10),
    "Qwen2": (Qwen2Config(**llama_like), True, 3),
    "Qwen2, window of 8 tokens": (
        Qwen2Config(**llama_like, use_sliding_window=True, sliding_window=8, max_window_layers=0), False, 3),
    "GPT-2": (GPT2Config(**gpt2), True, 10),
    "GPT-2, attention scaled by layer": (
        GPT2Config(**gpt2, scale_attn_by_inverse_layer_idx=True), False, 10),
}  # fmt: skip
for name, (config, agrees, scale) in cases.items():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(10 if "embed_tokens" in weight_name and "Gemma" in name else scale)
        logits = model(tokens).logits[0].float()
    right = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
    folder = f"{sys.argv[1]}/{name}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ctranslate2.converters.TransformersConverter(folder).convert(folder + " converted")
    generator = ctranslate2.Generator(folder + " converted", compute_type="float32")
    (seen,) = generator.score_batch([[str(token) for token in tokens[0].tolist()]])
    error = float(np.abs(np.array(seen.log_probs) - right).mean())
    print(f"{name}: scores are {error:.5f} nats off in the mean; largest logit {logits.abs().max():.0f}")
    if agrees:
        assert error < 1e-3
    else:
        assert error > 0.02, "the behaviour has changed"
PY
