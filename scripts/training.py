"""What the training scripts share: arguments, the model from its configuration, the loop, checkpoints and results.

A script subclasses `TrainingRun` and says what an example is, what its loss is and how it is evaluated.
"""

import functools
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import accelerate
import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, send_to_device
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.hf_argparser import HfArg

import lion_transformers
from lion_transformers.scripts.arguments import KeyValues, MergeKeyValues, UsageError, one_line, why_not_loaded
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
from lion_transformers.scripts.optimization import weight_decay_groups
from lion_transformers.tokenization.corpus import CorpusError


VERSIONED_MODULES = [lion_transformers, torch, transformers, accelerate, datasets]


# Arguments


def check_range(arguments: Any, names: list[str], low: float, below: float = math.inf) -> None:
    """Refuse the arguments that are out of range; None means that one is not given."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not low <= value < below:
            upper = "" if below == math.inf else f" and below {below}"
            raise UsageError(f"{name} must be at least {low}{upper}, got {value}.")


@dataclass
class ModelArguments:
    _argument_group_name = "model"

    model_type: str = HfArg(
        default="lion", help="Family of a new model, by Transformers' name: lion, bert, modernbert, vit ..."
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


@dataclass
class TrainingArguments:
    _argument_group_name = "training"

    output_dir: str = field(metadata={"help": "Folder for everything that the run writes."})
    overwrite_output_dir: bool = HfArg(default=False, help="Write into output_dir even if it holds an earlier run.")
    global_train_batch_size: int | None = HfArg(
        default=None,
        help="Examples per update over all devices; gradient accumulation follows. Default: one batch a device.",
    )
    per_device_train_batch_size: int = HfArg(default=8, help="Examples per device in one forward pass.")
    per_device_eval_batch_size: int = HfArg(default=8, help="The same in evaluation.")
    adam_beta1: float = HfArg(default=0.9, help="AdamW's β₁.")
    adam_beta2: float = HfArg(default=0.999, help="AdamW's β₂.")
    adam_epsilon: float = HfArg(default=1e-8, help="AdamW's ε.")
    weight_decay: float = HfArg(default=0.01, help="AdamW's weight decay; biases, norms and decays are exempt.")
    max_grad_norm: float = HfArg(default=1.0, help="Norm that gradients are clipped to; 0 clips nothing.")
    num_train_epochs: float = HfArg(default=3.0, help="Passes over the data, where max_steps is not given.")
    max_steps: int = HfArg(default=-1, help="Updates; overrides num_train_epochs if positive.")
    mixed_precision: Literal["no", "bf16", "fp16"] = HfArg(
        default="no", help="Precision of the forward and backward passes."
    )
    seed: int = HfArg(default=17, help="Of weights, order and whatever else is drawn.")
    logging_steps: int = HfArg(default=50, help="Updates between two logs.")
    eval_steps: int | None = HfArg(default=500, help="Updates between two evaluations.")
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
        if self.eval_steps and self.save_steps % self.eval_steps:
            raise UsageError(f"save_steps {self.save_steps} is not a multiple of eval_steps {self.eval_steps}.")


# The start of a run


def start(args: TrainingArguments) -> Accelerator:
    """Claim output_dir and meet the other processes; only the main one shows progress."""
    output_dir = Path(args.output_dir)
    claim_output_dir(output_dir, args.overwrite_output_dir)
    accelerator = make_accelerator(args)
    accelerator.wait_for_everyone()
    show_progress_once(accelerator)
    if accelerator.is_main_process:
        clear_output_dir(output_dir)
    return accelerator


def show_progress_once(accelerator: Accelerator) -> None:
    transformers.logging.disable_progress_bar()  # one bar for the run, none for every file that it saves
    if not accelerator.is_main_process:
        transformers.logging.set_verbosity_error()
        datasets.disable_progress_bars()


def make_accelerator(args: TrainingArguments) -> Accelerator:
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


def init_trackers(accelerator: Accelerator, name: str, arguments: dict[str, Any]) -> None:
    accelerator.init_trackers(name, config={argument: str(value) for argument, value in arguments.items()})


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


@contextmanager
def loading(source: str) -> Iterator[None]:
    """Turn what `datasets` raises about `source` into one sentence."""
    try:
        yield
    except CorpusError as error:
        raise UsageError(one_line(error)) from error
    except (DatasetsError, OSError, ValueError) as error:
        # "An error occurred while generating the dataset" has the reason as its cause.
        raise UsageError(f"cannot load {source}: {one_line(error.__cause__ or error)}") from error


def build_model(args: ModelArguments, auto_class: type, settings: dict[str, Any], **loading: Any) -> PreTrainedModel:
    """A new model, or one to continue from, with float32 master weights.

    Args:
        args: where it comes from; `args.config` wins over `settings`.
        auto_class: the Auto class of the task.
        settings: fields of the configuration.
        **loading: goes to `from_pretrained`, where there are weights to load.

    Raises:
        UsageError: an unknown family, fields that it refuses, a model that is not there.
    """
    name, settings = args.model_name_or_path or args.config_name, {**settings, **args.config}
    if name is None and args.model_type not in CONFIG_MAPPING:
        raise UsageError(f"unknown model_type {args.model_type}.")
    try:
        if name:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False, **settings)
        else:
            config = AutoConfig.for_model(args.model_type, **settings)
        if args.model_name_or_path:
            loading = {"config": config, "dtype": torch.float32, "trust_remote_code": False, **loading}
            return auto_class.from_pretrained(name, **loading)
        return auto_class.from_config(config, dtype=torch.float32)
    # RuntimeError: weights of other sizes; KeyError: an activation that is not there.
    except (OSError, ValueError, TypeError, RuntimeError, KeyError, StrictDataclassError) as error:
        raise UsageError(f"cannot make the model {name or args.model_type}: {why_not_loaded(error)}") from error


def load_pretrained_config(args: ModelArguments) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(args.model_name_or_path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load the model {args.model_name_or_path}: {why_not_loaded(error)}") from error


def load_tokenizer(name: str | None, needed: list[str], purpose: str) -> PreTrainedTokenizerBase:
    """A tokenizer by folder or Hub name, which must have the `needed` tokens (`pad_token` ...) for `purpose`."""
    if name is None:
        raise UsageError("give a tokenizer_name: a folder or a name on the Hub.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load the tokenizer {name}: {why_not_loaded(error)}") from error
    for token in needed:
        if getattr(tokenizer, token) is None:
            raise UsageError(f"the tokenizer {name} has no {token}, which {purpose} needs.")
    return tokenizer


def check_max_seq_length(config: PreTrainedConfig, max_seq_length: int) -> None:
    """Refuse sequences that are longer than a table of learned positions."""
    max_positions = getattr(config, "max_position_embeddings", None) or max_seq_length
    if max_positions < max_seq_length and getattr(config, "position_embedding_type", "absolute") != "none":
        raise UsageError(
            f"max_seq_length {max_seq_length} exceeds the model's max_position_embeddings {max_positions}."
        )


def adamw(model: nn.Module, args: TrainingArguments, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        weight_decay_groups(model, args.weight_decay),
        lr=learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )


def prepare_training(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Hand model and optimizer to Accelerate and tell it what belongs to a checkpoint."""
    # The schedule is not prepared: Accelerate would advance it once for every process.
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(scheduler)
    accelerator.register_save_state_pre_hook(functools.partial(save_weights, accelerator))
    return model, optimizer


