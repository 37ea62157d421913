"""What lies on disk of a run: checkpoints, records, Hugging Face folders; written and read here.

May import `data`, `model` and `ffn`; never `training`.
"""
