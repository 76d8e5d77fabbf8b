"""Reading a text corpus, from files or from a data set, one example at a time."""

import glob
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any


# File name ending → arguments of `datasets.load_dataset`. Empty CSV fields stay text, as does the word "null".
FILE_FORMATS = {
    ".txt": {"path": "text"},
    ".csv": {"path": "csv", "keep_default_na": False},
    ".tsv": {"path": "csv", "keep_default_na": False, "sep": "\t"},
    ".json": {"path": "json"},
    ".jsonl": {"path": "json"},
    ".parquet": {"path": "parquet"},
}
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")


class CorpusError(ValueError):
    """The corpus cannot be read as asked; the message says why in one sentence."""


def load_files(patterns: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Open text, CSV, TSV, JSON (lines) or Parquet files, compressed or not, as one streaming data set.

    Args:
        patterns: File names or globs (`**` included), all of one format. Files of one glob are read in sorted order.

    Returns:
        A `datasets.IterableDataset`. Lines of text files are in the column `text`.

    Raises:
        CorpusError: A pattern matches no file, the format is unknown, or formats are mixed.
    """
    return _load(**files_arguments(train=patterns), split="train", streaming=True)


def files_arguments(**splits: Iterable[str]) -> dict[str, Any]:
    """Arguments with which `datasets.load_dataset` reads files, by the ending of their names.

    Args:
        **splits: File names or globs (`**` included) of each split, all of one format.

    Raises:
        CorpusError: A pattern matches no file, a file is empty, the format is unknown, or formats are mixed.
    """
    files = {split: [file for pattern in patterns for file in _expand(pattern)] for split, patterns in splits.items()}
    for file in itertools.chain(*files.values()):
        if os.path.getsize(file) == 0:
            raise CorpusError(f"The file {file!r} is empty.")
    endings = sorted({_ending(file) for file in itertools.chain(*files.values())})
    if len(endings) > 1:
        raise CorpusError(f"All files must have one format, but these end in {', '.join(endings)}.")
    # Names are given to `datasets` as patterns.
    escaped = {split: [glob.escape(file) for file in names] for split, names in files.items()}
    return {**FILE_FORMATS[endings[0]], "data_files": escaped}


def load_named(
    name: str, config_name: str | None = None, *, split: str = "train", streaming: bool = False
) -> Iterable[dict[str, Any]]:
    """Open a data set of the Hub, or a folder laid out as one.

    Args:
        name: Name on the Hub or path of a folder.
        config_name: Configuration of the data set, if it has several.
        split: Split to read.
        streaming: Read over the network as needed instead of downloading first. Neither holds the corpus in memory.

    Returns:
        A `datasets.Dataset`, or a `datasets.IterableDataset` if `streaming`.

    Raises:
        CorpusError: The data set, its configuration or its split cannot be had.
    """
    return _load(path=name, name=config_name, split=split, streaming=streaming)


def iterate_texts(
    dataset: Iterable[dict[str, Any]], *, text_column: str = "text", max_examples: int | None = None
) -> Iterator[str]:
    """Yield the texts of one column, skipping empty and missing ones.

    Args:
        dataset: Examples, as `load_files` or `load_named` return them.
        text_column: Column to read.
        max_examples: Read at most this many examples, counting those that are skipped. `None` reads all.

    Raises:
        CorpusError: There is no such column (the message names those there are), it holds something other than text,
            or reading fails.
    """
    for example in _read(itertools.islice(dataset, max_examples)):
        if text_column not in example:
            raise CorpusError(f"There is no column {text_column!r}; the columns are {', '.join(example)}.")
        text = example[text_column]
        if text is not None and not isinstance(text, str):
            raise CorpusError(f"Column {text_column!r} holds {type(text).__name__}, not text.")
        if text and not text.isspace():
            yield text


def _expand(pattern: str) -> list[str]:
    if os.path.isfile(pattern):
        return [pattern]
    files = sorted(file for file in glob.glob(pattern, recursive=True) if os.path.isfile(file))
    if not files:
        raise CorpusError(f"There is no file {pattern!r}.")
    return files


def _ending(file: str) -> str:
    root, ending = os.path.splitext(file.lower())
    if ending in COMPRESSED:
        ending = os.path.splitext(root)[1]
    if ending not in FILE_FORMATS:
        raise CorpusError(f"Cannot tell the format of {file!r}: its name must end in {', '.join(FILE_FORMATS)}.")
    return ending


def _load(**arguments: Any) -> Iterable[dict[str, Any]]:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise CorpusError(
            "Reading a corpus needs the datasets package: pip install 'lion-transformers[scripts]'."
        ) from error
    try:
        return load_dataset(**arguments)
    # OSError covers a missing data set and a failing network, ValueError an unknown configuration or split,
    # DatasetsError a file that cannot be read when the data set is not streamed.
    except (OSError, ValueError, DatasetsError) as error:
        raise CorpusError(f"Cannot open the corpus: {_first_line(error)}") from error


def _read(examples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    # The errors of pandas, pyarrow, json and text decoding are all ValueErrors.
    try:
        yield from examples
    except (OSError, ValueError) as error:
        raise CorpusError(f"Cannot read the corpus: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