def save_weights(accelerator: Accelerator, models: list[nn.Module], weights: list[dict], folder: Path) -> None:
    """In place of Accelerate's own weights file, one that from_pretrained reads."""
    if accelerator.is_main_process:
        accelerator.unwrap_model(models[0]).save_pretrained(folder)
    weights.clear()


def endless_batches(
    accelerator: Accelerator, loader: DataLoader, set_epoch: Callable[[int], Any], size: str
) -> Iterator[dict[str, Tensor]]:
    """This process's micro-batches without end.

    Args:
        accelerator: its device gets the batches.
        loader: one pass over the data, full batches only.
        set_epoch: gives the next pass its own order.
        size: a batch in words, for the error.

    Raises:
        UsageError: there are too few examples for one batch.
    """
    for epoch in itertools.count():
        set_epoch(epoch)
        batch = None
        for batch in loader:
            yield send_to_device(batch, accelerator.device, non_blocking=True)
        if batch is None:
            raise UsageError(
                f"the training data are too small for one batch of {size} on each of"
                f" {accelerator.num_processes} devices."
            )


# The run


def backward_micro_batches(
    accelerator: Accelerator,
    model: nn.Module,
    micro_batches: list[dict[str, Tensor]],
    sum_loss: Callable[[dict[str, Tensor]], Tensor],
    num_terms: Tensor,
) -> Tensor:
    """Gradients of the loss averaged over its terms in all micro-batches of all processes.

    Args:
        accelerator: what `model` was prepared by.
        model: whose gradients are synchronised over processes, once.
        micro_batches: those of this process.
        sum_loss: the summed loss of one of them.
        num_terms: number of terms over all processes, a scalar; 0 is taken as 1.

    Returns:
        The summed loss of this process.
    """
    # Processes' gradients are averaged, not summed.
    scale = accelerator.num_processes / num_terms.clamp(min=1)
    summed_loss = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else accelerator.no_sync(model):
            loss = sum_loss(batch)
            accelerator.backward(loss * scale)
        summed_loss += loss.detach()
    return summed_loss


