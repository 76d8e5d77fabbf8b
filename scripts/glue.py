"""The tasks of the GLUE benchmark (arXiv 1804.07461) and their data: from the Hub, as GLUE's own files, JSON or CSV.

Wherever they come from, rows have the columns that `nyu-mll/glue` gives them, and labels are ids in GLUE's order.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, load_dataset
from transformers import PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from lion_transformers.scripts.arguments import UsageError
from lion_transformers.scripts.reading import MAX_CHARACTERS, loading
from lion_transformers.scripts.training import check_range
from lion_transformers.tokenization.corpus import files_arguments


logger = logging.get_logger(__name__)

FILE_ENDINGS = ["jsonl", "json", "csv", "parquet"]
COLA_COLUMNS = ["source", "label", "star", "sentence"]  # its training and development files have no header


@dataclass(frozen=True)
class Task:
    """One task of GLUE.

    Args:
        name: as the Hub has it.
        title: as the benchmark has it; also the name of its folder and of its submission.
        columns: of the one or two texts, on the Hub.
        labels: in GLUE's order; a regression has one, its score.
        tsv_columns: of GLUE's files, where they differ from the Hub's; of all texts and "label".
        submits_names: whether a submission has labels by name, or as ids.
        parts: of the evaluation and test sets: only MNLI has two.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    tsv_columns: dict[str, str] = field(default_factory=dict)
    submits_names: bool = False
    parts: tuple[str, ...] = ("",)

    @property
    def is_regression(self) -> bool:
        return len(self.labels) == 1

    @property
    def validation_splits(self) -> dict[str, str]:
        """Part → split on the Hub."""
        return {part: f"validation_{part}" if part else "validation" for part in self.parts}

    @property
    def test_splits(self) -> dict[str, str]:
        return {part: f"test_{part}" if part else "test" for part in self.parts}

    @property
    def tsv_files(self) -> dict[str, str]:
        """Split → GLUE's own file."""
        splits = ["train", *self.validation_splits.values(), *self.test_splits.values()]
        return {split: f"{split.replace('validation', 'dev')}.tsv" for split in splits}

    def submission_file(self, part: str) -> str:
        short = {"matched": "-m", "mismatched": "-mm"}.get(part, "")
        return f"{self.title}{short}.tsv"

    def label_id(self, value: Any) -> int | float:
        """The id of a label by name or id, or the score.

        Raises:
            ValueError: it is none of the task's.
        """
        if self.is_regression:
            score = float(value)
            if not 0 <= score <= 5:
                raise ValueError(value)
            return score
        if value in self.labels:
            return self.labels.index(value)
        if (number := float(value)) not in range(len(self.labels)):
            raise ValueError(value)
        return int(number)

    def submitted(self, prediction: int | float) -> str:
        """A prediction as the benchmark reads it."""
        if self.is_regression:
            return f"{min(max(prediction, 0.0), 5.0):.3f}"
        return self.labels[prediction] if self.submits_names else str(prediction)


PAIR = ("sentence1", "sentence2")
ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    task.name: task
    for task in [
        Task("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable")),
        Task("sst2", "SST-2", ("sentence",), ("negative", "positive")),
        Task(
            "mrpc",
            "MRPC",
            PAIR,
            ("not_equivalent", "equivalent"),
            {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
        ),
        Task("stsb", "STS-B", PAIR, ("score",), {"label": "score"}),
        Task("qqp", "QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), {"label": "is_duplicate"}),
        Task(
            "mnli",
            "MNLI",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
            submits_names=True,
            parts=("matched", "mismatched"),
        ),
        Task("qnli", "QNLI", ("question", "sentence"), ENTAILMENT, submits_names=True),
        Task("rte", "RTE", PAIR, ENTAILMENT, submits_names=True),
        Task("wnli", "WNLI", PAIR, ("not_entailment", "entailment")),
    ]
}


