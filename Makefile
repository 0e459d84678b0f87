# Everything runs in .venv, made from $(PYTHON) with the versions of constraints.txt. `make help` lists the targets.
PYTHON ?= python3
TORCH := 2.13.0
VENV := .venv
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
ARGS ?=

# Nothing is fetched from a hub, and caches go with the environment.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HOME ?= $(CURDIR)/$(VENV)/cache/huggingface
export MPLCONFIGDIR ?= $(CURDIR)/$(VENV)/cache/matplotlib

.PHONY: help venv quickstart test slow check lint types layers bench constraints clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1: /p' Makefile

venv: $(VENV)/installed ## make .venv with tunery (editable) and every tool

quickstart: venv ## train LoRA on a small real model and real text, without a hub
	$(RUN) tunery train recipes/quickstart.yaml

test: venv ## the tests, without the slow ones; ARGS="-k name" narrows them
	$(RUN) pytest -m "not slow" -n 2 --dist loadscope $(ARGS)

slow: venv ## the slow tests: real models, many runs, whole environments, the README's blocks
	$(RUN) pytest -m slow -n 2 --dist loadscope $(ARGS)

check: lint types layers ## every check that runs no test

lint: venv ## ruff, as linter and as formatter
	$(RUN) ruff check .
	$(RUN) ruff format --check .

# mypy does not follow an editable install's import hook, and a clone's folder may have any name: a link gives the right one.
types: venv ## mypy --strict on the package
	@mkdir -p $(VENV)/src && ln -sfn "$(CURDIR)" $(VENV)/src/tunery
	$(RUN) MYPYPATH=$(VENV)/src mypy --strict -p tunery

layers: venv ## the floors: who may import whom
	$(RUN) lint-imports

bench: venv ## every performance script, quick; each exits 1 when a claim is short
	@set -e; for script in $$(grep -l __main__ benchmarks/performance/*.py); do \
		$(RUN) python -m tunery.benchmarks.performance.$$(basename $$script .py) --quick; \
	done

# Resolves afresh and installs nothing. The local tag (+cpu) goes; torch pins its own CUDA packages where it has any.
constraints: $(VENV)/bin/pip ## resolve every dependency again and write constraints.txt; use the oldest supported Python
	@{ echo "# Every dependency of tunery[dev], pinned. Made by \`make constraints\`; not edited by hand."; \
	$(PIP) -qq install --dry-run --ignore-installed --report - torch==$(TORCH) -e ".[dev]" | $(VENV)/bin/python -c 'import json, sys; \
	found = [item["metadata"] for item in json.load(sys.stdin)["install"]]; \
	pins = {meta["name"].lower().replace("_", "-"): meta["version"].split("+")[0] for meta in found}; \
	skip = ("tunery", "nvidia-", "cuda-", "triton"); \
	print(*(f"{name}=={pins[name]}" for name in sorted(pins) if not name.startswith(skip)), sep="\n")'; } > $(VENV)/constraints.txt
	@mv $(VENV)/constraints.txt constraints.txt

clean: ## remove the environment and everything built; runs/ and results/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

# pip is the last thing a new environment gets: without it the environment is half made, and made again.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tunery needs Python 3.11 or newer: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
