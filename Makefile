# One command each: `make demo`, `make demo-image`, `make test`, `make lint`. The first use of any makes .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two test workers with one thread each: tiny models gain nothing from more threads.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: install demo demo-image demo-glue test test-slow lint format bench clean

install: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[scripts,dev]"
	touch $@

demo: install
	$(BIN)/python scripts/demo.py

demo-image: install
	$(BIN)/python scripts/demo_image.py

demo-glue: install
	$(BIN)/python scripts/demo_glue.py

test: install
	$(TEST) -m "not slow"

test-slow: install
	$(TEST) -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python scripts/benchmark.py decay
	$(BIN)/python scripts/benchmark.py forms

clean:
	rm -rf $(VENV) outputs build dist *.egg-info
