"""pretrain_mlm.py --packing: which documents share a row, what a row holds, and that each is trained as if alone."""

import functools
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
import training_checks
from datasets import Dataset
from modeling_checks import DECAYS, MODES, build_from
from torch.nn import functional as F
from transformers import DataCollatorForLanguageModeling, DataCollatorForTokenClassification

from lion_transformers import LionConfig, LionForMaskedLM
from lion_transformers.scripts import pretrain_mlm
from lion_transformers.scripts.packing import PACKED_FEATURES, best_fit, pack_documents
from lion_transformers.scripts.pretrain_mlm import DataArguments, encode, encode_documents, mask_once
from lion_transformers.tokenization import build_character_tokenizer


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TINY_LION = ["--config", ",".join(f"{name}={value}" for name, value in TINY.items())]
PAD, CLS, SEP, MASK = 0, 2, 3, 4
FIRST_BYTE = 5

pytestmark = pytest.mark.usefixtures("isolated_run")
run_script = functools.partial(training_checks.run_script, pretrain_mlm)
fails_with = functools.partial(training_checks.fails_with, pretrain_mlm)


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer("bytes")


def mixed_lengths(number, longest, seed=0):
    """Many short documents, some long ones, a few that fill a row."""
    rng = random.Random(seed)
    return [min(longest, max(1, round(rng.lognormvariate(3.5, 1.0)))) for _ in range(number)]


def mixed_texts(number, longest, seed=0):
    rng = random.Random(seed)
    return [
        "".join(rng.choices("abcdefgh ", k=length)) + rng.choice("xyz")
        for length in mixed_lengths(number, longest, seed)
    ]


def documents_of(rows):
    """The documents in rows of `PACKED_FEATURES`, as (token ids, special tokens mask), by where positions restart."""
    found = []
    for ids, special, mask, positions in zip(*(rows[name] for name in PACKED_FEATURES), strict=True):
        length = sum(mask)
        starts = [place for place in range(length) if positions[place] == 0]
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            assert positions[start:end] == list(range(end - start))
            found.append((ids[start:end], special[start:end]))
    return found


# Which documents share a row


def fewest_rows(lengths, size):
    """By trying everything."""
    best = len(lengths)

    def place(rest, spaces):
        nonlocal best
        if len(spaces) >= best:
            return
        if not rest:
            best = len(spaces)
            return
        first, *rest = rest
        for number, space in enumerate(spaces):
            if space >= first:
                place(rest, [*spaces[:number], space - first, *spaces[number + 1 :]])
        place(rest, [*spaces, size - first])

    place(sorted(lengths, reverse=True), [])
    return best


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_few_and_hold_every_document_once(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 8))]
    rows = best_fit(lengths, 12)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 12 for row in rows)
    assert len(rows) <= 11 / 9 * fewest_rows(lengths, 12) + 6 / 9  # what is proven of best fit, longest first


def test_a_document_goes_where_least_space_is_left():
    """Where there are 8 and 2 tokens of space, 2 tokens go to the latter; first fit would take the former."""
    assert sorted(best_fit([12, 9, 9, 2], 20)) == [[0], [1, 2, 3]]


def test_rows_say_nothing_about_lengths_by_their_order():
    lengths = mixed_lengths(20_000, 128)
    longest = [max(lengths[number] for number in row) for row in best_fit(lengths, 128)]
    half = len(longest) // 2
    first, second = (sum(part) / len(part) for part in (longest[:half], longest[half:]))
    assert first == pytest.approx(second, rel=0.05)


@pytest.mark.parametrize("row_size", [128, 512])
def test_at_least_95_percent_of_tokens_are_real(row_size):
    lengths = mixed_lengths(1000, row_size)  # the documents of one batch of datasets' map
    rows = best_fit(lengths, row_size)
    assert sum(lengths) / (len(rows) * row_size) >= 0.95
    assert sum(lengths) / (len(lengths) * row_size) < 0.5  # padded, most of it would be padding


