"""scripts/run_glue.py: its recipes and arguments, GLUE's data in each form, heads, whole runs, the report."""

import csv
import functools
import json
import math
import os
import random
import warnings
from pathlib import Path

import matplotlib.image
import pytest
import torch
import training_checks
import yaml
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from matplotlib.axes import Axes
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from training_checks import TWO_CPUS, run_and_check
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from lion_transformers import LionConfig, LionForMaskedLM
from lion_transformers.scripts import glue, glue_report, run_glue
from lion_transformers.scripts.arguments import RECIPES, UsageError
from lion_transformers.scripts.glue import TASKS, DataArguments, load_task
from lion_transformers.scripts.run_glue import ModelArguments, load_model, parse


SCRIPT = Path(run_glue.__file__)
WORDS = ["a", "the", "good", "bad", "red", "big", "film", "cat", "dog", "sees", "likes", "was", "is", "not"]
TINY = {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
LABELS = {
    "cola": ["unacceptable", "acceptable"],
    "sst2": ["negative", "positive"],
    "mrpc": ["not_equivalent", "equivalent"],
    "stsb": ["score"],
    "qqp": ["not_duplicate", "duplicate"],
    "mnli": ["entailment", "neutral", "contradiction"],
    "qnli": ["entailment", "not_entailment"],
    "rte": ["entailment", "not_entailment"],
    "wnli": ["not_entailment", "entailment"],
}
NUMBER_OF_LABELS = {task: len(names) for task, names in LABELS.items()}

pytestmark = pytest.mark.usefixtures("isolated_run")
run_script = functools.partial(training_checks.run_script, run_glue)
fails_with = functools.partial(training_checks.fails_with, run_glue)


@pytest.fixture
def tokenizer(tmp_path):
    """A word-level tokenizer of 19 tokens for one text or two."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


@pytest.fixture
def bert(tokenizer):
    """The folder of a pretrained encoder."""
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(max_position_embeddings=32, **TINY)).save_pretrained("bert")
    tokenizer.save_pretrained("bert")
    return "bert"


@pytest.fixture
def lion(tokenizer):
    torch.manual_seed(0)
    LionForMaskedLM(LionConfig(decay_type="selective", max_position_embeddings=32, **TINY)).save_pretrained("lion")
    tokenizer.save_pretrained("lion")
    return "lion"


# GLUE's own files, as the benchmark distributes them: the folder, and the columns of labelled files and of test.tsv,
# among which A and B mark the texts and L the label.

STSB = "index,genre,filename,year,old_index,source1,source2,A:sentence1,B:sentence2"
MNLI = "index,promptID,pairID,genre,sentence1_parse,sentence2_parse,A:sentence1,B:sentence2"
PAIR = "index,A:sentence1,B:sentence2"
TSV = {
    "cola": ("CoLA", "source,L:label,star,A:sentence", "index,A:sentence"),
    "sst2": ("SST-2", "A:sentence,L:label", "index,A:sentence"),
    "mrpc": (
        "MRPC",
        "L:Quality,#1 ID,#2 ID,A:#1 String,B:#2 String",
        "index,#1 ID,#2 ID,A:#1 String,B:#2 String",
    ),
    "stsb": ("STS-B", f"{STSB},L:score", STSB),
    "qqp": ("QQP", "id,qid1,qid2,A:question1,B:question2,L:is_duplicate", "id,A:question1,B:question2"),
    "mnli": ("MNLI", f"{MNLI},label1,L:gold_label", MNLI),
    "qnli": ("QNLI", "index,A:question,B:sentence,L:label", "index,A:question,B:sentence"),
    "rte": ("RTE", f"{PAIR},L:label", PAIR),
    "wnli": ("WNLI", f"{PAIR},L:label", PAIR),
}
HUB_COLUMNS = {
    "cola": ["sentence"],
    "sst2": ["sentence"],
    "mrpc": ["sentence1", "sentence2"],
    "stsb": ["sentence1", "sentence2"],
    "qqp": ["question1", "question2"],
    "mnli": ["premise", "hypothesis"],
    "qnli": ["question", "sentence"],
    "rte": ["sentence1", "sentence2"],
    "wnli": ["sentence1", "sentence2"],
}
BY_NAME = ["mnli", "qnli", "rte"]  # whose files have labels as words


def splits_of(task, base):
    return [f"{base}_matched", f"{base}_mismatched"] if task == "mnli" else [base]


def make_rows(task, split, number):
    """(first text, second text, label id or score); the label is the number of "good" in the first text."""
    rng = random.Random(f"{task} {split}")
    rows = []
    for row in range(number):
        label = row % NUMBER_OF_LABELS[task] if task != "stsb" else row % 6
        words = [*["good"] * label, *rng.choices(["red", "big", "bad", "cat"], k=4)]
        rng.shuffle(words)
        rows.append((" ".join(words), f"the {rng.choice(['film', 'dog'])}", label))
    return rows


def write_tsv(file, task, columns, rows, has_header):
    fields = [column.rpartition(":") for column in columns.split(",")]
    lines = [[name for _, _, name in fields]] if has_header else []
    for number, (first, second, label) in enumerate(rows):
        values = {"A": first, "B": second, "L": LABELS[task][label] if task in BY_NAME else str(label)}
        lines.append([values.get(kind, f"x{number}") for kind, _, _ in fields])
    file.write_text("".join("\t".join(line) + "\n" for line in lines))


def write_glue(folder, tasks=TSV, train=16, validation=7, test=5):
    """GLUE's folders, with rows of make_rows."""
    for task in tasks:
        title, labelled, unlabelled = TSV[task]
        path = Path(folder, title)
        path.mkdir(parents=True)
        for split in ["train", *splits_of(task, "dev")]:
            rows = make_rows(task, split, train if split == "train" else validation)
            write_tsv(path / f"{split}.tsv", task, labelled, rows, has_header=task != "cola")
        for split in splits_of(task, "test"):
            write_tsv(path / f"{split}.tsv", task, unlabelled, make_rows(task, split, test), has_header=True)
    return str(folder)


def results_in(folder):
    return json.loads(Path(folder, "results.json").read_text())


# Recipes and arguments


@pytest.mark.parametrize("form", ["lit", "d", "s"])
@pytest.mark.parametrize("size", ["base", "large"])
def test_recipes_hold_the_papers_setting(size, form):
    arguments, jobs = parse(["--recipe", f"glue_text_{size}_lion_{form}", "--output_dir", "out"])
    assert (arguments.data.dataset_name, arguments.data.max_seq_length) == ("nyu-mll/glue", 128)
    seeds = [19, 8364, 717, 10536, 90166]
    table = {
        "mnli": (48, 3, 5e-6, 1),
        "qqp": (16, 5, 3e-6, 1),
        "qnli": (16, 10, 1e-6, 1),
        "sst2": (16, 3, 3e-6, 3),
        "cola": (32, 10, 1e-6, 4),
        "stsb": (32, 8, 3e-6, 5),
        "mrpc": (32, 10, 8e-6, 5),
        "rte": (16, 2, 1e-6, 5),
    }
    for task, (batch_size, epochs, weight_decay, number_of_seeds) in table.items():
        of_task = [job for job in jobs if job.task.name == task]
        assert [job.seed for job in of_task] == seeds[:number_of_seeds]
        for job in of_task:
            args = job.arguments.training
            assert (args.global_train_batch_size, args.num_train_epochs) == (batch_size, epochs)
            assert args.weight_decay == weight_decay
            assert (args.learning_rate, args.warmup_ratio, args.mixed_precision) == (1e-5, 0.06, "bf16")
            assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.98, 1e-6)
            assert (args.max_steps, args.seed) == (-1, job.seed)
            assert args.start_from_mnli == (task in ["rte", "mrpc", "stsb"])
    assert jobs[0].task.name == "mnli" and {job.task.name for job in jobs} == {*table, "wnli"}
    _, long = parse(["--recipe", f"glue_text_{size}_lion_{form}", "--output_dir", "out", "--max_seq_length", "512"])
    assert {job.arguments.data.max_seq_length for job in long} == {512}


