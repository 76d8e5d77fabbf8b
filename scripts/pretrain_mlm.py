"""Pretrain a masked language model from a recipe, on one device or many.

    python scripts/pretrain_mlm.py --recipe pretrain_text_base_lion_s --output_dir outputs/lion-s
    accelerate launch scripts/pretrain_mlm.py --recipe scripts/recipes/pretrain_text_base_lion_s.yaml \\
        --per_device_train_batch_size 64 --output_dir outputs/lion-s
    python scripts/pretrain_mlm.py --train_file reviews.csv --tokenizer_name my-tokenizer --output_dir outputs/small \\
        --config_overrides decay_type=fixed,hidden_size=128 --max_steps 500
    python scripts/pretrain_mlm.py --model_type bert ...            # any masked language model of Transformers

The command line overrides the recipe, the recipe overrides the defaults. One update sees `global_train_batch_size`
sequences, however many processes and micro-batches they are spread over, and its loss is the mean over their masked
tokens. output_dir receives the weights, the tokenizer, the config, results.json and loss_curve.png; the best and the
last checkpoint are beside them. Not here: resuming a run, DeepSpeed.
"""

import functools
import itertools
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import accelerate
import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, send_to_device, set_seed
from datasets import Dataset, Features, IterableDataset, List, Value, load_dataset
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.hf_argparser import HfArg

import lion_transformers
from lion_transformers.scripts.arguments import KeyValues, MergeKeyValues, UsageError, one_line, parse_arguments, run
from lion_transformers.scripts.checkpointing import (
    atomic_write,
    checkpoint_folder,
    claim_output_dir,
    clear_output_dir,
    prune_checkpoints,
    publish,
    publish_files,
    unfinished,
    write_json,
)
from lion_transformers.scripts.optimization import linear_schedule, weight_decay_groups
from lion_transformers.tokenization.corpus import CorpusError, files_arguments


def check_range(arguments: Any, names: list[str], low: float, below: float = math.inf) -> None:
    for name in names:
        if not low <= getattr(arguments, name) < below:
            upper = "" if below == math.inf else f" and below {below}"
            raise UsageError(f"{name} must be at least {low}{upper}, got {getattr(arguments, name)}.")


@dataclass
class ModelArguments:
    _argument_group_name = "model"

    model_type: str = HfArg(
        default="lion", help="Family of a new model, by Transformers' name: lion, bert, modernbert ..."
    )
    config: KeyValues = field(
        default_factory=KeyValues,
        metadata={
            "action": MergeKeyValues,
            "aliases": ["--config_overrides"],
            "metavar": "KEY=VALUE,KEY=VALUE",
            "help": "Fields of the model's configuration; may be repeated. A mapping in a recipe.",
        },
    )
    config_name: str | None = HfArg(
        default=None, help="Folder or Hub name of a configuration to start a new model from."
    )
    model_name_or_path: str | None = HfArg(
        default=None, help="Folder or Hub name of a model whose weights training continues from."
    )
    tokenizer_name: str | None = HfArg(
        default=None, help="Folder or Hub name of the tokenizer (that of the model, if there is one)."
    )
    pad_vocab_to_multiple_of: int = HfArg(default=8, help="Round the model's vocabulary up to a multiple of this.")


@dataclass
class DataArguments:
    _argument_group_name = "data"

    dataset_name: str | None = HfArg(default=None, help="Hub name or folder of a data set, for example allenai/c4.")
    dataset_config_name: str | None = HfArg(default=None, help="Its configuration, for example en.")
    train_file: list[str] | None = field(
        default=None, metadata={"help": "Text (a document a line), CSV, JSON or Parquet files, instead of a data set."}
    )
    validation_file: list[str] | None = field(
        default=None, metadata={"help": "Files of the same kind to evaluate on."}
    )
    validation_split_percentage: float = HfArg(
        default=5.0, help="Share held out where there is neither file nor split for it."
    )
    text_column: str = HfArg(default="text", help="Column that holds the text.")
    streaming: bool = HfArg(default=False, help="Read the data while training instead of preparing it on disk first.")
    shuffle_buffer_size: int = HfArg(default=10_000, help="Documents that a streamed data set is shuffled within.")
    max_seq_length: int = HfArg(default=128, help="Tokens in a sequence.")
    line_by_line: bool = HfArg(
        default=False, help="Make every document one sequence, cut at max_seq_length, instead of packing."
    )
    mlm_probability: float = HfArg(default=0.3, help="Share of tokens to predict in training.")
    eval_mlm_probability: float = HfArg(default=0.15, help="Share of tokens to predict in evaluation.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on the first so many sequences.")
    preprocessing_num_workers: int | None = HfArg(default=None, help="Processes that tokenise data on disk.")
    dataloader_num_workers: int = HfArg(
        default=0, help="Processes that load batches (and tokenise a stream) per device."
    )

    def __post_init__(self):
        check_range(self, ["max_seq_length"], low=1)
        check_range(self, ["mlm_probability", "eval_mlm_probability"], low=0, below=1)
        check_range(self, ["validation_split_percentage"], low=0, below=100)


