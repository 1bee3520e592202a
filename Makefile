# `make demo` and `make test` do all the set-up they need, in .venv, and reuse it the next time.
.DEFAULT_GOAL := help
.PHONY: help demo serve test test-slow test-jax12 lint format lock clean

JOBS := 2
VENV := .venv
BIN := $(VENV)/bin
VENV_12 := .venv-jax12
# The first of these that is Python 3.12 or newer and can be started.
CANDIDATES := python3.12 python3.13 python3.14 python3 python
FIND_PYTHON = for p in $(PYTHON) $(CANDIDATES); do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then command -v $$p; exit 0; fi; done; \
	echo "no Python 3.12 or newer found; name one with: make PYTHON=/path/to/python3.12" >&2; exit 1
# Python keeps what it compiles of the sources, also where the environment says not to: importing jax takes three times as long without.
export PYTHONDONTWRITEBYTECODE :=
SYNC = $(BIN)/uv sync --quiet --frozen --inexact --python $(BIN)/python

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/.demo ## answer a batch of chat prompts with a real model
	@$(BIN)/python examples/demo.py

serve: $(VENV)/.demo ## serve the demo model on port 8000; flags in ARGS
	@exec $(BIN)/python -m jaxllm.serve $(ARGS)

test: $(VENV)/.dev ## run the tests, in JOBS processes (2), each of which takes up to 5 GB
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-slow: $(VENV)/.dev ## run the tests that take minutes too
	$(BIN)/python -m pytest -m "not multi_gpu" $(ARGS)

test-jax12: $(VENV_12)/.jax12 ## run the tests of the kernels and of compiled steps with jax 0.12
	$(VENV_12)/bin/python -m pytest tests/kernels tests/aot tests/plan $(ARGS)

lint: $(VENV)/.dev ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## mend style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(VENV)/.uv ## resolve the dependencies anew
	$(BIN)/uv lock --python $(BIN)/python

clean: ## remove the environment
	rm -rf $(VENV) $(VENV_12)

# uv itself comes from PyPI into the environment, so that nothing but Python is needed.
$(VENV)/.uv:
	@python=$$($(FIND_PYTHON)) || exit 1; \
	"$$python" -m venv $(VENV) || { echo "$$python cannot make a virtual environment (Debian: apt install python3-venv)" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	@touch $@

$(VENV)/.demo: $(VENV)/.uv pyproject.toml uv.lock
	@echo "installing jaxllm into $(VENV)"
	@$(SYNC) --no-dev --extra demo --extra cpu --extra bench --extra serve
	@touch $@

$(VENV)/.dev: $(VENV)/.uv pyproject.toml uv.lock
	@echo "installing jaxllm and the development tools into $(VENV)"
	@$(SYNC) --extra demo --extra cpu --extra bench --extra serve --extra ray --extra aot
	@touch $@

# The newest jax that is supported, in an environment of its own: what is locked stays as it is.
$(VENV_12)/.jax12: $(VENV)/.uv pyproject.toml
	@echo "installing jaxllm with jax 0.12 into $(VENV_12)"
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(VENV_12)
	@$(BIN)/uv pip install --quiet --python $(VENV_12)/bin/python --no-config '.[aot,cpu]' 'jax>=0.12,<0.13' \
		pytest pytest-timeout hypothesis
	@touch $@
