# Every way to work with the project; `make` alone lists them.
SHELL := /bin/bash
PY := .venv/bin/python
PYTHON ?= python3
PYTHONS ?= 3.10 3.11 3.12 3.13
.DEFAULT_GOAL := help
.PHONY: help venv test core-unit core-lab core-host core-faults check fmt unit pythons engine site editor clients recording host faults gpu-all gpu gpu-repeats gpu-train gpu-times gpu-plans cpu-all cpu-plugin cpu-proofs cpu-sizes cpu-seeing cpu-models cpu-tools kernels backends demo demo-fast lab-up lab-down lab-purge lab-model plan docs golden lock-requirements advisories sbom checksums release

# Profiles of Qwen3.8-Flash-Next do not fit the default model.
PROFILES := $(filter-out flash-%,$(basename $(notdir $(wildcard catalog/profiles/*.yml))))

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

venv: .venv/installed ## the controller's Python environment, pinned with hashes

# PYTHON makes the environment; the lab and the hosts have interpreters of their own.
.venv/installed $(PYTHONS:%=build/pythons/%/installed): requirements/dev.txt pyproject.toml
	@test ! -L $(@D) || { echo "error: $(@D) is a link: another checkout's environment would be emptied"; \
	  echo "  fix: rm $(@D), then make venv"; exit 1; }
	@$(PYTHON) -m venv --clear $(@D) 2>/dev/null || { \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q python3-venv && \
	  $(PYTHON) -m venv --clear $(@D); }
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . \
	  || $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# `make test` runs all unit tests, the comparisons with the engine's sources, and the lab tests marked
# `gate`; `make host faults engine` runs all lab tests.
# Half of a unit test's time is waiting, so there are two of them for each core. Lab tests run one at a
# time on a group of guests and mostly wait, so two groups and the unit tests run at the same time.
# Compiled files are always kept: each test process then starts in half the time.
unexport PYTHONDONTWRITEBYTECODE
PARALLEL := -q -o tmp_path_retention_policy=failed --numprocesses $(shell expr 2 \* $$(nproc)) --dist worksteal

test: venv ## unit tests and the core lab tests, from nothing (root)
	$(PY) -m lab prepare --engine none --engine-trees
	@echo "three test runs at the same time; each prints its output when it ends, in 5 to 15 minutes"
	@$(MAKE) --no-print-directory --jobs 3 --output-sync core-unit core-host core-faults

core-unit: kernels
	nice -n 10 $(PY) -m pytest $(PARALLEL) -m "not engine" tests/unit tests/engine

core-lab: venv
	$(PY) -m lab prepare --engine cpu --variant awkward

core-host: core-lab
	$(PY) -m pytest --durations=12 -m gate tests/host

core-faults: core-lab
	SPARK_FLEET_GUESTS="lab-23 lab-24" SPARK_SPARE_GUESTS="lab-25 lab-26" $(PY) -m pytest --durations=12 -m gate tests/faults

check: venv ## format, lint, types, quick unit tests
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	$(PY) -m pytest $(PARALLEL) -m "not slow" tests/unit

fmt: venv ## format and fix what can be fixed
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

unit: venv ## all unit tests, including slow ones; no network
	$(PY) -m pytest $(PARALLEL) tests/unit

pythons: ## unit tests on every installed Python of PYTHONS, with environments in build/pythons
	@failed=; for version in $(PYTHONS); do \
	  python=$$(tools/find_python $$version) || continue; \
	  echo "Python $$version"; \
	  $(MAKE) --no-print-directory PYTHON=$$python build/pythons/$$version/installed && \
	  build/pythons/$$version/bin/python -m pytest $(PARALLEL) tests/unit || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "error: unit tests failed on Python$$failed"; exit 1; }

engine: venv ## test the plugin in vLLM's CPU build: 15 minutes (root)
	$(PY) -m lab prepare --engine cpu
	$(PY) -m pytest tests/engine

host: venv ## lab tests of deploys, switches and serving (root)
	$(PY) -m pytest tests/host

faults: venv ## lab tests that break things on purpose (root)
	$(PY) -m pytest tests/faults

gpu-plans: venv ## write the plans for `make gpu` to build/plans; a CUDA machine needs nothing else from here
	@mkdir -p build/plans
	@for profile in $(PROFILES); do \
	  .venv/bin/spark-deploy plan inventory/spark.py --estimate --json --profile $$profile \
	    > build/plans/$$profile.json || exit 1; done
	@$(PY) -m proofs.releases.planning build/plans

site: venv ## build the documentation site in build/site
	@test -d build/site-venv || $(PYTHON) -m venv build/site-venv
	build/site-venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 build/site-venv/bin/mkdocs build --strict

editor: venv ## test completion and diagnostics with the YAML language server (npm)
	$(PY) -m pytest -q tests/editor

clients: venv ## test real clients with the output of `connect` and a real gateway (npm, PyPI)
	$(PY) -m pytest -q tests/clients

recording: venv ## record the animation at the top of the README in the lab (root)
	@test -d build/record-venv || $(PYTHON) -m venv build/record-venv
	build/record-venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/record.txt
	PATH=$$PWD/build/record-venv/bin:$$PATH $(PY) tools/docs/record.py

# One command for each kind of machine: `gpu-all` and `cpu-all` make every result file again but those
# of the training, which `gpu-train` makes: other weights, which the others would then be judged by.
SPARK_GPU_RESULTS ?= build/gpu-results
gpu-all: ## all results that need a CUDA GPU: make gpu and gpu-repeats, then gpu-times on an idle GPU (not gpu-train)
	@SPARK_GPU_RESULTS=$(abspath $(SPARK_GPU_RESULTS)) $(MAKE) --no-print-directory gpu; held=$$?; \
	  $(MAKE) --no-print-directory gpu-repeats; repeated=$$?; \
	  $(MAKE) --no-print-directory gpu-times && exit $$((held + repeated))

GPU_PYTHON ?= python3
gpu: ## all proofs on a CUDA machine; GPU_PYTHON needs torch, triton, vllm, pytest and our plugin (proofs/README.md)
	@test -d build/plans || $(MAKE) --no-print-directory gpu-plans \
	  || echo "no plans could be made here: tests that serve them are skipped (make gpu-plans elsewhere)"
	$(GPU_PYTHON) -m pytest tests/gpu $(GPU_PYTEST)

cpu-all: ## all results that need no GPU, one after another (root, lab)
	@$(MAKE) --no-print-directory cpu-proofs && $(MAKE) --no-print-directory cpu-sizes && \
	  $(MAKE) --no-print-directory cpu-seeing && $(MAKE) --no-print-directory cpu-models && \
	  $(MAKE) --no-print-directory cpu-tools

ON_CPU = PYTHONPATH=$(CURDIR)/build/cpu/plugin:$(CURDIR):$(CURDIR)/files/contract:$(CURDIR)/files/checkpoint:$(CURDIR)/files/host \
	VLLM_PLUGINS=spark $(PY) -m lab.engine run -m
cpu-plugin: venv
	@rm -rf build/cpu/context build/cpu/plugin && mkdir -p build/cpu && cp -r files/image build/cpu/context
	$(PY) -m lab.engine run -m pip install --quiet --no-index --no-deps --no-build-isolation \
	  --target build/cpu/plugin build/cpu/context

cpu-proofs: cpu-plugin ## proofs in vLLM's CPU build; ONLY=dflash runs one of them (root)
	$(ON_CPU) proofs.on_cpu build/cpu/results $(or $(ONLY),steered prefixes dflash)

cpu-sizes: cpu-plugin ## full-size layers in vLLM's CPU build, compared with transformers; needs 20 GB of memory (root)
	$(ON_CPU) proofs.on_cpu build/cpu/results sizes

SEEING = spark-1 --inventory proofs/releases/inventory/two.py --model lab-tiny --profile v2-seeing
cpu-seeing: cpu-plugin ## image recognition in vLLM's CPU build, with a trained and a damaged vision tower: 15 minutes (root)
	@mkdir -p build/cpu/plans
	.venv/bin/spark-deploy plan $(SEEING) --estimate --json > build/cpu/plans/seeing.json
	@test -e build/cpu/eyes.npz || $(ON_CPU) proofs.releases.eyes $(CURDIR)/build/cpu/eyes.npz
	$(ON_CPU) proofs.on_cpu build/cpu/results seeing

cpu-models: venv ## published models in a guest of the lab; writes to proofs/results/cpu (root)
	RESULTS=write $(PY) -m pytest tests/host/test_plain_models.py

cpu-tools: venv ## typed tool calls through chat templates and the engines' parsers; writes to proofs/results/cpu (root)
	RESULTS=write $(PY) -m pytest tests/engine/test_tool_calls.py

gpu-repeats: ## check answers and tokens of repeated conversations, several engines per GPU; writes to SPARK_GPU_RESULTS
	$(GPU_PYTHON) -m proofs.recall.repeats --out $(SPARK_GPU_RESULTS)

gpu-train: ## train the recall model again on a CUDA machine, minutes; writes to build/recall
	@rm -rf build/recall
	$(GPU_PYTHON) -m proofs.recall.race build/recall/first
	$(GPU_PYTHON) -m proofs.recall.training build/recall/further --further build/recall/first --seed 112
	@echo "to test it: SPARK_GPU_RECALL=build/recall/further make gpu; to keep it:"
	@echo "its weights.npz goes into proofs/recall"

# Run nothing else on the GPU, because other work would change the times.
HEAD := proofs/kernels/lm_head
gpu-times: ## times of LM head, shared experts, cache formats and table lookups on an idle GPU; writes to SPARK_GPU_RESULTS
	@mkdir -p $(SPARK_GPU_RESULTS)
	$(GPU_PYTHON) proofs/kernels/shared_experts.py --out $(SPARK_GPU_RESULTS)/shared-experts.json
	$(GPU_PYTHON) proofs/kernels/cache_formats.py --out $(SPARK_GPU_RESULTS)/cache-formats.json
	$(GPU_PYTHON) proofs/kernels/ngram_lookups.py --out $(SPARK_GPU_RESULTS)/ngram-lookups.json
	$(GPU_PYTHON) $(HEAD).py --tiles 9.0 --out $(SPARK_GPU_RESULTS)/lm-head.json
	DISABLE_MMA_V3=1 $(GPU_PYTHON) $(HEAD).py --tiles 12.1 --out $(SPARK_GPU_RESULTS)/lm-head-spark-tiles.json
	$(GPU_PYTHON) $(HEAD)_sweep.py --batches 1,4,8,16 --inputs 3072,2048 --out $(SPARK_GPU_RESULTS)/lm-head-sweep-to-16.json
	$(GPU_PYTHON) $(HEAD)_sweep.py --batches 32,64 --inputs 3072 --out $(SPARK_GPU_RESULTS)/lm-head-sweep-32-64.json
	$(GPU_PYTHON) $(HEAD)_sweep.py --batches 128,256,512 --inputs 3072 --out $(SPARK_GPU_RESULTS)/lm-head-sweep-above-64.json
	DISABLE_MMA_V3=1 $(GPU_PYTHON) $(HEAD)_sweep.py --batches 1,8,16,32 --inputs 3072 --out $(SPARK_GPU_RESULTS)/lm-head-sweep-no-wgmma.json
	DISABLE_MMA_V3=1 $(GPU_PYTHON) $(HEAD)_sweep.py --batches 64 --inputs 3072 --spark --out $(SPARK_GPU_RESULTS)/lm-head-sweep-48-programs.json

kernels: venv build/triton ## compile the LM head and attention kernels for a Spark (no GPU needed; fetches 190 MB once)
	PYTHONPATH=build/triton $(PY) -m pytest -q tests/unit/plugin/test_head_for_a_spark.py \
	  tests/engine/test_turboquant_for_a_spark.py tests/engine/test_triton_attention_for_a_spark.py

build/triton: requirements/kernels.txt
	@rm -rf $@ $@.part
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
	  --target $@.part -r requirements/kernels.txt
	@mv $@.part $@ && touch $@

backends: venv build/backends/installed ## list the kernels that vLLM chooses on an H200 and a GB10 (no GPU needed; 10 GB of wheels)
	@rm -rf build/backends/plans && mkdir -p build/backends/plans
	@for profile in $(PROFILES); do \
	  .venv/bin/spark-deploy plan inventory/spark.py --estimate --json --profile $$profile \
	    > build/backends/plans/$$profile.json || exit 1; done
	@.venv/bin/spark-deploy plan inventory/spark.py --estimate --json --model qwen3.5-35b > build/backends/plans/35b.json
	@.venv/bin/python -m proofs.releases.planning build/backends/published
	@mv build/backends/published/published-bf16.json build/backends/plans/
	PYTHONPATH=$(CURDIR):$(CURDIR)/files/contract:$(CURDIR)/files/host:$(CURDIR)/files/checkpoint:$(CURDIR)/files/image \
	  build/backends/bin/python -m proofs.engine.backends build/backends/plans proofs/results/cpu/backends.json

# Without --no-deps pip would also check what these packages require of each other.
build/backends/installed: requirements/backends.txt
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@

# Create the environment and the base image of hosts in parallel; the image needs only Python.
define demo
	@python3 -m lab demo --engine $(1) --requirements
	@python3 -m lab prepare --engine none >/dev/null & prepared=$$!; \
	  $(MAKE) --no-print-directory venv || { kill $$prepared; exit 1; }; wait $$prepared
	$(PY) -m lab demo --engine $(1) --skip-requirements
endef

demo: ## deploy two bare virtual hosts and check their servers, with real vLLM (root)
	$(call demo,cpu)

demo-fast: ## the same with a stub engine, in a few minutes (root)
	$(call demo,stub)

VARIANT ?=
lab-up: venv ## start the virtual lab with two hosts (root); VARIANT=lived-in chooses their image
	$(PY) -m lab up 2 $(addprefix --variant ,$(VARIANT))

lab-down: venv ## stop the virtual lab (root)
	$(PY) -m lab down

lab-purge: venv ## stop the lab and delete its disks and caches (root)
	$(PY) -m lab down --purge

lab-model: venv ## train the lab's model again (root, minutes)
	OMP_WAIT_POLICY=PASSIVE $(PY) -m lab.engine run -m lab.model train

plan: venv ## print the plan of the hosts in inventory/spark.py; contacts no host
	.venv/bin/spark-deploy plan

docs: venv ## regenerate schemas, group_vars/all.yml, pictures, and the generated pages and tables
	$(PY) tools/docs/generate.py

golden: venv ## rewrite the expected plans; read the diff before committing
	GOLDEN=write $(PY) -m pytest -q tests/unit/planning/test_goldens.py

# uv comes from requirements/audit.txt, with a hash like everything else.
COMPILE = build/audit-venv/bin/uv pip compile --universal --python-version 3.10 --generate-hashes \
  --no-header --no-annotate --quiet
lock-requirements: build/audit-venv/installed ## pin the Python dependencies again, with hashes and without index addresses
	$(COMPILE) pyproject.toml --output-file requirements/run.txt
	$(COMPILE) pyproject.toml --extra dev --output-file requirements/dev.txt
	for name in audit docs kernels record; do \
	  $(COMPILE) requirements/$$name.in --output-file requirements/$$name.txt || exit 1; done
	build/audit-venv/bin/uv pip compile requirements/backends.in --python-platform x86_64-manylinux_2_28 --python-version 3.11 \
	  --generate-hashes --no-header --no-annotate --quiet --output-file requirements/backends.txt

build/audit-venv/installed: requirements/audit.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

# Add `--ignore-vuln ID` below a comment with the reason when an advisory does not apply.
advisories: build/audit-venv/installed ## check the pinned packages for known vulnerabilities (network)
	build/audit-venv/bin/pip-audit --strict --disable-pip --require-hashes --vulnerability-service osv \
	  -r requirements/run.txt -r requirements/dev.txt -r files/checkpoint/requirements.txt

sbom: build/audit-venv/installed ## list the packages sent to hosts and the files of the image in dist
	@mkdir -p dist
	build/audit-venv/bin/cyclonedx-py requirements files/checkpoint/requirements.txt \
	  --spec-version 1.6 --output-reproducible --output-file dist/host-packages.cdx.json
	cd files/image && git ls-files -z | xargs -0 sha256sum > $(CURDIR)/dist/image-files.sha256

checksums: sbom ## write checksums of all files in dist to dist/SHA256SUMS
	cd dist && find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%P\0' | sort -z | xargs -0 sha256sum > SHA256SUMS

release: venv ## make release VERSION=1.2.3: changelog, wheel, commit and tag; needs a clean tree
	@$(PY) -m tools.release "$(VERSION)"