@dataclass
class PretrainingArguments:
    _argument_group_name = "training"

    output_dir: str = field(metadata={"help": "Folder for everything that the run writes."})
    overwrite_output_dir: bool = HfArg(default=False, help="Write into output_dir even if it holds an earlier run.")
    global_train_batch_size: int | None = HfArg(
        default=None,
        help="Sequences per update over all devices; gradient accumulation follows. Default: one batch a device.",
    )
    per_device_train_batch_size: int = HfArg(default=8, help="Sequences per device in one forward pass.")
    per_device_eval_batch_size: int = HfArg(default=8, help="The same in evaluation.")
    learning_rate: float = HfArg(default=8e-4, help="Peak of the schedule.")
    warmup_ratio: float = HfArg(
        default=0.06, help="Share of the updates in which the rate rises linearly to its peak."
    )
    final_lr_ratio: float = HfArg(
        default=0.02, help="Share of the peak that it falls to, linearly, at the last update."
    )
    adam_beta1: float = HfArg(default=0.9, help="AdamW's β₁.")
    adam_beta2: float = HfArg(default=0.98, help="AdamW's β₂.")
    adam_epsilon: float = HfArg(default=1e-6, help="AdamW's ε.")
    weight_decay: float = HfArg(default=1e-5, help="AdamW's weight decay; biases, norms and decays are exempt.")
    max_grad_norm: float = HfArg(default=1.0, help="Norm that gradients are clipped to; 0 clips nothing.")
    num_train_epochs: float = HfArg(default=3.0, help="Passes over the data, where max_steps is not given.")
    max_steps: int = HfArg(default=-1, help="Updates; overrides num_train_epochs if positive.")
    mixed_precision: Literal["no", "bf16", "fp16"] = HfArg(
        default="no", help="Precision of the forward and backward passes."
    )
    seed: int = HfArg(default=17, help="Of weights, order and masks.")
    logging_steps: int = HfArg(default=50, help="Updates between two logs.")
    eval_steps: int = HfArg(default=500, help="Updates between two evaluations.")
    save_steps: int | None = HfArg(
        default=None, help="Updates between two checkpoints, a multiple of eval_steps, which is the default."
    )
    save_total_limit: int = HfArg(default=2, help="Checkpoints kept; the best and the last always are.")
    report_to: list[str] = field(
        default_factory=lambda: ["tensorboard"],
        metadata={"help": "Trackers by Accelerate's names (tensorboard wandb ...), all, or none."},
    )

    def __post_init__(self):
        self.save_steps = self.save_steps or self.eval_steps
        positive = ["per_device_train_batch_size", "per_device_eval_batch_size", "logging_steps", "eval_steps"]
        check_range(self, [*positive, "save_steps", "save_total_limit"], low=1)
        check_range(self, ["warmup_ratio", "final_lr_ratio"], low=0, below=1)
        if self.save_steps % self.eval_steps:
            raise UsageError(f"save_steps {self.save_steps} is not a multiple of eval_steps {self.eval_steps}.")


# Data: documents → sequences of token ids → masked micro-batches

SEQUENCE_FEATURES = Features({"input_ids": List(Value("int32")), "special_tokens_mask": List(Value("int8"))})


