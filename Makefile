PYTHON ?= python3
VENV := .venv
TFRS_VENV := .venv-tfrs
TORCH_VENV := .venv-torch
# On Linux its newest wheels bring 3 GB of CUDA; a CPU build by its version, such as TORCH=torch==2.13.0, does as well.
TORCH ?= torch
TOOLS_VENV := .venv-tools
DOCS_VENV := .venv-docs
PEERS_VENV := .venv-peers
GPU_VENV := .venv-gpu
PORT ?= 8000
# Python compiles what is imported, 5,000 of the 13,000 files that are installed; then it is kept, even in images that
# say otherwise: hundreds of processes start.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# uv installs the same versions in a tenth of pip's time; pip does it where uv does not find everything.
INSTALL = $(VENV)/bin/python $(PIP_INSTALL) uv && $(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python $(1) \
	|| $(VENV)/bin/python $(PIP_INSTALL) $(1)
unexport PYTHONDONTWRITEBYTECODE
# With an older Python pip tries old versions of everything for minutes before it refuses.
NEW_VENV := @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or newer, found " \
	+ sys.version.split()[0] + ": name another one, as in make demo PYTHON=python3.12")' && $(PYTHON) -m venv
# Whole files to a worker each, long ones first (tests/conftest.py); four on two cores too, as end-to-end tests mostly
# wait for the processes that they start.
PYTEST := $(VENV)/bin/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-nightly quick check imports format docs docs-pages audit pictures bench bench-peers bench-gpu bench-seeds clean

demo: $(VENV)/.installed  ## Train, index and serve MovieLens 100K; ONESHOT=1 stops after the first query.
	$(VENV)/bin/python demo.py --port $(PORT) $(if $(ONESHOT),--oneshot)

test:  ## Lint, types, and all tests but the nightly ones.
	$(MAKE) --jobs=2 check imports $(TOOLS_VENV)/.installed
	PATH="$$PATH:$(CURDIR)/$(TOOLS_VENV)/bin" $(PYTEST)

test-nightly: $(VENV)/.installed-dev $(TFRS_VENV)/.installed $(TORCH_VENV)/.installed  ## Slow proofs, JAX, PyTorch, TFRS.
	LONGTAIL_TFRS_PYTHON=$(TFRS_VENV)/bin/python LONGTAIL_TORCH_PYTHON=$(TORCH_VENV)/bin/python LONGTAIL_KILLS=12 $(PYTEST) -m nightly

quick: $(VENV)/.installed-dev  ## The tests that need no other process, no browser and no TFRS.
	$(PYTEST) -m 'not process and not slow and not nightly'

audit: $(TOOLS_VENV)/.installed  ## Known vulnerabilities of what the images install.
	for image in serving serving-gpu trainer; do \
		$(TOOLS_VENV)/bin/pip-audit --strict --disable-pip --require-hashes --requirement docker/requirements-$$image.txt || exit; \
	done

check: $(VENV)/.installed-dev  ## Formatting, lint and types; seconds.
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# While mypy works: else four processes of pytest begin with compiling the same thousands of files, tests among them.
imports: $(VENV)/.installed-dev
	@tests=$$($(VENV)/bin/python -m pytest --collect-only --quiet --quiet) || { echo "$$tests"; exit 1; }

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: $(DOCS_VENV)/.installed  ## The site, into build/docs: warnings are errors, every link inside it is checked.
	rm -rf build/docs  # pages of an earlier build would be checked as well
	$(DOCS_VENV)/bin/sphinx-build --fail-on-warning --keep-going --fresh-env --quiet -b html docs build/docs
	$(DOCS_VENV)/bin/python docs/check_links.py build/docs

docs-pages: $(VENV)/.installed-dev  ## The parts of docs/ that are made from docstrings, settings and other files; a test compares.
	$(VENV)/bin/python -m docs.generate

bench: $(VENV)/.installed-dev $(TFRS_VENV)/.installed  ## The tables of benchmarks/RESULTS.md that need no data set.
	$(VENV)/bin/python -m benchmarks.step_cost --tfrs-python $(TFRS_VENV)/bin/python
	$(VENV)/bin/python -m benchmarks.index_recall
	$(VENV)/bin/python -m benchmarks.service_resources
	$(VENV)/bin/python -m benchmarks.service_load

pictures: $(VENV)/.installed-dev  ## README's pictures, from the demo and a browser based on Chromium.
	test -d runs/demo || $(MAKE) demo ONESHOT=1
	$(VENV)/bin/python -m docs.pictures

bench-peers: $(PEERS_VENV)/.installed  ## The index beside other libraries of vector search; LABELS=300000.
	$(PEERS_VENV)/bin/python -m benchmarks.index_peers --labels $(or $(LABELS),100000)

bench-gpu: $(GPU_VENV)/.installed  ## One CUDA 12 GPU beside the CPU: steps, tables, indexes, two recipes; FROM=DIR has their downloads.
	$(GPU_VENV)/bin/python -m benchmarks.gpu
	for name in movielens-100k gowalla; do \
		test -d data/$$name || $(GPU_VENV)/bin/longtail-train data $$name --out data/$$name $(if $(FROM),--from $(FROM)/$$name) || exit; \
		KERAS_BACKEND=jax $(GPU_VENV)/bin/longtail-train fit data/$$name/recipe.toml --out runs/gpu-$$name || exit; \
	done

bench-seeds: $(VENV)/.installed-dev  ## The papers' findings, resumable; what is measured is kept; QUICK=1 prints a small version.
	for name in delicious $(if $(QUICK),,movielens-1m amazon-beauty gowalla); do \
		test -d data/$$name || $(VENV)/bin/longtail-train data $$name --out data/$$name $(if $(FROM),--from $(FROM)/$$name) || exit; \
	done
	$(VENV)/bin/python -m benchmarks.seeds --data data $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) $(TFRS_VENV) $(TOOLS_VENV) $(DOCS_VENV) $(PEERS_VENV) $(GPU_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The demo and README need 85 of the 200 packages that tests, types and every extra need.
$(VENV)/.installed: EXTRAS := train,index,serve,client
$(VENV)/.installed-dev: EXTRAS := dev
$(VENV)/.installed $(VENV)/.installed-dev: pyproject.toml setup.py
	$(NEW_VENV) $(VENV)
	$(call INSTALL,--editable '.[$(EXTRAS)]')
	touch $@ $(VENV)/.installed

# tensorflow-recommenders runs on legacy Keras, which cannot share a process with the trainer.
$(TFRS_VENV)/.installed: pyproject.toml setup.py
	$(NEW_VENV) $(TFRS_VENV)
	$(TFRS_VENV)/bin/python $(PIP_INSTALL) --editable '.[tfrs]' 'pytest>=8.3'
	touch $@

$(TORCH_VENV)/.installed: pyproject.toml setup.py
	$(NEW_VENV) $(TORCH_VENV)
	$(TORCH_VENV)/bin/python $(PIP_INSTALL) '$(TORCH)'
	$(TORCH_VENV)/bin/python $(PIP_INSTALL) --editable '.[torch]' 'pytest>=8.3' keras-rs
	touch $@

$(TOOLS_VENV)/.installed: docker/tools.txt
	$(NEW_VENV) $(TOOLS_VENV)
	$(TOOLS_VENV)/bin/python $(PIP_INSTALL) --requirement docker/tools.txt
	touch $@

# The site is made from Markdown alone and needs none of the package.
$(DOCS_VENV)/.installed: pyproject.toml setup.py
	$(NEW_VENV) $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP_INSTALL) --editable '.[docs]'
	touch $@

# faiss-gpu and faiss-cpu are one module; PyTorch is compared where it is installed as well.
$(GPU_VENV)/.installed: pyproject.toml setup.py
	$(NEW_VENV) $(GPU_VENV)
	$(GPU_VENV)/bin/python $(PIP_INSTALL) --editable '.[train,gpu]'
	touch $@

# ScaNN does not load beside another TensorFlow than its own.
$(PEERS_VENV)/.installed: pyproject.toml setup.py
	$(NEW_VENV) $(PEERS_VENV)
	$(PEERS_VENV)/bin/python $(PIP_INSTALL) --editable '.[index,serve]' onnx hnswlib usearch scann rabitqlib scalable-vs
	touch $@
