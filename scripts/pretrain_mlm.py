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
last checkpoint are beside them. A run that was stopped goes on with the same command. Several GPUs or machines:
scripts/accelerate.
"""

import functools
import itertools
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel, set_seed
from accelerate.utils import load as load_without_code
from datasets import Dataset, Features, IterableDataset, List, Value, load_dataset
from datasets.distributed import split_dataset_by_node
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.hf_argparser import HfArg

from lion_transformers import LionConfig
from lion_transformers.scripts import training
from lion_transformers.scripts.arguments import UsageError, parse_arguments, run
from lion_transformers.scripts.batching import (
    Batches,
    StreamedBatches,
    check_first_batch,
    derived_seed,
    drawing_from,
    endless_batches,
    shuffle_stream,
    shuffled,
)
from lion_transformers.scripts.checkpointing import removing_if_empty
from lion_transformers.scripts.optimization import linear_schedule
from lion_transformers.scripts.packing import PACKED_FEATURES, pack_documents
from lion_transformers.scripts.reading import MAX_CHARACTERS, ReadStream, hold_out, loading, main_process_first
from lion_transformers.scripts.resuming import Checkpoint
from lion_transformers.scripts.training import (
    ArgumentGroups,
    TrainerState,
    TrainingArguments,
    TrainingRun,
    accumulation_steps,
    adamw,
    backward_micro_batches,
    begin,
    build_model,
    check_max_seq_length,
    check_range,
    evaluation_batches,
    leaving_on_sigterm,
    load_tokenizer,
    prepare_training,
    start,
    stopping_on_signals,
)
from lion_transformers.tokenization.corpus import files_arguments


@dataclass
class ModelArguments(training.ModelArguments):
    tokenizer_name: str | None = HfArg(
        default=None, help="Folder or Hub name of the tokenizer (that of the model, if there is one)."
    )
    pad_vocab_to_multiple_of: int = HfArg(default=8, help="Round the model's vocabulary up to a multiple of this.")

    def __post_init__(self):
        check_range(self, ["pad_vocab_to_multiple_of"], low=1)


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
        default=False, help="Make every document one sequence, cut at max_seq_length, instead of joining them."
    )
    packing: bool = HfArg(
        default=False,
        help="Fill sequences with whole documents that do not see each other, instead of joining and cutting them.",
    )
    mlm_probability: float = HfArg(default=0.3, help="Share of tokens to predict in training.")
    eval_mlm_probability: float = HfArg(default=0.15, help="Share of tokens to predict in evaluation.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on the first so many sequences.")
    preprocessing_num_workers: int | None = HfArg(default=None, help="Processes that tokenise data on disk.")
    dataloader_num_workers: int = HfArg(
        default=0, help="Processes that load batches (and tokenise a stream) per device."
    )

    def __post_init__(self):
        sizes = ["max_seq_length", "max_eval_samples", "shuffle_buffer_size", "preprocessing_num_workers"]
        check_range(self, sizes, low=1)
        check_range(self, ["dataloader_num_workers"], low=0)
        check_range(self, ["mlm_probability", "eval_mlm_probability"], above=0, below=1)
        check_range(self, ["validation_split_percentage"], low=0, below=100)
        if self.packing and self.line_by_line:
            raise UsageError("packing puts several documents into a sequence, line_by_line one: give one of them.")


@dataclass
class PretrainingArguments(TrainingArguments):
    learning_rate: float = HfArg(default=8e-4, help="Peak of the schedule.")
    warmup_ratio: float = HfArg(
        default=0.06, help="Share of the updates in which the rate rises linearly to its peak."
    )
    final_lr_ratio: float = HfArg(
        default=0.02, help="Share of the peak that it falls to, linearly, at the last update."
    )
    adam_beta2: float = HfArg(default=0.98, help="AdamW's β₂.")
    adam_epsilon: float = HfArg(default=1e-6, help="AdamW's ε.")
    weight_decay: float = HfArg(default=1e-5, help="AdamW's weight decay; biases, norms and decays are exempt.")

    def __post_init__(self):
        super().__post_init__()
        check_range(self, ["warmup_ratio", "final_lr_ratio"], low=0, below=1)
        check_range(self, ["learning_rate"], low=0)


# Data: documents → sequences of token ids → masked micro-batches

SEQUENCE_FEATURES = Features({"input_ids": List(Value("int32")), "special_tokens_mask": List(Value("int8"))})


def sequence_features(args: DataArguments) -> Features:
    return PACKED_FEATURES if args.packing else SEQUENCE_FEATURES


def load_documents(args: DataArguments, seed: int) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset]:
    """Training and validation documents, as the data set, the files or a random split give them."""
    if (args.dataset_name is None) == (args.train_file is None):
        raise UsageError("give either a dataset_name or a train_file.")
    if args.dataset_name and args.validation_file:
        raise UsageError("a validation_file goes with a train_file; a data set brings its own validation split.")
    files = {"train": args.train_file, "validation": args.validation_file}
    files = {split: names for split, names in files.items() if names}
    sources = {split: " ".join(names) for split, names in files.items()}
    source = args.dataset_name or sources["train"]
    with loading(" ".join(sources.values()) or source, **sources):
        if args.dataset_name:
            splits = load_dataset(args.dataset_name, args.dataset_config_name, streaming=args.streaming)
        else:
            splits = load_dataset(**files_arguments(**files), streaming=args.streaming)
        if "train" not in splits:
            raise UsageError(f"{source} has no train split, only {', '.join(splits)}.")
        for split, documents in splits.items():
            check_text_column(documents, args.text_column, sources.get(split, source))
    if "validation" in splits:
        return splits["train"], splits["validation"]
    if args.streaming:
        raise UsageError(f"{source} has no validation split, and a stream cannot be split: give a validation_file.")
    return hold_out(splits["train"], args.validation_split_percentage, seed, source)


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
    line_by_line: bool = False,
    packing: bool = False,
) -> dict[str, list[list[int]]]:
    """Sequences from a batch of documents.

    Joined, as run_mlm.py does it: documents with their special tokens are joined and cut into blocks of exactly
    `max_seq_length`; what is left over at the end of the batch is dropped. Line by line: one sequence a document.
    Packed: as `pack_documents` does it, within the batch, so that a stream has no state between batches.

    Raises:
        UsageError: a document is none, or too long to be tokenised at once.
    """
    texts = [text for text in batch[text_column] if text and not _checked(text, text_column).isspace()]
    longest = max(map(len, texts), default=0)
    if longest > MAX_CHARACTERS:
        raise UsageError(
            f"a document has {longest:,} characters, more than the {MAX_CHARACTERS:,} that are tokenised at once:"
            " cut it into several."
        )
    if not texts:
        return {name: [] for name in (PACKED_FEATURES if packing else SEQUENCE_FEATURES)}
    encoded = tokenizer(
        texts,
        truncation=line_by_line,
        max_length=max_seq_length if line_by_line else None,
        return_special_tokens_mask=True,
        verbose=False,  # "longer than the model's maximum" does not apply to what is cut into blocks
    )
    if packing:
        documents = (encoded[name] for name in SEQUENCE_FEATURES)
        return pack_documents(*documents, max_seq_length, tokenizer.pad_token_id)
    if line_by_line:
        return {name: encoded[name] for name in SEQUENCE_FEATURES}
    return {name: _blocks(encoded[name], max_seq_length) for name in SEQUENCE_FEATURES}


def _checked(text: Any, text_column: str) -> str:
    if not isinstance(text, str):  # as JSON can have it
        raise UsageError(f"column {text_column} has {text!r:.50}, not text.")
    return text


def _blocks(rows: Iterable[list[int]], size: int) -> list[list[int]]:
    joined = list(itertools.chain.from_iterable(rows))
    return [joined[start : start + size] for start in range(0, len(joined) - size + 1, size)]


def encode_documents(
    documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments
) -> Dataset | IterableDataset:
    on_disk = {} if args.streaming else {"num_proc": args.preprocessing_num_workers, "desc": "Tokenising"}
    return documents.select_columns([args.text_column]).map(
        encode,
        batched=True,
        remove_columns=[args.text_column],
        features=sequence_features(args),
        fn_kwargs={
            "tokenizer": tokenizer,
            "text_column": args.text_column,
            "max_seq_length": args.max_seq_length,
            "line_by_line": args.line_by_line,
            "packing": args.packing,
        },
        **on_disk,
    )


def mask_once(
    batch: dict[str, list], indices: list[int], tokenizer: PreTrainedTokenizerBase, mlm_probability: float, seed: int
) -> dict[str, list[list[int]]]:
    """The library's masking, drawn from the seed and the place in the data alone: every evaluation asks the same."""
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=mlm_probability, seed=seed + indices[0])
    examples = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    return _as_columns(collator([example]) for example in examples)