@dataclass
class DataArguments:
    _argument_group_name = "data"

    dataset_name: str | None = HfArg(
        default=None, help="Hub name or folder of a data set with a configuration for every task: nyu-mll/glue."
    )
    data_dir: str | None = HfArg(
        default=None,
        help="Folder with a folder for every task (CoLA or cola, SST-2 or sst2 ...), of GLUE's own files"
        f" (train.tsv, dev.tsv, test.tsv ...) or of train, validation and test in {', '.join(FILE_ENDINGS)}."
        " A single task may lie in it directly.",
    )
    max_seq_length: int = HfArg(default=128, help="Tokens that a text, or both together, are cut to.")
    dataloader_num_workers: int = HfArg(default=0, help="Processes that load batches, per device.")

    def __post_init__(self):
        check_range(self, ["max_seq_length"], low=1)
        check_range(self, ["dataloader_num_workers"], low=0)
        if bool(self.dataset_name) == bool(self.data_dir):
            raise UsageError("give either a dataset_name (nyu-mll/glue) or a data_dir.")


def load_task(task: Task, args: DataArguments, alone: bool) -> dict[str, Dataset]:
    """The splits of a task by the Hub's names, with its texts and, save for the test splits, `labels`.

    Args:
        task: which.
        args: where it is.
        alone: whether it may lie in `data_dir` itself.

    Raises:
        UsageError: a split or column is missing, a text or label is not one. Test splits may be missing.
    """
    if args.dataset_name:
        source = f"{args.dataset_name} ({task.name})"
        with loading(source):
            splits = dict(load_dataset(args.dataset_name, task.name))
    else:
        folder = _find_folder(task, Path(args.data_dir), alone)
        source = str(folder)
        with loading(source):
            splits = _read_tsv_files(task, folder) if (folder / "train.tsv").is_file() else _read_files(task, folder)
    tested = {split: splits[split] for split in task.test_splits.values() if split in splits}
    labelled = ["train", *task.validation_splits.values()]
    for split in labelled:
        if split not in splits:
            raise UsageError(f"{source} has no {split} split, which {task.title} needs, only {', '.join(splits)}.")
    return {
        **{split: _with_labels(task, splits[split], f"the {split} split of {source}") for split in labelled},
        **{split: _texts(task, rows, f"the {split} split of {source}") for split, rows in tested.items()},
    }


def _find_folder(task: Task, data_dir: Path, alone: bool) -> Path:
    if not data_dir.is_dir():
        raise UsageError(f"there is no folder {data_dir}.")
    for folder in [data_dir / task.title, data_dir / task.name]:
        if folder.is_dir():
            return folder
    if alone and any(data_dir.glob("train.*")):
        return data_dir
    raise UsageError(f"{data_dir} has no folder {task.title} or {task.name}.")


def _read_files(task: Task, folder: Path) -> dict[str, Dataset]:
    splits = {}
    for split in task.tsv_files:
        found = [folder / f"{split}.{ending}" for ending in FILE_ENDINGS if (folder / f"{split}.{ending}").is_file()]
        if found:
            splits[split] = load_dataset(**files_arguments(train=[str(found[0])]), split="train")
            if found[0].suffix == ".csv":
                _check_cells(task, splits[split], found[0])
    if not splits:
        raise UsageError(f"{folder} has neither train.tsv nor train.{', train.'.join(FILE_ENDINGS)}.")
    return splits


def _check_cells(task: Task, rows: Dataset, file: Path) -> None:
    """Refuse texts that are missing. (In GLUE's own formats they are texts like others.)"""
    for column in {*task.columns} & {*rows.column_names}:
        for row, text in enumerate(rows[:][column]):
            if isinstance(text, str) and not text.strip():
                raise UsageError(
                    f"row {row} of {file} has no text in column {column}: fill it in or leave the row out."
                )


def _read_tsv_files(task: Task, folder: Path) -> dict[str, Dataset]:
    files = {split: folder / name for split, name in task.tsv_files.items()}
    return {split: _read_tsv(task, file, split) for split, file in files.items() if file.is_file()}


