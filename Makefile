# Every target makes and re-uses .venv; nothing else needs to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests whose kernels run on a GPU where there is one.
GPU_TESTS := $(shell grep -rl --include='test_*.py' -e kernel_device -e torch.cuda.is_available tests/runtime)
SANITIZER := compute-sanitizer --target-processes all --error-exitcode 9
# CUDA graphs want the allocator that hides accesses beyond a tensor, so they go without it apart.
GRAPHS := captured or one_graph
# What CUDA is asked for to see it refused is an error to the sanitizer.
REFUSED := refused_locking
# A few minutes each at most on 2 quiet cores; gpu says in one line that there is no GPU. Not among them,
# with minutes that are estimates:
#   10 to 60 minutes: cooperative, full_graph_plan, learning, learning_samplers, matrix, memory_plans,
#     partition, placement_scale, plan_scale --scale 0.0625, policies, scaling, soak_failures, service
#   boundary (100 minutes), prediction (three hours), drawn (90 minutes); both can be stopped and gone on with
BENCH ?= placement published sampling samplers bulk gather loader compute end_to_end planning gpu
# What a bare CUDA image (Python 3.12, x86-64; torch, triton, numba, torch_geometric, typer) lacks of what
# the GPU's experiments import.
SILICON_WHEELS := pulp highspy kaminpar pydantic pydantic_core annotated-types typing-inspection \
  typing_extensions fastapi starlette uvicorn httptools SQLAlchemy alembic Mako httpx2 beartype