def load_documents(args: DataArguments, seed: int) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset]:
    """Training and validation documents, as the data set, the files or a random split give them."""
    if (args.dataset_name is None) == (args.train_file is None):
        raise UsageError("give either a dataset_name or a train_file.")
    if args.dataset_name and args.validation_file:
        raise UsageError("a validation_file goes with a train_file; a data set brings its own validation split.")
    source = args.dataset_name or " ".join(args.train_file)
    try:
        if args.dataset_name:
            splits = load_dataset(args.dataset_name, args.dataset_config_name, streaming=args.streaming)
        else:
            files = {"train": args.train_file, "validation": args.validation_file}
            files = files_arguments(**{split: names for split, names in files.items() if names})
            splits = load_dataset(**files, streaming=args.streaming)
        if "train" not in splits:
            raise UsageError(f"{source} has no train split, only {', '.join(splits)}.")
        for split in splits.values():
            check_text_column(split, args.text_column, source)
    except CorpusError as error:
        raise UsageError(one_line(error)) from error
    except (DatasetsError, OSError, ValueError) as error:
        # "An error occurred while generating the dataset" has the reason as its cause.
        raise UsageError(f"cannot load {source}: {one_line(error.__cause__ or error)}") from error
    if "validation" in splits:
        return splits["train"], splits["validation"]
    if args.streaming:
        raise UsageError(f"{source} has no validation split, and a stream cannot be split: give a validation_file.")
    if len(splits["train"]) < 2:
        raise UsageError(f"{source} is too small: a single document cannot be split for validation.")
    splits = splits["train"].train_test_split(test_size=args.validation_split_percentage / 100, seed=seed)
    return splits["train"], splits["test"]


def check_text_column(documents: Dataset | IterableDataset, text_column: str, source: str) -> None:
    first = next(iter(documents), None)
    if first is None:
        raise UsageError(f"{source} is empty.")
    if text_column not in first:
        raise UsageError(f"{source} has no column {text_column}; its columns are {', '.join(first)}.")
    if not isinstance(first[text_column], str | None):
        raise UsageError(f"column {text_column} of {source} holds {type(first[text_column]).__name__}, not text.")


def encode(
    batch: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    text_column: str,
    max_seq_length: int,
    line_by_line: bool,
) -> dict[str, list[list[int]]]:
    """Sequences from a batch of documents.

    Packed, as run_mlm.py does it: documents with their special tokens are joined and cut into blocks of exactly
    `max_seq_length`; what is left over at the end of the batch is dropped. Line by line: one sequence a document.
    """
    texts = [text for text in batch[text_column] if text and not text.isspace()]
    if not texts:
        return {name: [] for name in SEQUENCE_FEATURES}
    encoded = tokenizer(
        texts,
        truncation=line_by_line,
        max_length=max_seq_length if line_by_line else None,
        return_special_tokens_mask=True,
        verbose=False,  # "longer than the model's maximum" does not apply to what is cut into blocks
    )
    if line_by_line:
        return {name: encoded[name] for name in SEQUENCE_FEATURES}
    return {name: _blocks(encoded[name], max_seq_length) for name in SEQUENCE_FEATURES}


def _blocks(rows: Iterable[list[int]], size: int) -> list[list[int]]:
    joined = list(itertools.chain.from_iterable(rows))
    return [joined[start : start + size] for start in range(0, len(joined) - size + 1, size)]


def encode_documents(
    documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments
) -> Dataset | IterableDataset:
    columns = list(next(iter(documents)))
    on_disk = {} if args.streaming else {"num_proc": args.preprocessing_num_workers, "desc": "Tokenising"}
    return documents.map(
        encode,
        batched=True,
        remove_columns=columns,
        features=SEQUENCE_FEATURES,
        fn_kwargs={
            "tokenizer": tokenizer,
            "text_column": args.text_column,
            "max_seq_length": args.max_seq_length,
            "line_by_line": args.line_by_line,
        },
        **on_disk,
    )


def mask_once(
    batch: dict[str, list], indices: list[int], tokenizer: PreTrainedTokenizerBase, mlm_probability: float, seed: int
) -> dict[str, list[list[int]]]:
    """The library's masking, drawn from the seed and the place in the data alone: every evaluation asks the same."""
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=mlm_probability, seed=seed + indices[0])
    examples = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    masked = [collator([example]) for example in examples]
    return {name: [row[name][0].tolist() for row in masked] for name in ["input_ids", "labels"]}