# What a row holds


def test_rows_by_hand():
    fields = pack_documents([[2, 7, 3], [2, 8, 8, 8, 3], [2, 3]], [[1, 0, 1], [1, 0, 0, 0, 1], [1, 1]], 6, 9)
    assert list(fields) == ["input_ids", "special_tokens_mask", "attention_mask", "position_ids"]
    assert sorted(zip(*fields.values(), strict=True)) == [
        ([2, 7, 3, 2, 3, 9], [1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 2, 0, 1, 0]),
        ([2, 8, 8, 8, 3, 9], [1, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 2, 3, 4, 0]),
    ]


def test_only_what_is_longer_than_a_row_is_cut(tokenizer):
    texts = ["abc", "", None, "  ", "d" * 25, "efghij", "k"]
    rows = encode({"text": texts}, tokenizer, "text", max_seq_length=10, packing=True)
    assert all(len(row) == 10 for name in PACKED_FEATURES for row in rows[name])
    long = [CLS, *[FIRST_BYTE + ord("d")] * 25, SEP]
    whole = [[CLS, *(FIRST_BYTE + ord(letter) for letter in text), SEP] for text in ("abc", "efghij", "k")]
    expected = [*whole, long[:10], long[10:20], long[20:]]
    documents = documents_of(rows)
    assert sorted(ids for ids, _ in documents) == sorted(expected)
    assert all(special == [int(token in (CLS, SEP)) for token in ids] for ids, special in documents)


def test_blank_documents_give_no_row(tokenizer):
    rows = encode({"text": ["", None, " "]}, tokenizer, "text", 10, packing=True)
    assert rows == {name: [] for name in PACKED_FEATURES}


def test_nothing_but_text_is_ever_predicted(tokenizer):
    rows = encode({"text": mixed_texts(300, 60)}, tokenizer, "text", 64, packing=True)
    examples = Dataset.from_dict(rows, PACKED_FEATURES)
    batch = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=1)(list(examples))
    labels, originals = batch["labels"], torch.tensor(rows["input_ids"])
    predicted = labels != -100
    assert set(batch) == {"input_ids", "attention_mask", "position_ids", "labels"}
    assert (batch["attention_mask"] == 0).any()
    assert not predicted[batch["attention_mask"] == 0].any()
    assert not predicted[(originals == CLS) | (originals == SEP)].any()
    assert torch.equal(labels[predicted], originals[predicted])
    text = originals > MASK
    assert predicted[text].float().mean().item() == pytest.approx(0.3, abs=0.02)


def test_evaluation_rows_keep_their_fields_and_are_masked_once(tokenizer):
    rows = encode({"text": mixed_texts(50, 30)}, tokenizer, "text", 32, packing=True)
    masked, again = (mask_once(rows, range(99), tokenizer, 0.15, seed=3) for _ in range(2))
    assert masked == again
    for name in ("attention_mask", "position_ids"):
        assert masked[name] == rows[name]
    batch = DataCollatorForTokenClassification(tokenizer)(
        [dict(zip(masked, row, strict=True)) for row in zip(*masked.values(), strict=True)]
    )
    for name, values in masked.items():
        assert batch[name].tolist() == values


@pytest.mark.parametrize("streaming", [False, True])
def test_data_are_packed_batch_by_batch_and_always_alike(tokenizer, streaming):
    """1500 documents: a batch of map's thousand and another; a stream goes on in the middle of the second."""
    texts = mixed_texts(1500, 60)
    data = Dataset.from_dict({"text": texts, "label": [0] * 1500})
    data = data.to_iterable_dataset() if streaming else data
    args = DataArguments(max_seq_length=64, packing=True, streaming=streaming)
    rows = list(encode_documents(data, tokenizer, args))
    assert rows == list(encode_documents(data, tokenizer, args))
    real = sum(sum(row["attention_mask"]) for row in rows)
    assert real == sum(len(text) + 2 for text in texts)
    assert real / (len(rows) * 64) >= 0.95

    if streaming:
        packed = encode_documents(data, tokenizer, args)
        iterator = iter(packed)
        seen = [next(iterator) for _ in range(len(rows) - 20)]
        position = packed.state_dict()
        resumed = encode_documents(data, tokenizer, args)
        resumed.load_state_dict(position)
        assert [*seen, *resumed] == rows


