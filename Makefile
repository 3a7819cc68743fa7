# Every target sets up what it needs. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
# One OpenMP thread per process: with more threads than free cores, training runs many times slower.
export OMP_NUM_THREADS ?= 1
WORKERS ?= 2
# A test that hangs is ended and says where it stood; the longest takes a tenth of this.
TEST_SECONDS ?= 600
CASES ?= 10000
SEED ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup protos job-reference lint format types test test-slow fuzz demo bench bench-quick bundle lock sbom images push testbed \
  testbed-down chaos soak clean

help:  ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.ready  ## make the virtual environment, every version pinned

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

protos: setup  ## regenerate the gRPC stubs in fedel/v1 from protos/
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. --mypy_out=quiet:. \
	  --mypy_grpc_out=quiet:. --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc protos/fedel/v1/*.proto
	@rm -f fedel/v1/model_pb2_grpc.py* fedel/v1/task_pb2_grpc.py*

job-reference: setup  ## write docs/job.md and the JSON schemas of job files from the code
	$(BIN)/python -m fedel.job_reference

lint: setup  ## style, dead code, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint

format: setup  ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## mypy, strict
	$(BIN)/mypy

test: setup lint types  ## lint, types and the fast tests, in minutes
	$(BIN)/pytest -n $(WORKERS) --timeout $(TEST_SECONDS) -m "not slow and not alone"
	$(BIN)/pytest --timeout $(TEST_SECONDS) -m "alone and not slow"

test-slow: setup  ## the slow tests: real data sets, measured times
	$(BIN)/pytest -m slow

fuzz: setup  ## hostile inputs to every decoder, file reader and RPC: CASES of each, and 100 times that of the codec
	$(BIN)/python -m tests.fuzz --cases $(CASES) --seed $(SEED)

demo: setup  ## a real federation on this machine: FedEL beside FedAvg, in a few minutes
	$(BIN)/fedel demo

bench: setup  ## measure FedEL beside other systems and the machine's limits, and what the docs claim (hours)
	$(BIN)/fedel bench
	$(BIN)/python -m benchmarks.selection
	$(BIN)/python -m benchmarks.elastic_step accuracy --model vgg16 --width 0.25
	$(BIN)/python -m benchmarks.elastic_step saving --model resnet50
	$(BIN)/python -m benchmarks.prefix_cache
	$(BIN)/python -m benchmarks.memory_limit
	$(BIN)/python -m benchmarks.fleet

bench-quick: setup  ## FedEL and the machine's limits, beside the ratios of an earlier run (3 minutes)
	$(BIN)/fedel bench --quick

bundle: setup  ## an agent for devices without internet, in dist/; TARGET="aarch64 3.10" for a Jetson
	systemd/bundle.sh $(TARGET)

lock: setup  ## docker/requirements from constraints.txt, with hashes; WHEELS="torch-...+cpu-....whl" adds theirs
	$(BIN)/python docker/lock.py $(WHEELS)

sbom:  ## what the images and the bundle consist of, as CycloneDX, in dist/
	$(PYTHON) docker/sbom.py

images: setup  ## container images of the servers, of agents and of their data
	PIP=$(BIN)/pip docker/images.sh

push: setup  ## the same for x86 and ARM, pushed to REGISTRY=registry.example.org/team
	@test -n "$(REGISTRY)" || { echo "make push REGISTRY=registry.example.org/team" >&2; exit 2; }
	REGISTRY=$(REGISTRY) PIP=$(BIN)/pip docker/images.sh

testbed: setup  ## a lab in containers: servers, database, dashboards, four agents, and a job of six rounds
	$(BIN)/fedel data get fashion-mnist
	PIP=$(abspath $(BIN))/pip docker/testbed.sh up

testbed-down:  ## end the testbed; its volumes are kept
	docker/testbed.sh down

chaos: setup  ## disturb a federation 200 times, with a seed each, and audit what it made (up to an hour)
	$(BIN)/fedel chaos --drills 200

soak: setup  ## one hour with 50 agents and a fault every 20 s: nothing lost, memory level
	$(BIN)/fedel chaos --minutes 60 --agents 50 --fault-every 20

clean:  ## remove everything that these targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