def mask_by_content(
    batch: dict[str, list], collator: DataCollatorForLanguageModeling, seed: int
) -> dict[str, list[list[int]]]:
    """The library's masking, drawn from the seed and the sequence itself.

    Its place in a stream depends on who else reads it. Copies of a sequence that stand in one batch have targets of
    their own.
    """
    examples = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    copies: Counter[int] = Counter()

    def mask(example: dict[str, list[int]]) -> dict[str, Tensor]:
        content = zlib.crc32(np.asarray(example["input_ids"], dtype=np.int32))
        copies[content] += 1
        with drawing_from(seed, content, copies[content]):
            return collator([example])

    return _as_columns(map(mask, examples))


def _as_columns(masked: Iterable[dict[str, Tensor]]) -> dict[str, list[list[int]]]:
    """Batches of one sequence each → columns of a data set."""
    rows = list(masked)
    return {name: [row[name][0].tolist() for row in rows] for name in rows[0]}


@dataclass
class MaskedSequences(torch.utils.data.Dataset):
    """Sequences whose targets are drawn anew whenever one is taken."""

    sequences: Dataset
    collator: DataCollatorForLanguageModeling

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: row[0] for name, row in self.collator([self.sequences[index]]).items()}


def masked_stream(
    documents: IterableDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments, seed: int, epoch: int
) -> IterableDataset:
    """One pass over streamed documents as sequences with targets, all in an order and by chances of its own."""
    seed = derived_seed(seed, epoch)
    documents = shuffle_stream(documents, seed, args.shuffle_buffer_size)
    sequences = encode_documents(documents, tokenizer, args)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=args.mlm_probability)
    masking = {"collator": collator, "seed": seed}
    return sequences.map(mask_by_content, batched=True, remove_columns=sequences.column_names, fn_kwargs=masking)


