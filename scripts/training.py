"""What the training scripts share: arguments, the model from its configuration, the loop, checkpoints and results.

A script subclasses `TrainingRun` and says what an example is, what its loss is and how it is evaluated.
"""

import functools
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import accelerate
import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration, broadcast_object_list, set_seed
from accelerate.utils import load as load_without_code
from huggingface_hub.errors import StrictDataclassError
from matplotlib.figure import Figure
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
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
from lion_transformers.configuration_lion import nearest_field
from lion_transformers.scripts.arguments import (
    KeyValues,
    MergeKeyValues,
    UsageError,
    did_you_mean,
    is_first_to_say,
    one_line,
    why_not_loaded,
)
from lion_transformers.scripts.batching import Batches, derived_seed
from lion_transformers.scripts.checkpointing import (
    atomic_write,
    checkpoint_folder,
    claim_output_dir,
    clear_output_dir,
    clear_unfinished,
    list_checkpoints,
    make_output_dir,
    prune_checkpoints,
    publish,
    publish_files,
    unfinished,
    write_json,
    write_manifest,
    writing,
)
from lion_transformers.scripts.optimization import weight_decay_groups
from lion_transformers.scripts.resuming import FREE_ARGUMENTS, Checkpoint, folder_to_resume, read_checkpoint


VERSIONED_MODULES = [lion_transformers, torch, transformers, accelerate, datasets]
SCHEDULER_FILE = "scheduler.bin"


# Arguments


def check_range(
    arguments: Any,
    names: list[str],
    low: float | None = None,
    *,
    above: float | None = None,
    below: float = math.inf,
    most: float | None = None,
) -> None:
    """Refuse the arguments that are out of range; None means that one is not given."""
    lower = f"above {above}" if low is None else f"at least {low}"
    for name in names:
        value = getattr(arguments, name)
        if value is None:
            continue
        is_above = value > above if low is None else value >= low
        is_below = value < below if most is None else value <= most
        if not (is_above and is_below):
            upper = f" and at most {most}" if most is not None else f" and below {below}"
            if below == math.inf and most is None:
                upper = "" if isinstance(value, int) else " and finite"
            raise UsageError(f"{name} must be {lower}{upper}, got {value}.")


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
    overwrite_output_dir: bool = HfArg(
        default=False, help="Begin anew and write into output_dir even if it holds an earlier run."
    )
    resume_from_checkpoint: str | None = HfArg(
        default=None,
        help="Folder of a checkpoint to go on from, or latest. Default: the last one in output_dir, if there is any.",
    )
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
    max_steps: int = HfArg(default=-1, help="Updates, instead of num_train_epochs; -1 goes by these.")
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
    max_nonfinite_steps: int = HfArg(
        default=5, help="Updates in a row that are left out because their loss is not finite; one more ends the run."
    )
    report_to: list[str] = field(
        default_factory=lambda: ["tensorboard"],
        metadata={"help": "Trackers by Accelerate's names (tensorboard wandb ...), all, or none."},
    )

    def __post_init__(self):
        self.save_steps = self.eval_steps if self.save_steps is None else self.save_steps
        positive = ["per_device_train_batch_size", "per_device_eval_batch_size", "logging_steps", "eval_steps"]
        check_range(self, [*positive, "save_steps", "save_total_limit", "global_train_batch_size"], low=1)
        check_range(self, ["max_nonfinite_steps", "adam_epsilon", "weight_decay", "max_grad_norm"], low=0)
        check_range(self, ["adam_beta1", "adam_beta2"], low=0, below=1)
        check_range(self, ["seed"], low=0, below=2**32)
        if self.max_steps == -1:
            check_range(self, ["num_train_epochs"], above=0)
        elif self.max_steps < 1:
            raise UsageError(f"max_steps must be at least 1, or -1 for num_train_epochs, got {self.max_steps}.")
        if self.eval_steps and self.save_steps % self.eval_steps:
            raise UsageError(f"save_steps {self.save_steps} is not a multiple of eval_steps {self.eval_steps}.")


class ArgumentGroups:
    """Base of the dataclass that a script gathers its groups of arguments in."""

    @property
    def flat(self) -> dict[str, Any]:
        """Every argument by its name."""
        return {name: value for group in asdict(self).values() for name, value in group.items()}


