# Every target sets itself up: `make test` and `make demo` work on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test check check-slow format docs bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/grpo_one_file.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 -m 'not slow'

# Formatting, lint, types, generated docs, tests: what a change must pass.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/groupwise docs --check
	$(MAKE) test

check-slow: $(READY)
	$(BIN)/python -m pytest -n 2 -m slow

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)
	$(BIN)/groupwise docs

bench: $(READY)
	$(BIN)/python benchmarks/losses.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