def mask_sequences(
    sequences: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    mlm_probability: float,
    seed: int,
    **options: Any,
) -> Dataset:
    """Sequences with targets that stay the same."""
    return sequences.map(
        mask_once,
        batched=True,
        with_indices=True,
        remove_columns=sequences.column_names,
        fn_kwargs={"tokenizer": tokenizer, "mlm_probability": mlm_probability, "seed": seed},
        **options,
    )


Stream = Callable[[int], IterableDataset]  # from the number of a pass over the data to its sequences


def load_sequences(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[MaskedSequences | Stream, Dataset]:
    """Training sequences, masked anew in every pass, and evaluation sequences, masked once and for all."""
    train, evaluation = load_documents(args, seed)
    evaluation = encode_documents(evaluation, tokenizer, args)
    if args.streaming:
        # Evaluation needs a length, so that sequences are counted once over several processes.
        first = itertools.islice(ReadStream(evaluation), args.max_eval_samples)
        rows = list(datasets.utils.tqdm(first, desc="Reading the validation text", total=args.max_eval_samples))
        check_not_empty(rows, "validation", args)
        evaluation = Dataset.from_list(rows, sequence_features(args))
        sequences = functools.partial(masked_stream, train, tokenizer, args, seed)
    else:
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=args.mlm_probability)
        sequences = MaskedSequences(encode_documents(train, tokenizer, args), collator)
        check_not_empty(sequences, "training", args)
    check_not_empty(evaluation, "validation", args)
    evaluation = evaluation.select(range(min(len(evaluation), args.max_eval_samples or len(evaluation))))
    masking = "Masking the validation text"
    return sequences, mask_sequences(evaluation, tokenizer, args.eval_mlm_probability, seed, desc=masking)


def check_not_empty(sequences: Sized, name: str, args: DataArguments) -> None:
    if len(sequences) == 0:
        raise UsageError(f"the {name} text is too small for one sequence of {args.max_seq_length} tokens.")


def train_batches(
    accelerator: Accelerator,
    sequences: MaskedSequences | Stream,
    collator: Callable[[list[Any]], dict[str, Tensor]],
    *,
    batch_size: int,
    num_workers: int,
    seed: int,
    start: int = 0,
) -> Batches:
    """This process's micro-batches, full ones only, without end; each pass over the data has its own order.

    `start` of them are left out, of data that are indexed.
    """
    options = {"batch_size": batch_size, "num_workers": num_workers, "unit": "sequences"}
    if isinstance(sequences, MaskedSequences):
        order = shuffled(len(sequences), seed)
        return endless_batches(accelerator, sequences, order, collator, seed=seed, start=start, **options)

    def own_part(epoch: int) -> ReadStream:
        part = split_dataset_by_node(sequences(epoch), accelerator.process_index, accelerator.num_processes)
        return ReadStream(part)

    return StreamedBatches(accelerator, own_part, collator, **options)