SILICON_PLATFORMS := $(foreach n,28 27 24 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64
FUZZ := $(shell find tests -name 'test_fuzz_*.py')
# One BLAS thread unless a plan says otherwise: tests run several processes at once.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Names or paths of the interpreters beside $(PYTHON) that test-versions takes.
INTERPRETERS ?= python3.12 python3.13

# Every process that is started reads the bytecode of the first.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo test unit notebooks test-slow test-versions check format bench bench-peers soak gpu mutants silicon silicon-pack clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --prefer-binary \
	  -c constraints.txt -e ".[dev]"
# On all cores, but for what is hardly imported; a file of torch's is for Python 3.12.
	$(BIN)/python -m compileall -qq -j 0 -x '/(_?tests?|testing|_inductor)/' $(VENV)/lib || true
	touch $(STAMP)

install: $(STAMP)  ## make .venv and install gnnplan with its development tools

demo: $(STAMP)  ## generate a graph, probe this machine, plan, train on 2 ranks, compare
	$(BIN)/gnnplan demo

test: unit notebooks  ## unit and property tests, distributed tests, notebooks

# Three workers on two cores: tests wait for processes, links and clocks (DEC-137).
unit: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 3 --durations=40 -m "not slow" tests

notebooks: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --nbmake --nbmake-timeout=240 --timeout=1200 notebooks

test-slow: $(STAMP)  ## tests of more than ten seconds
	$(TEST_ENV) $(BIN)/python -m pytest -q -m slow tests
	GNNPLAN_FUZZ_EXAMPLES=$${GNNPLAN_FUZZ_EXAMPLES:-1000} $(TEST_ENV) $(BIN)/python -m pytest -q $(FUZZ)
	GNNPLAN_API_CASES=$${GNNPLAN_API_CASES:-200} $(TEST_ENV) $(BIN)/python -m pytest -q tests/api/test_openapi.py

# Torch's default wheel wants a Triton of its own; other versions than those of every day warn of this and that.
test-versions:  ## unit tests on other Pythons, and with the oldest packages that pyproject.toml allows
	@missing=; failed=; \
	run() { \
	  venv=.venv-$$1; test -x $$venv/bin/python || $$2 -m venv $$venv || return 1; \
	  grep -v '^triton==' $$3 >$$venv/constraints.txt; \
	  $$venv/bin/python -m pip install --quiet --disable-pip-version-check --prefer-binary \
	    -c $$venv/constraints.txt -e ".[dev]" || return 1; \
	  NUMBA_CACHE_DIR=$$venv/numba $(TEST_ENV) $$venv/bin/python -m pytest -q -n 2 -p no:cacheprovider \
	    -W ignore::DeprecationWarning -W ignore::FutureWarning -m "not slow and not distributed" tests; \
	}; \
	run oldest $(PYTHON) constraints-oldest.txt || failed="$$failed oldest"; \
	for python in $(INTERPRETERS); do \
	  name=$$($$python -c "import platform; print(platform.python_version())" 2>/dev/null) || \
	    { missing="$$missing $$python"; continue; }; \
	  run $$name $$python constraints.txt || failed="$$failed $$python"; \
	done; \
	test -z "$$failed" || echo "test-versions: failed with$$failed"; \
	test -z "$$missing" || \
	  echo "test-versions: not run with$$missing, which do not start here (INTERPRETERS=\"NAME-OR-PATH ...\")"; \
	test -z "$$missing$$failed"

check: $(STAMP)  ## format, lint, types, import directions, notebooks without outputs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/nbstripout --verify notebooks/*.ipynb

format: $(STAMP)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## the benchmarks that take minutes, one JSON object per line; BENCH="NAME ..." for others
	for name in $(BENCH); do $(BIN)/python -m tests.benchmarks.$$name --json || exit 1; done
	$(BIN)/python -m tests.benchmarks.service --json --only cached_plan

bench-peers: $(STAMP)  ## gnnplan beside GraphBolt and PyG, in turns on one graph: table and picture in build/bench-peers (PEERS="--cores 2 ...")
	$(BIN)/python -m tests.benchmarks.peers --install .venv-peers --out build/bench-peers $(PEERS)

soak: $(STAMP)  ## long runs: 50 injected faults; learning on real graphs; the service loaded, killed and fuzzed
	$(TEST_ENV) $(BIN)/python -m tests.benchmarks.soak_failures --json
	$(BIN)/python -m tests.benchmarks.learning --json
	$(TEST_ENV) $(BIN)/python -m tests.benchmarks.service --json
	for database in sqlite postgresql; do GNNPLAN_API_CASES=2000 GNNPLAN_API_DATABASE=$$database \
	  $(TEST_ENV) $(BIN)/python -m pytest -q tests/api/test_openapi.py || exit 1; done

silicon: $(STAMP)  ## the experiments that wait for a GPU, as far as they come in 480 s; records to commit
	$(BIN)/python -m tests.silicon --seconds $(or $(SECONDS),480)

silicon-pack: $(STAMP)  ## .silicon/: wheels for a bare CUDA image without network, which runs `python -m tests.silicon`
	rm -rf .silicon
	grep -iE "^($$(echo $(SILICON_WHEELS) | tr ' _' '|.'))==" constraints.txt > .silicon.txt
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
	  --implementation cp $(SILICON_PLATFORMS) --dest .silicon -r .silicon.txt
	rm .silicon.txt
	du -sm .silicon | awk '{print; exit $$1 > 63}'

gpu: $(STAMP)  ## kernels on this machine's GPU: their tests, then compute-sanitizer's memcheck and racecheck
	@$(BIN)/python -c "import torch; raise SystemExit(not torch.cuda.is_available())" || \
	  { echo "expected a GPU that torch can use, found none: nothing was run (gnnplan doctor)"; exit 1; }
	@command -v compute-sanitizer >/dev/null || \
	  { echo "expected compute-sanitizer (CUDA toolkit) on the path, found none"; exit 1; }
	$(TEST_ENV) $(BIN)/python -m pytest -q $(GPU_TESTS)
	for tool in memcheck racecheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(TEST_ENV) $(SANITIZER) --tool $$tool $(BIN)/python -m pytest -q \
	    -m "not slow and not distributed" -k "not ($(GRAPHS) or $(REFUSED))" $(GPU_TESTS) || exit 1; \
	  $(TEST_ENV) $(SANITIZER) --tool $$tool $(BIN)/python -m pytest -q \
	    -m "not slow and not distributed" -k "$(GRAPHS)" $(GPU_TESTS) || exit 1; \
	done

mutants: $(STAMP)  ## plant 60 small faults (FAULTS=LIST for drawn ones) and see which survive the tests; hours
	@test -n "$(FAULTS)" || $(BIN)/python -m tests.mutation draw > mutants.jsonl
	$(TEST_ENV) $(BIN)/python -m tests.mutation run $(or $(FAULTS),mutants.jsonl)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
