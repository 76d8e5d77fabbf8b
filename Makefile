# One command each: `make demo`, `make demo-image`, `make test`, `make lint` ... The first use of any makes .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two test workers with one thread each: tiny models gain nothing from more threads.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
BENCHMARK := $(BIN)/python scripts/benchmark.py
ON_GPU := --device cuda --output_dir outputs/benchmark-gpu --max_seconds 8
CARD := $(BIN)/python scripts/model_card.py --license apache-2.0

.PHONY: install demo demo-image demo-glue cards test test-slow test-hf fuzz lint format bench bench-long bench-gpu clean

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

# Within 15 minutes on two cores, alone on them; whole models where sequences are short, fewer of their equal layers
# where they are long or weights are in bfloat16. With a layer of twelve goes a twelfth of the vocabulary.
bench: install
	$(BENCHMARK) model --lengths 128 512 2048 8192 32768 --num_hidden_layers 12 12 1 1 1 --tokens 512 --repetitions 3 \
		--max_seconds 15
	$(BENCHMARK) model --name model-bf16 --dtype bfloat16 --lengths 128 512 2048 8192 --num_hidden_layers 1 \
		--tokens 2048 --repetitions 3 --max_seconds 8
	$(BENCHMARK) flat --decays selective --num_hidden_layers 1 --repetitions 3 --max_seconds 65
	$(BENCHMARK) model --name model-images --modality image --tokens 512 --repetitions 3 --max_seconds 15
	$(BENCHMARK) model --name model-images-bf16 --modality image --dtype bfloat16 --num_hidden_layers 1 --tokens 2048 \
		--repetitions 3 --max_seconds 8
	$(BENCHMARK) images --decays selective --passes inference --num_hidden_layers 1 --repetitions 3 --max_seconds 8
	$(BENCHMARK) memory --lengths 512 32768 --tokens 32768 --num_hidden_layers 1 --passes inference
	$(BENCHMARK) packing --documents 32 --num_hidden_layers 1 --config vocab_size=2544 --repetitions 3 \
		--max_seconds 25
	$(BENCHMARK) operator --decays selective --passes inference --tokens 2048 --repetitions 3 --max_seconds 10
	$(BENCHMARK) forms --lengths 32 64 96 128 192 256 384 --tokens 512 --repetitions 3
	$(BENCHMARK) chunk-size --passes inference --tokens 4096 --repetitions 3
	$(BENCHMARK) rnn --repetitions 3
	$(BENCHMARK) floor --num_hidden_layers 12 4 --decays selective --tokens 512 --repetitions 3 --max_seconds 20
	$(BENCHMARK) decay; status=$$?; $(BENCHMARK) readme && exit $$status

# A text of 262 144 tokens through all twelve layers, in chunk and in rnn form: some minutes each.
bench-long: install
	for form in chunk rnn; do $(BENCHMARK) memory --name long-$$form --peer none --decays selective --passes inference \
		--lengths 262144 --attn_mode $$form || exit 1; done

# What `make bench` measures, on a GPU, in bfloat16, within 8 minutes.
bench-gpu: install
	$(BENCHMARK) model $(ON_GPU) --tokens 65536
	$(BENCHMARK) flat $(ON_GPU)
	$(BENCHMARK) model --name model-images --modality image $(ON_GPU) --tokens 65536
	$(BENCHMARK) images $(ON_GPU) --decays selective --passes inference --tokens 65536
	$(BENCHMARK) memory $(ON_GPU) --lengths 512 32768 --tokens 32768 --decays selective
	$(BENCHMARK) operator $(ON_GPU) --tokens 65536
	$(BENCHMARK) forms $(ON_GPU) --tokens 8192
	$(BENCHMARK) packing $(ON_GPU)
	$(BENCHMARK) rnn $(ON_GPU)
	$(BENCHMARK) floor $(ON_GPU) --tokens 32768
	$(BENCHMARK) decay $(ON_GPU)

clean:
	rm -rf $(VENV) .transformers outputs build dist *.egg-info
