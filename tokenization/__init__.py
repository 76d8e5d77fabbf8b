"""Tokenizers built from a corpus or from a fixed alphabet, loaded afterwards with plain `AutoTokenizer`."""

from .character import build_character_tokenizer
from .wordpiece import train_wordpiece_tokenizer


__all__ = ["build_character_tokenizer", "train_wordpiece_tokenizer"]