def test_there_is_a_recipe_for_each_size_and_form():
    names = {f"glue_text_{size}_lion_{form}" for size in ["base", "large"] for form in ["lit", "d", "s"]}
    assert {path.stem for path in RECIPES.glob("glue_*")} == names


def settings_of(jobs):
    return {
        (job.task.name, job.seed): (job.arguments.training.num_train_epochs, job.arguments.training.weight_decay)
        for job in jobs
    }


def test_the_command_line_wins_over_tasks_and_these_over_the_rest_of_the_recipe():
    recipe = {
        "output_dir": "out",
        "data_dir": "data",
        "task_name": ["rte", "sst2", "mnli"],
        "num_train_epochs": 3.0,
        "seeds": [1],
        "tasks": {"rte": {"num_train_epochs": 7, "weight_decay": "5e-6", "seeds": [3, 2]}},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    _, jobs = parse(["--recipe", "recipe.yaml"])
    expected = {("mnli", 1): (3, 1e-6), ("sst2", 1): (3, 1e-6), ("rte", 3): (7, 5e-6), ("rte", 2): (7, 5e-6)}
    assert settings_of(jobs) == expected and list(settings_of(jobs)) == list(expected)  # in this order
    _, jobs = parse(["--recipe", "recipe.yaml", "--num-train-epochs", "1", "--seeds", "9"])
    assert settings_of(jobs) == {("mnli", 9): (1, 1e-6), ("sst2", 9): (1, 1e-6), ("rte", 9): (1, 5e-6)}
    _, jobs = parse(
        ["--recipe", "recipe.yaml", "--tasks", "{sst2: {num_train_epochs: 2}}", "--task_name", "sst2", "rte"]
    )
    assert settings_of(jobs) == {("sst2", 1): (2, 1e-6), ("rte", 3): (7, 5e-6), ("rte", 2): (7, 5e-6)}
    assert [job.output_dir for job in jobs] == [
        Path("out/sst2/seed-1"),
        Path("out/rte/seed-3"),
        Path("out/rte/seed-2"),
    ]


def test_small_tasks_start_from_mnli_only_where_it_is_among_the_tasks():
    def starts(*argv):
        _, jobs = parse(["--output_dir", "out", "--data_dir", "data", *argv])
        return [(job.task.name, job.arguments.training.start_from_mnli) for job in jobs]

    others = ["cola", "sst2", "mrpc", "stsb", "qqp", "qnli", "rte", "wnli"]
    from_mnli = [("mnli", False), *((name, name in ["rte", "mrpc", "stsb"]) for name in others)]
    assert starts() == starts("--task_name", "all") == from_mnli
    assert starts("--task_name", "rte", "stsb") == [("stsb", False), ("rte", False)]
    assert starts("--task_name", "rte", "mnli", "--start_from_mnli", "False") == [("mnli", False), ("rte", False)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--task_name", "rte", "sst5"], "GLUE has no task sst5, only cola, sst2"),
        (["--tasks", "{sst5: {seed: 1}}"], "GLUE has no task sst5"),
        (["--tasks", "rte=3"], "the settings of rte in tasks must be a mapping of arguments, got 3"),
        (
            ["--tasks", "{rte: {num_train_epoch: 1}}"],
            "unknown recipe key num_train_epoch: did you mean num_train_epochs",
        ),
        (["--tasks", "{rte: {num_train_epochs: many}}"], "invalid float value: 'many'"),
        (["--early_stopping_patience", "0"], "early_stopping_patience must be at least 1, got 0"),
        (["--dataset_name", "nyu-mll/glue"], "give either a dataset_name (nyu-mll/glue) or a data_dir"),
        (["--data_dir="], "give either a dataset_name (nyu-mll/glue) or a data_dir"),
        (["--max_seq_length", "0"], "max_seq_length must be at least 1"),
        (["--warmup_ratio", "6"], "warmup_ratio must be at least 0 and below 1"),
    ],
)
def test_wrong_arguments_are_named(argv, message):
    with pytest.raises(UsageError) as error:
        parse(["--output_dir", "out", "--data_dir", "data", "--task_name", "rte", *argv])
    assert message in str(error.value)


# Data


def load(task, alone=False, **source):
    return load_task(TASKS[task], DataArguments(**source), alone)


def check_splits(task, splits, train=16, validation=7, test=5, dev="dev"):
    """The splits hold exactly the rows of make_rows, under the Hub's names."""
    expected = {"train": (train, "train")}
    for ours, theirs in zip(splits_of(task, "validation"), splits_of(task, dev), strict=True):
        expected[ours] = (validation, theirs)
    expected |= {split: (test, split) for split in splits_of(task, "test")}
    assert list(splits) == list(expected)
    for split, (number, name) in expected.items():
        rows = make_rows(task, name, number)
        for place, column in enumerate(HUB_COLUMNS[task]):
            assert splits[split][column][:] == [row[place] for row in rows]
        if split.startswith("test"):
            assert splits[split].column_names == HUB_COLUMNS[task]
        else:
            assert splits[split]["labels"][:] == [row[2] for row in rows]
            assert splits[split].features["labels"].dtype == ("float64" if task == "stsb" else "int64")


@pytest.mark.parametrize("task", TSV)
def test_glues_own_files(task):
    write_glue("data", [task])
    check_splits(task, load(task, data_dir="data"))


def test_a_folder_by_the_name_of_the_hub_or_a_single_task_in_data_dir_itself():
    write_glue("data", ["sst2"])
    Path("data/SST-2").rename("data/sst2")
    check_splits("sst2", load("sst2", data_dir="data"))
    check_splits("sst2", load("sst2", alone=True, data_dir="data/sst2"))
    with pytest.raises(UsageError, match="data/sst2 has no folder SST-2 or sst2"):
        load("sst2", data_dir="data/sst2")


