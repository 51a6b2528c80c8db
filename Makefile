# SPDX-License-Identifier: Apache-2.0
# One command a job; each prepares what it needs. Python 3.10+, a C++ compiler and a network suffice.
#   make setup | demo | demo-crash | test | test-thorough | test-oldest | test-deepspeed | test-clients | soak-device | lint | format
#   make faults | crash | fuzz | scripts | soak | values | quality | docs | bench | bench-planner | bench-device | clean
#   make test-gpu | bench-gpu
# Overridable: PYTHON, VENV, DS_VERSION, TORCH, TORCH_FLAGS (for instance a package index), EXTRAS, TEST_FLAGS.

PYTHON ?= python3
VENV ?= .venv
DS_VERSION ?= 0.19.8
DS_OLDEST := 0.18.9
TORCH ?= torch==2.13.0
TORCH_FLAGS ?=
EXTRAS ?= dev,huggingface,docs
# What moments of 8 bits are compared with; in a folder of its own, as transformers and peft act on it where they find it.
TORCHAO ?= torchao==0.18.0
# Three workers, which is what two cores need to be busy; a file stays on one, so that its tests share their stock runs.
TEST_FLAGS ?= -n 3 --dist loadfile
DEMO_CONFIG ?= configs/finetune_fuyou.json
DEMO_FLAGS ?= --layers 6 --steps 30

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-deepspeed-$(DS_VERSION)
PIP := $(BIN)/python -m pip --disable-pip-version-check
CPP := $(shell find ds_fuyou/csrc tests/csrc tests/device/native tests/faults -name '*.cpp' -o -name '*.h' -o -name '*.c')
# Operators that torch and DeepSpeed compile belong to one environment: shared, two environments rebuild each other's.
RUN := PATH="$(abspath $(BIN)):$$PATH" TORCH_EXTENSIONS_DIR="$(abspath $(VENV))/torch_extensions"
OLDEST := PATH="$(abspath .venv-ds0189/bin):$$PATH" TORCH_EXTENSIONS_DIR="$(abspath .venv-ds0189)/torch_extensions"

# DeepSpeed's setup.py imports torch and these; without build isolation they must be there before.
BUILD_TOOLS := "setuptools>=77" wheel packaging ninja psutil py-cpuinfo numpy tqdm hjson "pydantic>=2" \
	einops msgpack

.PHONY: setup demo demo-crash test test-thorough test-oldest test-deepspeed test-clients soak-device faults crash fuzz scripts soak values \
	quality lint format docs bench bench-planner bench-device test-gpu bench-gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip $(BUILD_TOOLS)
	$(PIP) install --quiet $(TORCH_FLAGS) "$(TORCH)"
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 DS_BUILD_OPS=0 \
		$(PIP) install --quiet --no-build-isolation "deepspeed==$(DS_VERSION)"
	$(PIP) install --quiet --no-build-isolation --editable ".[$(EXTRAS)]"
	$(PIP) install --quiet --no-deps --target $(VENV)/torchao --upgrade "$(TORCHAO)"
	rm -f $(VENV)/.installed-deepspeed-*
	touch $(STAMP)

demo: setup
	mkdir -p .work/fuyou
	$(RUN) fuyou build
	$(RUN) deepspeed examples/finetune.py --deepspeed --deepspeed_config $(DEMO_CONFIG) $(DEMO_FLAGS)

# Killed ten times, the example prints what it prints when nothing happens: a couple of minutes. CRASH_FLAGS="--kills 3"
demo-crash: setup
	$(RUN) fuyou build
	$(RUN) python examples/crash.py --deepspeed_config $(DEMO_CONFIG) $(CRASH_FLAGS)

test: lint
	$(RUN) python tests/harness/prebuild.py
	$(RUN) python -m pytest -m "not thorough" $(TEST_FLAGS)

# What takes minutes a test, and what shorter tests of `make test` show in part: before a release, and after a change of what
# orders streams, of the C++ core, or of what a killed run leaves.
test-thorough: setup
	$(RUN) python tests/harness/prebuild.py
	$(RUN) python -m pytest -m thorough $(TEST_FLAGS)

