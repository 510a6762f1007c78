# Everyday commands. `make serve` and `make test` set up all they need on a machine with Python >= 3.11 and a C compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
# Arguments for `relay serve`, for example: make serve ARGS="--prefill 0 --decode 2"
ARGS ?=

# Arguments for `relay chaos`
CHAOS ?= --requests 170 --faults 75 --seeds 3 --shape 1P+2D --shape 2P+2D --shape 1P+3D --shape 3 --trace build/chaos/traces
CHAOS_GATEWAYS ?= --gateways 2 --requests 75 --faults 30 --seed 1 --shape 1P+2D --shape 3
CHAOS_NETNS ?= --netns --gateways 2 --requests 75 --faults 30 --seed 1 --shape 1P+2D --shape 3

.PHONY: serve test test-cuda check lint types contract verify sim sim-fresh chaos chaos-gateways chaos-netns resume bench tables clean

serve: $(VENV)/.base
	$(BIN)/relay serve $(ARGS)

test: check
	$(BIN)/python -m pytest

# Kernels and code for GPUs on a machine without one: Triton's interpreter, and compiling for sm_80 to sm_120. In a venv of its own:
# Triton 3.6's interpreter needs numpy < 2.4. Two processes, some four minutes.
test-cuda: $(VENV)-cuda/.ready
	$(VENV)-cuda/bin/python -m pytest tests/cuda --ignore=tests/cuda/test_interpreted.py & others=$$!; \
	  $(VENV)-cuda/bin/python -m pytest tests/cuda/test_interpreted.py; status=$$?; wait $$others && exit $$status

check: lint types contract

lint: $(VENV)/.$(EXTRAS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.$(EXTRAS)
	$(BIN)/mypy

contract: $(VENV)/.$(EXTRAS)
	$(BIN)/lint-imports

verify: $(VENV)/.base
	$(BIN)/relay verify

# A long simulation: 2,000 seeds, then directed runs until every fault has struck in every moment. Some three minutes on two cores.
SEEDS ?= 2000
sim: $(VENV)/.base
	$(BIN)/relay sim --seeds $(SEEDS) --json > benchmarks/results/cpu/sim.json; \
	  status=$$?; cat benchmarks/results/cpu/sim.json; exit $$status

# Seeds that nobody has run yet, for SIM_MINUTES. A violation is printed with the command that plays it again.
SIM_MINUTES ?= 10
sim-fresh: $(VENV)/.base
	$(BIN)/relay sim --time-limit $$(($(SIM_MINUTES) * 60)) --fresh --no-fill

# The full run of docs/failure-model.md, some 20 minutes. What passed is kept under build/chaos: an interrupted run goes on there.
chaos: $(VENV)/.base
	$(BIN)/relay chaos $(CHAOS) --keep build/chaos --output benchmarks/results/cpu/chaos.json
	$(BIN)/python -m benchmarks.tables

# The same with two gateways that are killed and stopped too: some 4 minutes.
chaos-gateways: $(VENV)/.base
	$(BIN)/relay chaos $(CHAOS_GATEWAYS) --keep build/chaos-gateways --output benchmarks/results/cpu/chaos_gateways.json
	$(BIN)/python -m benchmarks.tables

# And with packets that are lost: where that is impossible (no root, no nft) one line says so, and nothing is done.
chaos-netns: $(VENV)/.base
	@$(BIN)/relay chaos $(CHAOS_NETNS) --keep build/chaos-netns --output benchmarks/results/cpu/chaos_netns.json; \
	  status=$$?; if [ $$status -eq 8 ]; then exit 0; elif [ $$status -ne 0 ]; then exit $$status; fi; $(BIN)/python -m benchmarks.tables

# Time to resume, alone on the machine: some 10 minutes.
resume: $(VENV)/.base
	$(BIN)/python -m benchmarks.resume --json benchmarks/results/cpu/resume.json
	$(BIN)/python -m benchmarks.tables

# The figures of docs/benchmarks.md; peers (transformers serve) are measured in the same run where installed.
bench: $(VENV)/.$(EXTRAS)
	$(BIN)/python -m benchmarks.serve --json benchmarks/results/cpu/serve.json
	$(BIN)/python -m benchmarks.tables

# Rewrites the figures of README.md and docs/benchmarks.md from benchmarks/results/.
tables: $(VENV)/.$(EXTRAS)
	$(BIN)/python -m benchmarks.tables

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# The package is installed editable: its C kernels are built here, by the C compiler found on this machine.
SOURCES := pyproject.toml hatch_build.py $(wildcard src/relay/kernels/cpu/*.c src/relay/kernels/cpu/*.h)

$(VENV)/.base: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.$(EXTRAS): $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@ $(VENV)/.base

$(VENV)-cuda/.ready: $(SOURCES)
	$(PYTHON) -m venv $(VENV)-cuda
	$(VENV)-cuda/bin/python -m pip install --quiet --editable ".[dev]" torch==2.13.0 "triton==3.6.*" "numpy<2.4"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-cuda build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src -name '*.so' -delete
