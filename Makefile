# The verbs of this repository. The first call of any of them makes .venv (Python >= 3.11).
PYTHON ?= python3
BIN := .venv/bin
PIP := .venv/.pip
READY := .venv/.ready
DEV := .venv/.dev
COMPILERS := .venv/nvrtc/.ready

.PHONY: help quickstart quickstart-gpu check test test-long lint docs bench results clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(READY) ## train recipes/debug.yaml for one to three minutes
	$(BIN)/sparsellm train debug
	@page=$$($(BIN)/sparsellm report runs/debug) && echo "$$page" | sed -n '1s/^/report: /p'
	@echo 'next:'
	@echo '  source .venv/bin/activate'
	@echo "  sparsellm generate runs/debug --prompt 'def '   # one byte per token"
	@echo '  sparsellm train debug --set train.steps=240   # go on from the checkpoint'
	@echo '  sparsellm train debug --fresh --set sparsity.l1_coefficient=0   # without L1'
	@echo "  sparsellm train debug --set name=mine --set 'data.files=[FOLDER]'   # text of your own"
	@echo '  sparsellm recipe list; sparsellm recipe show 0.5b'

quickstart-gpu: $(READY) ## train the pilot on the text in DATA=FOLDER, dense and sparse (one GPU)
	@[ -n "$(DATA)" ] || { echo 'make quickstart-gpu DATA=DIR: a folder of .txt, JSON Lines or Parquet files (column "text")'; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cuda]'
	$(BIN)/sparsellm sweep quickstart-gpu --set 'data.files=["$(abspath $(DATA))"]'

check: $(DEV) ## within a minute: lint, types, and the fast tests of what changed
	$(BIN)/python tests/check.py

# On two cores three processes take 8 minutes where two take 10: many tests wait for processes that they start.
# All processes share the bytecode, also where PYTHONDONTWRITEBYTECODE would have each compile it again.
test: ## the tests that need no GPU, except those of `make test-long`
	@$(MAKE) --no-print-directory --jobs 2 $(DEV) $(COMPILERS)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

test-long: ## the tests that take most of a minute each, which `make test` leaves out
	@$(MAKE) --no-print-directory --jobs 2 $(DEV) $(COMPILERS)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal -m long

lint: $(DEV) ## format, lint and types, as pre-commit and CI do
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(DEV) ## build the documentation into site/, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo 'site/index.html'

bench: $(READY) ## on a GPU, the kernels of one FFN beside dense
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN)/sparsellm bench ffn && $(BIN)/sparsellm bench ffn-train; \
	else echo 'no CUDA device: the kernels were not measured'; fi

results: $(DEV) ## tables and figures of the documentation, from benchmarks/results.jsonl
	$(BIN)/python benchmarks/make_results.py

# pip compiles the bytecode of all files. What is used is compiled here, also where
# PYTHONDONTWRITEBYTECODE would have every command compile it again.
INSTALL = $(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable
COMPILE = PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import sparsellm.training.loop'

$(PIP):
	$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"sparsellm needs Python 3.11 or newer; this is {v[0]}.{v[1]}. Set PYTHON=python3.12, say")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade pip  # older ones are silent while they install
	@echo 'installing what training needs: PyTorch is the largest download, on Linux several GB; pip names every size'
	touch $@

$(READY): pyproject.toml constraints.txt | $(PIP)
	$(INSTALL) .
	$(COMPILE)
	touch $@

$(DEV): pyproject.toml constraints.txt | $(PIP)
	$(INSTALL) '.[dev]'
	$(COMPILE)
	touch $(READY) $@

$(COMPILERS): tests/ffn/kernels/nvrtc.py | $(PIP)
	[ "$$(uname)" != Linux ] || $(BIN)/python $< fetch
	mkdir -p $(@D) && touch $@

clean: ## remove .venv and what tools left behind
	rm -rf .venv dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
