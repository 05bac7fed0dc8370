# What people type. `make help` lists it.
PYTHON ?= python3
VENV   ?= .venv
RUN     = $(VENV)/bin/python -m
ARGS   ?=
# What jobs import: runs on Python 3.10.
IN_JOBS = $(addprefix slurm_elastic/,core integrations job rpc training cli/console_scripts.py)

.PHONY: help venv test-tools test test-unit test-integrations test-gpu test-cluster test-releases lint docs docs-links generate fuzz packages test-packages lock data audit chaos demo cluster-up cluster-down clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

venv: $(VENV)/installed ## the development environment in .venv

$(VENV)/installed: pyproject.toml requirements/dev.txt
	@PYTHON=$(PYTHON) contrib/install-test-tools || true
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python contrib/install-dev
	touch $@

lint: venv ## ruff, mypy --strict, import-linter, unique names
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(RUN) mypy
	$(RUN) mypy --python-version 3.10 $(IN_JOBS)
	$(VENV)/bin/lint-imports
	contrib/check-names

test-tools: ## programs that the tests need, as root on Debian or Ubuntu; else they are named
	@PYTHON=$(PYTHON) contrib/install-test-tools || true

test-unit: test-tools venv ## unit and property tests, without Docker
	$(RUN) tests.run unit $(ARGS)

INTEGRATIONS ?= build/integrations
test-integrations: ## trainings of other frameworks in changing worlds, in an environment of its own; 3 GB, some minutes
	test -x $(INTEGRATIONS)/bin/pytest || { $(PYTHON) -m venv $(INTEGRATIONS) && $(INTEGRATIONS)/bin/pip install torch==2.13.0 \
		&& DS_BUILD_OPS=0 $(INTEGRATIONS)/bin/pip install -r requirements/integrations.txt; }
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations tests/unit/test_stability.py $(ARGS)

test-gpu: ## try the library on this machine's GPUs, without Slurm, with the torch of PYTHON; docs/gpu.md
	$(PYTHON) -m tests.gpu $(ARGS)

test-cluster: test-tools venv ## tests on real Slurm clusters in containers; the first stays up: make cluster-down
	$(RUN) tests.run cluster $(ARGS)

test-releases: venv ## try each release of Slurm in a small cluster of its own; prints the table of docs/slurm-versions.md
	$(RUN) tests.releases $(ARGS)

# The image of the cluster tests takes minutes: it is begun beside the environment. What goes wrong
# there is said by the tests, which wait for it.
test: test-tools ## everything: lint, docs, test-unit, test-cluster; says at the end what did not run
	@$(PYTHON) contrib/cluster/cluster build >/dev/null 2>&1 & trap "kill $$! 2>/dev/null" EXIT; \
		$(MAKE) --no-print-directory venv && $(RUN) tests.run lint docs unit cluster $(ARGS)

docs: venv ## the documentation as a site, in build/site; warnings, dead links and citations are errors
	$(RUN) sphinx -W --keep-going -n -q -c docs . build/site
	@echo "build/site/index.html"

docs-links: venv ## ask whether the pages that the documentation links to on the network are there
	$(RUN) sphinx -q -b linkcheck -c docs . build/links

generate: venv ## completion, manual pages and etc/elastic.toml, from the definitions
	$(RUN) contrib.generate

fuzz: venv ## hostile input: make fuzz ARGS="--surface inbox --minutes 5"; docs/security-fuzzing.md
	$(RUN) tests.fuzz $(ARGS)

PACKAGES ?=
packages: venv ## wheel, .deb and .rpm in dist/, built in containers; make packages PACKAGES=trixie
	$(VENV)/bin/python contrib/packaging/build $(PACKAGES)

test-packages: venv ## each .deb installed, used and removed in a fresh container, after make packages
	$(RUN) pytest tests/packages $(ARGS)

lock: venv ## write requirements/dev.txt anew: exact versions and hashes
	$(VENV)/bin/python contrib/lock

data: ## fetch the published data that tests and benchmarks read; docs/data.md
	contrib/fetch-data $(ARGS)

audit: venv ## look up what is installed in databases of known vulnerabilities
	$(VENV)/bin/python contrib/audit

chaos: venv ## faults at random moments: make chaos ARGS="--minutes 5 --seed 1"; docs/reliability.md
	$(RUN) tests.chaos $(ARGS)

demo: venv ## watch elastic jobs on a real Slurm cluster; under 5 minutes once the image is built
	$(RUN) contrib.demo $(ARGS)

cluster-up: ## start the container cluster
	contrib/cluster/cluster up

cluster-down: ## stop it and leave nothing behind
	contrib/cluster/cluster down

clean: cluster-down ## remove the environment as well
	rm -rf $(VENV)
