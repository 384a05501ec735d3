# Every target makes what it needs: `make demo` works in a fresh clone with nothing but Python 3.10 or newer.
PYTHON ?= python3
# Test processes. Each gets one thread, so that two of them fill two cores and results do not depend on the machine.
JOBS ?= 2

# Threads that wait sleep instead of spinning: on cores shared with anything else, that is the difference between
# half a second and ten seconds a step.
export OMP_WAIT_POLICY := passive

BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint coverage bench docs

demo: $(READY)
	$(BIN)/python examples/train_gpt.py --logger wandb

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# What no test runs; half as long again as the tests alone. Whatever folder a process runs in, its data come here.
coverage: $(READY)
	$(BIN)/coverage erase
	OMP_NUM_THREADS=1 COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/depth_scaling.py

docs: $(READY)
	$(BIN)/mkdocs build

$(READY): pyproject.toml constraints.txt
	@echo "Installing PyTorch, Lightning and the tools into .venv: minutes the first time, nothing afterwards."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