def test_quotes_and_odd_line_ends_are_text(caplog):
    write_glue("data", ["mrpc"])
    text = (
        '1\t2\t3\t"an open quote\t\'s "quoted""\r\n'
        "0\t2\t3\tline\u2028separator\x85\tcarriage\rreturn\r\n\n0\t5\t6\tcut off\n"
    )
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    Path("data/MRPC/train.tsv").write_bytes((header + text).encode())
    train = load("mrpc", data_dir="data")["train"]
    assert train["sentence1"][:] == ['"an open quote', "line\u2028separator\x85"]
    assert train["sentence2"][:] == ['\'s "quoted""', "carriage\rreturn"]
    assert train["labels"][:] == [1, 0]
    assert "1 of 3 rows lack fields and are left out" in caplog.text  # as in the real QQP


def hub_rows(task):
    """Split → rows of make_rows, by the Hub's names, with as many as check_splits expects."""
    sizes = {"train": 16} | dict.fromkeys(splits_of(task, "validation"), 7) | dict.fromkeys(splits_of(task, "test"), 5)
    return {split: make_rows(task, split, number) for split, number in sizes.items()}


def write_files(task, ending, write):
    folder = Path("data", task)
    folder.mkdir(parents=True)
    columns = HUB_COLUMNS[task]
    for split, rows in hub_rows(task).items():
        rows = [{**dict(zip(columns, row, strict=False)), "label": row[2]} for row in rows]
        write(folder / f"{split}.{ending}", rows)


def write_jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(file, rows):
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("task", ["cola", "mnli", "stsb"])
@pytest.mark.parametrize(("ending", "write"), [("jsonl", write_jsonl), ("csv", write_csv)])
def test_json_lines_and_csv(task, ending, write):
    write_files(task, ending, write)
    check_splits(task, load(task, data_dir="data"), dev="validation")


def test_labels_by_name_and_without_a_test_set():
    rows = [{"sentence": "good", "label": "positive"}, {"sentence": 'bad, "very"', "label": "negative"}]
    for write, ending in [(write_jsonl, "jsonl"), (write_csv, "csv")]:
        folder = Path(ending, "sst2")
        folder.mkdir(parents=True)
        for split in ["train", "validation"]:
            write(folder / f"{split}.{ending}", rows)
        splits = load("sst2", data_dir=ending)
        assert list(splits) == ["train", "validation"]
        assert splits["train"]["labels"][:] == [1, 0] and splits["train"]["sentence"][:] == ["good", 'bad, "very"']


def hub_splits(task, names):
    """As `load_dataset` gives them: class labels, −1 for those of the test set, a column of numbers."""
    splits = {}
    for split, rows in hub_rows(task).items():
        columns = {name: [row[place] for row in rows] for place, name in enumerate(HUB_COLUMNS[task])}
        ids = [row[2] if names is None else names.index(LABELS[task][row[2]]) for row in rows]
        features = {name: Value("string") for name in columns}
        features |= {"label": Value("float32") if names is None else ClassLabel(names=names), "idx": Value("int32")}
        columns |= {"label": [-1] * len(rows) if split.startswith("test") else ids, "idx": range(100, 100 + len(rows))}
        splits[split] = Dataset.from_dict(columns, Features(features))
    return DatasetDict(splits)


@pytest.mark.parametrize("task", TSV)
def test_the_hub(task, monkeypatch):
    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        return hub_splits(task, None if task == "stsb" else LABELS[task])

    monkeypatch.setattr(glue, "load_dataset", load_dataset)
    check_splits(task, load(task, dataset_name="nyu-mll/glue"), dev="validation")
    assert asked == [("nyu-mll/glue", task)]


def test_a_data_set_with_labels_in_another_order(monkeypatch):
    monkeypatch.setattr(glue, "load_dataset", lambda *_: hub_splits("rte", ["not_entailment", "entailment"]))
    check_splits("rte", load("rte", dataset_name="mine"), dev="validation")


def test_a_folder_laid_out_as_the_hub_does():
    for split, rows in hub_splits("sst2", LABELS["sst2"]).items():
        Path("hub/sst2").mkdir(parents=True, exist_ok=True)
        rows.to_parquet(f"hub/sst2/{split}-00000-of-00001.parquet")
    files = [{"split": split, "path": f"sst2/{split}-*"} for split in ["train", "validation", "test"]]
    configs = [{"config_name": "sst2", "data_files": files}]
    Path("hub/README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    check_splits("sst2", load("sst2", dataset_name="hub"), dev="validation")
    with pytest.raises(UsageError, match="cannot load hub \\(rte\\): BuilderConfig 'rte' not found"):
        load("rte", dataset_name="hub")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("SST-2/dev.tsv", None, "data/SST-2 has no validation split, which SST-2 needs, only train, test."),
        ("SST-2/train.tsv", None, "data/SST-2 has neither train.tsv nor train.jsonl, train.json, train.csv"),
        ("SST-2/train.tsv", "", "data/SST-2/train.tsv is empty."),
        ("SST-2/train.tsv", "sentence\tlabel\n", "the train split of data/SST-2 is empty."),
        (
            "SST-2/train.tsv",
            "text\tlabel\ngood\t1\n",
            "train.tsv has no column sentence; its columns are text, label.",
        ),
        (
            "SST-2/dev.tsv",
            "sentence\tlabel\ngood\t1\nbad\t2\n",
            "row 1 of the validation split of data/SST-2 has the label '2', not one of negative, positive.",
        ),
        (
            "SST-2/dev.tsv",
            "sentence\tlabel\ngood\t-1\n",
            "row 0 of the validation split of data/SST-2 has the label '-1'",
        ),
        ("SST-2/dev.tsv", "sentence\tlabel\ngood\t0.5\n", "the label '0.5', not one of negative, positive."),
        ("SST-2/dev.tsv", "sentence\tlabel\ngood\tfine\n", "the label 'fine', not one of negative, positive."),
    ],
)
def test_broken_files_are_named(file, content, message):
    write_glue("data", ["sst2"])
    path = Path("data", file)
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UsageError) as error:
        load("sst2", data_dir="data")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"text": "good", "label": 1}],
            "the train split of data/sst2 has no column sentence; its columns are text, label.",
        ),
        ([{"sentence": "good"}], "the train split of data/sst2 has no column label; its columns are sentence."),
        ([{"sentence": 3, "label": 1}], "row 0 of the train split of data/sst2 has 3 in column sentence, not a text."),
        (
            [{"sentence": "a", "label": 1}, {"sentence": "b", "label": None}],
            "row 1 of the train split of data/sst2 has the",
        ),
    ],
)
def test_broken_rows_are_named(rows, message):
    Path("data/sst2").mkdir(parents=True)
    write_jsonl(Path("data/sst2/train.jsonl"), rows)
    write_jsonl(Path("data/sst2/validation.jsonl"), [{"sentence": "good", "label": 1}])
    with pytest.raises(UsageError) as error:
        load("sst2", data_dir="data")
    assert message in str(error.value)


