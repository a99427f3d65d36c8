# Creates a virtual environment with llama.cpp and specgen, and runs a target in it. `make help`
# lists the targets. Needs Python 3.10 or newer, a C++ compiler and cmake. Builds and installations
# print to stderr, so that stdout has only the output of the target.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Correct the spelling and change nothing else: The harbour was quiet when the first boats came in. Nobody on the pier had expeckted them before noon, and the fish market was still closed. The oldest of the fishermen, who had recieved the message a day earlier, was already waiting with his dog. He said nothing, looked at the sky, and began to untie the ropes. Then the harbour master came down the stairs, and the two of them talked untill the first boat touched the pier.
ARGS ?=
PYTEST_ARGS ?=
# Runs tests in a process per core. `PYTEST_ARGS="-n 0 tests/method/test_loop.py"` uses one process.
WORKERS = --numprocesses auto --maxprocesses 8 --dist worksteal
# How often `make fuzz` runs the tests that use Hypothesis, with new examples each time.
SEARCHES = 10
# The processors that `make dist` builds wheels for.
MACHINES = x86_64
# The versions of Python for `make pythons`, and the tests that it runs with them. They cover what differs between
# versions: signatures (from which options are made), JSON, tarfile, temporary folders, recursion and messages.
PYTHONS = 3.10 3.12 3.13
PORTABLE = tests/cli/test_cli_flags.py tests/cli/test_cli_streams.py tests/text/test_json_schema.py \
	tests/session/test_template_sandbox.py tests/llama/test_llama_backend.py tests/llama/test_native_failures.py \
	tests/measure/test_goodness_of_fit.py tests/models tests/project/test_api.py tests/project/test_packaging.py \
	tests/render tests/serve/test_formats.py tests/serve/test_answers.py tests/serve/test_server_openai.py

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
# Read from pyproject.toml, so that the version is defined in one place only.
LLAMA := $(shell sed -n 's/^ *"\(llama-cpp-python[^"]*\)",$$/\1/p' pyproject.toml)
KERNELS := hatch_build.py scripts/build_kernels.py $(filter-out kernels/tests/%,$(wildcard kernels/*/*.cpp kernels/*/*.h))

export PROMPT

.PHONY: help run picture peers spec-bench rpc arm gpu-test test architectures quick pythons dist check lint format format-check types fuzz soak templates schemas llama-cpp-tests docs docs-check install clean FORCE

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | \
		while IFS='|' read -r target text; do printf '%-24s%s\n' "$$target" "$$text"; done
	@printf '\n%s\n%s\n' \
		'Variables: PROMPT, ARGS (options of specgen), PYTEST_ARGS, SEARCHES, PYTHON, VENV, and' \
		'CMAKE_ARGS for the build of llama.cpp, for example CMAKE_ARGS=-DGGML_CUDA=on'

# While llama.cpp is compiled, packages are downloaded, and models, too, unless ARGS may name others.
run: ## Answer PROMPT with the default pair of models, downloaded on first use
	@$(MAKE) --silent -j 2 $(VENV)/.installed $(if $(ARGS),,$(VENV)/.models) >&2
	@$(BIN)/specgen run $(ARGS) -- "$$PROMPT"

# Run it on an idle machine: the picture shows the measured speed-up.
picture: $(VENV)/.installed $(VENV)/.models ## Race the default pair of models on PROMPT, for the README's picture
	@$(BIN)/specgen race --svg docs/images/race.svg $(ARGS) -- "$$PROMPT"

test: $(VENV)/.installed-dev ## Run the test suite
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

# Downloads llama.cpp's source (77 MB) and writes 1.4 GB of random models, once.
architectures: $(VENV)/.installed-dev ## Check models of all architectures that llama.cpp supports (ARCHITECTURES_ARGS="--only lfm2 gpt-oss-moe")
	@$(BIN)/python -m scripts.build_architectures $(VENV)/architectures
	OMP_WAIT_POLICY=passive $(BIN)/python -m tests.architectures.run $(VENV)/architectures $(ARCHITECTURES_ARGS)

quick: lint types ## Lint, types, and the tests that find most mistakes, in two minutes
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" $(PYTEST_ARGS)

