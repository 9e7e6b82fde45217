# Two commands do all the set-up: `make quickstart` and `make test`. Everything goes into .venv (`make VENV=...`: elsewhere);
# a second run installs nothing.

# A supported Python that is here, the system's own first; `make PYTHON=... test` chooses another.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell command -v $(p) >/dev/null 2>&1 && \
	$(p) -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,13))' >/dev/null 2>&1 && echo $(p))))
REQUIREMENTS ?= $(shell if command -v nvidia-smi >/dev/null 2>&1; then echo requirements/gpu.txt; else echo requirements/cpu.txt; fi)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-$(notdir $(REQUIREMENTS))
# What a run needs, without what only tests need; what the tests need serves as well.
RUN_STAMP := $(VENV)/installed-$(if $(findstring gpu,$(REQUIREMENTS)),run-gpu,run).txt
TEST := $(BIN)/python -m pytest -q
# Tests of one file share a process and what its fixtures start; the long ones of tests/e2e come first.
SHARED := $(TEST) -n 2 --dist loadfile --no-loadscope-reorder --durations=25

# Containers often set it. Each process would compile torch, transformers and Ray anew: a run's start would take twice as long.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lowest unit real slow lint acceptance drills requirements audit docs page sbom dist browser clean
# Tools of these two only; uv keeps them apart from the environment.
UVX := $(BIN)/uvx --quiet
ADVISORIES ?= osv
PINNED := requirements/cpu.txt requirements/gpu.txt requirements/run.txt requirements/run-gpu.txt requirements/cloud.txt

help: ## Show the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

install: $(STAMP) ## Create the environment with everything that the tests need

$(VENV)/installed-%.txt: requirements/%.txt requirements/no_deps.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11, 3.12 or 3.13 is needed; install it, for example: apt-get install python3 python3-venv"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,13))' || { echo "error: $(PYTHON) is not Python 3.11, 3.12 or 3.13: name one of these with PYTHON=..."; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no venv module; install it: apt-get install python3-venv"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'uv>=0.8'
	$(BIN)/uv pip sync --quiet --python $(BIN)/python $<
	@rm -rf rl_vlm.egg-info # an older one would hide entry points that have come since
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	$(if $(findstring run,$*),,$(BIN)/python -m pip install --quiet --ignore-requires-python --no-deps --require-hashes -r requirements/no_deps.txt)
	@rm -f $(VENV)/installed-*.txt && touch $@

quickstart: $(if $(wildcard $(STAMP)),$(STAMP),$(RUN_STAMP)) ## Train the tiny VLM on shapes, offline, in minutes
	$(BIN)/rl-vlm train quickstart --overwrite

lint: install ## Check style, spelling, types and which way imports point
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-cache

unit: install ## Tests without Ray, in minutes
	$(TEST) -n auto --dist loadfile -m "not slow and not acceptance" tests/unit tests/security

# Ray starts its workers at priority 15 unless it is given another, which is below that of the tests beside them.
real slow test: export RAY_worker_niceness = 0
real: install ## Each real thing once: the quickstart run, a server, vLLM, a preference run, actors that are killed
	$(SHARED) -m "real and not slow and not acceptance" $$(grep -rl mark.real tests/e2e tests/integration)

test: lint ## All of these three, the tests in one go: ten minutes on two cores
	$(SHARED) -m "not slow and not acceptance" $$(grep -rl mark.real tests/e2e tests/integration) tests/unit tests/security

slow: install ## Everything else that is no acceptance test: model families, strategies, recipes, fuzzing, the browser
	$(SHARED) -m "slow and not acceptance" tests/e2e tests/integration $$(grep -rl mark.slow tests/security tests/unit)

acceptance: install ## Everything else: learning on several seeds, fault drills, benchmarks (hours)
	$(TEST) -m acceptance tests

drills: install ## Kill, stop and cut off every part of a run on three nodes (root; hours): a table in runs/drills
	$(BIN)/python tests/drills/matrix.py --out runs/drills