def _read_tsv(task: Task, file: Path, split: str) -> Dataset:
    """One of GLUE's files, in which quotes mean nothing. Some rows of QQP lack fields: all readers leave them out."""
    columns = [*task.columns] if split.startswith("test") else [*task.columns, "label"]
    names = [task.tsv_columns.get(column, column) for column in columns]
    # Other characters that end lines are text.
    with loading(str(file)), file.open(encoding="utf-8-sig", newline="\n") as lines:
        rows = [line.rstrip("\r\n").split("\t") for line in lines if line.strip()]
    if not rows:
        raise UsageError(f"{file} is empty.")
    header = COLA_COLUMNS if task.name == "cola" and split != "test" else rows.pop(0)
    if missing := [name for name in names if name not in header]:
        raise UsageError(f"{file} has no column {missing[0]}; its columns are {', '.join(header)}.")
    places = [header.index(name) for name in names]
    whole = [row for row in rows if len(row) > max(places)]
    if len(whole) < len(rows) and split.startswith("test"):  # a submission counts its rows
        raise UsageError(f"{file}: {len(rows) - len(whole)} of {len(rows)} rows lack fields.")
    if len(whole) < len(rows):
        logger.warning(f"{file}: {len(rows) - len(whole)} of {len(rows)} rows lack fields and are left out.")
    return Dataset.from_dict(
        {column: [row[place] for row in whole] for column, place in zip(columns, places, strict=True)}
    )


def _texts(task: Task, rows: Dataset, source: str) -> Dataset:
    """The text columns alone."""
    if missing := [column for column in task.columns if column not in rows.column_names]:
        raise UsageError(f"{source} has no column {missing[0]}; its columns are {', '.join(rows.column_names)}.")
    if len(rows) == 0:
        raise UsageError(f"{source} is empty.")
    texts = rows.select_columns(list(task.columns))
    for column in task.columns:
        for row, text in enumerate(texts[:][column]):
            if not isinstance(text, str):
                raise UsageError(f"row {row} of {source} has {text!r} in column {column}, not a text.")
            if len(text) > MAX_CHARACTERS:
                raise UsageError(
                    f"row {row} of {source} has {len(text):,} characters in column {column}, more than the"
                    f" {MAX_CHARACTERS:,} that are tokenised at once."
                )
    return texts


def _with_labels(task: Task, rows: Dataset, source: str) -> Dataset:
    """The text columns, and `labels` as ids or scores."""
    texts = _texts(task, rows, source)
    if "label" not in rows.column_names:
        raise UsageError(f"{source} has no column label; its columns are {', '.join(rows.column_names)}.")
    feature, values = rows.features["label"], rows.select_columns(["label"])[:]["label"]
    if isinstance(feature, ClassLabel):  # whose ids need not be in GLUE's order
        values = [value if value is None or value < 0 else feature.names[value] for value in values]
    labels = []
    for row, value in enumerate(values):
        try:
            labels.append(task.label_id(value))
        except (TypeError, ValueError) as error:
            expected = "a score from 0 to 5" if task.is_regression else f"one of {', '.join(task.labels)}"
            raise UsageError(f"row {row} of {source} has the label {value!r}, not {expected}.") from error
    return texts.add_column("labels", labels)


# Rows → token ids


def encode(
    task: Task, splits: dict[str, Dataset], tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> dict[str, Dataset]:
    """Every split with the tokenizer's columns in place of the texts."""
    return {
        split: rows.map(
            _tokenize,
            batched=True,
            remove_columns=list(task.columns),
            fn_kwargs={"columns": task.columns, "tokenizer": tokenizer, "max_seq_length": max_seq_length},
            desc=f"Tokenising {task.title} ({split})",
        )
        for split, rows in splits.items()
    }


def _tokenize(
    batch: dict[str, list], columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> dict[str, list]:
    return tokenizer(*(batch[column] for column in columns), truncation=True, max_length=max_seq_length)