# The start of a run


def start(
    args: TrainingArguments, record: dict[str, Any], script: str, free: set[str] = FREE_ARGUMENTS
) -> tuple[Accelerator, Checkpoint | None]:
    """Claim output_dir, meet the other processes, and find what there is to go on from; the main one shows progress.

    Args:
        args: of the run.
        record: every argument of the run by its name; a checkpoint of other ones is refused.
        script: whose run it is; a checkpoint of another one is refused.
        free: names of those that may differ all the same.
    """
    output_dir = Path(args.output_dir)
    claim_output_dir(output_dir, args.overwrite_output_dir or bool(list_checkpoints(output_dir)))
    make_output_dir(output_dir)
    folder = folder_to_resume(output_dir, args.resume_from_checkpoint, args.overwrite_output_dir)
    if folder and Path(folder).resolve().parent != output_dir.resolve() and list_checkpoints(output_dir):
        raise UsageError(f"output_dir {output_dir} holds checkpoints of another run than {folder}: choose another.")
    accelerator = make_accelerator(args)
    accelerator.wait_for_everyone()
    show_progress_once(accelerator)
    checkpoint = folder and read_on_main_process(accelerator, folder)
    if checkpoint:
        checkpoint.check_script(script)
        checkpoint.check_arguments(record, free)
        if accelerator.is_main_process:
            tqdm.write(f"{checkpoint.folder}: going on from step {checkpoint.state['step']}")
    return accelerator, checkpoint


def read_on_main_process(accelerator: Accelerator, folder: Path) -> Checkpoint:
    """The checkpoint, whose files one process reads for all, to see that they are whole; a failure is one of all."""
    result = None
    if accelerator.is_main_process:
        try:
            result = read_checkpoint(folder)
        except UsageError as error:
            result = error
    (result,) = broadcast_object_list([result])
    if isinstance(result, UsageError):
        raise result
    return result


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
        )
    except (ValueError, ImportError) as error:  # DeepSpeed may be missing
        raise UsageError(one_line(error)) from error
    check_trackers(accelerator, args.report_to)
    check_processes(accelerator)
    if args.mixed_precision == "fp16" and accelerator.device.type == "cpu":  # Accelerate would train in float32
        raise UsageError("mixed_precision fp16 needs a GPU: on a CPU give bf16 or no.")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        configure_deepspeed(accelerator, args)
    return accelerator


def check_trackers(accelerator: Accelerator, names: list[str]) -> None:
    """Refuse those whose package is missing, which Accelerate leaves out."""
    if missing := sorted(set(names) - {"none", "all", *map(str, accelerator.log_with)}):
        raise UsageError(f"report_to {missing[0]} needs its package, which is not installed.")


def check_processes(accelerator: Accelerator) -> None:
    """Refuse processes that would train otherwise than they were launched to."""
    dividing = [DistributedType.FSDP, DistributedType.DEEPSPEED]
    asked = [kind for kind in dividing if os.environ.get(f"ACCELERATE_USE_{kind.value}", "").lower() == "true"]
    if asked and accelerator.distributed_type not in dividing:  # Accelerate would leave weights whole without a word
        raise UsageError(
            f"{asked[0].value} divides over GPUs only, and this run uses none: start it without that --config_file."
        )
    # What accelerate launch sets for several processes, also where it leaves it to MPI to start them. A cluster sets
    # the address for one process as well, but to that of a machine.
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("MASTER_ADDR") == "127.0.0.1"
    if by_accelerate and not os.environ.get("WORLD_SIZE"):
        raise UsageError(
            "accelerate launch has started one process alone: give --multi_gpu and, where there are no GPUs, set"
            " ACCELERATE_USE_CPU=true."
        )
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if accelerator.num_processes != launched:  # each would train alone, into the same folder
        raise UsageError(f"{launched} processes that do not work together: without GPUs, set ACCELERATE_USE_CPU=true.")


