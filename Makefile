# Two commands: `make demo` shows what fedgg does, `make test` shows that it is right. Both make .venv first.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test slow browser docs notebooks dist versions bench lock numbers clean

help:
	@echo "make demo   compare FedGG, FedAvg, FedProx and SCAFFOLD on real digits (under a minute after the install)"
	@echo "make test   ruff, mypy, and every test that needs neither data sets nor minutes"
	@echo "make slow   the long tests: real CIFAR-10 and SVHN where they are, a hundred kills"
	@echo "make browser  the report in a real Chromium: FEDGG_CHROMIUM, or chromium on the path"
	@echo "make docs   the documentation site in build/site, which opens from disk; executes the notebooks first"
	@echo "make notebooks  execute docs/notebooks and write their outputs into them"
	@echo "make dist   a wheel and an sdist in dist/, checked, and installed and tried outside this folder"
	@echo "make versions  the tests with the oldest and with the newest supported versions (Python 3.10 and 3.13; 12 GB)"
	@echo "make bench  fedgg beside pfl-research, Flower and FedLab, which it installs under .bench (4 GB); a quiet machine"
	@echo "make lock   write requirements.lock again after a change of constraints.txt"
	@echo "make numbers  fill docs/numbers.md, docs/literature.md and figures from results/paper"
	@echo "make clean  remove .venv and everything the tools left behind (runs/ stays)"

.venv/ready: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else f"fedgg needs Python 3.11 to 3.13, this is {v[0]}.{v[1]}: make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv .venv
	$(INSTALL) --require-hashes --no-deps --requirement requirements.lock
	$(INSTALL) --constraint constraints.txt --no-build-isolation --editable '.[test]'
	@touch $@

demo: .venv/ready
	$(BIN)/fedgg compare --out runs/demo

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

slow: .venv/ready
	$(BIN)/pytest -m slow

browser: .venv/ready
	$(INSTALL) --constraint constraints.txt --no-build-isolation --editable '.[test,browser]'
	$(BIN)/pytest -m browser

.venv/docs: .venv/ready constraints-docs.txt
	$(INSTALL) --constraint constraints.txt --constraint constraints-docs.txt --no-build-isolation --editable '.[test,docs,release]'
	@touch $@

docs: .venv/docs
	$(BIN)/pytest tests/documentation
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open build/site/index.html"

notebooks: .venv/docs
	$(BIN)/python docs/site_build/execute_notebooks.py

dist: .venv/docs
	rm -rf build/lib dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/try_wheel.py dist/*.whl dist/*.tar.gz

versions: .venv/ready
	$(BIN)/python .ci/versions.py

bench: .venv/ready
	$(BIN)/fedgg bench setup
	$(BIN)/fedgg bench

lock: .venv/ready
	$(BIN)/python .ci/lock.py

numbers: .venv/ready
	$(BIN)/python benchmarks/paper_numbers.py

clean:
	rm -rf .venv .versions build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