@pytest.mark.parametrize("score", ["5.5", "-0.1", "nan", "high"])
def test_scores_are_from_0_to_5(score):
    write_glue("data", ["stsb"])
    file = Path("data/STS-B/dev.tsv")
    file.write_text(file.read_text().replace("\t5\n", f"\t{score}\n"))
    with pytest.raises(UsageError, match=f"has the label '{score}', not a score from 0 to 5"):
        load("stsb", data_dir="data")


def test_pairs_are_cut_to_the_length_and_keep_their_types(tokenizer):
    write_glue("data", ["qnli"])
    splits = glue.encode(TASKS["qnli"], load("qnli", data_dir="data"), tokenizer, 8)
    row, (question, sentence, label) = splits["train"][3], make_rows("qnli", "train", 4)[3]
    pair = ["[CLS]", *question.split()[:4], "[SEP]", *sentence.split()[:1], "[SEP]"]
    assert max(map(len, splits["train"]["input_ids"])) == 8
    full = tokenizer(question, sentence, truncation=True, max_length=8)
    assert row == {**full, "labels": label} and len(pair) == 8
    assert set(row["token_type_ids"]) == {0, 1}
    assert "labels" not in splits["test"].column_names


# Heads


@pytest.mark.parametrize("task", LABELS)
def test_the_configuration_names_the_labels_in_glues_order(task, bert, tokenizer):
    model = load_model(ModelArguments(model_name_or_path=bert), TASKS[task], tokenizer, 16)
    model.save_pretrained("saved")
    config = AutoModelForSequenceClassification.from_pretrained("saved").config
    assert config.id2label == dict(enumerate(LABELS[task]))
    assert config.label2id == {name: label for label, name in enumerate(LABELS[task])}
    assert config.num_labels == NUMBER_OF_LABELS[task]
    assert config.problem_type == ("regression" if task == "stsb" else "single_label_classification")
    assert model.dtype == torch.float32


def classifier(folder, names, kind=BertForSequenceClassification, config=BertConfig):
    torch.manual_seed(1)
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: label for label, name in enumerate(names)}}
    model = kind(config(**TINY, **labels))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "names", [["entailment", "not_entailment"], ["LABEL_0", "LABEL_1"], LABELS["mnli"], ["score"]]
)
def test_a_head_with_other_labels_is_refused_or_renewed(names, tokenizer):
    """WNLI's labels are RTE's in the other order: a head of the same size that means the opposite."""
    trained = classifier("trained", names)
    with pytest.raises(UsageError) as error:
        load_model(ModelArguments(model_name_or_path="trained"), TASKS["wnli"], tokenizer, 16)
    assert str(error.value) == (
        f"the classification head of trained has the labels {', '.join(names)}, not not_entailment, entailment of"
        " WNLI: give the encoder that it was made from, or --ignore_mismatched_sizes for a new head."
    )
    args = ModelArguments(model_name_or_path="trained", ignore_mismatched_sizes=True)
    torch.manual_seed(2)
    model = load_model(args, TASKS["wnli"], tokenizer, 16)
    assert model.config.id2label == dict(enumerate(LABELS["wnli"]))
    assert model.classifier.weight.shape == (2, 32) and model.config.num_labels == 2
    for name, weight in trained.bert.state_dict().items():
        assert torch.equal(model.bert.state_dict()[name], weight), name
    assert not torch.equal(model.classifier.weight, trained.classifier.weight[:2])
    assert (model.classifier.bias == 0).all() and 0.01 < model.classifier.weight.std() < 0.03


def test_a_head_for_the_tasks_labels_is_kept_and_models_without_a_pooler_get_a_whole_new_one(tokenizer):
    trained = classifier("trained", LABELS["rte"])
    kept = load_model(ModelArguments(model_name_or_path="trained"), TASKS["qnli"], tokenizer, 16)
    assert torch.equal(kept.classifier.weight, trained.classifier.weight)
    trained = classifier("roberta", LABELS["rte"], RobertaForSequenceClassification, RobertaConfig)
    args = ModelArguments(model_name_or_path="roberta", ignore_mismatched_sizes=True)
    model = load_model(args, TASKS["wnli"], tokenizer, 16)
    assert not torch.equal(model.classifier.dense.weight, trained.classifier.dense.weight)
    assert torch.equal(
        model.roberta.embeddings.word_embeddings.weight, trained.roberta.embeddings.word_embeddings.weight
    )


def test_a_new_model_fits_the_tokenizer(tokenizer):
    model = load_model(ModelArguments("bert", config={**TINY, "vocab_size": 40}), TASKS["rte"], tokenizer, 16)
    assert model.config.vocab_size == 40
    config = {name: value for name, value in TINY.items() if name != "vocab_size"}
    model = load_model(ModelArguments("lion", config=config), TASKS["rte"], tokenizer, 16)
    assert (model.config.vocab_size, model.config.pad_token_id) == (19, 0)
    with pytest.raises(UsageError, match="the tokenizer has 19 tokens, the model only 9"):
        load_model(ModelArguments("bert", config={**TINY, "vocab_size": 9}), TASKS["rte"], tokenizer, 16)


