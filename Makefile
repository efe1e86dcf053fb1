# make demo and make test are the two commands; the rest is for people who change the lab.
SHELL := /bin/bash
PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps
# Compiled when installed: where PYTHONDONTWRITEBYTECODE is set, each process of a server would compile vLLM anew.
# PyTorch's own index is asked only where the machine's settings know no CPU build of torch.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
CHROMIUM := /usr/bin/chromium

# Two processes share the tests that need no engine; an engine takes all cores and much of the memory.
SIDE_BY_SIDE := unit docs
ALONE := faults engine notebooks browser

.PHONY: help setup demo test unit browser soak bench lab lint format render lock clean

help:  ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(BIN)/.ready  ## make .venv (re-used while the requirements stay the same)

$(BIN)/.ready: requirements/cpu.txt pyproject.toml
	@echo "setting up .venv ($$($(PYTHON) --version))"; start=$$SECONDS; set -e; \
	test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
	$(PIP) '$(TORCH)' 2>/dev/null || $(PIP) --index-url $(TORCH_INDEX) '$(TORCH)'; \
	$(PIP) "$$(grep '^uv==' requirements/cpu.txt)"; \
	grep -v '^torch==' requirements/cpu.txt > .venv/rest.txt; \
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps -r .venv/rest.txt \
	  || $(PIP) -r .venv/rest.txt; \
	$(PIP) --no-build-isolation --editable .; \
	touch $@; echo ".venv is ready after $$((SECONDS - start)) s"

demo: setup  ## the five notebooks at demo scale, and the page that shows them
	$(BIN)/labkit run all --run-id demo --scale demo

test: setup lint $(CHROMIUM)  ## unit tests, real engine, notebooks, JupyterLab in a browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(SIDE_BY_SIDE:%=tests/%)
	$(BIN)/python -m pytest $(ALONE:%=tests/%)

$(CHROMIUM):  # Debian's; the browser tests drive it
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	else echo "the browser tests want $@: install Debian's package chromium, then run this again"; exit 1; fi

browser: setup $(CHROMIUM)  ## JupyterLab in a browser; pictures in outputs/ci
	$(BIN)/python -m pytest tests/browser

unit: setup  ## the tests that need no engine
	$(BIN)/python -m pytest tests/unit

soak: setup $(CHROMIUM)  ## the probe of every seam, n-gram over 40 prompts, each kill in each place, the fuzzers, Run All in a browser (hours)
	$(BIN)/labkit doctor --probe
	LABKIT_SOAK=1 $(BIN)/python -m pytest tests/unit/test_train_resume.py
	LABKIT_SOAK=1 $(BIN)/python -m pytest tests/faults
	LABKIT_SOAK=1 $(BIN)/python -m pytest tests/engine/test_real_ngram.py tests/engine/test_head_forms.py tests/engine/test_two_trainings.py
	LABKIT_SOAK=1 $(BIN)/python -m pytest tests/engine/test_swap.py
	LABKIT_SOAK=1 $(BIN)/python -m pytest tests/engine/test_extract_real.py
	LABKIT_SOAK=1 $(BIN)/python -m pytest tests/notebooks -k killed
	LABKIT_SOAK=1 $(BIN)/python -m pytest tests/browser -k "others"

PEERS := .venv/peers
$(PEERS)/.ready: requirements/bench.txt $(BIN)/.ready
	$(PYTHON) -m venv $(PEERS)
	$(BIN)/uv pip install --quiet --python $(PEERS)/bin/python --no-deps -r requirements/bench.txt
	touch $@

bench: setup $(PEERS)/.ready  ## side-by-side timings against peers, on a quiet machine (about 16 minutes)
	$(BIN)/python -m benchmarks.controls
	$(BIN)/python -m benchmarks.client_overhead
	$(BIN)/python -m benchmarks.ngram_vs_vllm
	$(BIN)/python -m benchmarks.experts_unique
	$(BIN)/python -m benchmarks.vocab_vs_speculators
	$(BIN)/python -m benchmarks.steps_vs_model
	$(BIN)/python -m benchmarks.train_step
	$(BIN)/python -m benchmarks.extract_vs_prefill
	$(BIN)/python -m benchmarks.trace_vs_hta $(PEERS)/bin/python

lab: setup  ## JupyterLab on loopback, with a token (LAB= for more of its options)
	LD_PRELOAD=$(CURDIR)/.venv/lib/libiomp5.so $(BIN)/jupyter lab --ip 127.0.0.1 --notebook-dir . \
	  --KernelManager.transport_encryption=auto $$([ "$$(id -u)" != 0 ] || echo --allow-root) $(LAB)

lint: setup  ## ruff, and notebooks without outputs
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify --keep-id notebooks/*.ipynb

format: setup  ## what lint wants
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/nbstripout --keep-id --extra-keys "metadata.papermill cell.metadata.papermill" notebooks/*.ipynb

render: setup  ## HTML pages of the demo run
	$(BIN)/labkit render demo

lock: setup  ## pin the requirements anew
	cd requirements && ../$(BIN)/uv pip compile -q --python-version 3.11 --override override.txt --no-annotate \
	  --no-header --no-emit-index-url --no-emit-find-links $${FIND_LINKS:+--find-links $$FIND_LINKS} cpu.in -o cpu.txt
	cd requirements && ../$(BIN)/uv pip compile -q --python-version 3.11 --no-annotate --no-header \
	  --no-emit-index-url --no-emit-find-links gpu.in -o gpu.txt
	cd requirements && ../$(BIN)/uv pip compile -q --python-version 3.11 --no-annotate --no-header \
	  --no-emit-index-url --no-emit-find-links bench.in -o bench.txt

clean:  ## remove what can be made again (not outputs/)
	rm -rf .venv .cache .pytest_cache .ruff_cache