# All versions share the build of llama.cpp in VENV, so nothing is compiled.
pythons: $(VENV)/.installed-dev ## Run some of the tests with other versions of Python, with uv (PYTHONS="3.10 3.12 3.13")
	@command -v uv > /dev/null || { echo 'make pythons needs uv: pip install uv' >&2; exit 1; }
	@native=$$($(BIN)/python -c 'from scripts.build_rpc import native_folder; print(native_folder())') && \
	for version in $(PYTHONS); do \
		environment=$(VENV)/pythons/$$version; \
		uv venv --quiet --allow-existing --python $$version $$environment || \
			{ echo "Python $$version: skipped, it is not installed and cannot be downloaded" >&2; continue; }; \
		echo "Python $$version"; \
		SKBUILD_WHEEL_CMAKE=false SPECGEN_KERNELS_BUILD=off \
			uv pip install --quiet --python $$environment/bin/python --editable '.[dev]' && \
		LLAMA_CPP_LIB_PATH=$$native $$environment/bin/python -m pytest $(WORKERS) $(PYTEST_ARGS) $(PORTABLE) \
			|| exit 1; \
	done

# Takes ten minutes for each wheel, mostly for CPU backends. Compiled files are kept in build/wheel. Then the wheel for
# this machine is tested, and the other one if there is an emulator (tests/project/test_wheel.py).
dist: $(VENV)/.installed-dev ## Build the wheels for Linux, which contain llama.cpp, and test them (MACHINES="x86_64 aarch64")
	@$(PIP) install --quiet auditwheel cmake ninja 'ziglang~=0.17.0' >&2
	@for machine in $(MACHINES); do \
		PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m scripts.build_wheel --machine $$machine || exit 1; \
	done
	$(BIN)/python -m pytest -n 0 $(PYTEST_ARGS) tests/project/test_wheel.py

check: lint format-check types docs-check ## What CI runs: lint, format, types, docs, the tests, some architectures
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory architectures ARCHITECTURES_ARGS=--part

lint: $(VENV)/.installed-dev ## Lint the code
	$(BIN)/ruff check .

format: $(VENV)/.installed-dev ## Format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

format-check: $(VENV)/.installed-dev ## Check that the code is formatted
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## Check the types, strictly
	$(BIN)/mypy

fuzz: $(VENV)/.installed-dev ## Search for failing examples, then test damaged files and odd options for half an hour (FUZZ_ARGS="--seed 1 --cases 3000")
	for number in $$(seq $(SEARCHES)); do \
		$(BIN)/python -m pytest $(WORKERS) -m hypothesis --hypothesis-profile search || exit 1; \
	done
	OMP_WAIT_POLICY=passive $(BIN)/python -m tests.long_runs.fuzz $(FUZZ_ARGS)

soak: $(VENV)/.installed-dev ## Send a server valid and invalid requests for an hour (SOAK_ARGS="--minutes 10 -- -m FILE")
	OMP_WAIT_POLICY=passive $(BIN)/python -m tests.long_runs.server_soak $(SOAK_ARGS)

templates: $(VENV)/.installed-dev ## Check all chat templates that llama.cpp ships: parsing of tool calls and thinking, and interrupted conversations (TEMPLATES=FOLDER)
	$(BIN)/python -m tests.long_runs.templates $(TEMPLATES)

schemas: $(VENV)/.installed-dev ## Check how real JSON schemas are enforced (SCHEMAS=FOLDER, the maskbench/data of guidance-ai/jsonschemabench)
	$(BIN)/python -m tests.long_runs.schemas $(SCHEMAS)

llama-cpp-tests: $(VENV)/.installed-dev ## Run llama.cpp's own tests of its server against specgen serve (LLAMA_CPP="SOURCE --models FOLDER")
	$(BIN)/python -m tests.long_runs.llama_cpp_tests $(LLAMA_CPP)

