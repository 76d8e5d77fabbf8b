"""Tokenizers built from a corpus and from alphabets, and the command that builds them."""

import gzip
import json
import os
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from string import ascii_lowercase

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from lion_transformers.tokenization import build_character_tokenizer, train_wordpiece_tokenizer, wordpiece
from lion_transformers.tokenization.build_tokenizer import main
from lion_transformers.tokenization.corpus import CorpusError, iterate_texts, load_files, load_named


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
# "ab" three times, "abc" twice, "bc" once.
TINY = ["ab abc ab", "abc ab bc"]
DNA = {letter: index for index, letter in enumerate("ACGTN", start=5)}


def vocab_list(tokenizer):
    vocab = tokenizer.get_vocab()
    assert sorted(vocab.values()) == list(range(len(vocab)))
    return sorted(vocab, key=vocab.get)


def train(texts, **arguments):
    return train_wordpiece_tokenizer(texts, show_progress=False, **arguments)


def pseudo_words(count=3000):
    """Text of short made-up words, so that very many pairs tie."""
    generator = random.Random(0)
    return ["".join(generator.choices("abcdefgh", k=generator.randint(1, 9))) for _ in range(count)]


def greedy_longest_match(word, vocab):
    """WordPiece as its paper states it."""
    pieces, start = [], 0
    while start < len(word):
        candidates = [("##" if start else "") + word[start:end] for end in range(len(word), start, -1)]
        piece = next((candidate for candidate in candidates if candidate in vocab), None)
        if piece is None:
            return ["[UNK]"]
        pieces.append(piece)
        start += len(piece.removeprefix("##"))
    return pieces


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "lower": train(["The Café, naïve! unwanted running runs"] * 3, vocab_size=80),
        "mixed": train(["The Café, naïve! unwanted running runs"] * 3, vocab_size=80, lowercase=False),
        "dna": build_character_tokenizer("dna"),
        "protein": build_character_tokenizer("protein"),
        "bytes": build_character_tokenizer("bytes"),
        "custom": build_character_tokenizer("xy z"),
    }


class TestWordPieceTraining:
    def test_vocabulary_worked_by_hand(self):
        # Pairs: a+b 5, b+c inside a word 2, b+c at its start 1. After "ab" comes ab+c with 2; then none occurs twice.
        vocab = vocab_list(train(TINY, vocab_size=12))
        assert vocab == [*SPECIAL, "a", "b", "c", "##b", "##c", "ab", "abc"]

    def test_ties_go_to_the_smaller_ids(self):
        texts = ["cd ab cd ab ef ef"]
        characters = [*"abcdef", "##b", "##d", "##f"]
        for size, merges in [(15, ["ab"]), (16, ["ab", "cd"]), (17, ["ab", "cd", "ef"])]:
            assert vocab_list(train(texts, vocab_size=size)) == [*SPECIAL, *characters, *merges]

    @pytest.mark.parametrize("vocab_size", [21, 22, 100, 701])
    def test_vocabulary_has_the_size_asked_for(self, vocab_size):
        assert len(train(pseudo_words(), vocab_size=vocab_size)) == vocab_size

    def test_smaller_vocabulary_is_a_prefix_of_a_larger(self):
        small, large = (vocab_list(train(pseudo_words(), vocab_size=size)) for size in (100, 300))
        assert large[:100] == small

    def test_exhausted_corpus_gives_fewer_tokens_and_a_warning(self, monkeypatch):
        messages = []
        monkeypatch.setattr(wordpiece.logger, "warning", messages.append)
        assert len(train(TINY, vocab_size=12)) == 12
        assert messages == []
        assert len(train(TINY, vocab_size=100)) == 12
        assert len(messages) == 1 and "holds 12 tokens, not 100" in messages[0]

    def test_min_frequency(self):
        assert vocab_list(train(TINY, min_frequency=3))[10:] == ["ab"]
        assert vocab_list(train(TINY, min_frequency=1))[10:] == ["ab", "abc", "bc"]

    def test_vocabulary_too_small_says_what_is_needed(self):
        with pytest.raises(ValueError, match=r"9 cannot hold the 5 special tokens and the 5 .* at least 10"):
            train(TINY, vocab_size=9)
        assert vocab_list(train(TINY, vocab_size=10)) == [*SPECIAL, "a", "b", "c", "##b", "##c"]

    @pytest.mark.parametrize("texts", [[], [""], ["  ", "\n\t"]])
    def test_empty_corpus(self, texts):
        with pytest.raises(ValueError, match="no text"):
            train(texts)

    def test_one_string_is_no_corpus(self):
        with pytest.raises(TypeError, match="iterable of strings"):
            train("ab abc")

    def test_words_that_encode_to_unk_teach_nothing(self):
        # BERT's limit is 100 characters; the longest word it reads must still be learnt from.
        assert "y" in train(["ab ab", "y" * 100]).get_vocab()
        assert "y" not in train(["ab ab", "y" * 101]).get_vocab()

    def test_special_tokens_in_the_corpus_are_text(self):
        vocab = vocab_list(train(["[SEP] [SEP]"]))
        assert vocab[:5] == SPECIAL and vocab.count("[SEP]") == 1
        assert {"[", "]", "sep"} <= set(vocab)

    def test_reads_an_iterator_once(self):
        assert vocab_list(train(text for text in TINY)) == vocab_list(train(TINY))

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.text(alphabet="aB c\t\n\x1c\x85\u00a0\u0301\u3000é.#中\u200b", max_size=12), min_size=1))
    def test_words_are_those_of_the_whole_text(self, texts):
        backend = BertTokenizer().backend_tokenizer
        expected = Counter(
            word
            for text in texts
            for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))
        )
        for limit in (1, wordpiece.MAX_PENDING):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(wordpiece, "MAX_PENDING", limit)
                assert wordpiece._count_words(texts, lowercase=True, show_progress=False) == expected

    @pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7])
    def test_repeating_in_parts_keeps_every_count(self, monkeypatch, limit):
        monkeypatch.setattr(wordpiece, "MAX_REPEAT", limit)
        texts = ["ab " * 6, "cd " * 5, "xy " * 7]
        for min_frequency, merges in [(5, ["xy", "ab", "cd"]), (6, ["xy", "ab"]), (7, ["xy"]), (8, [])]:
            assert vocab_list(train(texts, min_frequency=min_frequency))[5 + 9 :] == merges

    def test_progress_shown_on_request(self, capfd):
        train_wordpiece_tokenizer(TINY, show_progress=True)
        assert "Counting words" in capfd.readouterr().err
        train_wordpiece_tokenizer(TINY, vocab_size=12, show_progress=False)
        assert capfd.readouterr() == ("", "")


class TestDeterminism:
    def test_same_file_from_every_process(self, tmp_path):
        script = (
            "import sys\n"
            "from lion_transformers.tokenization import train_wordpiece_tokenizer\n"
            "texts = open(sys.argv[1]).read().split('\\n')\n"
            "train_wordpiece_tokenizer(texts, vocab_size=600, show_progress=False).save_pretrained(sys.argv[2])\n"
        )
        words = pseudo_words()
        (tmp_path / "corpus.txt").write_text("\n".join(" ".join(words[i : i + 50]) for i in range(0, len(words), 50)))
        processes = []
        for run, threads in enumerate(["1", "2", "4"]):
            environment = {
                **os.environ,
                "PYTHONHASHSEED": str(run),
                "RAYON_NUM_THREADS": threads,
                "TOKENIZERS_PARALLELISM": "false" if threads == "1" else "true",
            }
            command = [sys.executable, "-c", script, tmp_path / "corpus.txt", tmp_path / str(run)]
            processes.append(subprocess.Popen(command, env=environment, cwd=tmp_path))
        assert [process.wait() for process in processes] == [0, 0, 0]
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert len({(tmp_path / str(run) / name).read_bytes() for run in range(3)}) == 1

    def test_same_vocabulary_in_one_process_and_in_any_order(self):
        # The trainer alone, without our order of its first tokens, differs between almost any two of these runs.
        words = pseudo_words()
        expected = vocab_list(train(words, vocab_size=600))
        for seed in range(5):
            shuffled = random.Random(seed).sample(words, len(words))
            texts = [" ".join(shuffled[i : i + 7]) for i in range(0, len(words), 7)]
            assert vocab_list(train(texts, vocab_size=600)) == expected


class TestWordPieceEncoding:
    def test_greedy_longest_match_worked_by_hand(self):
        tokenizer = train(TINY)
        assert tokenizer.tokenize("abcb") == ["abc", "##b"]
        assert tokenizer.tokenize("abbc") == ["ab", "##b", "##c"]
        assert tokenizer.tokenize("cab") == ["[UNK]"]  # "##a" never occurred
        assert tokenizer("abcb")["input_ids"] == [CLS, 11, 8, SEP]

    def test_greedy_longest_match_against_a_reference(self):
        tokenizer = train(pseudo_words(), vocab_size=400)
        vocab = tokenizer.get_vocab()
        generator = random.Random(1)
        for _ in range(500):
            word = "".join(generator.choices("abcdefghz", weights=[5] * 8 + [1], k=generator.randint(1, 15)))
            assert tokenizer.tokenize(word) == greedy_longest_match(word, vocab)

    def test_lower_case(self):
        tokenizer = train([ascii_lowercase * 2, " ".join(ascii_lowercase), "!,中"])
        assert "".join(tokenizer.tokenize("CAFÉ")).replace("##", "") == "cafe"
        assert tokenizer.tokenize("A,b!C 中中\tD\u0000\nE") == ["a", ",", "b", "!", "c", "中", "中", "d", "e"]
        assert tokenizer.do_lower_case is True

    def test_mixed_case_keeps_case_and_accents(self):
        tokenizer = train(["Café É c"], lowercase=False)
        assert tokenizer.tokenize("Café") == ["C", "##a", "##f", "##é"]
        assert tokenizer.tokenize("É") == ["É"]
        assert tokenizer.tokenize("café, cafe") == ["c", "##a", "##f", "##é", "[UNK]", "[UNK]"]
        assert tokenizer.do_lower_case is False

    def test_lower_case_vocabulary_has_neither_case_nor_accents(self):
        vocab = train(["CAFÉ Ünï"] * 3).get_vocab()
        learnt = "".join(token for token in vocab if token not in SPECIAL)
        assert learnt == learnt.lower() == unicodedata.normalize("NFD", learnt)
        assert "cafe" in vocab and "uni" in vocab

    def test_same_as_bert_with_this_vocabulary(self, tokenizers):
        # The vocabulary alone, given to a plain BertTokenizer with its defaults, must say everything.
        bert = BertTokenizer(vocab=tokenizers["lower"].get_vocab())
        texts = ["The CAFÉ, naïve!", "unwanted\u00a0running--runs", "x y z", "[MASK] the [SEP] cafe"]
        for text in texts:
            assert tokenizers["lower"](text, text).data == bert(text, text).data

    def test_decode(self, tokenizers):
        ids = tokenizers["lower"]("The Café")["input_ids"]
        assert tokenizers["lower"].decode(ids, skip_special_tokens=True) == "the cafe"

    def test_truncation_length(self):
        assert train(TINY).model_max_length == 512
        tokenizer = train(TINY, model_max_length=4)
        assert tokenizer("ab ab ab ab", truncation=True)["input_ids"] == [CLS, 10, 10, SEP]


class TestDna:
    def test_vocabulary(self, tokenizers):
        assert vocab_list(tokenizers["dna"]) == [*SPECIAL, *"ACGTN"]

    @given(st.text(alphabet="ACGTN"))
    def test_round_trip(self, sequence):
        tokenizer = build_character_tokenizer("dna")
        encoded = tokenizer(sequence)["input_ids"]
        assert encoded == [CLS, *(DNA[letter] for letter in sequence), SEP]
        assert tokenizer.decode(encoded, skip_special_tokens=True) == sequence

    def test_lower_case_is_folded(self, tokenizers):
        assert tokenizers["dna"].tokenize("acgtnACGTN") == [*"ACGTNACGTN"]

    def test_ambiguity_codes_become_n(self, tokenizers):
        assert tokenizers["dna"].tokenize("RYSWKMBDHVryswkmbdhv") == ["N"] * 20

    def test_other_characters_are_unknown_one_by_one(self, tokenizers):
        assert tokenizers["dna"].tokenize("AUu-.Xé1") == ["A", *["[UNK]"] * 7]

    def test_line_breaks_are_dropped(self, tokenizers):
        assert tokenizers["dna"].tokenize("AC\nGT \tA\r\n") == [*"ACGTA"]

    def test_offsets_refer_to_the_text_given(self, tokenizers):
        encoded = tokenizers["dna"]("aC\nr?", return_offsets_mapping=True)
        assert encoded["input_ids"] == [CLS, DNA["A"], DNA["C"], DNA["N"], UNK, SEP]
        assert encoded["offset_mapping"] == [(0, 0), (0, 1), (1, 2), (3, 4), (4, 5), (0, 0)]

    def test_mask_in_text(self, tokenizers):
        assert tokenizers["dna"]("AC[MASK]T", add_special_tokens=False)["input_ids"] == [5, 6, MASK, 8]


class TestProtein:
    def test_vocabulary(self, tokenizers):
        vocab = vocab_list(tokenizers["protein"])
        assert vocab[:5] == SPECIAL
        # All letters are in use: twenty amino acids and B J O U X Z.
        assert sorted(vocab[5:]) == ["*", "-", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]

    @given(st.text(alphabet="ACDEFGHIKLMNPQRSTVWYXBZUOJ*-"))
    def test_round_trip(self, sequence):
        tokenizer = build_character_tokenizer("protein")
        assert tokenizer.tokenize(sequence) == list(sequence)
        assert tokenizer.decode(tokenizer(sequence)["input_ids"], skip_special_tokens=True) == sequence

    def test_folding(self, tokenizers):
        tokens = tokenizers["protein"].tokenize(f"{ascii_lowercase}\nM K.1")
        assert tokens == [*ascii_lowercase.upper(), "M", "K", "[UNK]", "[UNK]"]


class TestBytes:
    @settings(max_examples=300, deadline=None)
    @given(st.one_of(st.text(), st.lists(st.sampled_from([*SPECIAL, " ", "##", "é", " ,", "n't"])).map("".join)))
    def test_ids_are_the_bytes_and_come_back(self, text):
        tokenizer = build_character_tokenizer("bytes")
        ids = tokenizer(text)["input_ids"]
        assert ids == [CLS, *(byte + 5 for byte in text.encode()), SEP]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text

    def test_every_byte_has_its_id(self, tokenizers):
        assert len(tokenizers["bytes"]) == 261
        text = "".join(map(chr, range(0x800))) + "\u0800\uffff\U00010000\U0010ffff"
        assert tokenizers["bytes"].decode([byte + 5 for byte in text.encode()]) == text

    def test_special_tokens_in_text_on_request(self, tokenizers):
        ids = tokenizers["bytes"]("a[MASK]", split_special_tokens=False)["input_ids"]
        assert ids == [CLS, ord("a") + 5, MASK, SEP]

    def test_offsets_count_characters(self, tokenizers):
        encoded = tokenizers["bytes"]("aé€", return_offsets_mapping=True, add_special_tokens=False)
        assert encoded["offset_mapping"] == [(0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (2, 3)]


class TestOtherAlphabets:
    def test_characters_as_they_are(self):
        tokenizer = build_character_tokenizer("aA é")
        assert vocab_list(tokenizer) == [*SPECIAL, "a", "A", " ", "é"]
        assert tokenizer.tokenize("Aa éb\n") == ["A", "a", " ", "é", "[UNK]", "[UNK]"]
        assert tokenizer.decode(tokenizer("Aa é")["input_ids"], skip_special_tokens=True) == "Aa é"

    @pytest.mark.parametrize(("name", "meant"), [("DNA", "dna"), ("protien", "protein"), ("byte", "bytes")])
    def test_misspelt_names_are_refused(self, name, meant):
        with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
            build_character_tokenizer(name)

    def test_repeated_characters_are_refused(self):
        with pytest.raises(ValueError, match=r"repeats 'G', 'T'"):
            build_character_tokenizer("ACGTTG")

    def test_empty_alphabet_is_refused(self):
        with pytest.raises(ValueError, match="empty"):
            build_character_tokenizer("")

    def test_truncation_length(self):
        assert build_character_tokenizer("dna").model_max_length == 512
        tokenizer = build_character_tokenizer("dna", model_max_length=3)
        assert tokenizer("ACGT", truncation=True)["input_ids"] == [CLS, 5, SEP]


KINDS = ["lower", "mixed", "dna", "protein", "bytes", "custom"]
KNOWN = {
    "lower": "The running",
    "mixed": "The running",
    "dna": "ACNT",
    "protein": "MKV",
    "bytes": "b é",
    "custom": "x yz",
}
SAMPLES = ["The Café, NAÏVE! running", "acgtn RX", "MKV*x y-z", "[MASK] é\u4e2d\n", ""]


class TestAsAnyTransformersTokenizer:
    @pytest.mark.parametrize("kind", KINDS)
    def test_special_tokens(self, tokenizers, kind):
        tokenizer = tokenizers[kind]
        assert isinstance(tokenizer, PreTrainedTokenizerFast) and tokenizer.is_fast
        assert tokenizer.convert_ids_to_tokens(range(5)) == SPECIAL
        assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id) == (PAD, UNK, MASK)
        assert (tokenizer.cls_token_id, tokenizer.sep_token_id) == (CLS, SEP)
        assert sorted(tokenizer.all_special_tokens) == sorted(SPECIAL)
        assert tokenizer.vocab_size == len(tokenizer)

    @pytest.mark.parametrize(("kind", "ids"), [("dna", [5, 8]), ("bytes", [70, 89])])
    def test_pair_template(self, tokenizers, kind, ids):
        encoded = tokenizers[kind]("AT", "T", return_special_tokens_mask=True)
        assert encoded["input_ids"] == [CLS, *ids, SEP, ids[1], SEP]
        assert encoded["token_type_ids"] == [0, 0, 0, 0, 1, 1]
        assert encoded["attention_mask"] == [1] * 6
        assert encoded["special_tokens_mask"] == [1, 0, 0, 1, 0, 1]

    def test_pair_template_of_wordpiece(self):
        encoded = train(TINY)("ab abc", "ab")
        assert encoded["input_ids"] == [CLS, 10, 11, SEP, 10, SEP]
        assert encoded["token_type_ids"] == [0, 0, 0, 0, 1, 1]

    @pytest.mark.parametrize("kind", KINDS)
    def test_padding_collator(self, tokenizers, kind):
        tokenizer = tokenizers[kind]
        long, short = tokenizer("xyxyACAC"), tokenizer("x")
        batch = DataCollatorWithPadding(tokenizer)([long, short])
        missing = len(long["input_ids"]) - len(short["input_ids"])
        assert list(batch) == ["input_ids", "token_type_ids", "attention_mask"] == tokenizer.model_input_names
        assert batch["input_ids"][1].tolist() == short["input_ids"] + [PAD] * missing
        assert batch["token_type_ids"][1].tolist() == [0] * len(long["input_ids"])
        assert batch["attention_mask"][1].tolist() == [1] * len(short["input_ids"]) + [0] * missing

    @pytest.mark.parametrize("kind", KINDS)
    def test_masking_collator(self, tokenizers, kind):
        tokenizer = tokenizers[kind]
        collator = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=1.0, mask_replace_prob=1.0, random_replace_prob=0.0
        )
        original, short = tokenizer(KNOWN[kind]), tokenizer(KNOWN[kind][:1])
        assert UNK not in original["input_ids"] + short["input_ids"]  # the collator never masks [UNK]
        assert len(original["input_ids"]) > len(short["input_ids"]) > 2
        batch = collator([original, short])
        inner = len(original["input_ids"]) - 2
        assert batch["input_ids"][0].tolist() == [CLS, *[MASK] * inner, SEP]
        assert batch["labels"][0].tolist() == [-100, *original["input_ids"][1:-1], -100]
        padded = [-100] * (len(original["input_ids"]) - len(short["input_ids"]) + 1)
        assert batch["labels"][1].tolist() == [-100, *short["input_ids"][1:-1], *padded]

    def test_offsets_of_wordpiece(self):
        encoded = train(TINY)("AB  Ább", return_offsets_mapping=True)
        assert encoded.tokens() == ["[CLS]", "ab", "ab", "##b", "[SEP]"]
        assert encoded["offset_mapping"] == [(0, 0), (0, 2), (4, 6), (6, 7), (0, 0)]

    def test_auto_tokenizer_loads_them_without_our_code(self, tokenizers, tmp_path):
        for kind, tokenizer in tokenizers.items():
            tokenizer.save_pretrained(tmp_path / kind)
        script = (
            "import json, sys\n"
            "sys.modules['lion_transformers'] = None\n"
            "from transformers import AutoTokenizer\n"
            "samples, kinds = json.loads(sys.argv[1])\n"
            "loaded = {kind: AutoTokenizer.from_pretrained(kind) for kind in kinds}\n"
            "print(json.dumps({kind: dict(\n"
            "    calls=[[t(s).data, t(s, s).data] for s in samples],\n"
            "    decoded=[t.decode(t(s)['input_ids']) for s in samples],\n"
            "    padded=t(samples, padding=True).data, vocab=t.get_vocab(), length=t.model_max_length,\n"
            "    names=t.model_input_names, special=t.special_tokens_map, type=type(t).__name__,\n"
            ") for kind, t in loaded.items()}))\n"
        )
        command = [sys.executable, "-c", script, json.dumps([SAMPLES, KINDS])]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        loaded = json.loads(result.stdout)
        for kind, t in tokenizers.items():
            expected = {
                "calls": [[t(s).data, t(s, s).data] for s in SAMPLES],
                "decoded": [t.decode(t(s)["input_ids"]) for s in SAMPLES],
                "padded": t(SAMPLES, padding=True).data,
                "vocab": t.get_vocab(),
                "length": 512,
                "names": ["input_ids", "token_type_ids", "attention_mask"],
                "special": t.special_tokens_map,
                "type": type(t).__name__,
            }
            assert loaded[kind] == expected, kind

    @pytest.mark.parametrize("kind", KINDS)
    def test_saving_again_changes_nothing(self, tokenizers, tmp_path, kind):
        tokenizers[kind].save_pretrained(tmp_path / "first")
        AutoTokenizer.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
        first, second = ((tmp_path / folder / "tokenizer.json").read_bytes() for folder in ("first", "second"))
        assert first == second


ROWS = [{"text": "ab abc", "label": 0}, {"text": 'ab, "é"', "label": 1}, {"text": "null", "label": 0}]


def write_rows(path):
    name = path.name
    if name.endswith(".parquet"):
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    elif name.endswith((".csv", ".tsv")):
        sep = "," if name.endswith(".csv") else "\t"
        datasets.Dataset.from_list(ROWS).to_csv(path, index=False, sep=sep)
    elif name.endswith(".json"):
        path.write_text(json.dumps(ROWS))
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    else:
        path.write_text("\n\n".join(row["text"] for row in ROWS) + "\n")
    return str(path)


class TestCorpus:
    @pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.json", "a.jsonl", "a.jsonl.gz", "a.parquet"])
    def test_formats(self, tmp_path, name):
        dataset = load_files([write_rows(tmp_path / name)])
        assert isinstance(dataset, datasets.IterableDataset)
        assert list(iterate_texts(dataset)) == [row["text"] for row in ROWS]

    def test_globs_and_lists(self, tmp_path):
        (tmp_path / "deep").mkdir()
        for name in ["b.txt", "a.txt", "deep/c.txt", "d[1].txt"]:
            (tmp_path / name).write_text(name)
        assert list(iterate_texts(load_files([f"{tmp_path}/?.txt"]))) == ["a.txt", "b.txt"]
        assert list(iterate_texts(load_files([f"{tmp_path}/**/c.txt", f"{tmp_path}/b.txt"]))) == [
            "deep/c.txt",
            "b.txt",
        ]
        assert list(iterate_texts(load_files([f"{tmp_path}/d[1].txt"]))) == ["d[1].txt"]

    def test_missing_file(self, tmp_path):
        with pytest.raises(CorpusError, match=r"no file 'nowhere/x\.txt'"):
            load_files(["nowhere/x.txt"])
        with pytest.raises(CorpusError, match="no file"):
            load_files([str(tmp_path)])

    def test_unknown_format(self, tmp_path):
        (tmp_path / "a.doc").write_text("a")
        with pytest.raises(CorpusError, match=r"Cannot tell the format of .*a\.doc"):
            load_files([f"{tmp_path}/a.doc"])

    def test_mixed_formats(self, tmp_path):
        files = [write_rows(tmp_path / name) for name in ("a.txt", "a.csv")]
        with pytest.raises(CorpusError, match=r"one format, but these end in \.csv, \.txt"):
            load_files(files)

    def test_unreadable_file(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": oops\n')
        with pytest.raises(CorpusError, match="Cannot read the corpus"):
            list(iterate_texts(load_files([f"{tmp_path}/a.jsonl"])))

    def test_other_column(self):
        assert list(iterate_texts([{"a": "1", "b": "2"}], text_column="b")) == ["2"]

    def test_missing_column_names_those_there_are(self):
        with pytest.raises(CorpusError, match="no column 'texts'; the columns are text, label"):
            list(iterate_texts(ROWS, text_column="texts"))

    def test_column_that_is_not_text(self):
        with pytest.raises(CorpusError, match="Column 'label' holds int, not text"):
            list(iterate_texts(ROWS, text_column="label"))

    def test_empty_and_missing_texts_are_skipped(self):
        assert list(iterate_texts([{"text": text} for text in ["a", None, "", " \n", "b"]])) == ["a", "b"]

    def test_reads_no_further_than_asked(self):
        def rows():
            yield from [{"text": "a"}, {"text": ""}, {"text": "b"}]
            raise AssertionError("read too far")

        texts = iterate_texts(rows())
        assert [next(texts), next(texts)] == ["a", "b"]
        assert list(iterate_texts(rows(), max_examples=2)) == ["a"]
        assert list(iterate_texts(rows(), max_examples=3)) == ["a", "b"]

    @pytest.mark.parametrize(("streaming", "kind"), [(True, datasets.IterableDataset), (False, datasets.Dataset)])
    def test_named_data_set(self, tmp_path, monkeypatch, streaming, kind):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "data").mkdir()
        for split in ("train", "test"):
            (tmp_path / "data" / f"{split}.csv").write_text(f"text\n{split} text\n")
        dataset = load_named(str(tmp_path / "data"), split="test", streaming=streaming)
        assert isinstance(dataset, kind)
        assert list(iterate_texts(dataset)) == ["test text"]
        with pytest.raises(CorpusError, match=r"Cannot open the corpus: .*dev"):
            load_named(str(tmp_path / "data"), split="dev", streaming=streaming)

    def test_named_data_set_that_is_not_there(self, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(CorpusError, match="Cannot open the corpus"):
            load_named("nobody/nothing-of-this-name")

    def test_without_datasets_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(CorpusError, match=r"pip install 'lion-transformers\[scripts\]'"):
            load_files([write_rows(tmp_path / "a.txt")])


class TestCommand:
    def refuse(self, capsys, arguments):
        """Run the command, which must fail as a user's mistake does; return its message."""
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        assert exit_info.value.code == 2
        message = capsys.readouterr().err.split("\n")[-2]
        assert message.startswith("build_tokenizer: error: ")
        return message

    def test_wordpiece_from_files(self, tmp_path, capsys):
        (tmp_path / "a.csv").write_text("review\n" + "Ab Abc Ab\nabc Ab bc\n" + "zz\n")
        arguments = ["--train_file", f"{tmp_path}/*.csv", "--text_column", "review", "--max_examples", "2"]
        out = ["--output_dir", str(tmp_path / "out")]
        main([*arguments, *out, "--vocab_size", "11", "--model_max_length", "77"])
        captured = capsys.readouterr()
        assert captured.out.endswith(f"Saved a tokenizer of 11 tokens in {tmp_path}/out\n")
        assert "Counting words" in captured.err
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert vocab_list(tokenizer) == [*SPECIAL, "a", "b", "c", "##b", "##c", "ab"]
        assert tokenizer.model_max_length == 77

        main([*arguments, *out, "--mixed_case", "--min_frequency", "4"])
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert vocab_list(tokenizer) == [*SPECIAL, *"Aabc", "##b", "##c", "Ab"]
        assert tokenizer.do_lower_case is False

    def test_wordpiece_from_a_data_set(self, tmp_path):
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TINY))
        arguments = ["--dataset_name", tmp_path / "data", "--dataset_split", "test", "--streaming"]
        main([*map(str, arguments), "--vocab_size", "12", "--output_dir", str(tmp_path / "out")])
        assert vocab_list(AutoTokenizer.from_pretrained(tmp_path / "out")) == vocab_list(train(TINY))

    @pytest.mark.parametrize(("name", "size"), [("dna", 10), ("protein", 33), ("bytes", 261)])
    def test_character_level(self, tmp_path, name, size):
        main(["--character", name, "--output_dir", str(tmp_path), "--model_max_length", "9"])
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer.get_vocab() == build_character_tokenizer(name).get_vocab()
        assert (len(tokenizer), tokenizer.model_max_length) == (size, 9)

    def test_corpus_at_fault(self, tmp_path, capsys):
        out = ["--output_dir", tmp_path / "out"]
        rows = write_rows(tmp_path / "a.csv")
        (tmp_path / "empty.txt").write_text("\n\n")
        (tmp_path / "nothing.csv").write_text("")
        assert "no file 'missing.txt'" in self.refuse(capsys, ["--train_file", "missing.txt", *out])
        message = self.refuse(capsys, ["--train_file", rows, "--text_column", "body", *out])
        assert "no column 'body'; the columns are text, label" in message
        assert "no text" in self.refuse(capsys, ["--train_file", tmp_path / "empty.txt", *out])
        assert "nothing.csv' is empty" in self.refuse(capsys, ["--train_file", tmp_path / "nothing.csv", *out])
        assert "at least" in self.refuse(capsys, ["--train_file", rows, "--vocab_size", "6", *out])

    def test_arguments_at_fault(self, tmp_path, capsys):
        out = ["--output_dir", tmp_path / "out"]
        assert "--output_dir" in self.refuse(capsys, ["--character", "dna"])
        assert "--train_file --dataset_name --character" in self.refuse(capsys, out)
        message = self.refuse(capsys, ["--character", "rna", *out])
        assert "'rna'" in message and all(name in message for name in ("dna", "protein", "bytes"))
        message = self.refuse(capsys, ["--character", "dna", "--vocab_size", "9", "--mixed_case", *out])
        assert "--vocab_size, --mixed_case cannot be used with --character" in message
        message = self.refuse(capsys, ["--train_file", "a.txt", "--streaming", *out])
        assert "--streaming cannot be used with --train_file" in message
        for value in ("0", "-3", "many"):
            message = self.refuse(capsys, ["--train_file", "a.txt", "--vocab_size", value, *out])
            assert f"--vocab_size: must be a whole number of at least 1, not '{value}'" in message

    def test_folder_that_cannot_be_made(self, tmp_path, capsys):
        (tmp_path / "out").write_text("in the way")
        assert "Cannot make the folder" in self.refuse(
            capsys, ["--character", "dna", "--output_dir", tmp_path / "out"]
        )

    def test_as_a_module(self, tmp_path):
        def run(*arguments):
            command = [sys.executable, "-m", "lion_transformers.tokenization.build_tokenizer", *arguments]
            return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

        helped = run("--help")
        assert helped.returncode == 0 and "--train_file" in helped.stdout and helped.stderr == ""
        (tmp_path / "a.txt").write_text("\n".join(TINY))
        built = run("--train_file", "a.txt", "--output_dir", "out", "--vocab_size", "12")
        assert built.returncode == 0 and "Saved a tokenizer of 12 tokens in out" in built.stdout
        refused = run("--train_file", "b.txt", "--output_dir", "out")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr == "build_tokenizer: error: There is no file 'b.txt'.\n"
