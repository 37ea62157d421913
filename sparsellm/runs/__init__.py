"""The files of a run: checkpoints, records and Hugging Face folders, written and read here."""
