PYTHON ?= python3
VENV := .venv
TFRS_VENV := .venv-tfrs
TORCH_VENV := .venv-torch
# On Linux the newest wheels bring 3 GB of CUDA. To install a CPU build, name its version: TORCH=torch==2.13.0.
TORCH ?= torch
TOOLS_VENV := .venv-tools
DOCS_VENV := .venv-docs
PEERS_VENV := .venv-peers
GPU_VENV := .venv-gpu
PORT ?= 8000
# Only 5,000 of 13,000 installed files are ever imported, so Python compiles them on first import instead of pip.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# uv installs the same versions in a tenth of pip's time. If uv cannot find a package, pip installs all of them.
INSTALL = $(VENV)/bin/python $(PIP_INSTALL) uv && $(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python $(1) \
	|| $(VENV)/bin/python $(PIP_INSTALL) $(1)
# Tests start hundreds of processes, which need compiled files, even in containers that turn them off.
unexport PYTHONDONTWRITEBYTECODE
# Check the version first: with an older Python, pip tries old releases of every package for minutes before it fails.
NEW_VENV := @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or newer, found " \
	+ sys.version.split()[0] + "; set PYTHON, for example make demo PYTHON=python3.12")' && $(PYTHON) -m venv
# Each worker takes whole files, the slowest first (tests/conftest.py). Four workers also suit two cores, because
# end-to-end tests mostly wait for the processes they start.
PYTEST := $(VENV)/bin/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-nightly quick check imports format docs docs-pages audit release-check pictures bench bench-peers bench-gpu bench-seeds clean

demo: $(VENV)/.installed  ## Train, index and serve MovieLens 100K; ONESHOT=1 stops after the first query.
	$(VENV)/bin/python demo.py --port $(PORT) $(if $(ONESHOT),--oneshot)

test:  ## Lint, types, and all tests but the nightly ones.
	$(MAKE) --jobs=2 check imports $(TOOLS_VENV)/.installed
	PATH="$$PATH:$(CURDIR)/$(TOOLS_VENV)/bin" $(PYTEST)

test-nightly: $(VENV)/.installed-dev $(TFRS_VENV)/.installed $(TORCH_VENV)/.installed  ## Slow proofs, JAX, PyTorch, TFRS.
	LONGTAIL_TFRS_PYTHON=$(TFRS_VENV)/bin/python LONGTAIL_TORCH_PYTHON=$(TORCH_VENV)/bin/python LONGTAIL_KILLS=12 $(PYTEST) -m nightly

quick: $(VENV)/.installed-dev  ## Tests that start no process or browser and take under a second or two.
	$(PYTEST) -m 'not process and not slow and not nightly'

audit: $(TOOLS_VENV)/.installed  ## Look for known vulnerabilities in the packages of the images.
	for image in serving serving-gpu trainer; do \
		$(TOOLS_VENV)/bin/pip-audit --strict --disable-pip --require-hashes --requirement docker/requirements-$$image.txt || exit; \
	done

release-check: test docs $(if $(filter no,$(AUDIT)),,audit)  ## All that a tag needs; AUDIT=no without a network.
	PATH="$(CURDIR)/$(TOOLS_VENV)/bin:$$PATH" $(VENV)/bin/python -m tests.release

check: $(VENV)/.installed-dev  ## Formatting, lint and types.
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# Compile tests and packages once while mypy runs; otherwise four pytest processes compile the same files.
imports: $(VENV)/.installed-dev
	@tests=$$($(VENV)/bin/python -m pytest --collect-only --quiet --quiet) || { echo "$$tests"; exit 1; }

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: $(DOCS_VENV)/.installed  ## Build the site in build/docs; warnings and broken internal links are errors.
	rm -rf build/docs  # otherwise pages of an earlier build would be checked too
	$(DOCS_VENV)/bin/sphinx-build --fail-on-warning --keep-going --fresh-env --quiet -b html docs build/docs
	$(DOCS_VENV)/bin/python docs/check_links.py build/docs

docs-pages: $(VENV)/.installed-dev  ## The parts of docs/ that are made from docstrings, settings and other files; a test compares.
	$(VENV)/bin/python -m docs.generate

bench: $(VENV)/.installed-dev $(TFRS_VENV)/.installed  ## Tables of benchmarks/RESULTS.md that need no data set.
	$(VENV)/bin/python -m benchmarks.step_cost --tfrs-python $(TFRS_VENV)/bin/python
	$(VENV)/bin/python -m benchmarks.index_recall
	$(VENV)/bin/python -m benchmarks.service_resources
	$(VENV)/bin/python -m benchmarks.service_load

pictures: $(VENV)/.installed-dev  ## README's pictures; needs the demo and a browser based on Chromium.
	test -d runs/demo || $(MAKE) demo ONESHOT=1
	$(VENV)/bin/python -m docs.pictures

bench-peers: LABELS ?= 100000
bench-peers: $(PEERS_VENV)/.installed  ## Compare the index with other vector search libraries; LABELS=1000000 SCALE=1.6.
	$(PEERS_VENV)/bin/python -m benchmarks.mips make data/mips-$(LABELS) --labels $(LABELS)
	$(PEERS_VENV)/bin/python -m benchmarks.mips run data/mips-$(LABELS) $(if $(SCALE),--scale $(SCALE))
	$(PEERS_VENV)/bin/python -m benchmarks.mips plot data/mips-$(LABELS)/curves.csv --out data/mips-$(LABELS)/curves.png

bench-gpu: $(GPU_VENV)/.installed  ## Compare a CUDA 12 GPU with the CPU: steps, tables, indexes, two recipes; FROM=DIR has downloads.
	$(GPU_VENV)/bin/python -m benchmarks.gpu
	for name in movielens-100k gowalla; do \
		test -d data/$$name || $(GPU_VENV)/bin/longtail-train data $$name --out data/$$name $(if $(FROM),--from $(FROM)/$$name) || exit; \
		KERAS_BACKEND=jax $(GPU_VENV)/bin/longtail-train fit data/$$name/recipe.toml --out runs/gpu-$$name || exit; \
	done

bench-seeds: $(VENV)/.installed-dev  ## Repeat the papers' findings over seeds; resumes where it stopped; QUICK=1 runs less.
	for name in delicious $(if $(QUICK),,movielens-1m amazon-beauty); do \
		test -d data/$$name || $(VENV)/bin/longtail-train data $$name --out data/$$name $(if $(FROM),--from $(FROM)/$$name) || exit; \
	done
	$(VENV)/bin/python -m benchmarks.seeds --data data $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) $(TFRS_VENV) $(TOOLS_VENV) $(DOCS_VENV) $(PEERS_VENV) $(GPU_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The demo and the README need 85 of the 200 packages in `dev`.
$(VENV)/.installed: EXTRAS := train,index,serve,client
$(VENV)/.installed-dev: EXTRAS := dev
$(VENV)/.installed $(VENV)/.installed-dev: pyproject.toml setup.py
	$(NEW_VENV) $(VENV)
	$(call INSTALL,--editable '.[$(EXTRAS)]')
	touch $@ $(VENV)/.installed

# tensorflow-recommenders needs legacy Keras, which cannot share a process with the trainer.
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

# Sphinx reads Markdown alone and imports nothing of the package.
$(DOCS_VENV)/.installed: pyproject.toml setup.py
	$(NEW_VENV) $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP_INSTALL) --editable '.[docs]'
	touch $@

# faiss-gpu and faiss-cpu install the same module. The benchmark compares PyTorch too if it is installed.
$(GPU_VENV)/.installed: pyproject.toml setup.py
	$(NEW_VENV) $(GPU_VENV)
	$(GPU_VENV)/bin/python $(PIP_INSTALL) --editable '.[train,gpu]'
	touch $@

$(PEERS_VENV)/.installed: pyproject.toml setup.py
	$(NEW_VENV) $(PEERS_VENV)
	$(PEERS_VENV)/bin/python $(PIP_INSTALL) --editable '.[peers]'
	touch $@
