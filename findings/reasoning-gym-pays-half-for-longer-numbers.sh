#!/bin/sh
# Question: reasoning-gym's datasets score a model's answer with score_answer(answer, entry), from 0 to 1, as accuracy or
#   as reward. The right answer of an addition is 5. What does "15" get, and what "5000"?
# Guess: 0, or the 0.01 that some datasets give for any answer.
# Seen (reasoning-gym 0.1.25): 0.5 and 0.25. In 33 of the 106 datasets, an answer that contains the right one gets the
#   share of its characters: "15", "-5" and "5.1" get 0.5, 0.5 and 0.33 for 5, and all ten digits in a row get 0.1 for any
#   answer of one digit. Over eight datasets of numbers, the right answers get 0.50 to 0.84 if a digit is added at their
#   end, and 0.34 to 0.84 with the wrong sign; answers that are too large by one get nearly nothing. The rule fits a right
#   answer with words around it. The README does not mention it, and says that answers are verified.
# Hurts: mean scores that are published as accuracies, and reinforcement learning: one more digit, or a wrong sign, is
#   nearly right. Count only scores of 1.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile reasoning-gym==0.1.25
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import importlib.metadata

import reasoning_gym
from reasoning_gym import factory
from reasoning_gym.dataset import ProceduralDataset

print("reasoning-gym", importlib.metadata.version("reasoning-gym"))
classes = [dataset for dataset, _ in factory.DATASETS.values()]
default = [dataset for dataset in classes if dataset.score_answer is ProceduralDataset.score_answer]
print(f"{len(default)} of {len(classes)} datasets have no rule of their own")
NAMES = "chain_sum", "products", "gcd", "lcm", "number_sequence", "count_primes", "letter_counting", "leg_counting"


def mean(dataset, change):
    """The mean score of the right answers after a change."""
    scores = [dataset.score_answer(change(entry["answer"]), entry) for entry in dataset]
    return sum(scores) / len(scores)


for name in NAMES:
    dataset = reasoning_gym.create_dataset(name, size=200, seed=0)
    right = mean(dataset, str)
    digit = mean(dataset, lambda answer: answer + "0")
    sign = mean(dataset, lambda answer: answer[1:] if answer.startswith("-") else "-" + answer)
    other = mean(dataset, lambda answer: str(int(answer) + 1))
    print(f"{name}: right {right:.2f}, a digit too many {digit:.2f}, wrong sign {sign:.2f}, one too large {other:.2f}")
    assert right == 1 and other < 0.1 and min(digit, sign) > 0.3, "the behaviour has changed"
answers = "5", "15", "-5", "5.1", "5000", "0123456789", "6"
scores = {answer: round(dataset.score_answer(answer, {"answer": "5"}), 2) for answer in answers}
print("for 5:", scores)
assert list(scores.values()) == [1, 0.5, 0.5, 0.33, 0.25, 0.1, 0], "the behaviour has changed"
PY
