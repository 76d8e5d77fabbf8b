"""Finetune an encoder on the tasks of GLUE from a recipe, over several seeds, on one device or many.

    python scripts/run_glue.py --recipe glue_text_base_lion_s --model_name_or_path outputs/lion-s-base \\
        --output_dir outputs/glue-lion-s
    accelerate launch scripts/run_glue.py --recipe glue_text_base_lion_s --max_seq_length 512 ...   # the ablation
    python scripts/run_glue.py --task_name sst2 rte --seeds 1 2 3 --data_dir glue_data \\
        --model_name_or_path google-bert/bert-base-uncased --output_dir outputs/glue-bert   # any encoder
    ... --recipe glue_text_base_lion_s --compare outputs/glue-bert       # its table beside the own
    ... --recipe glue_text_base_lion_s --dataset_name "" --data_dir glue_data

The command line overrides the settings of a task (`tasks` in the recipe), these the rest of the recipe, the recipe the
defaults. Every task and seed is a run in output_dir/<task>/seed-<seed>, which leaves the model of its best evaluation,
its predictions for the test set and results.json. A call that was stopped goes on with the same command: finished runs
are not done again, an unfinished one goes on from its last checkpoint. MNLI comes first, and RTE, MRPC and STS-B start
from its best model, with new heads. --overwrite_output_dir does all of them again. At the end output_dir has glue.md,
glue.json and a chart over all runs in it and, from the best seeds, a submission. Not here: the set AX.
"""

import functools
import itertools
import json
import math
import sys
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.hf_argparser import HfArg

from lion_transformers.scripts import training
from lion_transformers.scripts.arguments import (
    KeyValues,
    MergeKeyValues,
    UsageError,
    as_arguments,
    parse_arguments,
    run,
)
from lion_transformers.scripts.batching import Batches, endless_batches, shuffled
from lion_transformers.scripts.checkpointing import list_checkpoints, removing_if_empty
from lion_transformers.scripts.glue import TASKS, DataArguments, Task, encode, load_task
from lion_transformers.scripts.glue_report import (
    best_seed,
    finished_runs,
    read_results,
    read_summaries,
    run_folder,
    write_predictions,
    write_report,
)
from lion_transformers.scripts.optimization import linear_schedule
from lion_transformers.scripts.reading import main_process_first
from lion_transformers.scripts.resuming import FREE_ARGUMENTS as FREE_IN_A_RUN
from lion_transformers.scripts.resuming import Checkpoint
from lion_transformers.scripts.training import (
    ArgumentGroups,
    TrainerState,
    TrainingArguments,
    TrainingRun,
    accumulation_steps,
    adamw,
    backward_full_batches,
    begin,
    build_model,
    check_max_seq_length,
    check_range,
    check_stop,
    evaluation_batches,
    leaving_on_sigterm,
    load_pretrained_config,
    load_tokenizer,
    make_accelerator,
    prepare_training,
    show_progress_once,
    start,
    stopping_on_signals,
)


METRIC = str(Path(__file__).parent / "metrics" / "glue")
STARTING_FROM_MNLI = ["rte", "mrpc", "stsb"]
OUTPUT_NAMES = {*TASKS, "glue.md", "glue.json", "glue.png", "submission", "runs"}
# Arguments that may differ between the calls that a set of runs is made in.
FREE_ARGUMENTS = {*FREE_IN_A_RUN, "task_name", "tasks", "seeds", "seed", "compare"} - {"global_train_batch_size"}

# Arguments that cannot be set for a single task.
COMMON_ARGUMENTS = {
    *["output_dir", "overwrite_output_dir", "resume_from_checkpoint", "task_name", "tasks", "compare", "report_to"],
    *["mixed_precision", "model_name_or_path", "tokenizer_name", "start_from_mnli"],
}


@dataclass
class ModelArguments(training.ModelArguments):
    tokenizer_name: str | None = HfArg(
        default=None, help="Folder or Hub name of the tokenizer (that of the model, if there is one)."
    )
    ignore_mismatched_sizes: bool = HfArg(
        default=False, help="Give a model whose classification head has other labels than the task a new head."
    )