@pytest.mark.parametrize("labels", [[1.0, 4.5, 0.0], [2], [3, 0]])
def test_regression_does_not_broadcast(labels):
    """Squares of differences of pairs, whatever the batch and the type of the labels."""
    logits = torch.tensor([[0.5], [2.0], [-1.0]])[: len(labels)]
    expected = sum((logit - label) ** 2 for logit, label in zip(logits.flatten().tolist(), labels, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = run_glue.sum_loss(TASKS["stsb"], logits, torch.tensor(labels))
    assert loss.item() == pytest.approx(expected)


def test_evaluation_averages_the_parts_of_mnli():
    logits = torch.tensor([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]])
    parts = {"matched": (logits, torch.tensor([0, 1, 2, 2])), "mismatched": (logits[:1], torch.tensor([2]))}
    metrics = run_glue.compute_metrics(TASKS["mnli"], parts)
    right, wrong = math.log(1 + 2 * math.exp(-4)), math.log(2 + math.exp(4))
    assert metrics == pytest.approx(
        {
            "eval_loss": (3 * right + 2 * wrong) / 5,
            "eval_matched_accuracy": 0.75,
            "eval_mismatched_accuracy": 0.0,
            "eval_combined_score": 0.375,
            "eval_examples": 5,
        }
    )


# Whole runs

SHORT = ["--per_device_train_batch_size", "4", "--max_seq_length", "16", "--report_to", "none"]


def test_all_nine_tasks(bert, monkeypatch):
    data = write_glue("data")
    run_script(
        monkeypatch, "--data_dir", data, "--model_name_or_path", bert, "--output_dir", "out", *SHORT, "--max_steps=1"
    )
    metrics = {task: ["accuracy"] for task in TSV}
    metrics |= {"cola": ["matthews_correlation"], "mrpc": ["accuracy", "f1"], "stsb": ["pearson", "spearmanr"]}
    metrics |= {"qqp": ["accuracy", "f1"], "mnli": ["matched_accuracy", "mismatched_accuracy"]}
    scores = {}
    for task in TSV:
        folder = Path("out", task, "seed-17")
        results = results_in(folder)
        assert results["steps"] == 1 and results["after"]["eval_examples"] == (14 if task == "mnli" else 7)
        values = [results["after"][f"eval_{name}"] for name in metrics[task]]
        scores[task] = results["after"]["eval_combined_score"]
        assert scores[task] == pytest.approx(sum(values) / len(values))
        assert results["started_from"] == ("out/mnli/seed-17" if task in ["rte", "mrpc", "stsb"] else bert)
        assert AutoModelForSequenceClassification.from_pretrained(folder).config.id2label == dict(
            enumerate(LABELS[task])
        )
        assert len(AutoTokenizer.from_pretrained(folder)) == 19
    finished = sorted(TSV, key=lambda task: Path("out", task, "seed-17", "results.json").stat().st_mtime_ns)
    assert finished[0] == "mnli"

    summary = json.loads(Path("out/glue.json").read_text())["models"]["out"]
    assert summary["average"] == pytest.approx(sum(scores[task] for task in TSV if task != "wnli") / 8)
    assert f"| GLUE average |  | {100 * summary['average']:.1f} |" in Path("out/glue.md").read_text()
    files = [f"{title}.tsv" for title, *_ in TSV.values() if title != "MNLI"]
    assert {path.name for path in Path("out/submission").iterdir()} == {*files, "MNLI-m.tsv", "MNLI-mm.tsv"}
    for path in Path("out/submission").iterdir():
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        assert lines[0] == ["index", "prediction"] and [index for index, _ in lines[1:]] == list("01234")
        predictions = {prediction for _, prediction in lines[1:]}
        if path.name == "STS-B.tsv":
            assert all(0 <= float(prediction) <= 5 for prediction in predictions)
        else:
            task = next(name for name, (title, *_) in TSV.items() if path.name.startswith(title))
            assert predictions <= set(LABELS[task] if task in BY_NAME else "01")


@pytest.mark.parametrize("size", [{"decay_type": "selective"}, {"decay_type": "none"}])
def test_lion_learns_and_the_folder_predicts_what_was_submitted(size, tokenizer, monkeypatch):
    torch.manual_seed(0)
    LionForMaskedLM(LionConfig(max_position_embeddings=32, **size, **TINY)).save_pretrained("lion")
    tokenizer.save_pretrained("lion")
    data = write_glue("data", ["sst2"], train=96, validation=21)
    training = "--learning_rate 5e-3 --num_train_epochs 3 --mixed_precision bf16 --seeds 1"
    run_script(
        monkeypatch, "--task_name=sst2", "--data_dir", data, "--model_name_or_path=lion", "--output_dir=out", *SHORT,
        *training.split(),
    )  # fmt: skip
    results = results_in("out/sst2/seed-1")
    assert results["before"]["eval_accuracy"] < 0.7 and results["after"]["eval_accuracy"] == 1.0
    assert results["steps"] == 3 * 96 / 4 and results["examples"] == 3 * 96
    assert [entry["step"] for entry in results["history"] if "eval_loss" in entry] == [0, 24, 48, 72]
    model = AutoModelForSequenceClassification.from_pretrained("out/sst2/seed-1").eval()
    texts = [row[0] for row in make_rows("sst2", "test", 5)]
    with torch.no_grad():
        predicted = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.argmax(-1)
    expected = ["index\tprediction", *(f"{row}\t{label}" for row, label in enumerate(predicted.tolist()))]
    assert Path("out/submission/SST-2.tsv").read_text().splitlines() == expected
    assert predicted.tolist() == [row[2] for row in make_rows("sst2", "test", 5)]


def test_regression_learns(bert, monkeypatch):
    data = write_glue("data", ["stsb"], train=96, validation=21)
    training = "--learning_rate 5e-3 --num_train_epochs 6"
    argv = ["--task_name=stsb", "--data_dir", data, "--model_name_or_path", bert, "--output_dir=out", *SHORT]
    run_script(monkeypatch, *argv, *training.split())
    results = results_in("out/stsb/seed-17")
    assert results["after"]["eval_loss"] < 0.3 * results["before"]["eval_loss"]
    assert results["after"]["eval_pearson"] > 0.9


def scripted(monkeypatch, scores):
    """Evaluation gives these scores, whatever the model."""
    remaining = iter(scores)
    metrics = lambda task, parts: {"eval_loss": 1.0, "eval_combined_score": next(remaining), "eval_examples": 7}  # noqa: E731
    monkeypatch.setattr(run_glue, "compute_metrics", metrics)


def weights(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder).state_dict()


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_it_leaves_the_best_checkpoint(bert, monkeypatch):
    data = write_glue("data", ["sst2"])
    scripted(monkeypatch, [0.95, 0.1, 0.9, 0.2])  # the first is before training, of no checkpoint
    argv = ["--task_name=sst2", "--data_dir", data, "--model_name_or_path", bert, "--output_dir=out", *SHORT]
    run_script(monkeypatch, *argv, "--learning_rate=1e-2")
    results = results_in("out/sst2/seed-17")
    assert results["best"] == {"step": 8, "eval_combined_score": 0.9}
    assert (results["after"]["step"], results["after"]["eval_combined_score"]) == (8, 0.9)
    folder = Path("out/sst2/seed-17")
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-12"}
    assert same(weights(folder), weights(folder / "checkpoint-8"))
    assert not same(weights(folder), weights(folder / "checkpoint-12"))


@pytest.mark.parametrize(
    ("patience", "scores", "steps", "best"),
    [
        (2, [0.0, 0.5, 0.4, 0.6, 0.6, 0.5, 0.9, 0.9], 20, 12),
        (1, [0.9, 0.5, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9], 8, 4),
        (3, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 24, 24),
    ],
)
def test_it_stops_when_patience_ends(patience, scores, steps, best, bert, monkeypatch):
    data = write_glue("data", ["sst2"])
    scripted(monkeypatch, scores)
    argv = ["--task_name=sst2", "--data_dir", data, "--model_name_or_path", bert, "--output_dir=out", *SHORT]
    run_script(monkeypatch, *argv, "--num_train_epochs=6", "--early_stopping_patience", patience)
    results = results_in("out/sst2/seed-17")
    assert (results["steps"], results["best"]["step"]) == (steps, best)
    assert same(weights("out/sst2/seed-17"), weights(f"out/sst2/seed-17/checkpoint-{best}"))


def test_patience_counts_evaluations_without_a_better_one_though_fewer_are_saved(bert, monkeypatch):
    data = write_glue("data", ["sst2"])
    scripted(monkeypatch, [0.0, 0.1, 0.2, 0.3, 0.4, 0.3, 0.2])
    argv = ["--task_name=sst2", "--data_dir", data, "--model_name_or_path", bert, "--output_dir=out", *SHORT]
    run_script(monkeypatch, *argv, "--max_steps=12", "--eval_steps=2", "--save_steps=4", "--early_stopping_patience=2")
    assert results_in("out/sst2/seed-17")["steps"] == 12


def test_a_run_that_stops_before_its_first_checkpoint_leaves_one(bert, monkeypatch):
    data = write_glue("data", ["sst2"])
    scripted(monkeypatch, [0.0, 0.3, 0.2])
    argv = ["--task_name=sst2", "--data_dir", data, "--model_name_or_path", bert, "--output_dir=out", *SHORT]
    run_script(
        monkeypatch, *argv, "--max_steps=12", "--eval_steps=2", "--save_steps=12", "--early_stopping_patience=1"
    )
    results = results_in("out/sst2/seed-17")
    assert (results["steps"], results["best"]["step"]) == (4, 4)


def test_runs_of_other_settings_are_not_averaged(bert, monkeypatch, capsys):
    data = write_glue("data", ["sst2"])
    argv = ["--task_name=sst2", "--data_dir", data, "--model_name_or_path", bert, "--output_dir=out", *SHORT]
    run_script(monkeypatch, *argv, "--max_steps=1", "--seeds", "1")
    message = fails_with(monkeypatch, capsys, *argv, "--max_steps=1", "--seeds", "2", "--learning_rate", "1.0")
    assert "out/sst2/seed-1 was trained with learning_rate 1e-05, not 1.0" in message
    run_script(monkeypatch, *argv, "--max_steps=1", "--seeds", "2")


def test_a_small_task_asked_for_alone_starts_from_the_mnli_that_is_there(bert, monkeypatch):
    data = write_glue("data", ["mnli", "rte"])
    argv = ["--data_dir", data, "--model_name_or_path", bert, "--output_dir=out", *SHORT, "--max_steps=1"]
    run_script(monkeypatch, *argv, "--task_name", "mnli")
    run_script(monkeypatch, *argv, "--task_name", "rte")
    assert results_in("out/rte/seed-17")["started_from"] == "out/mnli/seed-17"


@pytest.mark.parametrize("setting", ["mixed_precision: bf16", "model_name_or_path: other"])
def test_what_is_common_to_all_tasks_cannot_be_set_for_one(setting, bert, monkeypatch, capsys):
    data = write_glue("data", ["sst2"])
    argv = ["--task_name=sst2", "--data_dir", data, "--model_name_or_path", bert, "--output_dir=out"]
    message = fails_with(monkeypatch, capsys, *argv, "--tasks", f"{{sst2: {{{setting}}}}}")
    assert f"{setting.split(':')[0]} is the same for all tasks" in message


def test_a_test_set_with_short_rows_is_refused():
    write_glue("data", ["mrpc"])
    with Path("data/MRPC/test.tsv").open("a") as file:
        file.write("99\tcut\n")
    with pytest.raises(UsageError, match=r"test\.tsv: 1 of \d+ rows lack fields"):
        load("mrpc", data_dir="data")


def test_a_stopped_call_goes_on_where_it_was(bert, monkeypatch, capsys):
    data = write_glue("data", ["sst2", "rte"], train=8)
    argv = ["--task_name", "sst2", "rte", "--data_dir", data, "--model_name_or_path", bert, *SHORT]
    argv += ["--tasks", "{sst2: {seeds: [1, 2]}}", "--learning_rate", "1e-3", "--num_train_epochs", "1"]
    predict = run_glue.GlueRun.predict_test_sets

    def stop(glue_run):
        if glue_run.args.seed == 2:
            raise KeyboardInterrupt
        predict(glue_run)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_glue.GlueRun, "predict_test_sets", stop)
        run_script(monkeypatch, *argv, "--output_dir", "out")
    first, begun = Path("out/sst2/seed-1/results.json"), Path("out/sst2/seed-2/checkpoint-2/model.safetensors")
    assert list(Path("out").rglob("results.json")) == [first]
    assert not Path("out/glue.md").exists()
    written = first.stat().st_mtime_ns
    os.utime(begun, (0, 0))

    run_script(monkeypatch, *argv, "--output_dir", "out", "--logging_steps", "1")
    assert first.stat().st_mtime_ns == written
    assert begun.stat().st_mtime == 0  # not made anew
    run_script(monkeypatch, *argv, "--output_dir", "whole")
    folders = ["rte/seed-17", "sst2/seed-1", "sst2/seed-2"]
    assert sorted(str(path.parent) for path in Path("out").rglob("results.json")) == [
        f"out/{name}" for name in folders
    ]
    for folder in folders:
        assert same(weights(f"out/{folder}"), weights(f"whole/{folder}"))
        assert results_in(f"out/{folder}")["after"] == results_in(f"whole/{folder}")["after"]
    assert not same(weights("out/sst2/seed-1"), weights("out/sst2/seed-2"))
    assert Path("out/glue.md").read_text().replace("out", "whole", 1) == Path("whole/glue.md").read_text()

    again = [*argv, "--output_dir", "out", "--weight_decay", "0.5"]
    error = fails_with(monkeypatch, capsys, *again)
    assert "out/sst2/seed-1 was trained with weight_decay 1e-06, not 0.5: give another output_dir, or" in error
    run_script(monkeypatch, *again, "--overwrite_output_dir", "--task_name", "rte")
    assert results_in("out/rte/seed-17")["arguments"]["weight_decay"] == 0.5
    assert first.stat().st_mtime_ns == written


