# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SEED ?= 0
BENCH = fixed_work pictures threshold collecting replay start growth

.PHONY: help install train test test-worlds lint types datasets learn bench bench-quick soak clean

help:            ## what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/'

install: $(VENV)/.installed  ## virtual environment with everything that the tests need

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q --disable-pip-version-check torch
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q --disable-pip-version-check -e ".[dev]"
	@touch $@

train: install   ## train PPO on CartPole-v1 to 475 and print the evaluation
	@out=runs/ppo-CartPole-v1-$(SEED)-$$(date +%Y%m%d-%H%M%S); \
	$(BIN)/zhixing train ppo --env CartPole-v1 --seed $(SEED) --out $$out stop_return=475 && \
	$(BIN)/zhixing eval $$out --episodes 100

test: lint types  ## lint, types and all tests
	$(BIN)/pytest --cov --cov-fail-under=90 --cov-report=term:skip-covered

test-worlds:     ## tests that `make test` skips, in an environment with all extras: simulators, emulators, Ray
	test -d .venv-worlds || $(PYTHON) -m venv .venv-worlds
	PIP_CONSTRAINT=constraints.txt .venv-worlds/bin/pip install -q --disable-pip-version-check torch
	PIP_CONSTRAINT=constraints.txt .venv-worlds/bin/pip install -q --disable-pip-version-check -e ".[dev,all]"
	.venv-worlds/bin/pytest -n 1 tests/unit/envs tests/unit/distributed tests/unit/report/test_window.py \
	  tests/learning/test_published_settings.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

datasets: install  ## data to learn from, made with our own agents
	$(BIN)/python benchmarks/make_datasets.py

learn: datasets  ## the longer learning studies: every algorithm, memory and goals, teams, data and experts
	@failed=0; for study in learn memory_and_goals teams offline; do \
	$(BIN)/python benchmarks/$$study.py || failed=1; done; exit $$failed

bench: datasets  ## speed side by side with peers: results, tables in docs/benchmarks.md and a chart
	@for study in $(BENCH) chart; do $(BIN)/python benchmarks/$$study.py || exit 1; done

bench-quick: install  ## the same on a small part of the work, into benchmarks/results/quick
	@for study in $(BENCH) chart; do $(BIN)/python benchmarks/$$study.py --quick || exit 1; done

soak: install    ## kills, faults, bad input and long runs, for hours
	$(BIN)/python benchmarks/soak.py

clean:           ## remove what was made
	rm -rf $(VENV) build dist *.egg-info .coverage* .mypy_cache .ruff_cache .pytest_cache
