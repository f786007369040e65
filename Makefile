# Everything works from a clean clone, as any user, with Python 3.10 or newer and a package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MADE   := $(VENV)/.made-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
DEMO   := $(VENV)/.demo-$(notdir $(MADE))

# Compiled modules are kept, also where the environment says not to: tests start our programs a thousand times.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: croissant demo docs venv test check oldest bench format clean

demo: $(or $(wildcard $(MADE)),$(DEMO))  ## a supervised Llama pretraining with faults injected, under three minutes
	$(BIN)/unbroken demo

# Native tracebacks: pytest's own parse sources, and Python 3.11 up to .7 may end the worker there (gh-106905).
test: $(MADE)  ## what this machine can run in minutes; ARGS='--slow' runs everything
	$(BIN)/python -m pytest -n auto --dist worksteal --tb native $(ARGS)

check: $(MADE)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vermin --quiet --target=3.9- --no-tips --violations unbroken.py supervisor/training recovery/worker.py recovery/snapshot*.py

oldest:  ## imports everything on Python 3.10, where that is installed
	tools/oldest_python.sh

bench: $(MADE)  ## repeats the figures of docs/benchmarks.md
	$(BIN)/unbroken bench recovery
	$(BIN)/unbroken bench recovery --fault xid
	-$(BIN)/unbroken bench overhead
	-$(BIN)/unbroken bench checkpoint
	-$(BIN)/python -m tests.bench scan
	$(BIN)/python -m tests.bench flight

docs: $(MADE)  ## the documentation as a site, in build/site; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would let warnings pass
	@du -sh build/site

croissant:  ## mlcroissant, which reads exports in a test, in an environment of its own (350 MB)
	@echo "mlcroissant in .venv-croissant: about half a minute."
	@$(PYTHON) -m venv .venv-croissant
	@.venv-croissant/bin/python -m pip install --quiet mlcroissant

format: $(MADE)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

venv: $(MADE)

# For the demo alone, without developers' tools: the virtual environment of the tests has all that it needs.
$(DEMO):
	tools/demo_environment.sh $(PYTHON) $(VENV)
	touch $@

# The virtual environment, made again when what it is made from has changed.
$(MADE):
	@echo "[1/2] A virtual environment in $(VENV): seconds."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/2] torch and all that tests, checks and docs need (1.7 GB on disk): one to five minutes, most of it quiet."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,dev,docs]'
	rm -f $(VENV)/.made-*
	touch $@

clean:
	rm -rf $(VENV) .venv-3.10 dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