requirements: install ## Pin the requirement files anew
	$(BIN)/uv pip compile requirements/cpu.in --universal --python-version 3.11 --generate-hashes --no-emit-package rl-vlm \
		--override requirements/overrides.txt --no-header -q -o requirements/cpu.txt
	$(BIN)/uv pip compile requirements/gpu.in --universal --python-version 3.11 --generate-hashes --no-emit-package rl-vlm \
		--no-header -q -o requirements/gpu.txt
	$(BIN)/uv pip compile requirements/run.in -c requirements/cpu.txt --universal --python-version 3.11 --generate-hashes \
		--no-emit-package rl-vlm --no-header -q -o requirements/run.txt
	$(BIN)/uv pip compile requirements/run-gpu.in -c requirements/gpu.txt --universal --python-version 3.11 --generate-hashes \
		--no-emit-package rl-vlm --no-header -q -o requirements/run-gpu.txt
	$(BIN)/uv pip compile requirements/cloud.in --universal --python-version 3.11 --generate-hashes --no-header -q -o requirements/cloud.txt

LOWEST := $(VENV)-lowest
lowest: install ## The unit tests and the exactness check with the oldest packages that pyproject.toml allows
	$(BIN)/uv pip compile pyproject.toml --resolution lowest-direct --python-version 3.11 --extra dev --extra deepspeed --extra nf4 \
		--extra bench --override requirements/overrides.txt --no-header -q -o $(VENV)/lowest.txt
	$(BIN)/uv venv --quiet --clear --python 3.11 $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python -r $(VENV)/lowest.txt
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps .
	$(LOWEST)/bin/python -m pytest -q -n 2 --dist loadfile tests/unit -m "not acceptance" \
		--ignore tests/unit/test_cluster_manifests.py --ignore tests/unit/test_gpu_settings.py # want kustomize, vLLM
	$(LOWEST)/bin/python benchmarks/gpu/quarter_hour.py --size tiny --part 1

audit: install ## Look all pinned packages up in the advisories of OSV (ADVISORIES=pypi: of PyPI); needs the network
	@mkdir -p build/audit
	@for file in $(PINNED); do \
		echo "$$file:"; log=build/audit/$$(basename $$file .txt).log; \
		$(UVX) pip-audit==2.10.1 --strict --no-deps --disable-pip --progress-spinner off --vulnerability-service $(ADVISORIES) \
			-r $$file > $$log 2>&1 && { tail -n 1 $$log; continue; }; \
		if grep -qE "ConnectionError|Max retries exceeded|ReadTimeout|Failed to fetch|not found on PyPI" $$log; then \
			echo "error: the advisories ($(ADVISORIES)) cannot be reached from here, so nothing was audited: run this where they can ($$log)"; exit 2; \
		fi; \
		cat $$log; exit 1; \
	done

docs: install ## Build the site of the documentation into build/docs; unknown links are errors
	$(BIN)/python docs/key_names.py
	$(BIN)/python docs/memory_table.py
	for page in configuration http_api errors; do $(BIN)/rl-vlm config --markdown --page $$page > docs/$$page.md || exit 1; done
	$(BIN)/python -m typer rl_vlm.cli.app utils docs --name rl-vlm --title Commands --output docs/commands.md
	$(UVX) --from sphinx==9.0.4 --with myst-parser==5.2.0 --with furo==2025.12.19 sphinx-build --quiet --fail-on-warning \
		--builder html docs build/docs && echo "build/docs/index.html"

sbom: install ## Write the bill of materials (CycloneDX) of each pinned requirement file into build/sbom
	@mkdir -p build/sbom
	@for file in $(PINNED); do \
		$(UVX) --from cyclonedx-bom==7.5.0 cyclonedx-py requirements $$file --pyproject pyproject.toml --output-format JSON \
			--output-reproducible --output-file build/sbom/$$(basename $$file .txt).cdx.json 2> build/sbom/log \
			|| { cat build/sbom/log; exit 1; }; \
	done; rm -f build/sbom/log; ls build/sbom

page: ## Check and build the page of `rl-vlm view` from viewer/ into the package (Node.js 20 or newer)
	cd viewer && npm ci --no-audit --no-fund --silent && npm run --silent check && npm run --silent build

browser: ## Install Chromium for the tests of the page, where there is no browser (root, Debian)
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
		apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null

dist: install ## Build the package (wheel and source) into dist
	rm -rf dist && $(BIN)/uv build --quiet --out-dir dist && ls dist

clean: ## Remove what runs and tests left behind (not .venv)
	rm -rf runs build dist .pytest_cache .mypy_cache .ruff_cache
