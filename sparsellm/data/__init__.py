"""From a corpus (``data/*.yaml``) to packed micro-batches of tokens, resumable to the token.

text/: corpus.py and shards.py name the shards, division.py holds out a share of their documents,
and identity.py notices edits of them. readers.py, json_lines.py, separated.py and token_shards.py
read documents by blocks, network.py from any address. blocks.py keeps the latest blocks.

Then tokenizer.py encodes text, stream.py orders and packs it for one lane, lanes.py numbers the
sequences of all lanes, workers.py makes them in processes, and loader.py gives them to a rank.
position.py is the saved state. held_out.py reads validation text; first_look.py tells what a text
is.
"""
