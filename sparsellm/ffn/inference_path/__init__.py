"""FFNs of finished models, made fast: found, checked by formula, replaced."""