def test_mnli_is_where_the_small_tasks_start_from(bert, monkeypatch):
    data = write_glue("data", ["mnli", "rte"])
    scripted(monkeypatch, [0.0, 0.3, 0.0, 0.8, 0.0, 0.5, 0.0, 0.1])  # before and after, of three seeds and of RTE
    argv = ["--task_name", "rte", "mnli", "--data_dir", data, "--model_name_or_path", bert, "--output_dir=out", *SHORT]
    tasks = "{mnli: {seeds: [1, 2, 3], learning_rate: 1e-2}, rte: {learning_rate: 1e-12}}"
    run_script(monkeypatch, *argv, "--max_steps=1", "--tasks", tasks)
    assert results_in("out/rte/seed-17")["started_from"] == "out/mnli/seed-2"
    mnli, rte, base = weights("out/mnli/seed-2"), weights("out/rte/seed-17"), weights("out/mnli/seed-1")
    name = "bert.encoder.layer.0.output.dense.weight"
    torch.testing.assert_close(rte[name], mnli[name], rtol=0, atol=1e-9)
    assert (rte[name] - base[name]).abs().max() > 1e-3
    assert rte["classifier.weight"].shape == (2, 32)


def test_two_processes_evaluate_as_one(lion, monkeypatch, tmp_path):
    """21 and 5 examples in batches of 8 on each of two processes; the second seed after the first."""
    data = write_glue("data", ["stsb"], train=32, validation=21, test=5)
    argv = ["--task_name=stsb", "--data_dir", data, "--model_name_or_path", lion, *SHORT, "--max_steps=1"]
    argv += ["--seeds", "1", "2", "--learning_rate=1e-12", "--output_dir"]
    run_script(monkeypatch, *argv, "alone")
    run_and_check([*TWO_CPUS, SCRIPT, *argv, "both"], tmp_path)
    for seed in [1, 2]:
        alone, both = (results_in(f"{output}/stsb/seed-{seed}") for output in ["alone", "both"])
        assert both["after"]["eval_examples"] == 21
        for moment in ["before", "after"]:
            assert both[moment] == pytest.approx(alone[moment], rel=1e-5)
        assert both["examples"] == 2 * alone["examples"] == 8
    assert Path("both/submission/STS-B.tsv").read_text() == Path("alone/submission/STS-B.tsv").read_text()
    assert Path("both/glue.md").read_text().replace("both", "alone", 1) == Path("alone/glue.md").read_text()