@dataclass
class GlueArguments(TrainingArguments):
    task_name: list[str] = field(
        default_factory=lambda: ["all"], metadata={"help": f"Tasks, of {' '.join(TASKS)}, or all."}
    )
    seeds: list[int] | None = field(
        default=None, metadata={"help": "A run of each task for every one of them. Default: seed alone."}
    )
    tasks: KeyValues = field(
        default_factory=KeyValues,
        metadata={
            "action": MergeKeyValues,
            "metavar": "{TASK: {ARGUMENT: VALUE}}",
            "help": "Values of these arguments for single tasks, in a recipe. The command line wins over them too.",
        },
    )
    start_from_mnli: bool = HfArg(
        default=True,
        help="Start RTE, MRPC and STS-B from the best MNLI model, where MNLI is among the tasks or is finished.",
    )
    compare: list[str] | None = field(
        default=None, metadata={"help": "Output folders of earlier calls, to be in the table and the chart too."}
    )
    early_stopping_patience: int | None = HfArg(
        default=None, help="Evaluations without a better score after which a run ends. Default: it goes on."
    )
    learning_rate: float = HfArg(default=1e-5, help="Peak of the schedule.")
    warmup_ratio: float = HfArg(
        default=0.06,
        help="Share of the updates in which the rate rises linearly to its peak, to fall to 0 at the last.",
    )
    adam_beta2: float = HfArg(default=0.98, help="AdamW's β₂.")
    adam_epsilon: float = HfArg(default=1e-6, help="AdamW's ε.")
    weight_decay: float = HfArg(default=1e-6, help="AdamW's weight decay; biases, norms and decays are exempt.")
    eval_steps: int | None = HfArg(
        default=None, help="Updates between two evaluations. Default: one pass over the data."
    )

    def __post_init__(self):
        super().__post_init__()
        check_range(self, ["warmup_ratio"], low=0, below=1)
        check_range(self, ["learning_rate"], low=0)
        check_range(self, ["early_stopping_patience"], low=1)
        if unknown := [name for name in [*self.task_name, *self.tasks] if name not in {*TASKS, "all"}]:
            raise UsageError(f"GLUE has no task {unknown[0]}, only {', '.join(TASKS)}.")
        if wrong := [seed for seed in self.seeds or [] if not 0 <= seed < 2**32]:
            raise UsageError(f"seeds must be at least 0 and below {2**32}, got {wrong[0]}.")
        for name, settings in self.tasks.items():
            if not isinstance(settings, dict):
                raise UsageError(f"the settings of {name} in tasks must be a mapping of arguments, got {settings}.")
            if common := sorted(COMMON_ARGUMENTS & settings.keys()):
                raise UsageError(f"{common[0]} is the same for all tasks: it cannot be in the settings of {name}.")

    @property
    def chosen_tasks(self) -> list[str]:
        """Each once, in the order in which they are trained: MNLI before those that start from it."""
        chosen = [name for name in TASKS if name in self.task_name or "all" in self.task_name]
        return sorted(chosen, key=lambda name: name != "mnli")


@dataclass
class Arguments(ArgumentGroups):
    """All arguments of a run."""

    model: ModelArguments
    data: DataArguments
    training: GlueArguments


# The list of runs


@dataclass
class Job:
    """One run: a task, a seed, and the arguments with the settings of both."""

    task: Task
    seed: int
    arguments: Arguments

    @property
    def output_dir(self) -> Path:
        return Path(self.arguments.training.output_dir)

    def is_finished(self) -> bool:
        """Whether it has results.

        Raises:
            UsageError: these come from other arguments.
        """
        file = self.output_dir / "results.json"
        if not file.is_file():
            return False
        self.check_settings(self.output_dir, read_results(file))
        return True

    def check_settings(self, folder: Path, earlier: dict[str, Any]) -> None:
        """Refuse an earlier run of the same task, which would be averaged with this one, if it had other arguments."""
        for name, value in json.loads(json.dumps(self.arguments.flat)).items():
            if name not in FREE_ARGUMENTS and earlier["arguments"].get(name) != value:
                raise UsageError(
                    f"{folder} was trained with {name} {earlier['arguments'].get(name)}, not {value}: give another"
                    " output_dir, or --overwrite_output_dir to train again."
                )


