# `make train` and `make test` work on a fresh machine: they install everything first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SEED ?= 0
# packages that register environments, which no extra installs
WORLD_PACKAGES = highway-env minigrid MinAtar popgym
BENCH = fixed_work image_updates threshold collecting replay startup growth

.PHONY: help install train test test-worlds lint types datasets learn bench bench-quick soak clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/'

install: $(VENV)/.installed  ## create a virtual environment with all that the tests need

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q --disable-pip-version-check torch
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q --disable-pip-version-check -e ".[dev]"
	@touch $@

train: install   ## train PPO on CartPole-v1 to 475 and print the evaluation
	@out=runs/ppo-CartPole-v1-$(SEED)-$$(date +%Y%m%d-%H%M%S); \
	$(BIN)/zhixing train ppo --env CartPole-v1 --seed $(SEED) --out $$out stop_return=475 && \
	$(BIN)/zhixing eval $$out --episodes 100

test: lint types  ## check style and types and run all tests
	$(BIN)/pytest --cov --cov-fail-under=90 --cov-report=term:skip-covered

test-worlds:     ## run the tests that need extras: simulators, emulators, Ray
	test -d .venv-worlds || $(PYTHON) -m venv .venv-worlds
	PIP_CONSTRAINT=constraints.txt .venv-worlds/bin/pip install -q --disable-pip-version-check torch
	PIP_CONSTRAINT=constraints.txt .venv-worlds/bin/pip install -q --disable-pip-version-check -e ".[dev,all]" $(WORLD_PACKAGES)
	.venv-worlds/bin/pytest -n 1 -rs tests/unit/envs tests/unit/distributed tests/unit/search tests/unit/reports \
	  tests/learning/test_published_settings.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

datasets: install  ## create the datasets for offline learning
	$(BIN)/python benchmarks/make_datasets.py

learn: datasets  ## run the learning studies, for many hours
	@failed=0; for script in learn memory_and_goals teams offline; do \
	$(BIN)/python benchmarks/$$script.py || failed=1; done; exit $$failed

bench: datasets  ## compare speed with other libraries and update docs/benchmarks.md, for hours
	@for script in $(BENCH) chart; do $(BIN)/python benchmarks/$$script.py || exit 1; done

bench-quick: install  ## do a small part of `make bench` and write to benchmarks/results/quick
	@for script in $(BENCH) chart; do $(BIN)/python benchmarks/$$script.py --quick || exit 1; done

soak: install    ## run the reliability tests at full length, for hours
	$(BIN)/python benchmarks/soak.py

clean:           ## remove the virtual environment, builds and caches
	rm -rf $(VENV) build dist *.egg-info .coverage* .mypy_cache .ruff_cache .pytest_cache
