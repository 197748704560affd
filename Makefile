# make demo        from nothing to a trained model on this machine
# make test        what a change must pass, tier by tier; its Ray and S3 servers are its own
# make test-unit   one tier; also test-ranks, test-s3, test-ray, test-e2e, test-faults
# make test-slow   the rest: every fault, several hosts; make test-unit SLOW=1: one tier's part; GATE=1: what CI runs of it
# make test-again  make test N=10 times beside LOAD=2 busy processes; prints what was not always green
# make mutants     faults made by hand, and which test finds each; ONLY=machine- narrows it
# make test-torch211  what meets torch, with the oldest supported torch
# make docs        the documentation as a site, in build/site
# make screenshots the pictures of docs/pictures; needs chromium and prometheus
# make chaos       every fault; MINUTES=30 MTBF=20 SEED=1: a random storm
# make fuzz        damaged input for every parser, for MINUTES=10
# make hashes      requirements/*.txt, after a change of constraints.txt
.PHONY: venv demo test test-unit test-ranks test-s3 test-ray test-e2e test-faults test-slow test-again mutants test-torch211 lint docs screenshots bench chaos fuzz hashes clean
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif
SHELL := /bin/bash
# Every process of the tests would compile all of raypp and the tests again.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where torch comes from. Empty: your package index. For a CPU-only torch on Linux:
#   make venv TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

# Checks of pages, tables, links and source text: `make lint` runs them.
LINT := tests/lint
# The tiers (CONTRIBUTING.md). TESTS=tests/ray/test_relays.py narrows `test` and `test-slow` to some of them.
UNIT := tests/unit
RANKS := tests/processes tests/ranks tests/gpu
S3 := tests/s3
RAY := tests/ray
E2E := tests/e2e
FAULTS := tests/chaos tests/hosts
TESTS ?=
# Processes of the tiers whose tests share nothing: one for each core. WORKERS=0: in pytest's own (for --pdb).
WORKERS ?= logical
# Some unit tests wait; one process more than there are cores computes meanwhile.
UNIT_WORKERS := $(if $(filter logical,$(WORKERS)),$(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1))),$(WORKERS))
# Clusters of test-ray, test-e2e and test-faults that run side by side, each with whole files of tests.
CLUSTERS ?= 1
ON_CLUSTERS := $(if $(filter-out 1,$(CLUSTERS)),-n $(CLUSTERS) --dist loadfile)
# SLOW=1: a tier's slow tests instead, for example the full matrices of test-unit and test-ranks.
# GATE=1: of these, the ones that .ci/run runs.
SLOW ?=
GATE ?=
# JUNIT=FOLDER: each tier writes its results there, as TIER.xml.
JUNIT ?=
PYTEST = $(BIN)/python -m pytest -m '$(if $(GATE),slow and gate,$(if $(SLOW),slow,not slow))' $(if $(JUNIT),--junitxml=$(JUNIT)/$@.xml)

# The oldest supported torch, in an environment of its own.
VENV211 := .venv-torch211
STAMP211 := $(VENV211)/.installed

venv: $(STAMP)

# $(call environment,FOLDER): an empty one.
define environment
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON): install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "raypp needs Python 3.11 or newer; use: make venv PYTHON=python3.11"; exit 1; }
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "installing the pinned versions into $(1) (some minutes the first time)"
endef