# DeepSpeed's own unit tests from a checkout of its repository, stock and with the block: make test-deepspeed
# DEEPSPEED_REPO=path. SUITE_FLAGS="--which stage3" gives every stage-3 configuration a block, not only those that offload.
test-deepspeed: setup
	@test -n "$(DEEPSPEED_REPO)" || { echo "DEEPSPEED_REPO must name a checkout of DeepSpeed's repository"; exit 2; }
	$(RUN) python tests/harness/prebuild.py --all
	$(RUN) python -m tests.deepspeed_suite.run --repo "$(DEEPSPEED_REPO)" $(SUITE_FLAGS)

# 200 seeds of the parity cases on the stand-in device (tests/device/README.md): about 20 minutes. SEEDS="20 1000": 20
# of them, from 1000.
soak-device: setup
	$(RUN) python tests/harness/prebuild.py
	$(RUN) python -m tests.device.soak $(SEEDS)

# What docs/durability.md promises, for hours; samples are in `make test` and `make test-thorough`. FAULTS_FLAGS,
# CRASH_FLAGS, FUZZ_FLAGS and SOAK_FLAGS: each module's --help says which there are.
RESULTS := benchmarks/results/$(shell date +%F)

# Every I/O operation of a run struck by every fault, on both I/O engines: about an hour. Interrupted, it goes on.
faults: setup
	$(RUN) python tests/harness/prebuild.py
	$(RUN) python -m tests.faults.sweep --table $(RESULTS)-faults.md $(FAULTS_FLAGS)

# 100,000 crashes of the store alone, then 2,000 kills of engine runs: hours. Interrupted, or after CRASH_FLAGS="--minutes 60",
# it goes on when it is started again.
crash: setup
	$(RUN) python tests/harness/prebuild.py
	$(RUN) python -m tests.durability.crash --table $(RESULTS)-crash.md $(CRASH_FLAGS)

# 120,000 hostile documents: some 10 minutes. Interrupted, it goes on.
fuzz: setup
	$(RUN) python tests/harness/prebuild.py
	$(RUN) python -m tests.faults.fuzz --table $(RESULTS)-fuzz.md $(FUZZ_FLAGS)

# 200 training scripts drawn at random, with the block and without: about an hour. SCRIPTS_FLAGS="--number 20 --first 1000"
scripts: setup
	$(RUN) python tests/harness/prebuild.py
	$(RUN) python -m tests.scripts.soak $(SCRIPTS_FLAGS)

# 20,000 steps of a small model: some 15 minutes.
soak: setup
	$(RUN) python tests/harness/prebuild.py
	$(RUN) python -m tests.durability.soak --table $(RESULTS)-soak.md $(SOAK_FLAGS)

# Every one of the 2^32 values of P32, split and put together again: a minute.
values:
	mkdir -p .work
	$${CXX:-g++} -std=c++17 -O3 -march=native -fopenmp -I ds_fuyou/csrc tests/csrc/values/all_values.cpp \
		ds_fuyou/csrc/pipeline/state_block.cpp ds_fuyou/csrc/pipeline/update_team.cpp ds_fuyou/csrc/kernels/elementwise.cpp \
		ds_fuyou/csrc/kernels/code_map.cpp ds_fuyou/csrc/kernels/moments.cpp ds_fuyou/csrc/kernels/place_sum.cpp \
		-o .work/all_values
	.work/all_values

# What moments of fewer bits do to training, and to fine-tuning on another text, three seeds: hours. Interrupted, it goes on.
# QUALITY_FLAGS="--steps 300 --seeds 1" is minutes.
QUALITY = $(RUN) python -m benchmarks.quality --steps 3000 --layers 8 --width 512
quality: setup
	$(RUN) python tests/harness/prebuild.py
	$(QUALITY) --seeds 3 --out .work/quality.json $(QUALITY_FLAGS)
	test -f .work/weights.pt || $(QUALITY) --moments fp32 $(QUALITY_FLAGS) --seeds 1 --save .work/weights.pt
	$(QUALITY) --seeds 3 --text library --weights .work/weights.pt --lr 2e-4 --out .work/finetuned.json $(QUALITY_FLAGS)

# Programs that others wrote, against stock ZeRO-3, and the table of docs/clients.md: some hours the first time, on two cores.
# Interrupted, it goes on: what the package, as it is, has an outcome for is not run again (CLIENTS_FLAGS=--again does).
# CLIENTS_FLAGS="--only trl" runs a part, and leaves the rest of the table as it was. DeepSpeedExamples' scripts run if
# DEEPSPEED_EXAMPLES names a checkout of them.
CLIENTS := .venv-clients
# Environments of programs that need other versions: each sees the first one's packages behind its own.
OTHER_CLIENTS := older axolotl examples
# $(1): an environment. torch, DeepSpeed and ninja, and so the operators that they compile, are the first one's.
clients_run = PATH="$(abspath $(1))/bin:$(abspath $(CLIENTS))/bin:$$PATH" DS_ACCELERATOR=cpu \
	TORCH_EXTENSIONS_DIR="$(abspath $(CLIENTS))/torch_extensions"
