# Thin wrappers: every line that runs here is in README.md too.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test env clean

demo: env
	$(BIN)/splitserve train recipe=smollm2_dspark

test: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

env: .venv/.complete

.venv/.complete: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -e ".[sglang,demo,test,dev]"
	touch $@

clean:
	rm -rf .venv dist build
