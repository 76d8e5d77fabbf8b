# One command each: `make demo`, `make demo-image`, `make test`, `make lint` ... The first use of any makes .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two test workers with one thread each: tiny models gain nothing from more threads.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
CARD := $(BIN)/python scripts/model_card.py --license apache-2.0

.PHONY: install demo demo-image demo-glue cards test test-slow test-hf fuzz lint format bench clean

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

# The example cards, of what both demos have left.
cards: install
	rm -f model_cards/*.md
	$(CARD) outputs/demo/pretrained --repo_id lion-transformers/lion-s-reviews --output_file model_cards/lion-s-reviews.md
	$(CARD) outputs/demo/finetuned --repo_id lion-transformers/lion-s-sentiment --output_file model_cards/lion-s-sentiment.md
	for model in lion-lit lion-d lion-s lion-d-natural lion-s-natural; do $(CARD) outputs/demo-image/$$model \
		--repo_id lion-transformers/$$model-digits --output_file model_cards/$$model-digits.md || exit 1; done

test: install
	$(TEST) -m "not slow"

test-slow: install
	$(TEST) -m slow

# Transformers' own model tests over the family; its source distribution holds them.
test-hf: install
	$(BIN)/python tests/hf/fetch.py
	HF_HUB_OFFLINE=1 $(TEST) tests/hf

# Ten thousand random cases of each kind; every run draws others.
fuzz: install
	$(TEST) --hypothesis-profile=nightly tests/test_fuzz.py

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
	rm -rf $(VENV) .transformers outputs build dist *.egg-info
