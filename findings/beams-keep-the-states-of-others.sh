#!/bin/sh
# Question: beam search on a recurrent model. Are the scores that `generate` returns with its texts
#   (`sequences_scores`, length_penalty=0) the log-probabilities of these texts?
# Guess: yes. When a beam is replaced by a continuation of another one, its cache is replaced as well.
# Seen (torch 2.13.0, transformers 5.24.0; MiniMax with 5.23.0, too): not for MiniMax and RecurrentGemma. The states of
#   their linear attention or recurrence stay in their rows while the texts change places, so a text goes on from the
#   state of another one. MiniMax's best text claims -15.1 nats and has -28.0; beam search without a cache finds one of
#   -15.6. A RecurrentGemma's claims -7.7 and has -8.2, where -7.4 can be found. Greedy decoding and a Falcon-H1's beams
#   are right.
# Hurts: everyone who uses beams on these models, for translation, summaries or evaluations: worse texts than they would
#   get, and scores for reranking that are wrong. Nothing is printed.
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
from transformers import AutoModelForCausalLM, FalconH1Config, MiniMaxConfig, RecurrentGemmaConfig

base = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": None}
attention = {"num_attention_heads": 4, "intermediate_size": 96}
mamba2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
configs = {
    "MiniMax": MiniMaxConfig(
        **base, **attention, num_key_value_heads=2, head_dim=16, block_size=8, num_local_experts=2, bos_token_id=1
    ),
    "RecurrentGemma": RecurrentGemmaConfig(**base, **attention, lru_width=64, attention_window_size=32),
    "Falcon-H1": FalconH1Config(**base, **attention, **mamba2, num_key_value_heads=2, mamba_d_ssm=128),
}
prompt = torch.randint(2, 97, (1, 12), generator=torch.Generator().manual_seed(0))
options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 10, "do_sample": False}
beams = {"num_beams": 4, "length_penalty": 0.0, "return_dict_in_generate": True, "output_scores": True}
print(f"transformers {transformers.__version__}")
for name, config in configs.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    greedy = [model.generate(prompt, use_cache=cached, **options).tolist() for cached in (True, False)]
    assert greedy[0] == greedy[1], "greedy decoding is wrong as well"
    gaps, scores = [], []
    for cached in (True, False):
        out = model.generate(prompt, use_cache=cached, **beams, **options)
        claimed = float(out.sequences_scores[0])
        with torch.no_grad():
            logits = model(out.sequences, use_cache=False).logits.log_softmax(-1)
        true = float(logits[0, 11:-1].gather(-1, out.sequences[0, 12:, None]).sum())
        print(f"{name:15} {'with a cache' if cached else 'without one ':12}: claims {claimed:.3f}, has {true:.3f} nats")
        gaps.append(abs(claimed - true))
        scores.append(true)
    assert gaps[1] < 1e-2, "beam search without a cache is wrong as well"
    if name == "Falcon-H1":
        assert gaps[0] < 1e-2, "the behaviour has changed"
    else:
        assert gaps[0] > 0.5, "the behaviour has changed"
PY