# Training


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("decay_type", DECAYS)
def test_documents_of_a_row_are_trained_as_if_alone(tokenizer, decay_type, mode):
    """Losses of every target and the gradients of all parameters, of packed rows and of each document by itself."""
    rows = encode({"text": mixed_texts(12, 30)}, tokenizer, "text", 40, packing=True)
    config = LionConfig(vocab_size=264, decay_type=decay_type, chunk_size=8, attn_mode=mode, **TINY)
    model = build_from(LionForMaskedLM, config, dtype=torch.float64)
    batch = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=2)(
        list(Dataset.from_dict(rows, PACKED_FEATURES))
    )
    assert len(batch["input_ids"]) > 1 and (batch["attention_mask"] == 0).any()

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    logits, labels, _ = pretrain_mlm.predict_targets(model, batch)
    packed = F.cross_entropy(logits.double(), labels, reduction="none")
    packed_gradients = gradients(packed.sum())
    losses = []
    for ids, targets, originals in zip(batch["input_ids"], batch["labels"], rows["input_ids"], strict=True):
        starts = [place for place, token in enumerate(originals) if token == CLS]
        length = len(originals) - originals[::-1].index(SEP)
        for start, end in itertools.pairwise([*starts, length]):
            alone = model(ids[None, start:end]).logits[0]
            losses.append(F.cross_entropy(alone.double(), targets[start:end], reduction="none", ignore_index=-100))
    alone = torch.cat(losses)
    torch.testing.assert_close(packed, alone[alone != 0], rtol=1e-6, atol=1e-6)  # logits of the script are float32
    for name, gradient in gradients(alone.sum()).items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.fixture
def files(tokenizer):
    tokenizer.save_pretrained("tokenizer")
    Path("text.txt").write_text("\n".join(mixed_texts(400, 60)) + "\n")
    arguments = (
        "--tokenizer_name tokenizer --max_seq_length 64 --train_file text.txt --report_to none --output_dir out"
    )
    return arguments.split()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_packed_run_learns_and_counts_real_tokens(files, monkeypatch, streaming):
    arguments = ["--packing", "--max_steps", "12", "--learning_rate", "1e-2", "--logging_steps", "1"]
    if streaming:
        arguments += ["--streaming", "--validation_file", "text.txt", "--max_eval_samples", "30"]
    run_script(monkeypatch, *TINY_LION, *files, *arguments)
    results = json.loads(Path("out/results.json").read_text())
    assert results["after"]["eval_loss"] < 0.9 * results["before"]["eval_loss"]
    assert results["arguments"]["packing"] is True
    assert 0.95 * 12 * 8 * 64 <= results["tokens"] < 12 * 8 * 64


def test_what_packing_cannot_go_with_is_one_sentence(files, monkeypatch, capsys):
    failure = functools.partial(fails_with, monkeypatch, capsys, *files, "--max_steps", "1", "--packing")
    bert = failure("--model_type", "bert", *TINY_LION)
    assert "packing needs a model that keeps the documents of a sequence apart, as lion does; bert would see" in bert
    unread = failure("--model_type", "bert", *TINY_LION, "--train_file", "nowhere.txt")  # hours of tokenising, maybe
    assert "packing needs a model" in unread
    assert "packing puts several documents into a sequence, line_by_line one" in failure(*TINY_LION, "--line_by_line")
    assert "max_seq_length 64 exceeds the model's max_position_embeddings 32" in failure(
        *TINY_LION, "--config", "decay_type=none,max_position_embeddings=32"
    )
    assert not Path("out/model.safetensors").exists()
