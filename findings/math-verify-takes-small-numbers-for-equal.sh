#!/bin/sh
# Question: the right answer is a small number, such as the charge of an electron, 1.6·10⁻¹⁹, or a probability of
#   0.0000004. A model gives another small number. What does math-verify's verify(parse(right), parse(answer)) say?
# Guess: False. Numbers are compared symbolically or with a relative tolerance.
# Seen (math-verify 0.9.0): True. Decimals are rounded to six places first, so that all decimals below 5·10⁻⁷ are
#   equal, to 0 as well. In LaTeX's notation, such as 1.6 \times 10^{-19}, the difference of both is computed to 15
#   places, and what is below about 10⁻¹⁶ counts as 0: the charge and the mass of an electron are the same, and Planck's
#   constant is that of Boltzmann. The documentation says what the six places are for: 0.333333 shall equal 1/3.
# Hurts: accuracies in physics, chemistry and probability, and rewards in reinforcement learning: any small number is right
#   where a small number was asked for. verify() with float_rounding=50 and numeric_precision=50 tells them apart, but
#   then 0.333333 is not 1/3.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile math-verify==0.9.0 latex2sympy2_extended==1.11.0
fi
"$PYTHON" - <<'PY'
import importlib.metadata

from math_verify import parse, verify

print("math-verify", importlib.metadata.version("math-verify"))


def power(number, exponent):
    return rf"${number} \times 10^{{{exponent}}}$"


CASES = (  # the right answer, the model's, what math-verify says
    (power("6.02", 23), power("6.03", 23), False),
    (power("1.6", -9), power("9.1", -9), False),
    (power("1.6", -19), power("9.1", -31), True),
    (power("6.63", -34), power("1.38", -23), True),
    (power("8.85", -18), power("4", -20), True),
    ("$0.00004$", "$0.00003$", False),
    ("$0.0000004$", "$0.0000001$", True),
    ("$0.0000004$", "$0.0$", True),
    ("The probability is 0.0000004.", "It is 0.00000000002.", True),
)
for right, answer, says in CASES:
    result = verify(parse(right), parse(answer))
    print(f"{right} for {answer}: {result}")
    assert result == says, "the behaviour has changed"
for precision in (15, 50):
    options = {"float_rounding": precision, "numeric_precision": precision}
    decimals = verify(parse("$0.0000004$"), parse("$0.0000001$"), **options)
    powers = verify(parse(power("1.6", -19)), parse(power("9.1", -31)), **options)
    third = verify(parse(r"$\frac{1}{3}$"), parse("$0.333333$"), **options)
    print(f"both options {precision}: 4e-7 for 1e-7 {decimals}, powers {powers}, 1/3 for 0.333333 {third}")
    assert not decimals and powers == (precision == 15) and not third
PY
