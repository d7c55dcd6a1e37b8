# PYTHON=python3.13 make demo   chooses the interpreter that .venv is made with (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.core  ## continue a prompt with and without speculation, and compare
	@$(BIN)/jspec demo

test: $(VENV)/.test  ## all tests but the slow ones
	@$(BIN)/pytest -q -m "not slow"

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .

clean:  ## forget the environment; the next command makes it anew
	rm -rf $(VENV)

# Each stamp holds what the one before it does, and is as old as the pyproject.toml it was made of.
$(VENV)/.core: pyproject.toml | $(BIN)/pip
	@echo "Installing jspec into $(VENV) (once; a minute or two) ..."
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/pip
	@echo "Installing jspec and its test tools into $(VENV) (once; a few minutes) ..."
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.core

$(VENV)/.dev: pyproject.toml | $(BIN)/pip
	@echo "Installing jspec and its development tools into $(VENV) (once; a few minutes) ..."
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.test $(VENV)/.core

# pip comes last when an environment is made: without it, an earlier attempt was interrupted.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but jspec needs Python 3.11 or newer;" \
	    "name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