def parse(argv: list[str]) -> tuple[Arguments, list[Job]]:
    """The arguments of a command line, and the runs that they ask for, in order."""
    kinds = [kind.type for kind in fields(Arguments)]
    names = [argument.name for kind in kinds for argument in fields(kind)]
    arguments = Arguments(*parse_arguments(kinds, argv, __doc__))
    jobs = []
    for name in arguments.training.chosen_tasks:
        # Settings of a task become a command line that stands before the given one, which wins.
        settings = as_arguments(arguments.training.tasks.get(name, {}), names)
        jobs += jobs_of_task(TASKS[name], Arguments(*parse_arguments(kinds, [*settings, *argv])))
    return arguments, jobs


def jobs_of_task(task: Task, arguments: Arguments) -> list[Job]:
    args = arguments.training
    has_mnli = "mnli" in args.chosen_tasks or finished_runs(Path(args.output_dir), "mnli")
    from_mnli = bool(args.start_from_mnli and task.name in STARTING_FROM_MNLI and has_mnli)
    jobs = []
    for seed in dict.fromkeys(args.seeds or [args.seed]):
        folder = str(run_folder(Path(args.output_dir), task.name, seed))
        resumed = args.resume_from_checkpoint
        if resumed is None or Path(folder).resolve() not in Path(resumed).resolve().parents:
            resumed = None  # the last checkpoint of every run that has any
        own = replace(args, seed=seed, output_dir=folder, start_from_mnli=from_mnli, resume_from_checkpoint=resumed)
        jobs.append(Job(task, seed, replace(arguments, training=own)))
    return jobs


def check_other_seeds(jobs: list[Job], output_dir: Path) -> None:
    """Refuse finished runs of the same tasks, with seeds that are not asked for now, that had other arguments."""
    asked = {job.output_dir for job in jobs}
    for job in jobs:
        for seed, results in finished_runs(output_dir, job.task.name).items():
            folder = run_folder(output_dir, job.task.name, seed)
            if folder not in asked:
                job.check_settings(folder, results)


def check_resumed_run(args: GlueArguments, jobs: list[Job]) -> None:
    """Refuse a checkpoint of none of the runs, and the last where none has any; all go on from theirs anyway."""
    folder = args.resume_from_checkpoint
    if folder is not None and args.overwrite_output_dir:
        raise UsageError("overwrite_output_dir begins anew, resume_from_checkpoint goes on: give one of them.")
    if folder == "latest" and not any(list_checkpoints(job.output_dir) for job in jobs):
        raise UsageError(f"output_dir {args.output_dir} has no checkpoint to resume from.")
    if folder not in (None, "latest") and not any(job.arguments.training.resume_from_checkpoint for job in jobs):
        raise UsageError(f"resume_from_checkpoint {folder} lies in the folder of none of the runs that are asked for.")


def check_output_dir(output_dir: Path, overwrite: bool) -> None:
    """Refuse a folder that holds something else than runs of this script."""
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError(f"output_dir {output_dir} is a file.")
    names = {path.name for path in output_dir.iterdir()} if output_dir.is_dir() else set()
    if not overwrite and (foreign := sorted(name for name in names - OUTPUT_NAMES if not name.startswith("."))):
        raise UsageError(
            f"output_dir {output_dir} has {foreign[0]}, which is not of GLUE; --overwrite_output_dir trains into it"
            " all the same."
        )


# Model


def has_other_labels(args: ModelArguments, task: Task) -> bool:
    """Whether the model to start from has a classification head, and for other labels or in another order."""
    config = load_pretrained_config(args)
    is_classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
    return is_classifier and list(task.labels) != [config.id2label[label] for label in sorted(config.id2label)]


def check_labels(args: ModelArguments, task: Task) -> None:
    if args.model_name_or_path and not args.ignore_mismatched_sizes and has_other_labels(args, task):
        labels = load_pretrained_config(args).id2label
        raise UsageError(
            f"the classification head of {args.model_name_or_path} has the labels {', '.join(labels.values())}, not"
            f" {', '.join(task.labels)} of {task.title}: give the encoder that it was made from, or"
            " --ignore_mismatched_sizes for a new head."
        )