# Model


def load_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> PreTrainedModel:
    """A new model, or one to continue from, whose vocabulary covers the tokenizer's. Master weights are float32.

    Raises:
        UsageError: `args.config` asks for a smaller vocabulary than the tokenizer's.
    """
    multiple = args.pad_vocab_to_multiple_of
    padded_vocab_size = math.ceil(len(tokenizer) / multiple) * multiple
    for_tokenizer = {"vocab_size": padded_vocab_size, "pad_token_id": tokenizer.pad_token_id}
    model = build_model(args, AutoModelForMaskedLM, {} if args.model_name_or_path else for_tokenizer)
    check_max_seq_length(model.config, max_seq_length)
    if (size := model.config.vocab_size) < len(tokenizer):
        if "vocab_size" in args.config:
            raise UsageError(f"the tokenizer has {len(tokenizer)} tokens, the model only {size}, by its vocab_size.")
        model.resize_token_embeddings(padded_vocab_size)
    return model


def check_packing(config: PreTrainedConfig) -> None:
    """Refuse other families: the attention of Transformers' encoders does not look at where positions restart."""
    if config.model_type != LionConfig.model_type:
        raise UsageError(
            f"packing needs a model that keeps the documents of a sequence apart, as lion does; {config.model_type}"
            " would see them all: give line_by_line instead."
        )


# Training and evaluation