def configure_deepspeed(accelerator: Accelerator, args: TrainingArguments) -> None:
    """Have DeepSpeed do what the arguments of the script say.

    It clips and takes the optimizer's step itself, at the end of the last backward pass of an update. Weights and
    gradients stay in float32 as elsewhere: only its forward pass is in bfloat16.
    """
    plugin = accelerator.deepspeed_plugin
    if plugin.zero_stage == 3:
        raise UsageError("weights are not divided by DeepSpeed here: give ZeRO stage 1 or 2, or take FSDP2.")
    if args.mixed_precision == "fp16":
        raise UsageError("mixed_precision fp16 does not go with DeepSpeed here: give bf16 or no.")
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=args.per_device_train_batch_size,
        train_batch_size=args.per_device_train_batch_size * accelerator.num_processes,
        gradient_accumulation_steps=1,  # `backward_micro_batches` says where an update ends, and averages over it
        gradient_clipping=args.max_grad_norm,
        bf16={"enabled": False},
        torch_autocast=autocast if args.mixed_precision == "bf16" else {"enabled": False},
    )


def begin(accelerator: Accelerator, script: str, arguments: dict[str, Any], checkpoint: Checkpoint | None) -> None:
    """Remove what an earlier run left beyond the checkpoint, and log from there on.

    To be called once data and model are known to be good: a run that fails before costs nothing that was written.
    """
    output_dir, step = Path(arguments["output_dir"]), checkpoint.state["step"] if checkpoint else None
    if accelerator.is_main_process:
        clear_output_dir(output_dir) if checkpoint is None else clear_unfinished(output_dir, after_step=step)
    options = {"tensorboard": {"purge_step": step + 1}} if step else {}
    with writing(output_dir / "runs"):
        accelerator.init_trackers(script, {argument: str(value) for argument, value in arguments.items()}, options)


# The end of a run that the machine's owner asks for

_stop = threading.Event()


class StopRequested(Exception):
    """A process has been sent SIGTERM, as clusters do before they take a machine away, or SIGINT, by Ctrl-C."""


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end at once, with exit code 0, what comes before training and has nothing to save."""
    asked = threading.Event()

    def leave(*_: Any) -> None:
        asked.set()
        sys.exit(0)  # not an Exception, which libraries would wrap

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except BaseException:  # some have others in their `finally`
        if not asked.is_set():
            raise
        sentence = "stopped with nothing to save; the same command starts again"
        if is_first_to_say(sentence):
            tqdm.write(sentence)
        sys.exit(0)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stopping_on_signals(accelerator: Accelerator) -> Iterator[None]:
    """Let a run end by itself when a process is sent SIGTERM or SIGINT: with a checkpoint, and exit code 0.

    A second SIGINT interrupts it at once. Where SIGINT is ignored, as in what a shell starts in its background, it
    stays so: Ctrl-C is meant for another.
    """
    ctrl_c = signal.getsignal(signal.SIGINT)
    before = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    if ctrl_c is not signal.SIG_IGN:
        before[signal.SIGINT] = ctrl_c

    def request_stop(*_: Any) -> None:
        _stop.set()
        signal.signal(signal.SIGINT, ctrl_c)

    try:
        for number in before:
            signal.signal(number, request_stop)
        yield
    except StopRequested:
        if accelerator.is_main_process:
            tqdm.write("stopped; the same command goes on from the last checkpoint")
        accelerator.end_training()
        sys.exit(0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _stop.clear()  # what runs next in this process has not been asked to stop


def in_any_process(accelerator: Accelerator, *flags: bool) -> list[bool]:
    """Whether each flag is set anywhere; all processes have to ask."""
    counts = torch.tensor(flags, dtype=torch.float32, device=accelerator.device)
    return [count > 0 for count in accelerator.reduce(counts, reduction="sum").tolist()]


def evaluation_batches(
    accelerator: Accelerator, loader: DataLoader, description: str = "Evaluating"
) -> Iterator[dict[str, Tensor]]:
    """One pass, with a progress bar.

    Raises:
        StopRequested: in the middle of it.
    """
    for batch in tqdm(loader, desc=description, leave=False, disable=not accelerator.is_main_process):
        yield batch
        check_stop(accelerator)


def check_stop(accelerator: Accelerator) -> None:
    """To be called by all processes.

    Raises:
        StopRequested: one has been asked to stop.
    """
    (stop,) = in_any_process(accelerator, _stop.is_set())
    if stop:
        raise StopRequested


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
        raise UsageError(f"unknown model_type {args.model_type}{did_you_mean(args.model_type, CONFIG_MAPPING)}")
    try:
        config = load_config(name, settings) if name else AutoConfig.for_model(args.model_type, **settings)
        check_spelling(args.config, config)
        if args.model_name_or_path:
            loading = {"config": config, "dtype": torch.float32, "trust_remote_code": False, **loading}
            return auto_class.from_pretrained(name, **loading)
        return auto_class.from_config(config, dtype=torch.float32)
    # RuntimeError: weights of other sizes; SafetensorError: a file that is cut; KeyError: an unknown activation.
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError, KeyError, StrictDataclassError) as error:
        raise UsageError(f"cannot make the model {name or args.model_type}: {why_not_loaded(error)}") from error


def load_config(name: str, settings: dict[str, Any]) -> PreTrainedConfig:
    """A saved configuration with other `settings`, of which it keeps all, as a new one does."""
    config, unused = AutoConfig.from_pretrained(name, trust_remote_code=False, return_unused_kwargs=True, **settings)
    for field_name in unused.keys() & settings.keys():
        setattr(config, field_name, settings[field_name])
    return config


def check_spelling(names: Iterable[str], config: PreTrainedConfig) -> None:
    """Refuse what is nearly the name of a field of any family: it would be kept without a word, to no effect."""
    known = [*type(config)().to_dict(), *config.attribute_map]
    for name in names:
        if name not in known and (meant := nearest_field(name, known)):
            raise UsageError(f"the configuration of {config.model_type} has no {name}: did you mean {meant}?")


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
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Hand model and optimizer to Accelerate and tell it how weights are saved.

    The schedule is not handed over: Accelerate would advance it once for every process, and load it as a pickle.
    """
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_save_state_pre_hook(functools.partial(save_weights, accelerator))
    accelerator.register_load_state_pre_hook(functools.partial(load_weights, accelerator))
    return model, optimizer


