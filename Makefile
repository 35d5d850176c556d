PYTHON ?= python3
JOBS ?= 2

# The demo runs in an environment of its own: smaller, and without timm's torchvision, which breaks the imports of
# transformers where its compiled operators do not match torch's build (see tests/torchvision_stub.py).
DEV := .venv
DEMO := .venv-demo

.DEFAULT_GOAL := help
.PHONY: help env demo docs publish notebook test slow lint mutants bench papers clean

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):.*##/\1\t/p' $(MAKEFILE_LIST) | expand -t 8

env: $(DEV)/stamp  ## create the development environment, .venv

demo: $(DEMO)/stamp  ## train a small language model with and without learned depth connections
	$(DEMO)/bin/python examples/train_lm.py

docs: env  ## build the documentation as a site, site/index.html
	@echo "building the site: some minutes"
	NO_MKDOCS_2_WARNING=1 $(DEV)/bin/mkdocs build --quiet
	@echo "the site is in site/index.html"

# On the local branch gh-pages; to publish it: git push origin gh-pages.
VERSION ?= $(shell $(DEV)/bin/python -c "import rewire; print('.'.join(rewire.__version__.split('.')[:2]))")
publish: env  ## add the documentation as that of VERSION to the branch gh-pages
	PATH=$(CURDIR)/$(DEV)/bin:$$PATH NO_MKDOCS_2_WARNING=1 VERSIONS=mike mike deploy --update-aliases $(VERSION) latest
	PATH=$(CURDIR)/$(DEV)/bin:$$PATH mike set-default latest

notebook: env  ## run examples/tour.py as a notebook, examples/tour.ipynb
	rm -f examples/tour.ipynb
	$(DEV)/bin/jupytext --quiet --to ipynb examples/tour.py
	cd $$(mktemp -d) && $(CURDIR)/$(DEV)/bin/jupyter execute --NotebookClient.record_timing=False --inplace $(CURDIR)/examples/tour.ipynb

test: env  ## run the tests
	$(DEV)/bin/pytest -n $(JOBS) --dist worksteal

SHARE ?= 1
slow: env  ## run the tests that take long; with SHARE=8, an eighth of the cases of each, another one for each commit
	TESTS_SHARE=$(SHARE) TESTS_PART=$$(git rev-list --count HEAD || echo 0) $(DEV)/bin/pytest -n $(JOBS) -m slow

lint: env  ## check style and types
	$(DEV)/bin/ruff check
	$(DEV)/bin/ruff format --check
	$(DEV)/bin/mypy

FILE ?= rewire/passes/finding/chains.py
TESTS ?= tests/passes/finding tests/passes/test_find.py
SAMPLE ?= 40
mutants: env  ## change FILE in SAMPLE small ways, and show which of them TESTS do not notice
	$(DEV)/bin/python -m pip install --quiet -e '.[mutants]' -c constraints.txt
	OMP_NUM_THREADS=1 $(DEV)/bin/python benchmarks/mutants.py $(FILE) $(TESTS) --sample $(SAMPLE)

bench: env  ## run the benchmarks
	$(DEV)/bin/python benchmarks/run.py

papers: env  ## check the papers' claims and write docs/papers.md
	PYTHONPATH=tests $(DEV)/bin/python benchmarks/papers/run.py

clean:  ## remove the environments, caches and outputs
	rm -rf $(DEV) $(DEMO) build dist site out *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEV)/stamp: EXTRAS := -e '.[dev]'
$(DEMO)/stamp: EXTRAS := -e '.[viz]' transformers

# torch first: a later requirement of any package then finds it and pulls in no other build.
%/stamp: pyproject.toml constraints.txt
	@echo "installing torch and rewire in $*: some minutes"
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet torch -c constraints.txt
	$*/bin/python -m pip install --quiet $(EXTRAS) -c constraints.txt
	touch $@