# Every file must have a hash of requirements/; nothing else is fetched. A torch from TORCH_INDEX has none there.
$(STAMP): pyproject.toml constraints.txt $(wildcard requirements/*.txt)
	$(call environment,$(VENV))
	@PYTHON='$(abspath $(BIN))/python' TORCH_INDEX='$(TORCH_INDEX)' requirements/install node store dev
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# An environment for tests only, without hashes. Its Triton's interpreter needs an older numpy than the pinned one.
$(STAMP211): pyproject.toml constraints.txt
	$(call environment,$(VENV211))
	@grep -v '^torch==\|^numpy==' constraints.txt > $(VENV211)/constraints.txt
	@$(VENV211)/bin/python -m pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.11.0 triton==3.6.0 numpy==2.3.5
	@$(VENV211)/bin/python -m pip install -q --disable-pip-version-check -c $(VENV211)/constraints.txt torch==2.11.0 -e '.[local,dev]'
	@touch $@

# The hashes of all files of the pinned versions, of every platform; needs uv.
hashes:
	@$(PYTHON) requirements/lock.py

demo: venv
	@$(BIN)/raypp local up
	@$(BIN)/raypp submit jobs/quickstart.yaml --set name=quickstart-$$(date +%m%d-%H%M%S)

ifdef TESTS
test: venv
	@$(PYTEST) $(TESTS)
else
# The last four wait more than they compute. Each prints when it ends.
test: test-unit test-ranks
	@echo "test-s3, test-ray, test-e2e and test-faults run side by side, three at a time (some minutes)"
	@$(MAKE) --no-print-directory -j 3 --output-sync=target SIDE_BY_SIDE=1 test-s3 test-ray test-e2e test-faults
endif

test-unit: venv
	@$(PYTEST) -n $(UNIT_WORKERS) --maxprocesses 8 --dist worksteal $(UNIT)

# Whole files: their tests share what ranks have computed.
test-ranks: venv
	@$(PYTEST) -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(RANKS)

test-s3: venv
	@$(PYTEST) $(S3)

test-ray: venv
	@$(PYTEST) $(ON_CLUSTERS) $(RAY)

test-e2e: venv
	@$(PYTEST) $(ON_CLUSTERS) $(E2E)

test-faults: venv
	@$(PYTEST) $(ON_CLUSTERS) $(FAULTS)

test-slow: venv
	@$(BIN)/python -m pytest -m slow $(or $(TESTS),tests)

# Prints every test that was not green in all of N runs beside LOAD busy processes. TESTS=… narrows it.
# FREEZE=1: and with random processes of the tests stopped for 50 ms each.
N ?= 10
LOAD ?= 2
FREEZE ?=
test-again: venv
	@$(BIN)/python -m tests.again --runs $(N) --load $(LOAD) $(if $(FREEZE),--freeze) $(TESTS)

# docs/benchmarks/mutants.md has the results. ONLY='machine- commit-' takes the faults whose names begin so.
ONLY ?=
mutants: venv
	@$(BIN)/python -m tests.mutants $(addprefix --only ,$(ONLY))

# A process test that needs a CUDA build of torch, which only this environment has without a GPU.
ON_CUDA_BUILD := tests/processes/test_cuda_starts_after_the_fork.py

# With the oldest supported torch: types, the first tier, and the ranks, whose numbers and checkpoints are compared with
# those of the pinned torch. CONTRIBUTING.md says when it must be run. Three kinds of mypy's errors depend only on which
# functions of torch and numpy have annotations.
test-torch211: venv $(STAMP211)
	@$(VENV211)/bin/mypy --cache-dir $(VENV211)/mypy --disable-error-code unused-ignore --disable-error-code no-any-return --disable-error-code no-untyped-call
	@RAYPP_OTHER_TORCH=$(abspath $(BIN))/python $(VENV211)/bin/python -m pytest -m 'not slow' -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(or $(TESTS),$(UNIT) $(LINT)/test_torch_private.py $(ON_CUDA_BUILD) tests/ranks tests/gpu)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q $(LINT)

# The documentation as a site, in build/site. A broken link or anchor fails.
DOCS_STAMP := $(VENV)/.docs-installed
docs: $(DOCS_STAMP)
	@$(BIN)/python docs/pictures/data_flow.py
	@$(BIN)/properdocs build

$(DOCS_STAMP): $(STAMP)
	@touch $@

screenshots: venv
	@PYTHONPATH=tests/servers $(BIN)/python docs/pictures/screens/make.py

bench: venv
	$(BIN)/python -m benchmarks.run

# Without MINUTES: every fault of the table; with them: a random storm of so many minutes, a fault every MTBF seconds.
MTBF ?= 20
SEED ?= 1
CHAOS_OUT ?=
chaos: venv
ifdef MINUTES
	@PYTHONPATH=.:tests/e2e:tests/servers $(BIN)/python tests/chaos/storm.py --minutes $(MINUTES) --mtbf $(MTBF) --seed $(SEED) $(if $(CHAOS_OUT),--out $(CHAOS_OUT))
else
	$(BIN)/python -m pytest tests/chaos
endif

# Every target of tests/fuzz in turns, for so many minutes; the same SEED gives the same inputs.
fuzz: MINUTES ?= 10
fuzz: venv
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(filter command% environment%,$(origin SEED)),--seed $(SEED)) $(TESTS)

clean:
	@if test -x $(BIN)/raypp; then $(BIN)/raypp local down --yes; fi
	rm -rf $(VENV) $(VENV211) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