def form_of_optimizer_states(accelerator: Accelerator) -> str:
    """How a checkpoint holds them; only a run that holds them alike can go on from it."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"DeepSpeed's of {accelerator.num_processes} processes"
    return "FSDP's" if accelerator.distributed_type == DistributedType.FSDP else "whole"


def save_weights(accelerator: Accelerator, models: list[nn.Module], weights: list[dict], folder: Path) -> None:
    """In place of Accelerate's own weights file, one that from_pretrained reads."""
    save_whole_model(accelerator, models[0], folder)
    weights.clear()


def save_whole_model(accelerator: Accelerator, model: nn.Module, folder: Path) -> None:
    """One folder of a model whose weights may be divided over processes: all have to ask, the main one writes."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        unwrapped = accelerator.unwrap_model(model)
        for tied in unwrapped.all_tied_weights_keys:  # gathered weights would be saved under both names
            weights.pop(tied, None)
        unwrapped.save_pretrained(folder, state_dict=weights)


def load_weights(accelerator: Accelerator, models: list[nn.Module], folder: Path) -> None:
    """The other way round."""
    if models:
        copy_weights(Path(folder), accelerator.unwrap_model(models[0]))
        models.clear()


def copy_weights(folder: Path, model: PreTrainedModel) -> None:
    """Give a model, whose weights may be divided over processes, those of one of its own class in `folder`."""
    saved = type(model).from_pretrained(folder, dtype=torch.float32)
    set_model_state_dict(model, saved.state_dict(), options=StateDictOptions(full_state_dict=True))


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
        accelerator.sync_gradients = number == len(micro_batches)  # where DeepSpeed takes the optimizer's step
        with nullcontext() if accelerator.sync_gradients else accelerator.no_sync(model):
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
    units: int = 0  # tokens or images seen, as far as they are logged
    train_seconds: float = 0.0  # without evaluation and saving
    wall_seconds: float = 0.0  # of what a resumed run goes on from
    best_step: int | None = None  # among the checkpoints
    best_metric: float | None = None
    nonfinite_steps: int = 0  # the last updates, as far as their loss was not finite
    # Since the last log:
    unlogged_loss: float = 0.0
    unlogged_terms: int = 0
    unlogged_units: int = 0
    unlogged_seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class TrainingRun:
    """Everything that takes part in a run, prepared by Accelerate where that is due.

    Args:
        args: of training.
        record: every argument of the run by its name.
        layout: what of data and processes a checkpoint can only be resumed with.
        batches: this process's, from the first that the run has not seen.
    """

    args: TrainingArguments
    record: dict[str, Any]
    layout: dict[str, Any]
    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    batches: Batches
    num_micro_batches: int
    state: TrainerState
    # Of the updates that are not in the state yet: loss of this process, numbers of terms and units (2,) of all.
    updates: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)
    timer: float = field(default=0.0, init=False)  # when the first of them began
    started: float = field(default=0.0, init=False)  # when the script was, by the same clock
    grad_norm: Tensor | None = field(default=None, init=False)  # of the last update, before clipping
    saved_step: int | None = field(default=None, init=False)  # of the last checkpoint

    script: ClassVar[str]  # name of its file
    unit: ClassVar[str]  # what throughput is counted in
    loss_label: ClassVar[str]
    metric_for_best_model: ClassVar[str]
    greater_is_better: ClassVar[bool]
    load_best_model_at_end: ClassVar[bool] = False  # whether the run leaves the model of its best checkpoint

    def __post_init__(self):
        self.layout = {**self.layout, "optimizer_states": form_of_optimizer_states(self.accelerator)}

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
        """Save what belongs to a checkpoint beside the weights and Accelerate's states; in the main process."""
        self.save_processor(folder)

    def load_checkpoint_files(self, folder: Path) -> None:
        """Load what of this belongs to the state of the run; in every process."""

    def save_process_files(self, folder: Path) -> None:
        """Save what belongs to a checkpoint and every process has its own of."""

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def final_model(self) -> PreTrainedModel:
        """The model that the run leaves."""
        return self.accelerator.unwrap_model(self.model)

    def resume(self, checkpoint: Checkpoint | None) -> None:
        """Go on as if the run had never stopped after the update that the checkpoint was made after."""
        if checkpoint is None:
            return
        checkpoint.check_layout(self.layout)
        try:
            self.accelerator.load_state(str(checkpoint.folder))
            self.scheduler.load_state_dict(load_without_code(checkpoint.folder / SCHEDULER_FILE))
            self.load_checkpoint_files(checkpoint.folder)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise UsageError(f"{checkpoint.folder} does not fit this run: {one_line(error)}") from error
        if checkpoint.folder.resolve() == checkpoint_folder(self.output_dir, self.state.step).resolve():
            self.saved_step = self.state.step

    @property
    def wall_seconds(self) -> float:
        """Since the script was started, and what went before the checkpoint that it has gone on from."""
        return self.state.wall_seconds + time.perf_counter() - self.started

    def train(self, started: float) -> None:
        """Evaluate, update, save and log until the last update; a stopped run goes on where it was.

        Args:
            started: when the script was, by `time.perf_counter`.

        Raises:
            StopRequested: after the update in which a process was asked to stop, or in the middle of an evaluation;
                there is a checkpoint.
        """
        self.started = started
        state, bar = self.state, self.accelerator.is_main_process
        progress = tqdm(total=state.max_steps, initial=state.step, desc="Training", unit="step", disable=not bar)
        try:
            self.evaluate_and_save_if_due()
            while state.step < state.max_steps and not self.stops_early():
                self.timer = time.perf_counter() if not self.updates else self.timer
                stop = self.update()
                state.step += 1
                progress.update()
                if self.is_evaluation_due() or state.step % self.args.logging_steps == 0:
                    self.log_training(progress)
                if stop:
                    raise StopRequested
                self.evaluate_and_save_if_due()
        except StopRequested:
            self.save_checkpoint()
            raise
        finally:
            self.batches.close()
            progress.close()
        if state.nonfinite_steps and bar:
            tqdm.write(
                f"warning: the last {state.nonfinite_steps} of {state.step} updates were left out, because the loss or"
                " its gradient was not finite"
            )
        if self.load_best_model_at_end:
            if self.state.best_step is None:  # it has stopped early, before the first step that is saved
                self.note_if_best(self.last_evaluation)
                self.save_checkpoint()
            self.load_best_checkpoint()

    def is_evaluation_due(self) -> bool:
        """Whether the run has come to a step that is evaluated, and this has not been done."""
        step, entry = self.state.step, self.last_evaluation
        is_due = step == self.state.max_steps or step % self.args.eval_steps == 0
        return is_due and (entry is None or entry["step"] != step)

    @property
    def last_evaluation(self) -> dict[str, float] | None:
        return next((entry for entry in reversed(self.state.history) if "eval_loss" in entry), None)

    def evaluate_and_save_if_due(self) -> None:
        state = self.state
        if not self.is_evaluation_due():
            return
        self.evaluate()
        if state.step == state.max_steps or (state.step and state.step % self.args.save_steps == 0):
            self.note_if_best(self.last_evaluation)  # no best checkpoint without an evaluation just before it
            self.save_checkpoint()

    def load_best_checkpoint(self) -> None:
        self.accelerator.wait_for_everyone()  # the main process gives the last checkpoint its name
        copy_weights(checkpoint_folder(self.output_dir, self.state.best_step), self.final_model)

    def update(self) -> bool:
        """One step of the optimizer, left out if the loss is not finite. Returns whether to stop after it."""
        micro_batches = [next(self.batches) for _ in range(self.num_micro_batches)]
        # Dropout follows from the seed and the step: it does not matter what was drawn before, nor when a run stopped.
        set_seed(derived_seed(self.args.seed, self.state.step, self.accelerator.process_index))
        loss, counts = self.accumulate_gradients(micro_batches)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm or math.inf)
        self.grad_norm = torch.as_tensor(norm, device=self.accelerator.device)  # DeepSpeed has a number
        scaler = self.accelerator.scaler  # takes care of gradients that are not finite itself
        is_finite = loss.isfinite() & (self.grad_norm.isfinite() if scaler is None else True)
        nonfinite, stop = in_any_process(self.accelerator, not is_finite, _stop.is_set())
        if scaler is not None or not nonfinite:
            self.optimizer.step()
            if not self.accelerator.optimizer_step_was_skipped:  # as fp16 does when gradients overflow
                self.scheduler.step()
        self.optimizer.zero_grad()
        if nonfinite:  # left out, of the averages too
            loss, counts, self.grad_norm = (torch.zeros_like(x) for x in (loss, counts, self.grad_norm))
        self.updates.append((loss, counts))
        self.count_nonfinite(nonfinite, micro_batches)
        return stop

    def count_nonfinite(self, nonfinite: bool, micro_batches: list[dict[str, Tensor]]) -> None:
        """Keep count of the updates that have been left out; too many in a row end the run."""
        state, args = self.state, self.args
        state.nonfinite_steps = state.nonfinite_steps + 1 if nonfinite else 0
        step = state.step + 1
        if nonfinite and self.accelerator.is_main_process:
            tqdm.write(f"step {step}: the loss or its gradient is not finite; this update is left out")
        if state.nonfinite_steps > args.max_nonfinite_steps:
            files = self.output_dir / f"nonfinite-batch-{step}-process-*.safetensors"  # so all say one sentence
            file = files.with_name(files.name.replace("*", str(self.accelerator.process_index)))
            tensors = {
                f"{number}.{name}": tensor.cpu().contiguous()
                for number, batch in enumerate(micro_batches)
                for name, tensor in batch.items()
            }
            with writing(file):
                atomic_write(file, functools.partial(save_file, tensors))
            raise UsageError(
                f"the loss or its gradient was not finite in {state.nonfinite_steps} updates in a row, up to step"
                f" {step}, whose batches are in {files}: look at them, or try a lower learning rate."
            )

    def sum_updates(self) -> None:
        """Add what has happened since the last log to the state."""
        if not self.updates:
            return
        losses, counts = (torch.stack(column) for column in zip(*self.updates, strict=True))
        state = self.state
        state.unlogged_loss += self.accelerator.reduce(losses.sum(), reduction="sum").item()
        terms, units = counts.sum(0).tolist()
        state.unlogged_terms += terms
        state.unlogged_units += units
        state.unlogged_seconds += time.perf_counter() - self.timer  # after .item(), which waited for the device
        self.updates.clear()

    def log_training(self, progress: tqdm) -> None:
        self.sum_updates()
        state, throughput = self.state, f"{self.unit}_per_second"
        metrics = {
            "loss": state.unlogged_loss / max(state.unlogged_terms, 1),
            "learning_rate": self.scheduler.get_last_lr()[0],
            "grad_norm": self.grad_norm.item(),
            throughput: state.unlogged_units / state.unlogged_seconds,
        }
        state.units += state.unlogged_units
        state.train_seconds += state.unlogged_seconds
        state.unlogged_loss, state.unlogged_terms, state.unlogged_units, state.unlogged_seconds = 0.0, 0, 0, 0.0
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
        with writing(self.output_dir / "runs"):
            self.accelerator.log({names[name]: value for name, value in metrics.items()}, step=self.state.step)

    def save_checkpoint(self) -> None:
        """A folder that the Auto classes load, with the states of optimizer, schedule and generators."""
        if self.saved_step == self.state.step:  # from before an evaluation, which stopped
            return
        self.sum_updates()
        folder = checkpoint_folder(self.output_dir, self.state.step)
        is_main = self.accelerator.is_main_process
        with writing(folder):
            self.accelerator.save_state(str(unfinished(folder)))
            self.save_process_files(unfinished(folder))
            if is_main:
                torch.save(self.scheduler.state_dict(), unfinished(folder) / SCHEDULER_FILE)
                self.save_checkpoint_files(unfinished(folder))
                state = {**asdict(self.state), "wall_seconds": self.wall_seconds}
                write_json(unfinished(folder) / "trainer_state.json", state)
            self.accelerator.wait_for_everyone()
            if is_main:
                write_manifest(unfinished(folder), script=self.script, arguments=self.record, layout=self.layout)
                publish(folder)
                prune_checkpoints(self.output_dir, self.state.best_step, self.args.save_total_limit)
        self.accelerator.wait_for_everyone()  # the others may look for it
        self.saved_step = self.state.step

    def note_if_best(self, metrics: dict[str, float]) -> None:
        metric, best = metrics[self.metric_for_best_model], self.state.best_metric
        if best is None:
            best = -math.inf if self.greater_is_better else math.inf
        if metric > best if self.greater_is_better else metric < best:
            self.state.best_step, self.state.best_metric = self.state.step, metric

    def save_results(self, **more: Any) -> dict[str, Any]:
        """The model, a plot and, last of all, results.json with `more` in it: where it is, the run is complete.

        All processes have to ask, the main one writes.
        """
        self.save_model()
        evaluations = {entry["step"]: entry for entry in self.state.history if "eval_loss" in entry}
        results = {
            "before": evaluations[0],
            "after": evaluations[self.state.best_step if self.load_best_model_at_end else self.state.step],
            "best": {"step": self.state.best_step, self.metric_for_best_model: self.state.best_metric},
            **more,
            "steps": self.state.step,
            self.unit: self.state.units,
            f"{self.unit}_per_second": self.state.units / self.state.train_seconds,
            "wall_seconds": self.wall_seconds,
            **provenance(self.final_model, self.record),
            "history": self.state.history,
        }
        if self.accelerator.is_main_process:
            plot = functools.partial(plot_losses, self.state.history, self.loss_label)
            with writing(self.output_dir / "loss_curve.png"):
                atomic_write(self.output_dir / "loss_curve.png", plot)
            with writing(self.output_dir / "results.json"):
                write_json(self.output_dir / "results.json", results)
        return results

    def save_model(self) -> None:
        folder = self.output_dir / "model"
        with writing(folder):
            save_whole_model(self.accelerator, self.final_model, unfinished(folder))
            if self.accelerator.is_main_process:
                self.save_processor(unfinished(folder))
                publish_files(folder, self.output_dir)


def provenance(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """What results came from: the model, the arguments and the versions of the libraries."""
    return {
        "model": {"class": type(model).__name__.removeprefix("FSDP"), "parameters": model.num_parameters()},
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