def predict_targets(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (targets, vocabulary) in float32, labels (targets,) and the mask (batch, length) of what is predicted."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    predicted = labels != -100
    with decoding_targets_alone(extract_model_from_parallel(model), predicted):
        logits = model(**inputs).logits
    if logits.ndim == 3:
        logits = logits[predicted]
    return logits.float(), labels[predicted], predicted


@contextmanager
def decoding_targets_alone(model: PreTrainedModel, predicted: Tensor) -> Iterator[None]:
    """Have any model make logits for `predicted` (batch, length) alone: those of all tokens are most of its cost."""

    def select(decoder: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_states, *others = args
        return (hidden_states[predicted] if hidden_states.shape[:-1] == predicted.shape else hidden_states, *others)

    decoder = model.get_output_embeddings()
    handle = decoder.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


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

    def sum_loss(batch: dict[str, Tensor]) -> Tensor:
        logits, labels, _ = predict_targets(model, batch)
        return F.cross_entropy(logits, labels, reduction="sum")

    return backward_micro_batches(accelerator, model, micro_batches, sum_loss, counts[0]), counts


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> dict[str, float]:
    """Loss, perplexity and accuracy over all targets, each counted once however many processes there are."""
    was_training = model.training
    model.eval()
    rows = []
    for batch in evaluation_batches(accelerator, loader):
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


@dataclass
class Pretraining(TrainingRun):
    tokenizer: PreTrainedTokenizerBase
    eval_loader: DataLoader

    script = "pretrain_mlm"
    unit = "tokens"
    loss_label = "loss per masked token"
    metric_for_best_model = "eval_loss"
    greater_is_better = False

    def accumulate_gradients(self, micro_batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        return accumulate_gradients(self.accelerator, self.model, micro_batches)

    def compute_metrics(self) -> dict[str, float]:
        return evaluate(self.accelerator, self.model, self.eval_loader)

    def describe(self, metrics: dict[str, float]) -> str:
        return describe(metrics)

    def save_processor(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)

    def save_process_files(self, folder: Path) -> None:
        if isinstance(self.batches, StreamedBatches):
            torch.save(self.batches.state_dict(), folder / self.stream_file)

    def load_checkpoint_files(self, folder: Path) -> None:
        if isinstance(self.batches, StreamedBatches):
            self.batches.load_state_dict(load_without_code(folder / self.stream_file))

    @property
    def stream_file(self) -> str:
        return f"stream_{self.accelerator.process_index}.bin"


def describe(metrics: dict[str, float]) -> str:
    return (
        f"loss {metrics['eval_loss']:.4f}, perplexity {metrics['eval_perplexity']:.2f},"
        f" masked accuracy {metrics['eval_masked_accuracy']:.2%} of {metrics['eval_targets']} targets"
    )


# The run


def count_steps(args: PretrainingArguments, sequences: MaskedSequences | Stream, global_batch_size: int) -> int:
    if args.max_steps > 0:
        return args.max_steps
    if not isinstance(sequences, Sized):
        raise UsageError("a stream has no length that num_train_epochs could count in: give max_steps.")
    return math.ceil(args.num_train_epochs * len(sequences) / global_batch_size)


@dataclass
class Arguments(ArgumentGroups):
    """All arguments of a run."""

    model: ModelArguments
    data: DataArguments
    training: PretrainingArguments


def make_layout(
    arguments: Arguments, sequences: MaskedSequences | Stream, global_batch_size: int, num_processes: int
) -> dict[str, int]:
    """What a run cannot change when it goes on: all that a stream is divided by, else the update alone."""
    layout = {"global_train_batch_size": global_batch_size}
    if isinstance(sequences, MaskedSequences):
        return {**layout, "training_sequences": len(sequences)}
    return {
        **layout,
        "num_processes": num_processes,
        "per_device_train_batch_size": arguments.training.per_device_train_batch_size,
        "dataloader_num_workers": arguments.data.dataloader_num_workers,
    }


def prepare(arguments: Arguments, accelerator: Accelerator, checkpoint: Checkpoint | None) -> Pretraining:
    """A run that begins, or one that goes on from a checkpoint."""
    model_args, data_args, args = arguments.model, arguments.data, arguments.training
    num_micro_batches = accumulation_steps(
        args.global_train_batch_size, args.per_device_train_batch_size, accelerator.num_processes
    )
    global_batch_size = num_micro_batches * args.per_device_train_batch_size * accelerator.num_processes
    tokenizer = load_tokenizer(
        model_args.tokenizer_name or model_args.model_name_or_path or model_args.config_name,
        ["mask_token", "pad_token"],
        "masked language modelling",
    )
    set_seed(args.seed)
    model = load_model(model_args, tokenizer, data_args.max_seq_length)  # a wrong one is found before hours of reading
    if data_args.packing:
        check_packing(model.config)
    train, evaluation = main_process_first(accelerator, lambda: load_sequences(data_args, tokenizer, args.seed))
    max_steps = count_steps(args, train, global_batch_size)
    state = TrainerState(**checkpoint.state) if checkpoint else TrainerState(max_steps)
    optimizer = adamw(model, args, args.learning_rate)
    scheduler = linear_schedule(optimizer, max_steps, args.warmup_ratio, args.final_lr_ratio)
    padding = DataCollatorForTokenClassification(tokenizer)  # pads labels along with their sequences
    eval_loader = DataLoader(evaluation, batch_size=args.per_device_eval_batch_size, collate_fn=padding)
    model, optimizer = prepare_training(accelerator, model, optimizer)
    eval_loader = accelerator.prepare(eval_loader)
    make_batches = functools.partial(
        train_batches,
        accelerator,
        train,
        padding,
        batch_size=args.per_device_train_batch_size,
        num_workers=data_args.dataloader_num_workers,
        seed=args.seed,
    )
    if checkpoint is None:
        check_first_batch(make_batches())
    pretraining = Pretraining(
        args=args,
        record=arguments.flat,
        layout=make_layout(arguments, train, global_batch_size, accelerator.num_processes),
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=make_batches(start=state.step * num_micro_batches),
        num_micro_batches=num_micro_batches,
        state=state,
        tokenizer=tokenizer,
        eval_loader=eval_loader,
    )
    pretraining.resume(checkpoint)
    return pretraining


def train_and_save(pretraining: Pretraining, started: float) -> None:
    """The run; `started` is when the script was."""
    pretraining.train(started)
    results = pretraining.save_results()
    if pretraining.accelerator.is_main_process:
        print(f"before: {describe(results['before'])}\nafter:  {describe(results['after'])}")
        print(f"{results['tokens_per_second']:,.0f} tokens per second; everything is in {pretraining.output_dir}")


def main() -> None:
    started = time.perf_counter()
    arguments = Arguments(*parse_arguments([kind.type for kind in fields(Arguments)], None, __doc__))
    with leaving_on_sigterm(), removing_if_empty(Path(arguments.training.output_dir)):
        accelerator, checkpoint = start(arguments.training, arguments.flat, Pretraining.script)
        pretraining = prepare(arguments, accelerator, checkpoint)
        begin(accelerator, pretraining.script, arguments.flat, checkpoint)
    with stopping_on_signals(accelerator):
        train_and_save(pretraining, started)
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