docs: $(VENV)/.installed-dev ## Write the generated part of docs/, and wrap all documents
	$(BIN)/python -m scripts.make_docs
	$(BIN)/python -m scripts.wrap_markdown *.md docs/*.md

docs-check: $(VENV)/.installed-dev ## Check that the generated part of docs/ is up to date
	$(BIN)/python -m scripts.make_docs --check

install: $(VENV)/.installed ## Build and install specgen into VENV

# Uses the flags of the installed build, unless CMAKE_ARGS gives others.
peers: $(VENV)/.installed ## Build llama.cpp's own programs, for benchmarks/peers.py
	@CMAKE_ARGS="$${CMAKE_ARGS:-$$(sed -n 's/^cmake: //p' $(VENV)/.llama-settings)}" \
		$(BIN)/python -m scripts.build_peers $(VENV)/peers

# Takes hours, and can be stopped at any time: the same command resumes after the last question.
spec-bench: $(VENV)/.installed ## Measure drafts on Spec-Bench (QUESTIONS=question.jsonl, SPEC_BENCH_ARGS="--bigger FILE --minutes 60")
	@$(BIN)/python -m benchmarks.spec_bench $(QUESTIONS) $(SPEC_BENCH_ARGS)

# Compiles two files of llama.cpp into a separate library: -DGGML_RPC=on would rebuild all of llama.cpp.
rpc: $(VENV)/.installed ## Build llama.cpp's RPC, for specgen worker and --rpc
	@$(BIN)/python -m scripts.build_rpc

# Skipped with a notice if there is no compiler for ARM or no emulator.
arm: $(VENV)/.installed-dev ## Build the kernels for ARM, and compare them with AVX2 in an emulator (QEMU), in a few minutes
	@$(BIN)/python -m scripts.arm_kernels

# If llama.cpp was built for a real GPU, `make test` runs these tests on it.
gpu-test: $(VENV)/.installed-dev ## Run the GPU tests on the CPU, with llama.cpp's Vulkan backend on Mesa's lavapipe (builds for a few minutes)
	@library=$$($(BIN)/python -m scripts.build_vulkan) && \
		GGML_BACKEND_PATH=$$library GGML_VK_VISIBLE_DEVICES=0 \
		$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS) tests/gpu

clean: ## Remove everything that make created, including the build of llama.cpp (which takes minutes)
	rm -rf $(VENV) build dist specgen/llama/*.so specgen/llama/*.json \
		.mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
		"specgen needs Python 3.10 or newer, $(PYTHON) is " + sys.version.split()[0])'
	@echo 'Creating $(VENV)' >&2
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Changes if CMAKE_ARGS or the version ask for another build of llama.cpp. Without CMAKE_ARGS, an existing build of
# this version is kept.
$(VENV)/.llama-settings: FORCE | $(VENV)/.created
	@if [ -n "$$CMAKE_ARGS" ] || ! grep -qsxF 'package: $(LLAMA)' $@; then \
		printf 'package: %s\ncmake: %s\n' '$(LLAMA)' "$$CMAKE_ARGS" > $@.new; \
		if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi; \
	fi

# pip's cache is disabled because it ignores CMAKE_ARGS: it could supply a wheel that was built
# without the flag that scripts/cmake_args.py adds.
$(VENV)/.llama: $(VENV)/.llama-settings
	@args=$$($(BIN)/python scripts/cmake_args.py) && \
		echo "Building llama.cpp, which takes several minutes (CMAKE_ARGS: $$args)" >&2 && \
		CMAKE_ARGS="$$args" $(PIP) install --no-cache-dir --no-deps --force-reinstall '$(LLAMA)' >&2
	@touch $@

# The packages that specgen requires, except for llama-cpp-python.
$(VENV)/.packages: pyproject.toml | $(VENV)/.created
	@sed -n '/^dependencies = \[/,/^\]/s/^ *"\([^"]*\)",$$/\1/p' $< | grep -v '^llama-cpp-python' > $@.txt
	@$(PIP) install --quiet --requirement $@.txt >&2
	@touch $@

# A failure is ignored here, because `specgen run` will report it.
$(VENV)/.models: models.toml | $(VENV)/.packages
	@$(BIN)/python -m specgen models pull "$$(sed -n 's/^default_pair = "\(.*\)"/\1/p' $<)" > /dev/null && touch $@ || true

# `specgen doctor` checks that the build can decode, and reports what is wrong if it cannot. The
# installation also compiles the kernels if they have changed (hatch_build.py).
$(VENV)/.installed: $(VENV)/.llama $(VENV)/.packages pyproject.toml $(KERNELS)
	@echo 'Installing specgen' >&2
	@$(PIP) install --quiet --editable '.[server]' >&2
	@report=$$($(BIN)/specgen doctor) || { printf '%s\n' "$$report" >&2; exit 1; }
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo 'Installing the development tools' >&2
	@$(PIP) install --quiet --editable '.[dev]' >&2
	@$(BIN)/python -m scripts.build_rpc >&2 || echo 'The tests of workers will be skipped' >&2
	@touch $@

FORCE:
