"""BERT-style WordPiece tokenizers, trained with the tokenizers library."""

from collections import Counter
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer
from tqdm.auto import tqdm
from transformers import BertTokenizer
from transformers.utils import logging


logger = logging.get_logger(__name__)

# In the order of their ids.
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}

# Distinct space-separated strings held before they are split into words: bounds memory on a large corpus.
MAX_PENDING = 1_000_000
# Repetitions of one word in one sequence given to the trainer: bounds the length of that sequence.
MAX_REPEAT = 10_000


def train_wordpiece_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 30522,
    lowercase: bool = True,
    min_frequency: int = 2,
    model_max_length: int = 512,
    show_progress: bool = True,
) -> BertTokenizer:
    """Train a BERT-style WordPiece tokenizer.

    The texts are read once and never held: memory grows with the number of distinct words. The vocabulary depends on
    nothing but how often each word occurs, so neither the order of the texts nor the number of threads changes it.
    Its ids are the special tokens ([PAD] is 0), the characters, the continuing characters (`##x`), each in code point
    order, then the merges from the most frequent on.

    Args:
        texts: The corpus, any iterable of strings.
        vocab_size: Number of tokens, special tokens included. Fewer come out, with a warning, where the corpus has no
            further pair that occurs `min_frequency` times; never more.
        lowercase: Lower-case and strip accents, as BERT uncased does. `False` keeps both, as BERT cased does.
        min_frequency: How often a pair of pieces must occur to become a token. Characters are always kept.
        model_max_length: Length in tokens to which `truncation=True` cuts.
        show_progress: Show progress bars for reading and for training.

    Returns:
        A `BertTokenizer`. What its `save_pretrained` writes is loaded by `AutoTokenizer.from_pretrained`.

    Raises:
        TypeError: `texts` is a single string.
        ValueError: The corpus holds no word, or `vocab_size` is too small for the special tokens and its characters.
    """
    if isinstance(texts, str):
        raise TypeError("texts must be an iterable of strings, not one string")
    word_counts = _count_words(texts, lowercase, show_progress)
    if not word_counts:
        raise ValueError("The corpus holds no text to build a vocabulary from.")
    vocab = _train_vocab(word_counts, vocab_size, min_frequency, show_progress)
    return BertTokenizer(vocab=vocab, do_lower_case=lowercase, model_max_length=model_max_length, **SPECIAL_TOKENS)


def _count_words(texts: Iterable[str], lowercase: bool, show_progress: bool) -> Counter[str]:
    """Count the words of the texts as the trained tokenizer will see them: normalized and split at punctuation."""
    backend = BertTokenizer(do_lower_case=lowercase).backend_tokenizer
    words: Counter[str] = Counter()
    pending: Counter[str] = Counter()
    for text in tqdm(texts, desc="Counting words", unit=" texts", disable=not show_progress):
        # A space separates words whatever stands around it, so each distinct string between spaces need be normalized
        # only once. Other white space must wait for the normalizer, whose list of it differs from Python's.
        pending.update(text.split(" "))
        if len(pending) >= MAX_PENDING:
            _add_words(words, pending, backend)
            pending.clear()
    _add_words(words, pending, backend)
    return words


def _add_words(words: Counter[str], strings: Counter[str], backend: Tokenizer) -> None:
    # WordPiece turns a longer word into [UNK] unread: nothing learnt from it could ever be used.
    max_length = backend.model.max_input_chars_per_word
    for string, count in strings.items():
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(string)):
            if len(word) <= max_length:
                words[word] += count


def _train_vocab(
    word_counts: Counter[str], vocab_size: int, min_frequency: int, show_progress: bool
) -> dict[str, int]:
    """Train on word counts and return token → id.

    The trainer numbers the continuing characters (`##x`) as it meets them in a hash map with a random seed, and breaks
    ties between equally frequent pairs by these numbers: its vocabulary changes from run to run, on one thread too.
    Given as special tokens, they are numbered first and in our order, and all that follows is settled by counts.
    """
    initial_tokens = [*SPECIAL_TOKENS.values(), *_alphabet(word_counts)]
    if vocab_size < len(initial_tokens):
        raise ValueError(
            f"A vocabulary of {vocab_size} cannot hold the {len(SPECIAL_TOKENS)} special tokens and the "
            f"{len(initial_tokens) - len(SPECIAL_TOKENS)} tokens of one character that the corpus needs: "
            f"ask for at least {len(initial_tokens)}."
        )
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=initial_tokens,
        show_progress=show_progress,
    )
    backend = Tokenizer(WordPiece(unk_token=SPECIAL_TOKENS["unk_token"]))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.train_from_iterator(_repeat_words(word_counts), trainer)
    vocab = backend.get_vocab()
    if len(vocab) < vocab_size:
        logger.warning(
            f"The vocabulary holds {len(vocab)} tokens, not {vocab_size}: "
            f"no further pair of pieces occurs at least {min_frequency} times in the corpus."
        )
    return dict(sorted(vocab.items(), key=lambda item: item[1]))


def _alphabet(words: Iterable[str]) -> list[str]:
    characters: set[str] = set()
    continuing: set[str] = set()
    for word in words:
        characters.update(word)
        continuing.update(word[1:])
    return sorted(characters) + [f"##{character}" for character in sorted(continuing)]


def _repeat_words(word_counts: Counter[str]) -> Iterator[str]:
    # The trainer counts words itself and takes no counts.
    for word, count in word_counts.items():
        full, rest = divmod(count, MAX_REPEAT)
        for repeat in [MAX_REPEAT] * full + [rest]:
            yield f"{word} " * repeat