purelib = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

test-clients: $(CLIENTS)/.installed-clients
	$(call clients_run,$(CLIENTS)) python -c 'from ds_fuyou.cli import main; main(["build"])'
	$(call clients_run,$(CLIENTS)) python -m tests.clients.run $(CLIENTS_FLAGS)
	$(MAKE) clients-older clients-axolotl $(if $(DEEPSPEED_EXAMPLES),clients-examples)
	$(call clients_run,$(CLIENTS)) python -m tests.clients.table

clients-%:
	$(call clients_run,$(CLIENTS)/$*) python -c 'from ds_fuyou.cli import main; main(["build"])'
	$(call clients_run,$(CLIENTS)/$*) DEEPSPEED_EXAMPLES="$(abspath $(DEEPSPEED_EXAMPLES))" \
		python -m tests.clients.run --environment $* $(CLIENTS_FLAGS)

# programs-NAME.txt is installed without what it asks for.
$(CLIENTS)/.installed-clients: $(wildcard tests/clients/*.txt)
	$(MAKE) setup VENV=$(CLIENTS) EXTRAS=huggingface
	$(CLIENTS)/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	set -e; for each in $(OTHER_CLIENTS); do \
		there=$(CLIENTS)/$$each; test -x $$there/bin/python || $(PYTHON) -m venv $$there; \
		echo "import site; site.addsitedir('$(call purelib,$(CLIENTS))')" > "$(call purelib,$$there)/clients.pth"; \
		$$there/bin/python -m pip install --quiet -r tests/clients/requirements-$$each.txt; \
		programs=tests/clients/programs-$$each.txt; \
		test ! -e $$programs || $$there/bin/python -m pip install --quiet --no-deps -r $$programs; \
	done
	touch $@

# A smaller selection (marker "compat") with the oldest DeepSpeed that works.
test-oldest:
	$(MAKE) setup VENV=.venv-ds0189 DS_VERSION=$(DS_OLDEST) EXTRAS=dev
	$(OLDEST) python tests/harness/prebuild.py core CPUAdamBuilder ShareMemCommBuilder
	$(OLDEST) python -m pytest -m "compat and not thorough" $(TEST_FLAGS)

lint: setup
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	$(RUN) clang-format --dry-run -Werror $(CPP)

format: setup
	$(RUN) ruff check --fix
	$(RUN) ruff format
	$(RUN) clang-format -i $(CPP)

docs: setup
	$(RUN) python docs/generate_settings.py
	$(RUN) sphinx-build -q --fail-on-warning --keep-going -c docs . build/site
	@echo build/site/docs/index.html

bench: setup
	$(RUN) python tests/harness/prebuild.py --all
	$(RUN) python -m benchmarks.run

# The automatic plan against exhaustive search, on the stand-in device in timed mode: about an hour.
bench-planner: setup
	$(RUN) python tests/harness/prebuild.py
	$(RUN) python -m benchmarks.planner

# Steps on the stand-in device in timed mode, ours and stock's, against the floor.
bench-device: setup
	$(RUN) python tests/harness/prebuild.py --all
	$(RUN) python -m benchmarks.device

# On this machine's GPU: bits of ours against stock's, and steps of both. More ranks than GPUs are skipped.
test-gpu: export DS_ACCELERATOR := cuda
test-gpu: setup
	$(RUN) python tests/harness/prebuild.py core CPUAdamBuilder CPULionBuilder CPUAdagradBuilder
	$(RUN) python -m pytest -m gpu tests/activations tests/unit
	$(RUN) python -m pytest $(TEST_FLAGS) tests/device/test_parity.py tests/parity tests/activations/test_parity.py \
		tests/huggingface/test_trainer.py

bench-gpu: export DS_ACCELERATOR := cuda
bench-gpu: setup
	$(RUN) python tests/harness/prebuild.py core CPUAdamBuilder AsyncIOBuilder
	$(RUN) python -m benchmarks.gpu --out $(RESULTS)-gpu.json

clean:
	rm -rf .venv .venv-ds0189 .venv-clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
