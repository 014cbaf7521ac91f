# `make demo` shows the library at work; `make test` is the check of a change, the same here and in CI. `make test-all` has
# in addition what is one more of many alike (marked `long`): before a release, or what touches what they try.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Two ranks on two cores: one thread each.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

# What holds of windows is tried once more with steps that run eagerly (tests/eagerly.py).
WINDOWS := $(addprefix tests/,runtime/test_window.py test_weights.py test_gradients.py test_manual.py \
	test_buffers.py test_several_optimizers.py test_saved_windows.py test_schedules.py test_window_errors.py \
	test_precision.py test_shapes.py test_ranks_ends.py test_ranks_saving.py test_ranks_disagreement.py \
	test_ranks_groups.py test_ranks_scripts.py)

# What tells in a minute whether a change holds at all: one process, no compiler, no browser, no examples.
QUICK := $(addprefix tests/,ir planning comm lowering runtime passes capture/test_names.py capture/test_reachable.py \
	eager/test_window.py test_options.py test_errors.py test_wording.py test_architecture.py test_zeroing.py \
	test_schedules.py test_methods.py) --ignore tests/passes/test_check_lowered.py

# Two files at a time, each file in one process.
JOBS := --numprocesses 2 --dist loadfile

.DELETE_ON_ERROR:
.PHONY: demo test test-all quick test-torch format docs clean

demo: $(VENV)/.examples
	$(BIN)/torchrun --nproc-per-node 2 examples/train_text.py

# Each process that compiles would try the vector instructions of /proc/cpuinfo in six processes more.
test test-all quick: export TORCHINDUCTOR_VEC_ISA_OK := 1

test: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(JOBS) -m 'not long'
	GRADSYNC_TESTS_EAGERLY=1 $(BIN)/python -m pytest $(JOBS) -m 'not long' $(WINDOWS)

test-all: test
	$(BIN)/python -m pytest $(JOBS) -m long

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not gloo and not inductor' $(QUICK)

# The core of the tests with another torch, in an environment of its own: make test-torch TORCH=2.15.0
test-torch:
	$(PYTHON) tests/versions.py '$(TORCH)' $(JOBS)

# Formats the code, and writes the layout table of docs/layout.md anew from the modules' docstrings.
format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tests/test_docs.py

# The site in build/site; a link or an anchor that does not exist is an error.
docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -W --keep-going -b html -c docs -d build/doctrees . build/site

clean:
	rm -rf $(VENV) .venv-torch-* build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamp files: an environment is filled once, and again only when what it is made from changes.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo '$(PYTHON) is older than 3.11 or missing; name another: make PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.examples: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into $(VENV) (torch is large: this can take some minutes) ...'
	$(INSTALL) --editable '.[examples]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into $(VENV) (torch is large: this can take some minutes) ...'
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.examples
