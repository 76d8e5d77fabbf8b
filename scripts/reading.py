"""What goes wrong with reading data, in one sentence that names the file, and in all processes."""

import math
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from datasets.arrow_writer import SchemaInferenceError
from datasets.exceptions import DatasetsError
from pyarrow import ArrowException

from lion_transformers.scripts.arguments import DISK_ERRORS, UsageError, one_line
from lion_transformers.tokenization.corpus import CorpusError


T = TypeVar("T")

READERS = "datasets.packaged_modules."
MAX_CHARACTERS = 10_000_000  # of a text: tokens take a hundred times the memory of their text
READ_ERRORS = (DatasetsError, OSError, ValueError, TypeError, ArrowException)  # TypeError: another type than expected


@contextmanager
def loading(source: str, **of_splits: str) -> Iterator[None]:
    """Turn what `datasets` raises about `source`, or one of the splits that have their own, into one sentence."""
    try:
        yield
    except CorpusError as error:
        raise UsageError(one_line(error)) from error
    except READ_ERRORS as error:
        reason = error.__cause__ or error  # "An error occurred while generating the dataset" has one
        if getattr(reason, "errno", None) in DISK_ERRORS:
            raise _no_room(reason) from error
        if empty := _split_without_rows(reason, error):
            source = of_splits.get(empty, source)
            reason = "it has a header but nothing below it, nothing that can be read, or no files"
            raise UsageError(f"{source} has no rows: {reason}.") from error
        raise UsageError(f"cannot load {file_being_read(reason) or source}: {one_line(reason)}") from error


def hold_out(rows: Dataset, percentage: float, seed: int, source: str) -> tuple[Dataset, Dataset]:
    """Rows to train on, and a random share of them to evaluate on.

    Raises:
        UsageError: one of the two would be empty.
    """
    number = math.ceil(percentage / 100 * len(rows))
    if not 0 < number < len(rows):
        raise UsageError(
            f"{source} has {len(rows)} rows, of which validation_split_percentage {percentage} leaves none to"
            f" {'train' if number else 'evaluate'} on: give another share, or data to evaluate on."
        )
    splits = rows.train_test_split(test_size=number, seed=seed)
    return splits["train"], splits["test"]


@contextmanager
def preparing() -> Iterator[None]:
    """Turn a full disk, where `datasets` keeps what is made of data, into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise _no_room(error) from error


def main_process_first(accelerator: Accelerator, prepare: Callable[[], T]) -> T:
    """What `prepare` makes of data: in the main process, then, of what that has left in the cache, in the others.

    Raises:
        UsageError: of one process, in all of them.
    """
    result, failure = None, None
    for is_due in (accelerator.is_main_process, not accelerator.is_main_process):
        try:
            if is_due:
                with preparing():
                    result = prepare()
        except UsageError as error:
            failure = str(error)
        raise_in_all(failure)
    return result


def raise_in_all(failure: str | None) -> None:
    """Raise what any process has to say in all of them, so that none waits for it; all have to ask."""
    failures = [message for message in gather_object([failure]) if message]
    if failures:
        raise UsageError(failures[0])


def _no_room(error: OSError) -> UsageError:
    return UsageError(
        f"cannot write into {datasets.config.HF_DATASETS_CACHE}, where datasets keeps what it has read:"
        f" {one_line(error)}; make room there, or set HF_DATASETS_CACHE to another folder."
    )


def _split_without_rows(reason: BaseException, error: BaseException) -> str | None:
    """Its name, where that is what `datasets` has to say."""
    if named := re.search(r'"(\w+)" corresponds to no data', str(reason)):
        return named[1]
    if isinstance(reason, SchemaInferenceError):  # of a file in which there is nothing to infer types from
        written = [frame.f_locals.get("split_generator") for frame, _ in traceback.walk_tb(error.__traceback__)]
        return next((generator.name for generator in reversed(written) if generator), None)
    return None


def file_being_read(error: BaseException) -> str | None:
    """The file that a reader of `datasets` was at, which does not say so itself; None where it is none of theirs."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if _module(frame).startswith(READERS) and "file" in frame.f_locals:
            return str(frame.f_locals["file"]).removeprefix(os.path.join(os.getcwd(), ""))
    return None


def _is_from(error: BaseException, *modules: str) -> bool:
    """Whether one of `modules`, by how their names begin, takes part in it."""
    return any(_module(frame).startswith(modules) for frame, _ in traceback.walk_tb(error.__traceback__))


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


class ReadStream(torch.utils.data.IterableDataset):
    """A stream whose files may turn out to be broken in the middle of a run; its position is that of the stream.

    Raises:
        UsageError: one is; in this process, or in a worker of a loader.
    """

    def __init__(self, stream: datasets.IterableDataset):
        self.stream = stream

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self.stream
        except READ_ERRORS as error:
            if not _is_from(error, READERS, "datasets.table"):
                raise
            raise UsageError(f"cannot read {file_being_read(error) or 'a stream'}: {one_line(error)}") from error

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)
