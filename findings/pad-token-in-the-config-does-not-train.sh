#!/bin/sh
# Question: GPT-2's tokenizer has no padding token, so a config gets pad_token_id = eos_token_id. Documents are packed,
#   with the end token before each, and nothing is padded. Does the setting change training?
# Guess: no. pad_token_id is for collators, generation and the masking of labels.
# Seen (transformers 5.23.0: Llama, Mistral, Qwen3, OLMo2): yes. These models make their embedding with
#   padding_idx=config.pad_token_id. The end token's row begins at zero and gets no gradient from its inputs, so with a
#   head of its own it stays zero for the whole run. A loaded row keeps its value, but does not train either. With
#   pad_token_id=None it trains like other rows. GPT-2's model does not read the setting.
# Hurts: pretraining and continued training on documents that this token separates. It stands before every document, and
#   attention often rests on the first token. Its input is a zero vector, and no message says so. Leave the config's
#   pad_token_id None.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" - <<'PY'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

end = 3
sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}


def row_after_training(kind, pad_token_id):
    """The norm of the end token's embedding and of the other rows' (their mean), after 5 steps on packed documents."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        kind, **sizes, **heads, eos_token_id=end, pad_token_id=pad_token_id, tie_word_embeddings=False
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        tokens = torch.randint(4, 64, (4, 32))
        tokens[:, ::8] = end  # every document begins with it, and has 7 tokens more
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    norms = model.get_input_embeddings().weight.detach().norm(dim=1)
    return norms[end].item(), norms[4:].mean().item()


for kind in ("llama", "mistral", "qwen3", "olmo2", "gpt2"):
    (trained, _), (padded, others) = row_after_training(kind, None), row_after_training(kind, end)
    print(f"{kind}: norm of the end token's row {trained:.3f} with pad_token_id=None, {padded:.3f} with pad_token_id="
          f"eos_token_id; other rows {others:.3f}")
    assert trained > 0.1
    assert (padded == 0) == (not kind.startswith("gpt")), "the behaviour has changed"
PY