def backward_full_batches(
    accelerator: Accelerator,
    model: nn.Module,
    micro_batches: list[dict[str, Tensor]],
    sum_loss: Callable[[dict[str, Tensor]], Tensor],
) -> tuple[Tensor, Tensor]:
    """`backward_micro_batches` of a loss with a term for every row of "labels", of which all processes have as many.

    Returns:
        The summed loss of this process, and the number of rows of all processes, twice: as terms and as units (2,).
    """
    # Batches are full everywhere: the other processes need not be asked.
    rows = sum(len(batch["labels"]) for batch in micro_batches) * accelerator.num_processes
    number = torch.tensor(rows, device=accelerator.device)
    loss = backward_micro_batches(accelerator, model, micro_batches, sum_loss, number)
    return loss, torch.stack([number, number])


@dataclass
class TrainerState:
    """What a run knows about itself; saved with every checkpoint."""

    max_steps: int
    step: int = 0
    units: int = 0  # tokens or images seen
    train_seconds: float = 0.0  # without evaluation and saving
    best_step: int | None = None  # among the checkpoints
    best_metric: float | None = None
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class TrainingRun:
    """Everything that takes part in a run, prepared by Accelerate where that is due."""

    args: TrainingArguments
    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    batches: Iterator[dict[str, Tensor]]
    num_micro_batches: int
    state: TrainerState

    unit: ClassVar[str]  # what throughput is counted in
    loss_label: ClassVar[str]
    metric_for_best_model: ClassVar[str]
    greater_is_better: ClassVar[bool]
    load_best_model_at_end: ClassVar[bool] = False  # whether the run leaves the model of its best checkpoint

    def accumulate_gradients(self, micro_batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Returns the summed loss of this process, and the numbers of its terms and of units (2,) of all processes."""
        raise NotImplementedError

    def compute_metrics(self) -> dict[str, float]:
        """Evaluation: `eval_loss`, the metric for the best model and others that begin with `eval_`."""
        raise NotImplementedError

    def describe(self, metrics: dict[str, float]) -> str:
        """Metrics in a line."""
        raise NotImplementedError

    def stops_early(self) -> bool:
        """Whether the run ends here, before `max_steps`; asked before every update."""
        return False

    def save_processor(self, folder: Path) -> None:
        """Save what makes a model's inputs beside the model."""
        raise NotImplementedError

    def save_checkpoint_files(self, folder: Path) -> None:
        """Save what belongs to a checkpoint beside the weights and Accelerate's states."""
        self.save_processor(folder)

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def final_model(self) -> PreTrainedModel:
        """The model that the run leaves."""
        return self.accelerator.unwrap_model(self.model)

    def train(self) -> None:
        state, args = self.state, self.args
        self.evaluate()
        progress = tqdm(
            total=state.max_steps, desc="Training", unit="step", disable=not self.accelerator.is_main_process
        )
        updates, started = [], time.perf_counter()
        while state.step < state.max_steps and not self.stops_early():
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
        if self.load_best_model_at_end:
            self.load_best_checkpoint()

    def load_best_checkpoint(self) -> None:
        self.accelerator.wait_for_everyone()  # the main process gives the last checkpoint its name
        best = type(self.final_model).from_pretrained(checkpoint_folder(self.output_dir, self.state.best_step))
        self.final_model.load_state_dict(best.state_dict())

    def update(self) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the optimizer. Returns accumulate_gradients' sums and the gradient's norm before clipping."""
        micro_batches = list(itertools.islice(self.batches, self.num_micro_batches))
        loss, counts = self.accumulate_gradients(micro_batches)
        grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm or math.inf)
        self.optimizer.step()
        if not self.accelerator.optimizer_step_was_skipped:  # as fp16 does when gradients overflow
            self.scheduler.step()
        self.optimizer.zero_grad()
        return loss, counts, grad_norm

    def log_training(self, updates: list[tuple[Tensor, Tensor, Tensor]], started: float, progress: tqdm) -> None:
        losses, counts, grad_norms = (torch.stack(column) for column in zip(*updates, strict=True))
        loss = self.accelerator.reduce(losses.sum(), reduction="sum").item()
        terms, units = counts.sum(0).tolist()
        seconds = time.perf_counter() - started  # after .item(), which waited for the device
        self.state.units += units
        self.state.train_seconds += seconds
        throughput = f"{self.unit}_per_second"
        metrics = {
            "loss": loss / max(terms, 1),
            "learning_rate": self.scheduler.get_last_lr()[0],
            "grad_norm": grad_norms[-1].item(),
            throughput: units / seconds,
        }
        self.log(metrics)
        progress.set_postfix({"loss": f"{metrics['loss']:.3f}", throughput: f"{metrics[throughput]:,.0f}"})

    def evaluate(self) -> None:
        metrics = self.compute_metrics()
        self.log(metrics)
        if self.accelerator.is_main_process:
            tqdm.write(f"step {self.state.step}: {self.describe(metrics)}")

    def log(self, metrics: dict[str, float]) -> None:
        self.state.history.append({"step": self.state.step, **metrics})
        names = {name: f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}" for name in metrics}
        self.accelerator.log({names[name]: value for name, value in metrics.items()}, step=self.state.step)

    def save_checkpoint(self) -> None:
        """A folder that the Auto classes load, with the states of optimizer, schedule and generators."""
        self.note_if_best(self.state.history[-1])  # no checkpoint without an evaluation just before it
        folder = checkpoint_folder(self.output_dir, self.state.step)
        self.accelerator.save_state(unfinished(folder))
        if self.accelerator.is_main_process:
            self.save_checkpoint_files(unfinished(folder))
            write_json(unfinished(folder) / "trainer_state.json", asdict(self.state))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            publish(folder)
            prune_checkpoints(self.output_dir, self.state.best_step, self.args.save_total_limit)

    def note_if_best(self, metrics: dict[str, float]) -> None:
        metric, best = metrics[self.metric_for_best_model], self.state.best_metric
        if best is None:
            best = -math.inf if self.greater_is_better else math.inf
        if metric > best if self.greater_is_better else metric < best:
            self.state.best_step, self.state.best_metric = self.state.step, metric

    def save_results(self, arguments: dict[str, Any], wall_seconds: float, **more: Any) -> dict[str, Any]:
        """The model, a plot and, last of all, results.json with `more` in it: where it is, the run is complete."""
        self.save_model()
        plot = functools.partial(plot_losses, self.state.history, self.loss_label)
        atomic_write(self.output_dir / "loss_curve.png", plot)
        evaluations = {entry["step"]: entry for entry in self.state.history if "eval_loss" in entry}
        results = {
            "before": evaluations[0],
            "after": evaluations[self.state.best_step if self.load_best_model_at_end else self.state.step],
            "best": {"step": self.state.best_step, self.metric_for_best_model: self.state.best_metric},
            **more,
            "steps": self.state.step,
            self.unit: self.state.units,
            f"{self.unit}_per_second": self.state.units / self.state.train_seconds,
            "wall_seconds": wall_seconds,
            **provenance(self.final_model, arguments),
            "history": self.state.history,
        }
        write_json(self.output_dir / "results.json", results)
        return results

    def save_model(self) -> None:
        folder = self.output_dir / "model"
        self.final_model.save_pretrained(unfinished(folder))
        self.save_processor(unfinished(folder))
        publish_files(folder, self.output_dir)


def provenance(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """What results came from: the model, the arguments and the versions of the libraries."""
    return {
        "model": {"class": type(model).__name__, "parameters": model.num_parameters()},
        "arguments": arguments,
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in VERSIONED_MODULES},
        },
    }


def plot_losses(history: list[dict[str, float]], loss_label: str, file: Path) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label, marker in [("loss", "training", ""), ("eval_loss", "evaluation", "o")]:
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        axes.plot(*zip(*points, strict=True), label=label, marker=marker)
    axes.set(xlabel="step", ylabel=loss_label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=150)
