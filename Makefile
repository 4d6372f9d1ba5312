# `make demo` and `make test` do all the set-up on a fresh machine: each makes .venv where it is missing.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow test-faults lint bench clean

$(STAMP): setup.py constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "torch" "setuptools>=70"
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[test,lint,bench]"
	touch $(STAMP)

demo: $(STAMP)
	$(PY) examples/demo.py

test: $(STAMP)
	$(PY) -m pytest -n 2 --dist loadscope

test-slow: $(STAMP)
	$(PY) -m pytest -n 2 --dist loadscope -m slow

test-faults: $(STAMP)
	$(PY) -m pytest -n 2 --dist loadscope -m "" tests/faults

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(STAMP)
	$(PY) benchmarks/table.py
	$(PY) benchmarks/save_load.py
	$(PY) benchmarks/simulate_ranks.py --ranks 256 --gb 25

clean:
	rm -rf $(VENV) build dist *.egg-info