def test_two_processes_train_as_one(lion, monkeypatch, tmp_path):
    """Updates of 8 examples: on one process in two micro-batches, on two in one each."""
    data = write_glue("data", ["sst2"], train=32)
    argv = ["--task_name=sst2", "--data_dir", data, "--model_name_or_path", lion, *SHORT, "--max_steps=4"]
    argv += ["--config", "hidden_dropout_prob=0.0", "--global_train_batch_size=8", "--learning_rate=1e-3"]
    argv += ["--logging_steps=1", "--eval_steps=4", "--output_dir"]
    run_script(monkeypatch, *argv, "alone")
    run_and_check([*TWO_CPUS, SCRIPT, *argv, "both"], tmp_path)
    alone, both = (results_in(f"{output}/sst2/seed-17") for output in ["alone", "both"])
    losses, rates = (
        [[entry[name] for entry in results["history"] if name in entry] for results in (alone, both)]
        for name in ("loss", "learning_rate")
    )
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert rates[0] == rates[1] and max(rates[0]) <= 1e-3 and rates[0][-1] == 0
    for name, tensor in weights("alone/sst2/seed-17").items():
        torch.testing.assert_close(weights("both/sst2/seed-17")[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("num_processes", "fitting"), [(1, 16), (2, 12), (3, 16), (4, 12), (8, 6), (5, None)])
def test_a_batch_is_divided_over_the_devices(num_processes, fitting, bert):
    data = write_glue("data", ["sst2"])
    argv = ["--task_name=sst2", "--data_dir", data, "--model_name_or_path", bert, "--output_dir=out"]
    sizes = ["--global_train_batch_size", "48", "--per_device_train_batch_size", "16"]
    _, (job,) = run_glue.parse([*map(str, argv), *sizes])
    job = run_glue.fit_batch_size(job, num_processes)
    if fitting is None:
        with pytest.raises(UsageError, match=r"global_train_batch_size 48 is not a multiple of"):
            run_glue.check_batches(job, 1000, num_processes)
    else:
        assert job.arguments.training.per_device_train_batch_size == fitting
        run_glue.check_batches(job, 1000, num_processes)


def test_a_comparison_has_both_models(bert, lion, monkeypatch, capsys):
    data = write_glue("data", ["sst2"])
    Path("data/SST-2/test.tsv").unlink()
    argv = ["--task_name=sst2", "--data_dir", f"{data}/SST-2", *SHORT, "--max_steps=1"]
    run_script(monkeypatch, *argv, "--model_name_or_path", bert, "--output_dir=glue-bert")
    compare = ["--model_name_or_path", lion, "--output_dir=glue-lion", "--compare", "glue-bert"]
    run_script(monkeypatch, *argv, *compare)
    scores = {
        name: results_in(f"{name}/sst2/seed-17")["after"]["eval_accuracy"] for name in ["glue-lion", "glue-bert"]
    }
    table = f"""\
| task | metric | glue-lion | glue-bert |
| --- | --- | --- | --- |
| SST-2 | accuracy | {100 * scores["glue-lion"]:.1f} (1) | {100 * scores["glue-bert"]:.1f} (1) |
"""
    assert Path("glue-lion/glue.md").read_text() == f"{table}\n{glue_report.NOTES}\n"
    assert table in capsys.readouterr().out
    assert not Path("glue-lion/submission").exists()  # there is no test set
    assert list(json.loads(Path("glue-lion/glue.json").read_text())["models"]) == ["glue-lion", "glue-bert"]
    # What is compared has its own results first and then those that it was compared with.
    written = json.loads(Path("glue-lion/glue.json").read_text())
    written["models"]["glue-lion"]["tasks"]["sst2"]["metrics"]["accuracy"]["mean"] = 0.123
    Path("glue-lion/glue.json").write_text(json.dumps(written))
    run_script(monkeypatch, *argv, "--model_name_or_path", bert, "--output_dir=glue-bert", "--compare", "glue-lion")
    row = f"| SST-2 | accuracy | {100 * scores['glue-bert']:.1f} (1) | 12.3 (1) |"
    assert row in Path("glue-bert/glue.md").read_text()
    failure = functools.partial(fails_with, monkeypatch, capsys, *argv, *compare[:3], "--compare")
    assert failure("nowhere").endswith("nowhere has no glue.json to compare with.")
    assert "two folders to compare are called glue-bert" in failure("glue-bert", "./glue-bert")
    assert "two folders to compare are called glue-lion" in failure("glue-lion")


# The report


def write_results(output_dir, task, seed, **metrics):
    folder = Path(output_dir, task, f"seed-{seed}")
    folder.mkdir(parents=True)
    after = {
        "step": 3,
        "eval_loss": 1.0,
        "eval_examples": 9,
        **{f"eval_{name}": value for name, value in metrics.items()},
    }
    Path(folder, "results.json").write_text(json.dumps({"task": task, "seed": seed, "after": after}))
    return folder


def write_all_results(output_dir):
    for seed, score in [(100, 0.5), (9, 0.9), (10, 0.7)]:
        write_results(output_dir, "cola", seed, matthews_correlation=score, combined_score=score)
    write_results(output_dir, "sst2", 1, accuracy=0.9, combined_score=0.9)
    write_results(output_dir, "mrpc", 1, accuracy=0.8, f1=0.9, combined_score=0.85)
    write_results(output_dir, "stsb", 1, pearson=0.8, spearmanr=0.7, combined_score=0.75)
    write_results(output_dir, "qqp", 1, accuracy=0.6, f1=0.4, combined_score=0.5)
    write_results(output_dir, "mnli", 1, matched_accuracy=0.8, mismatched_accuracy=0.7, combined_score=0.75)
    write_results(output_dir, "qnli", 1, accuracy=0.65, combined_score=0.65)
    write_results(output_dir, "rte", 1, accuracy=0.5, combined_score=0.5)
    write_results(output_dir, "wnli", 1, accuracy=0.0, combined_score=0.0)


def test_the_table_is_exact():
    write_all_results("ours")
    write_results("theirs", "qqp", 1, accuracy=0.7, f1=0.5, combined_score=0.6)
    table = glue_report.write_report(Path("ours"), {"theirs": glue_report.summarise(Path("theirs"))})
    # CoLA: 50, 70, 90; the deviation of three equidistant values is their distance. Average: 5.6 / 8.
    assert (
        table
        == f"""\
| task | metric | ours | theirs |
| --- | --- | --- | --- |
| CoLA | Matthews correlation | 70.0 ± 20.0 (3) |  |
| SST-2 | accuracy | 90.0 (1) |  |
| MRPC | accuracy | 80.0 (1) |  |
| MRPC | F1 | 90.0 (1) |  |
| STS-B | Pearson correlation | 80.0 (1) |  |
| STS-B | Spearman correlation | 70.0 (1) |  |
| QQP | accuracy | 60.0 (1) | 70.0 (1) |
| QQP | F1 | 40.0 (1) | 50.0 (1) |
| MNLI | accuracy, matched | 80.0 (1) |  |
| MNLI | accuracy, mismatched | 70.0 (1) |  |
| QNLI | accuracy | 65.0 (1) |  |
| RTE | accuracy | 50.0 (1) |  |
| WNLI | accuracy | 0.0 (1) |  |
| GLUE average |  | 70.0 |  |

{glue_report.NOTES}
"""
    )
    assert Path("ours/glue.md").read_text() == table
    models = json.loads(Path("ours/glue.json").read_text())["models"]
    assert models["ours"]["average"] == pytest.approx(0.7) and models["theirs"]["average"] is None
    cola = models["ours"]["tasks"]["cola"]
    assert cola["metrics"]["matthews_correlation"] == pytest.approx({"mean": 0.7, "std": 0.2})
    assert list(cola["seeds"]) == ["9", "10", "100"] and cola["best_seed"] == 9
    assert models["ours"]["tasks"]["rte"]["metrics"]["accuracy"] == {"mean": 0.5, "std": None}


@pytest.mark.parametrize("missing", ["cola", "wnli"])
def test_the_average_needs_every_task_but_wnli(missing):
    write_all_results("out")
    Path("out", missing).rename("elsewhere")
    summary = glue_report.summarise(Path("out"))
    assert (summary["average"] is None) == (missing == "cola")
    assert ("GLUE average |" in glue_report.make_table({"out": summary})) == (missing == "wnli")


def test_the_chart_has_a_bar_for_every_task_and_model(monkeypatch):
    write_all_results("ours")
    write_results("theirs", "qqp", 1, accuracy=0.7, f1=0.5, combined_score=0.6)
    drawn, bar = [], Axes.bar

    def spy(axes, places, heights, width, **options):
        drawn.append((places, heights, width, options))
        return bar(axes, places, heights, width, **options)

    monkeypatch.setattr(Axes, "bar", spy)
    glue_report.write_report(Path("ours"), {"theirs": glue_report.summarise(Path("theirs"))})
    (places, heights, width, options), (other_places, other_heights, _, other_options) = drawn
    assert heights == pytest.approx([70, 90, 85, 75, 50, 75, 65, 50, 0])
    assert options["yerr"] == pytest.approx([20, *[0] * 8])
    assert other_heights == pytest.approx([60]) and other_places[0] - places[4] == pytest.approx(width)
    assert (options["label"], other_options["label"]) == ("ours", "theirs")
    assert matplotlib.image.imread("ours/glue.png").std() > 0.05


def test_the_submission_is_that_of_the_best_seed():
    for seed, score in [(3, 0.2), (1, 0.8), (2, 0.8)]:
        folder = write_results("out", "rte", seed, accuracy=score, combined_score=score)
        glue_report.write_predictions(folder / "predictions", "RTE.tsv", [f"seed {seed}", "x"])
    glue_report.write_report(Path("out"), {})
    assert Path("out/submission/RTE.tsv").read_text() == "index\tprediction\n0\tseed 1\n1\tx\n"


def test_predictions_are_spelled_as_the_benchmark_reads_them():
    spelled = {
        name: [TASKS[name].submitted(label) for label in range(len(LABELS[name]))] for name in TSV if name != "stsb"
    }
    expected = {name: LABELS[name] if name in BY_NAME else ["0", "1"] for name in TSV if name != "stsb"}
    assert spelled == expected
    assert [TASKS["stsb"].submitted(score) for score in [-0.5, 1.23456, 5.1]] == ["0.000", "1.235", "5.000"]
    assert [TASKS["mnli"].submission_file(part) for part in TASKS["mnli"].parts] == ["MNLI-m.tsv", "MNLI-mm.tsv"]


# What is wrong is said in one sentence before anything is trained


def test_failures_are_one_sentence(bert, monkeypatch, capsys):
    data = write_glue("data", ["sst2", "mnli", "rte"])

    def failure(*argv):
        given = ["--task_name", "sst2", "rte", "--data_dir", data, "--model_name_or_path", bert, "--output_dir", "out"]
        message = fails_with(monkeypatch, capsys, *given, *SHORT, *argv)
        assert not list(Path(".").rglob("checkpoint-*"))
        return message

    assert "there is no folder nowhere." in failure("--data_dir", "nowhere")
    assert "data has no folder CoLA or cola." in failure("--task_name", "sst2", "cola")
    assert "cannot load the model nowhere" in failure("--model_name_or_path", "nowhere")
    assert "cannot load the tokenizer nowhere" in failure("--tokenizer_name", "nowhere")
    assert "give a tokenizer_name" in failure("--model_name_or_path", "")
    assert "SST-2 has 16 training examples, too few for a batch of 17: give" in failure(
        "--per_device_train_batch_size", "17"
    )
    assert "max_seq_length 64 exceeds the model's max_position_embeddings 32" in failure("--max_seq_length", "64")
    Path("taken").mkdir()
    Path("taken/model.safetensors").touch()
    assert "taken has model.safetensors, which is not of GLUE; --overwrite" in failure("--output_dir", "taken")
    assert "output_dir data/SST-2/dev.tsv is a file." in failure("--output_dir", "data/SST-2/dev.tsv")
    classifier("trained", LABELS["rte"])
    AutoTokenizer.from_pretrained(bert).save_pretrained("trained")
    message = failure("--model_name_or_path", "trained")
    assert "the labels entailment, not_entailment, not negative, positive of SST-2" in message
    Path("data/RTE/dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n")
    assert "row 0 of the validation split of data/RTE has the label 'maybe'" in failure()
