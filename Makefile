# Every install step lives here: CI and a fresh machine run nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BARE := .venv-bare

# Tests start many processes. Without files of bytecode each of them would compile both packages anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup browser pictures trainers sarif programs demo test test-fast test-bare sweep check lock docs playground dist vsix bench kernels gpu figures clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[runtime,huggingface,tune,plan,fast,pictures,docs,dev]'
	touch $(READY)

browser:  ## for tests/compiler/drawing/test_html_*.py, which are skipped without it: Chromium from apt, where it is missing and this is root
	@command -v chromium >/dev/null \
	  || { apt-get update -qq && apt-get install -yqq --no-install-recommends chromium; }

trainers: build/trainers/.ready  ## for test_trainers.py, test_lora.py and test_megatron_core.py of tests/compiler/interchange, skipped without it: torchtitan, NeMo AutoModel, megatron-core and PEFT

# Without their dependencies, which would move the pins above (NeMo AutoModel wants another transformers).
build/trainers/.ready: constraints.txt | setup
	rm -rf build/trainers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/trainers -c constraints.txt \
	  torchtitan nemo-automodel megatron-core peft tyro docstring-parser typeguard dill spmd-types
	touch $@

sarif: build/sarif-2.1.0.json  ## for the tests of findings as SARIF, which need it to ask the published schema: from npm, where a package of Microsoft carries it

build/sarif-2.1.0.json:
	mkdir -p build/npm
	npm pack @microsoft/jest-sarif@1.0.0-beta.0 --silent --pack-destination build/npm
	tar -xzOf build/npm/microsoft-jest-sarif-1.0.0-beta.0.tgz package/lib/schemas/sarif-2.1.0-rtm.5.json > $@.part
	mv $@.part $@

pictures:  ## for tests/compiler/drawing/test_pictures.py and test_graphs.py, which skip what lacks them: cairo and graphviz, as browser does
	@{ command -v dot && $(BIN)/python -c 'import cairosvg'; } >/dev/null 2>&1 \
	  || { apt-get update -qq && apt-get install -yqq --no-install-recommends libcairo2 graphviz; }

# Where they cannot be installed, the tests that need them skip.
programs: setup
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  $(MAKE) --no-print-directory browser pictures trainers sarif || echo "tests that need these programs will be skipped"; fi

demo: setup  ## compile dualpipev and train a small transformer with it on 4 local ranks, checked bitwise
	$(BIN)/schedc compile dualpipev -o build/dualpipev
	$(BIN)/schedc run dualpipev -D P=4 -D M=10 --check bitwise

ROOM ?=
# A worker waits for ranks, timeouts and commands during a third of its time: three keep two cores busy.
WORKERS ?= 3
# Its last lines are the skipped tests by reason.
PYTEST = python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -rfEs

test: programs  ## the whole suite, with the long sweeps in their reduced form; `make test ROOM=runtime/moe` for one room
	$(BIN)/$(PYTEST) tests/$(ROOM)

test-fast: setup  ## what starts no ranks and is not marked slow
	$(BIN)/$(PYTEST) -m 'not processes and not slow' tests/$(ROOM)

$(BARE)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BARE)
	$(BARE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[runtime]' pytest pytest-xdist hypothesis
	touch $@

# The programs that tests may take for granted. dot, Chromium and compilers are not among them.
build/bare: Makefile
	rm -rf $@ && mkdir -p $@
	for name in bash cat env git head make mktemp sh sleep; do ln -s "$$(command -v $$name)" $@/; done

test-bare: WORKERS = 2  # these tests wait for nobody
test-bare: $(BARE)/.ready build/bare  ## the fast tests as on a machine that has Python, git and make: no extra but `runtime`, none of the programs above
	SCHEDC_BARE=1 PATH="$(CURDIR)/$(BARE)/bin:$(CURDIR)/build/bare" $(BARE)/bin/$(PYTEST) -m 'not processes and not slow' tests/$(ROOM)

sweep: setup  ## the long sweeps in full; the suite runs them reduced
	SCHEDC_SWEEP=full $(BIN)/python -m pytest -m sweep

check: setup  ## what CI demands besides the tests: style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

UPGRADE ?=

lock: setup  ## requirements.lock: every package with its hashes; what it pins stays but for constraints.txt and `make lock UPGRADE=--upgrade`
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target build/uv -c constraints.txt uv
	build/uv/bin/uv pip compile pyproject.toml --all-extras --constraints constraints.txt --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --custom-compile-command 'make lock' $(UPGRADE) --quiet --output-file requirements.lock

docs: setup  ## the site in build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html -d build/doctrees docs build/docs

playground: setup  ## the page that checks and draws in a browser, in build/playground; `make docs` puts it beside the site
	$(BIN)/python docs/playground/build.py build/playground

dist: setup  ## source distribution and wheel, built from it as a user's pip does, and checked as a package index does
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

build/sched.vsix: $(wildcard editors/vscode/src/*.js editors/vscode/*.json editors/vscode/pack.py)
	cd editors/vscode && npm ci --no-audit --no-fund --loglevel=error && npm run --silent bundle
	$(PYTHON) editors/vscode/pack.py $@

vsix: build/sched.vsix  ## the extension for VS Code, which needs node; nothing else of the project does

bench: setup  ## every benchmark, one after the other; run it when nothing else runs
	@for name in compile timeline planner claims cold_start executor split_backward overlap alltoall batch_gemm recompute hot_experts moe_step products routes host_asks imbalance policies dropout tune; do $(BIN)/python benchmarks/$$name.py || exit 1; done
	@for name in compiled deferral dropout families large loop masks shapes split-cost tied; do $(BIN)/python benchmarks/trainers.py $$name || exit 1; done
	@for word in families networks prices rows monotone; do $(BIN)/python benchmarks/planner_truth.py $$word || exit 1; done
	@$(BIN)/python benchmarks/planned.py --toys 5 --seed 1 --top 6

kernels: setup  ## the Triton kernels compiled for all GPUs, and the table of their registers and loads written anew
	@PYTHONPATH=tests $(BIN)/python tests/support/kernel_facts.py --write

PART ?=
GPU_OUT ?= build

gpu: setup  ## what only a GPU can tell, in parts of five minutes: build/gpu.json and build/gpu.md; `make gpu PART=right`; without a GPU simulated
	@$(BIN)/python benchmarks/gpu.py $(PART) --out $(GPU_OUT)/gpu.json --page $(GPU_OUT)/gpu.md --docs docs/gpu.md

figures: setup  ## the drawings of the README and the docs
	$(BIN)/schedc show dualpipev -D P=4 -D M=10 -o docs/figures/dualpipev.svg
	$(BIN)/schedc show dualpipe -D P=8 -D M=20 -o docs/figures/dualpipe.svg
	$(BIN)/schedc show dualpipev --cell FB --cost-file examples/costs/hops.toml -o docs/figures/cell.svg

clean:
	rm -rf $(VENV) $(BARE) build dist