def load_model(
    args: ModelArguments, task: Task, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> PreTrainedModel:
    """A classifier, or regressor, whose configuration names the task's labels in GLUE's order."""
    check_labels(args, task)
    settings = {
        "id2label": dict(enumerate(task.labels)),
        "label2id": {name: label for label, name in enumerate(task.labels)},
        "problem_type": "regression" if task.is_regression else "single_label_classification",
    }
    loading = {}
    if args.model_name_or_path:
        loading["ignore_mismatched_sizes"] = has_other_labels(args, task)
    else:
        settings |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = build_model(args, AutoModelForSequenceClassification, settings, **loading)
    check_max_seq_length(model.config, max_seq_length)
    if len(tokenizer) > model.config.vocab_size:
        raise UsageError(f"the tokenizer has {len(tokenizer)} tokens, the model only {model.config.vocab_size}.")
    if args.model_name_or_path and has_other_labels(args, task):
        renew_head(model)  # one of the same size has been loaded
    return model


def renew_head(model: PreTrainedModel) -> None:
    """Replace everything but the encoder with new weights."""
    new = AutoModelForSequenceClassification.from_config(model.config, dtype=torch.float32)
    for name, module in new.named_children():
        if name != new.base_model_prefix:
            setattr(model, name, module)


def sum_loss(task: Task, logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, or squared error of a regression, summed over the batch.

    Args:
        task: which of the two.
        logits: (batch, labels).
        labels: (batch,).
    """
    if task.is_regression:
        return F.mse_loss(logits.float().squeeze(-1), labels.float(), reduction="sum")
    return F.cross_entropy(logits.float(), labels, reduction="sum")


# Evaluation


@torch.no_grad()
def predict(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[Tensor, Tensor | None]:
    """Logits (examples, labels) and, where there are any, labels (examples,): every example once, on the CPU."""
    was_training = model.training
    model.eval()
    rows = []
    for batch in evaluation_batches(accelerator, loader):
        labels = batch.pop("labels", None)
        with accelerator.autocast():
            logits = model(**batch).logits.float()
        gathered = accelerator.gather_for_metrics((logits,) if labels is None else (logits, labels))
        rows.append([part.cpu() for part in gathered])
    model.train(was_training)
    logits, *labels = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return logits, labels[0] if labels else None


def decide(task: Task, logits: Tensor) -> list[int] | list[float]:
    """Ids of labels, or scores, from logits (examples, labels)."""
    return logits.squeeze(-1).double().tolist() if task.is_regression else logits.argmax(-1).tolist()


@dataclass
class GlueRun(TrainingRun):
    task: Task
    tokenizer: PreTrainedTokenizerBase
    eval_loaders: dict[str, DataLoader]  # by part of the evaluation set
    test_loaders: dict[str, DataLoader]

    script = "run_glue"
    unit = "examples"
    loss_label = "loss per example"
    metric_for_best_model = "eval_combined_score"
    greater_is_better = True
    load_best_model_at_end = True

    def accumulate_gradients(self, micro_batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        return backward_full_batches(self.accelerator, self.model, micro_batches, self.sum_loss)

    def sum_loss(self, batch: dict[str, Tensor]) -> Tensor:
        batch = dict(batch)
        labels = batch.pop("labels")
        with self.accelerator.autocast():
            logits = self.model(**batch).logits
        return sum_loss(self.task, logits, labels)

    def compute_metrics(self) -> dict[str, float]:
        parts = {part: predict(self.accelerator, self.model, loader) for part, loader in self.eval_loaders.items()}
        # On one process, because `evaluate` writes the module into a cache that all share.
        metrics = [compute_metrics(self.task, parts) if self.accelerator.is_main_process else None]
        return broadcast_object_list(metrics)[0]

    def describe(self, metrics: dict[str, float]) -> str:
        return describe(metrics)

    def stops_early(self) -> bool:
        patience, metric = self.args.early_stopping_patience, self.metric_for_best_model
        scores = [entry[metric] for entry in self.state.history if metric in entry and entry["step"] > 0]
        if patience is None or not scores:
            return False
        return len(scores) - 1 - scores.index(max(scores)) >= patience

    def save_processor(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)

    def predict_test_sets(self) -> None:
        """Write what the benchmark would be sent."""
        for part, loader in self.test_loaders.items():
            logits, _ = predict(self.accelerator, self.model, loader)
            if self.accelerator.is_main_process:
                predictions = [self.task.submitted(prediction) for prediction in decide(self.task, logits)]
                write_predictions(self.output_dir / "predictions", self.task.submission_file(part), predictions)


def compute_metrics(task: Task, parts: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Loss and metrics from the logits and labels of each part of the evaluation set; scores are means over parts."""
    losses, metrics, scores = [], {}, []
    for part, (logits, labels) in parts.items():
        losses.append(sum_loss(task, logits, labels).item())
        metric = evaluate.load(METRIC, task.name, keep_in_memory=True)
        values = metric.compute(predictions=decide(task, logits), references=labels.tolist())
        scores.append(values.pop("combined_score"))
        metrics |= {f"eval_{part}_{name}" if part else f"eval_{name}": value for name, value in values.items()}
    examples = sum(len(labels) for _, labels in parts.values())
    return {
        "eval_loss": sum(losses) / examples,
        **metrics,
        "eval_combined_score": sum(scores) / len(scores),
        "eval_examples": examples,
    }


def describe(metrics: dict[str, float]) -> str:
    names = [name for name in metrics if name not in ["step", "eval_loss", "eval_examples", "eval_combined_score"]]
    scores = [f"{name.removeprefix('eval_').replace('_', ' ')} {100 * metrics[name]:.2f}" for name in names]
    return f"loss {metrics['eval_loss']:.4f}, {', '.join(scores)} of {metrics['eval_examples']} examples"


# The runs


def make_train_batches(
    accelerator: Accelerator, rows: Dataset, collator: Any, args: GlueArguments, num_workers: int, start: int
) -> Batches:
    """This process's micro-batches from number `start` on: full ones, without end, every pass in its own order."""
    return endless_batches(
        accelerator,
        rows,
        shuffled(len(rows), args.seed),
        collator,
        batch_size=args.per_device_train_batch_size,
        num_workers=num_workers,
        seed=args.seed,
        start=start,
        unit="examples",
    )


def prepare(
    job: Job,
    model_args: ModelArguments,
    splits: dict[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    checkpoint: Checkpoint | None,
) -> GlueRun:
    """A run that begins, or one that goes on from a checkpoint."""
    args, data_args, task = job.arguments.training, job.arguments.data, job.task
    num_micro_batches = accumulation_steps(
        args.global_train_batch_size, args.per_device_train_batch_size, accelerator.num_processes
    )
    global_batch_size = num_micro_batches * args.per_device_train_batch_size * accelerator.num_processes
    steps_per_epoch = len(splits["train"]) / global_batch_size
    max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
    state = TrainerState(**checkpoint.state) if checkpoint else TrainerState(max_steps)
    set_seed(args.seed)  # the same new head everywhere
    model = load_model(model_args, task, tokenizer, data_args.max_seq_length)
    optimizer = adamw(model, args, args.learning_rate)
    scheduler = linear_schedule(optimizer, max_steps, args.warmup_ratio, final_lr_ratio=0.0)
    model, optimizer = prepare_training(accelerator, model, optimizer)
    collator = DataCollatorWithPadding(tokenizer)
    num_workers, seen = data_args.dataloader_num_workers, state.step * num_micro_batches
    batches = make_train_batches(accelerator, splits["train"], collator, args, num_workers, seen)

    def loaders(splits_of_parts: dict[str, str]) -> dict[str, DataLoader]:
        batch_size = args.per_device_eval_batch_size
        return {
            part: accelerator.prepare(DataLoader(splits[split], batch_size=batch_size, collate_fn=collator))
            for part, split in splits_of_parts.items()
            if split in splits
        }

    glue_run = GlueRun(
        args=replace(args, eval_steps=args.eval_steps or math.ceil(steps_per_epoch)),
        record=job.arguments.flat,
        layout={"global_train_batch_size": global_batch_size, "training_examples": len(splits["train"])},
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        num_micro_batches=num_micro_batches,
        state=state,
        task=task,
        tokenizer=tokenizer,
        eval_loaders=loaders(task.validation_splits),
        test_loaders=loaders(task.test_splits),
    )
    glue_run.resume(checkpoint)
    return glue_run


def model_to_start_from(job: Job, output_dir: Path) -> ModelArguments:
    """The model that is given, or the best of MNLI, with a new head."""
    args = job.arguments.model
    if not job.arguments.training.start_from_mnli:
        return args
    mnli = run_folder(output_dir, "mnli", best_seed(finished_runs(output_dir, "mnli")))
    return replace(args, model_name_or_path=str(mnli), ignore_mismatched_sizes=True)


def train_and_save(job: Job, splits: dict[str, Dataset], tokenizer: PreTrainedTokenizerBase, output_dir: Path) -> None:
    """One run, from its beginning or its last checkpoint.

    Raises:
        StopRequested: in the middle of it; there is a checkpoint.
    """
    started = time.perf_counter()
    with removing_if_empty(Path(job.arguments.training.output_dir)):
        accelerator, checkpoint = start(job.arguments.training, job.arguments.flat, GlueRun.script, FREE_ARGUMENTS)
        model_args = model_to_start_from(job, output_dir)
        if accelerator.is_main_process:
            tqdm.write(f"{job.task.title}, seed {job.seed}:")
        glue_run = prepare(job, model_args, splits, tokenizer, accelerator, checkpoint)
        begin(accelerator, GlueRun.script, job.arguments.flat, checkpoint)
    try:
        glue_run.train(started)
        glue_run.predict_test_sets()
        glue_run.save_results(task=job.task.name, seed=job.seed, started_from=model_args.model_name_or_path)
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
    accelerator.free_memory()
    accelerator.wait_for_everyone()  # for results.json, which says what is next


def load_tasks(jobs: list[Job], accelerator: Accelerator) -> dict[str, dict[str, Dataset]]:
    """The data of all tasks, so that what is wrong with any of them is found before anything is trained."""
    loaded = {}
    for name, job in {job.task.name: job for job in jobs}.items():
        alone = len(job.arguments.training.chosen_tasks) == 1
        load = functools.partial(load_task, job.task, job.arguments.data, alone)
        loaded[name] = main_process_first(accelerator, load)
        check_labels(job.arguments.model, job.task)
        check_batches(job, len(loaded[name]["train"]), accelerator.num_processes)
    return loaded


def fit_batch_size(job: Job, num_processes: int) -> Job:
    """The same run with the largest batch per device, up to the given one, that the global batch is a multiple of."""
    args = job.arguments.training
    share = (args.global_train_batch_size or 0) // num_processes
    fitting = [size for size in range(1, args.per_device_train_batch_size + 1) if share and share % size == 0]
    size = max(fitting, default=args.per_device_train_batch_size)
    return replace(job, arguments=replace(job.arguments, training=replace(args, per_device_train_batch_size=size)))


def check_batches(job: Job, num_examples: int, num_processes: int) -> None:
    args = job.arguments.training
    accumulation_steps(args.global_train_batch_size, args.per_device_train_batch_size, num_processes)
    at_once = args.per_device_train_batch_size * num_processes
    if num_examples < at_once:
        raise UsageError(
            f"{job.task.title} has {num_examples} training examples, too few for a batch of {at_once}: give"
            " a smaller per_device_train_batch_size."
        )


def load_task_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase:
    name = args.tokenizer_name or args.model_name_or_path or args.config_name
    return load_tokenizer(name, ["pad_token"], "padding")


def main() -> None:
    arguments, jobs = parse(sys.argv[1:])
    args, output_dir = arguments.training, Path(arguments.training.output_dir)
    check_output_dir(output_dir, args.overwrite_output_dir)
    check_resumed_run(args, jobs)
    compared = read_summaries(args.compare or [], output_dir.resolve().name)
    check_other_seeds(jobs, output_dir)
    pending = [job for job in jobs if args.overwrite_output_dir or not job.is_finished()]
    with leaving_on_sigterm():
        accelerator = make_accelerator(args)
        show_progress_once(accelerator)
        pending = [fit_batch_size(job, accelerator.num_processes) for job in pending]
        rows = load_tasks(pending, accelerator)
        tokenizer = load_task_tokenizer(arguments.model) if pending else None
    with stopping_on_signals(accelerator):
        for name, group in itertools.groupby(pending, key=lambda job: job.task.name):
            runs = list(group)
            max_seq_length = runs[0].arguments.data.max_seq_length
            encode_rows = functools.partial(encode, TASKS[name], rows.pop(name), tokenizer, max_seq_length)
            splits = main_process_first(accelerator, encode_rows)
            for job in runs:
                check_stop(accelerator)
                train_and_save(job, splits, tokenizer, output_dir)
    if accelerator.is_main_process:
        print(write_report(output_dir, compared))
        print(f"everything is in {output_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
