# make demo | test | lint | dev | kernels | ray | postgres | docs | soak | bench     (README.md)
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 3000
MODEL := data/models/smollm2-135m-instruct
export DAGSTER_HOME := $(CURDIR)/.dagster_home

.PHONY: demo test lint dev kernels ray postgres docs soak bench ready
.DELETE_ON_ERROR:

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(DAGSTER_HOME)/dagster.yaml: dagster.yaml
	mkdir -p $(@D)
	cp $< $@

$(MODEL)/config.json: | $(VENV)/.installed
	$(BIN)/python -m bulk_pipeline.embedded_model $(MODEL)

ready: $(VENV)/.installed $(DAGSTER_HOME)/dagster.yaml $(MODEL)/config.json

demo: ready  ## Run the sample dataset through the small model and show the answers
	$(BIN)/bulk-pipeline partitions sync demo
	PYTHONWARNINGS=ignore $(BIN)/dagster asset materialize -m bulk_pipeline.definitions \
	  --select 'group:demo' --partition-range everyday...knowledge_and_code \
	  --config-json '{"loggers": {"console": {"config": {"log_level": "INFO"}}}}'
	$(BIN)/bulk-pipeline show demo --rows 0

test: ready  ## Run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist load --maxschedchunk 1

lint: $(VENV)/.installed  ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

dev: ready  ## Start Dagster's UI on http://localhost:3000, or with PORT=3001 there
	-$(BIN)/bulk-pipeline partitions sync
	$(BIN)/dagster dev --port $(PORT)

kernels: $(VENV)/.installed  ## Test the GPU kernels without a GPU, in Triton's interpreter
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/triton triton==3.6.0
	PYTHONPATH=$(VENV)/triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
	  bulk_pipeline_tests/engine/test_dense.py bulk_pipeline_tests/engine/test_sampling_kernel.py

ray: $(VENV)/.installed  ## Test examples/ray on a Ray cluster of this machine
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	$(BIN)/python -m pytest -v -m cluster bulk_pipeline_tests/test_ray_example.py

postgres: $(VENV)/.installed  ## Test examples/postgres with Debian's PostgreSQL
	ls /usr/lib/postgresql/*/bin/initdb || (apt-get update && apt-get install --yes postgresql)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,postgres]'
	$(BIN)/python -m pytest -v -m cluster bulk_pipeline_tests/test_postgres_example.py

docs: $(VENV)/.installed  ## Write docs/settings.md from the specification
	$(BIN)/python -W ignore docs/make_settings.py

soak: $(VENV)/.installed  ## Kill the stages fifty times at random moments (benchmarks/soak.md)
	PYTHONPATH=. $(BIN)/python benchmarks/soak.py

bench: ready  ## Measure the stages around a stand-in (benchmarks/bench_pipeline.json)
	PYTHONPATH=. $(BIN)/python benchmarks/bench_pipeline.py
