"""Tokenizers with one token for each character of a fixed alphabet: DNA, protein, bytes or any other."""

from difflib import get_close_matches

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import TokenizersBackend
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .wordpiece import SPECIAL_TOKENS


# Name → characters in the order of their ids.
SEQUENCE_ALPHABETS = {
    "dna": "ACGTN",
    # The twenty amino acids; X any, B Asx, Z Glx, U selenocysteine, O pyrrolysine, J Leu or Ile; * stop, - gap.
    "protein": "ACDEFGHIKLMNPQRSTVWYXBZUOJ*-",
}
ALPHABET_NAMES = (*SEQUENCE_ALPHABETS, "bytes")

# IUPAC's codes for "one of several bases", besides N itself.
AMBIGUOUS_BASES = "RYSWKMBDHV"


def build_character_tokenizer(alphabet: str, *, model_max_length: int = 512) -> TokenizersBackend:
    """Build a tokenizer with one token for each character of an alphabet.

    The five special tokens come first ([PAD] is 0), then the characters in the order of the alphabet. Decoding joins
    characters without spaces.

    - `"dna"`: A C G T N. Lower case (soft-masked repeats) becomes upper case, the other ambiguity codes of IUPAC
      (R Y S W K M B D H V) become N, white space is dropped; all else, U and gaps included, is [UNK].
    - `"protein"`: the twenty amino acids, X B Z U O J, `*` (stop) and `-` (gap). Lower case becomes upper case, white
      space is dropped; all else is [UNK].
    - `"bytes"`: the 256 bytes of UTF-8, byte b with id b + 5. Any text comes back exactly. A special token spelled out
      in a text is read as its bytes; pass `split_special_tokens=False` to the call to have it read as the token.
    - any other string: its characters as they are. Nothing is folded or dropped, all else is [UNK].

    Args:
        alphabet: `"dna"`, `"protein"`, `"bytes"`, or a string of the characters to know.
        model_max_length: Length in tokens to which `truncation=True` cuts.

    Returns:
        A `TokenizersBackend`. What its `save_pretrained` writes is loaded by `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: The alphabet is empty, repeats a character, or looks like a misspelt name.
    """
    if alphabet == "bytes":
        backend = _byte_backend()
    elif alphabet in SEQUENCE_ALPHABETS:
        backend = _character_backend(SEQUENCE_ALPHABETS[alphabet])
        backend.normalizer = _sequence_normalizer(alphabet)
    else:
        _check_characters(alphabet)
        backend = _character_backend(alphabet)
    backend.post_processor = _bert_template(backend)
    return TokenizersBackend(
        tokenizer_object=backend,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        # Without this a text that happens to contain "[SEP]" would not come back from its bytes.
        split_special_tokens=alphabet == "bytes",
        **SPECIAL_TOKENS,
    )


def _check_characters(characters: str) -> None:
    if not characters:
        raise ValueError("The alphabet is empty.")
    if close := get_close_matches(characters.lower(), ALPHABET_NAMES, n=1):
        raise ValueError(f"Unknown alphabet {characters!r}: did you mean {close[0]!r}?")
    if repeated := sorted({character for character in characters if characters.count(character) > 1}):
        raise ValueError(
            f"The alphabet {characters!r} repeats {', '.join(map(repr, repeated))}: give each character once, "
            f"or one of the names {', '.join(ALPHABET_NAMES)}."
        )


def _vocab(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate([*SPECIAL_TOKENS.values(), *tokens])}


def _character_backend(characters: str) -> Tokenizer:
    # BPE without merges is a split into characters in linear time, with no piece of text per character in between.
    backend = Tokenizer(BPE(vocab=_vocab(list(characters)), merges=[], unk_token=SPECIAL_TOKENS["unk_token"]))
    backend.decoder = decoders.Fuse()
    return backend


def _byte_backend() -> Tokenizer:
    # The vocabulary file is text: the tokenizers library writes each byte as a printable character of its own.
    byte_characters = bytes_to_unicode()
    backend = Tokenizer(BPE(vocab=_vocab([byte_characters[byte] for byte in range(256)]), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sequence_normalizer(name: str) -> normalizers.Normalizer:
    steps = [normalizers.Replace(Regex(r"\s+"), "")]
    if name == "dna":
        steps.append(normalizers.Replace(Regex(f"[{AMBIGUOUS_BASES}{AMBIGUOUS_BASES.lower()}]"), "N"))
    # The library has a normalizer to lower case but none to upper case.
    letters = [character for character in SEQUENCE_ALPHABETS[name] if character.isalpha()]
    steps.extend(normalizers.Replace(letter.lower(), letter) for letter in letters)
    return normalizers.Sequence(steps)


def _bert_template(backend: Tokenizer) -> TemplateProcessing:
    cls, sep = SPECIAL_TOKENS["cls_token"], SPECIAL_TOKENS["sep_token"]
    return TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
    )