def load_sequences(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[Dataset | IterableDataset, Dataset]:
    """Training sequences, masked when they are batched, and evaluation sequences, masked once and for all."""
    train, evaluation = load_documents(args, seed)
    if args.streaming:
        train = train.shuffle(seed=seed, buffer_size=args.shuffle_buffer_size)
    train = encode_documents(train, tokenizer, args)
    evaluation = encode_documents(evaluation, tokenizer, args)
    if args.streaming:
        # Evaluation needs a length, so that sequences are counted once over several processes.
        first = itertools.islice(evaluation, args.max_eval_samples)
        rows = list(datasets.utils.tqdm(first, desc="Reading the validation text", total=args.max_eval_samples))
        evaluation = Dataset.from_list(rows, SEQUENCE_FEATURES)
    for name, sequences in {"training": train, "validation": evaluation}.items():
        if isinstance(sequences, Dataset) and len(sequences) == 0:
            raise UsageError(f"the {name} text is too small for one sequence of {args.max_seq_length} tokens.")
    evaluation = evaluation.select(range(min(len(evaluation), args.max_eval_samples or len(evaluation))))
    return train, evaluation.map(
        mask_once,
        batched=True,
        with_indices=True,
        remove_columns=evaluation.column_names,
        fn_kwargs={"tokenizer": tokenizer, "mlm_probability": args.eval_mlm_probability, "seed": seed},
        desc="Masking the validation text",
    )


def train_batches(
    accelerator: Accelerator, sequences: Dataset | IterableDataset, collator: Any, batch_size: int, num_workers: int
) -> Iterator[dict[str, Tensor]]:
    """This process's micro-batches, full ones only, without end; each pass over the data has its own order."""
    streamed = isinstance(sequences, IterableDataset)
    if streamed:
        sequences = split_dataset_by_node(sequences, accelerator.process_index, accelerator.num_processes)
    loader = DataLoader(
        sequences,
        batch_size=batch_size,
        shuffle=None if streamed else True,
        collate_fn=collator,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=accelerator.device.type == "cuda",
    )
    if not streamed:  # a stream is already split over the processes
        loader = accelerator.prepare(loader)
    for epoch in itertools.count():
        (sequences if streamed else loader).set_epoch(epoch)
        batch = None
        for batch in loader:
            yield send_to_device(batch, accelerator.device)
        if batch is None:
            raise UsageError(
                f"the training text is too small for one batch of {batch_size} sequences"
                f" on each of {accelerator.num_processes} devices."
            )


# Model


def load_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase:
    name = args.tokenizer_name or args.model_name_or_path or args.config_name
    if name is None:
        raise UsageError("give a tokenizer_name: a folder or a name on the Hub.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load the tokenizer {name}: {one_line(error)}") from error
    for token in ["mask_token", "pad_token"]:
        if getattr(tokenizer, token) is None:
            raise UsageError(f"the tokenizer {name} has no {token}, which masked language modelling needs.")
    return tokenizer


def load_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> PreTrainedModel:
    """A new model, or one to continue from, whose vocabulary covers the tokenizer's. Master weights are float32."""
    multiple = args.pad_vocab_to_multiple_of
    padded_vocab_size = math.ceil(len(tokenizer) / multiple) * multiple
    for_tokenizer = {"vocab_size": padded_vocab_size, "pad_token_id": tokenizer.pad_token_id}
    name = args.model_name_or_path or args.config_name
    if name is None and args.model_type not in CONFIG_MAPPING:
        raise UsageError(f"unknown model_type {args.model_type}.")
    try:
        if args.model_name_or_path:
            config = AutoConfig.from_pretrained(name, **args.config)
            model = AutoModelForMaskedLM.from_pretrained(name, config=config, dtype=torch.float32)
        else:
            settings = {**for_tokenizer, **args.config}
            if name:
                config = AutoConfig.from_pretrained(name, **settings)
            else:
                config = AutoConfig.for_model(args.model_type, **settings)
            model = AutoModelForMaskedLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise UsageError(f"cannot make the model {name or args.model_type}: {one_line(error)}") from error
    max_positions = getattr(config, "max_position_embeddings", None) or max_seq_length
    if max_positions < max_seq_length and getattr(config, "position_embedding_type", "absolute") != "none":
        raise UsageError(
            f"max_seq_length {max_seq_length} exceeds the model's max_position_embeddings {max_positions}."
        )
    if model.config.vocab_size < len(tokenizer):
        model.resize_token_embeddings(padded_vocab_size)
    return model


# Training and evaluation


def accumulation_steps(global_batch_size: int | None, per_device_batch_size: int, num_processes: int) -> int:
    """Micro-batches of each process in one update."""
    at_once = per_device_batch_size * num_processes
    steps, rest = divmod(global_batch_size or at_once, at_once)
    if rest or not steps:
        raise UsageError(
            f"global_train_batch_size {global_batch_size} is not a multiple of {at_once}"
            f" ({per_device_batch_size} per device × {num_processes} processes)."
        )
    return steps


def predict_targets(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (targets, vocabulary) in float32, labels (targets,) and the mask (batch, length) of what is predicted."""
    labels = batch["labels"]
    predicted = labels != -100
    # Models with `sparse_prediction` make logits for the targets alone, once they are told which these are.
    logits = model(**batch).logits
    if logits.ndim == 3:
        logits = logits[predicted]
    return logits.float(), labels[predicted], predicted


def accumulate_gradients(
    accelerator: Accelerator, model: nn.Module, micro_batches: list[dict[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Gradients of the loss averaged over the targets of all micro-batches of all processes.

    The loss is made from the logits, because not every model of Transformers can sum its own. Micro-batches without
    targets add exactly nothing.

    Returns:
        The summed loss of this process, and the numbers of targets and tokens (2,) of all processes.
    """
    targets = sum((batch["labels"] != -100).sum() for batch in micro_batches)
    tokens = sum(batch["attention_mask"].sum() for batch in micro_batches)
    counts = accelerator.reduce(torch.stack([targets, tokens]), reduction="sum")
    # Processes' gradients are averaged, not summed.
    scale = accelerator.num_processes / counts[0].clamp(min=1)
    summed_loss = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else accelerator.no_sync(model):
            logits, labels, _ = predict_targets(model, batch)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            accelerator.backward(loss * scale)
        summed_loss += loss.detach()
    return summed_loss, counts


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> dict[str, float]:
    """Loss, perplexity and accuracy over all targets, each counted once however many processes there are."""
    was_training = model.training
    model.eval()
    rows = []
    for batch in tqdm(loader, desc="Evaluating", leave=False, disable=not accelerator.is_main_process):
        logits, labels, predicted = predict_targets(model, batch)
        sums = torch.zeros(*predicted.shape, 3, device=logits.device)  # (batch, length, [loss, correct, targets])
        losses = F.cross_entropy(logits, labels, reduction="none")
        sums[predicted] = torch.stack([losses, logits.argmax(-1) == labels, torch.ones_like(losses)], dim=-1)
        rows.append(accelerator.gather_for_metrics(sums.sum(1)).cpu())
    model.train(was_training)
    loss, correct, targets = torch.cat(rows).double().sum(0).tolist()
    mean_loss = loss / max(targets, 1)
    return {
        "eval_loss": mean_loss,
        "eval_perplexity": float(torch.tensor(mean_loss, dtype=torch.float64).exp()),
        "eval_masked_accuracy": correct / max(targets, 1),
        "eval_targets": int(targets),
    }


VERSIONED_MODULES = [lion_transformers, torch, transformers, accelerate, datasets]


@dataclass
class TrainerState:
    """What a run knows about itself; saved with every checkpoint."""

    max_steps: int
    step: int = 0
    tokens: int = 0
    train_seconds: float = 0.0  # without evaluation and saving
    best_step: int | None = None  # among the checkpoints
    best_loss: float | None = None
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Pretraining:
    """Everything that takes part in a run, prepared by Accelerate where that is due."""

    args: PretrainingArguments
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    batches: Iterator[dict[str, Tensor]]
    num_micro_batches: int
    eval_loader: DataLoader
    state: TrainerState

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir)

    def train(self) -> None:
        state, args = self.state, self.args
        self.evaluate()
        progress = tqdm(
            total=state.max_steps, desc="Training", unit="step", disable=not self.accelerator.is_main_process
        )
        updates, started = [], time.perf_counter()
        while state.step < state.max_steps:
            updates.append(self.update())
            state.step += 1
            progress.update()
            is_last = state.step == state.max_steps
            is_eval = is_last or state.step % args.eval_steps == 0
            if is_eval or state.step % args.logging_steps == 0:
                self.log_training(updates, started, progress)
                if is_eval:
                    self.evaluate()
                if is_last or state.step % args.save_steps == 0:
                    self.save_checkpoint()
                updates, started = [], time.perf_counter()
        progress.close()

    def update(self) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the optimizer. Returns accumulate_gradients' sums and the gradient's norm before clipping."""
        micro_batches = list(itertools.islice(self.batches, self.num_micro_batches))
        loss, counts = accumulate_gradients(self.accelerator, self.model, micro_batches)
        grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm or math.inf)
        self.optimizer.step()
        if not self.accelerator.optimizer_step_was_skipped:  # as fp16 does when gradients overflow
            self.scheduler.step()
        self.optimizer.zero_grad()
        return loss, counts, grad_norm

    def log_training(self, updates: list[tuple[Tensor, Tensor, Tensor]], started: float, progress: tqdm) -> None:
        losses, counts, grad_norms = (torch.stack(column) for column in zip(*updates, strict=True))
        loss = self.accelerator.reduce(losses.sum(), reduction="sum").item()
        targets, tokens = counts.sum(0).tolist()
        seconds = time.perf_counter() - started  # after .item(), which waited for the device
        self.state.tokens += tokens
        self.state.train_seconds += seconds
        metrics = {
            "loss": loss / max(targets, 1),
            "learning_rate": self.scheduler.get_last_lr()[0],
            "grad_norm": grad_norms[-1].item(),
            "tokens_per_second": tokens / seconds,
        }
        self.log(metrics)
        progress.set_postfix(loss=f"{metrics['loss']:.3f}", tokens_per_second=f"{metrics['tokens_per_second']:,.0f}")

    def evaluate(self) -> None:
        metrics = evaluate(self.accelerator, self.model, self.eval_loader)
        self.log(metrics)
        if self.accelerator.is_main_process:
            tqdm.write(f"step {self.state.step}: {describe(metrics)}")

    def log(self, metrics: dict[str, float]) -> None:
        self.state.history.append({"step": self.state.step, **metrics})
        names = {name: f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}" for name in metrics}
        self.accelerator.log({names[name]: value for name, value in metrics.items()}, step=self.state.step)

    def save_checkpoint(self) -> None:
        """A folder that AutoModelForMaskedLM loads, with the states of optimizer, schedule and generators."""
        state = self.state
        eval_loss = state.history[-1]["eval_loss"]  # no checkpoint without an evaluation just before it
        if eval_loss < (math.inf if state.best_loss is None else state.best_loss):
            state.best_step, state.best_loss = state.step, eval_loss
        folder = checkpoint_folder(self.output_dir, state.step)
        self.accelerator.save_state(unfinished(folder))
        if self.accelerator.is_main_process:
            self.tokenizer.save_pretrained(unfinished(folder))
            write_json(unfinished(folder) / "trainer_state.json", asdict(state))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            publish(folder)
            prune_checkpoints(self.output_dir, state.best_step, self.args.save_total_limit)

    def save_results(self, arguments: dict[str, Any], wall_seconds: float) -> dict[str, Any]:
        """The model, its tokenizer, a plot and, last of all, results.json: where it is, the run is complete."""
        folder = self.output_dir / "model"
        model = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(unfinished(folder))
        self.tokenizer.save_pretrained(unfinished(folder))
        publish_files(folder, self.output_dir)
        atomic_write(self.output_dir / "loss_curve.png", functools.partial(plot_losses, self.state.history))
        evaluations = [entry for entry in self.state.history if "eval_loss" in entry]
        results = {
            "before": evaluations[0],
            "after": evaluations[-1],
            "best": {"step": self.state.best_step, "eval_loss": self.state.best_loss},
            "steps": self.state.step,
            "tokens": self.state.tokens,
            "tokens_per_second": self.state.tokens / self.state.train_seconds,
            "wall_seconds": wall_seconds,
            "model": {"class": type(model).__name__, "parameters": model.num_parameters()},
            "arguments": arguments,
            "versions": {
                "python": platform.python_version(),
                **{module.__name__: module.__version__ for module in VERSIONED_MODULES},
            },
            "history": self.state.history,
        }
        write_json(self.output_dir / "results.json", results)
        return results


def describe(metrics: dict[str, float]) -> str:
    return (
        f"loss {metrics['eval_loss']:.4f}, perplexity {metrics['eval_perplexity']:.2f},"
        f" masked accuracy {metrics['eval_masked_accuracy']:.2%} of {metrics['eval_targets']} targets"
    )


def plot_losses(history: list[dict[str, float]], file: Path) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label, marker in [("loss", "training", ""), ("eval_loss", "evaluation", "o")]:
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        axes.plot(*zip(*points, strict=True), label=label, marker=marker)
    axes.set(xlabel="step", ylabel="loss per masked token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=150)


# The run


def make_accelerator(args: PretrainingArguments) -> Accelerator:
    try:
        accelerator = Accelerator(
            mixed_precision=args.mixed_precision,
            log_with=None if args.report_to == ["none"] else args.report_to,
            project_config=ProjectConfiguration(args.output_dir, logging_dir=str(Path(args.output_dir, "runs"))),
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        )
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != launched:  # each would train alone, into the same folder
        raise UsageError(f"{launched} processes that do not work together: without GPUs, set ACCELERATE_USE_CPU=true.")
    return accelerator


def count_steps(args: PretrainingArguments, sequences: Dataset | IterableDataset, global_batch_size: int) -> int:
    if args.max_steps > 0:
        return args.max_steps
    if isinstance(sequences, IterableDataset):
        raise UsageError("a stream has no length that num_train_epochs could count in: give max_steps.")
    return math.ceil(args.num_train_epochs * len(sequences) / global_batch_size)


def prepare(
    model_args: ModelArguments, data_args: DataArguments, args: PretrainingArguments, accelerator: Accelerator
) -> Pretraining:
    at_once = args.per_device_train_batch_size * accelerator.num_processes
    num_micro_batches = accumulation_steps(
        args.global_train_batch_size, args.per_device_train_batch_size, accelerator.num_processes
    )
    tokenizer = load_tokenizer(model_args)
    with accelerator.main_process_first():
        train, evaluation = load_sequences(data_args, tokenizer, args.seed)
    state = TrainerState(max_steps=count_steps(args, train, num_micro_batches * at_once))
    set_seed(args.seed, device_specific=True)  # dropout and masks differ over devices
    model = load_model(model_args, tokenizer, data_args.max_seq_length)
    optimizer = torch.optim.AdamW(
        weight_decay_groups(model, args.weight_decay),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )
    scheduler = linear_schedule(optimizer, state.max_steps, args.warmup_ratio, args.final_lr_ratio)
    eval_loader = DataLoader(
        evaluation,
        batch_size=args.per_device_eval_batch_size,
        collate_fn=DataCollatorForTokenClassification(tokenizer),  # pads labels along with their sequences
    )
    # The schedule is not prepared: Accelerate would advance it once for every process.
    model, optimizer, eval_loader = accelerator.prepare(model, optimizer, eval_loader)
    accelerator.register_for_checkpointing(scheduler)
    accelerator.register_save_state_pre_hook(functools.partial(save_weights, accelerator))
    batches = train_batches(
        accelerator,
        train,
        DataCollatorForLanguageModeling(tokenizer, mlm_probability=data_args.mlm_probability),
        args.per_device_train_batch_size,
        data_args.dataloader_num_workers,
    )
    # One batch now: text that is too short or broken is found before anything else takes time.
    batches = itertools.chain([next(batches)], batches)
    return Pretraining(
        args, accelerator, tokenizer, model, optimizer, scheduler, batches, num_micro_batches, eval_loader, state
    )


def save_weights(accelerator: Accelerator, models: list[nn.Module], weights: list[dict], folder: Path) -> None:
    """In place of Accelerate's own weights file, one that from_pretrained reads."""
    if accelerator.is_main_process:
        accelerator.unwrap_model(models[0]).save_pretrained(folder)
    weights.clear()


def main() -> None:
    started = time.perf_counter()
    model_args, data_args, args = parse_arguments([ModelArguments, DataArguments, PretrainingArguments], None, __doc__)
    output_dir = Path(args.output_dir)
    claim_output_dir(output_dir, args.overwrite_output_dir)
    accelerator = make_accelerator(args)
    accelerator.wait_for_everyone()
    transformers.logging.disable_progress_bar()  # one bar for the run, none for every file that it saves
    if accelerator.is_main_process:
        clear_output_dir(output_dir)
    else:
        transformers.logging.set_verbosity_error()
        datasets.disable_progress_bars()

    pretraining = prepare(model_args, data_args, args, accelerator)
    arguments = {**asdict(model_args), **asdict(data_args), **asdict(args)}
    accelerator.init_trackers("pretrain_mlm", config={name: str(value) for name, value in arguments.items()})
    pretraining.train()
    if accelerator.is_main_process:
        results = pretraining.save_results(arguments, time.perf_counter() - started)
        print(f"before: {describe(results['before'])}\nafter:  {describe(results['after'])}")
        print(f"{results['tokens_per_second']:,.0f} tokens per second; everything is in {output_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
