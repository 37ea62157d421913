"""One training run on every rank: the loop and what a step needs.

May import `processes`, `evaluate`, `runs`, `data`, `model` and `ffn`; imported by the command line
and `sweep`.
"""
