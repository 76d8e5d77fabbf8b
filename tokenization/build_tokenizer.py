"""Build a tokenizer and save it for `AutoTokenizer.from_pretrained`.

WordPiece, from files or from a data set:

    python -m lion_transformers.tokenization.build_tokenizer \\
        --train_file 'corpus/*.txt' --vocab_size 30522 --output_dir tokenizer
    python -m lion_transformers.tokenization.build_tokenizer \\
        --dataset_name Salesforce/wikitext --dataset_config_name wikitext-103-raw-v1 --streaming --output_dir tokenizer

Character level, from a fixed alphabet:

    python -m lion_transformers.tokenization.build_tokenizer --character dna --output_dir tokenizer
"""

import argparse
import os
from collections.abc import Iterator
from typing import NoReturn

from transformers import PreTrainedTokenizerBase

from .character import ALPHABET_NAMES, build_character_tokenizer
from .corpus import iterate_texts, load_files, load_named
from .wordpiece import train_wordpiece_tokenizer


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One sentence, without the usage that argparse puts before it.
        self.exit(2, f"build_tokenizer: error: {message}\n")


def main(argv: list[str] | None = None) -> None:
    """Run the command.

    Args:
        argv: Arguments of the command line; those of the process by default.

    Raises:
        SystemExit: With code 2 and one sentence on stderr when the arguments or the corpus are at fault.
    """
    parser = _make_parser()
    args = parser.parse_args(argv)
    _refuse_unused(parser, args)
    try:
        # Before the corpus is read: a folder that cannot be written should not cost an hour.
        os.makedirs(args.output_dir, exist_ok=True)
    except OSError as error:
        parser.error(f"Cannot make the folder {args.output_dir!r}: {error.strerror}.")
    try:
        tokenizer = _build(args)
    except ValueError as error:
        parser.error(str(error))
    tokenizer.save_pretrained(args.output_dir)
    print(f"Saved a tokenizer of {len(tokenizer)} tokens in {args.output_dir}")


def _build(args: argparse.Namespace) -> PreTrainedTokenizerBase:
    if args.character is not None:
        return build_character_tokenizer(args.character, model_max_length=args.model_max_length)
    return train_wordpiece_tokenizer(
        _texts(args),
        vocab_size=args.vocab_size,
        lowercase=not args.mixed_case,
        min_frequency=args.min_frequency,
        model_max_length=args.model_max_length,
    )


def _texts(args: argparse.Namespace) -> Iterator[str]:
    if args.train_file is not None:
        dataset = load_files(args.train_file)
    else:
        dataset = load_named(
            args.dataset_name, args.dataset_config_name, split=args.dataset_split, streaming=args.streaming
        )
    return iterate_texts(dataset, text_column=args.text_column, max_examples=args.max_examples)


def _refuse_unused(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    unused = []
    if args.dataset_name is None:
        unused += ["dataset_config_name", "dataset_split", "streaming"]
    if args.character is not None:
        unused += ["text_column", "max_examples", "vocab_size", "min_frequency", "mixed_case"]
    given = [f"--{name}" for name in unused if getattr(args, name) != parser.get_default(name)]
    if given:
        source = "--character" if args.character is not None else "--train_file"
        parser.error(f"{', '.join(given)} cannot be used with {source}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m lion_transformers.tokenization.build_tokenizer",
        description=(
            "Build a WordPiece tokenizer from a corpus, or a character-level one from an alphabet, "
            "and save it for AutoTokenizer.from_pretrained."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", required=True, help="folder to save the tokenizer in")
    parser.add_argument("--model_max_length", type=_positive, default=512, help="length that truncation cuts to")

    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--train_file",
        nargs="+",
        metavar="FILE",
        help="text, CSV, TSV, JSON (lines) or Parquet files of one format, or globs; read as a stream",
    )
    source.add_argument("--dataset_name", help="data set on the Hub, or a folder laid out as one")
    source.add_argument("--character", choices=ALPHABET_NAMES, help="alphabet of a character-level tokenizer")

    corpus = parser.add_argument_group("corpus")
    corpus.add_argument("--dataset_config_name", help="configuration of the data set")
    corpus.add_argument("--dataset_split", default="train", help="split of the data set")
    corpus.add_argument("--streaming", action="store_true", help="stream the data set instead of downloading it")
    corpus.add_argument("--text_column", default="text", help="column that holds the text")
    corpus.add_argument("--max_examples", type=_positive, help="read at most this many examples")

    wordpiece = parser.add_argument_group("WordPiece")
    wordpiece.add_argument("--vocab_size", type=_positive, default=30522, help="tokens, special ones included")
    wordpiece.add_argument("--min_frequency", type=_positive, default=2, help="how often a merged pair must occur")
    wordpiece.add_argument("--mixed_case", action="store_true", help="keep case and accents")
    return parser


if __name__ == "__main__":
    main()
