"""Train an image classifier from a recipe, on one device or many.

    python scripts/train_image_classification.py --recipe train_image_tiny_lion_s_natural --output_dir outputs/lion-s
    accelerate launch scripts/train_image_classification.py --recipe train_image_base_lion_d \\
        --per_device_train_batch_size 256 --output_dir outputs/lion-d
    python scripts/train_image_classification.py --train_dir flowers/train --validation_dir flowers/val \\
        --config image_size=64,patch_size=8,hidden_size=128,modality=image --output_dir outputs/flowers
    python scripts/train_image_classification.py --model_type vit ...        # any image classifier of Transformers
    ... --recipe train_image_tiny_lion_d --dataset_name "" --train_dir ...   # its setting, other images
    ... --teacher_name_or_path timm/regnety_160.deit_in1k --distillation_type hard
    python scripts/train_image_classification.py --evaluate_only --model_name_or_path outputs/lion-s \\
        --dataset_name ILSVRC/imagenet-1k --eval_resolutions 224 384 --output_dir outputs/lion-s-evaluation

The command line overrides the recipe, the recipe overrides the defaults. Images get the size and the channels of the
model's configuration. One update sees `global_train_batch_size` images, however many processes and micro-batches they
are spread over, and its loss is the mean over them. output_dir receives the weights (averaged ones, with ema_decay),
the image processor, the config, results.json, loss_curve.png, confusion_matrix.png and predictions.png; the best and
the last checkpoint are beside them. A run that was stopped goes on with the same command.
Several GPUs or machines: scripts/accelerate. Not here: averaged weights under FSDP.
"""

import functools
import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from datasets import Dataset
from matplotlib.figure import Figure
from safetensors import SafetensorError
from sklearn.metrics import ConfusionMatrixDisplay, accuracy_score, confusion_matrix, top_k_accuracy_score
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
    ViTImageProcessor,
)
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from lion_transformers.configuration_lion import as_pair
from lion_transformers.scripts.arguments import UsageError, one_line, parse_arguments, run, why_not_loaded
from lion_transformers.scripts.batching import Batches, check_first_batch, endless_batches, shuffled
from lion_transformers.scripts.checkpointing import atomic_write, removing_if_empty, write_json, writing
from lion_transformers.scripts.images import (
    AugmentationArguments,
    DataArguments,
    EvaluationTransform,
    LabelledImages,
    MixingCollator,
    channel_statistics,
    class_names,
    crop_percentage,
    labelled_images,
    load_splits,
    make_image_processor,
    num_channels,
    saved_statistics,
    train_transform,
)
from lion_transformers.scripts.optimization import cosine_schedule
from lion_transformers.scripts.reading import main_process_first
from lion_transformers.scripts.resuming import Checkpoint
from lion_transformers.scripts.training import (
    ArgumentGroups,
    ModelArguments,
    TrainerState,
    TrainingArguments,
    TrainingRun,
    accumulation_steps,
    adamw,
    backward_full_batches,
    begin,
    build_model,
    check_range,
    copy_weights,
    evaluation_batches,
    leaving_on_sigterm,
    load_pretrained_config,
    prepare_training,
    provenance,
    start,
    stopping_on_signals,
)


logger = logging.get_logger(__name__)

MOST_CLASSES_WITH_NUMBERS = 20
NUM_SAMPLE_PREDICTIONS = 16


@dataclass
class DistillationArguments:
    _argument_group_name = "distillation"

    teacher_name_or_path: str | None = HfArg(
        default=None, help="Folder or Hub name of an image classifier with the same classes."
    )
    distillation_type: Literal["none", "hard", "soft"] = HfArg(
        default="none", help="What is learnt from the teacher: its best class or its probabilities."
    )
    distillation_alpha: float = HfArg(default=0.5, help="Weight of the teacher's part of the loss.")
    distillation_tau: float = HfArg(default=1.0, help="Temperature of soft distillation.")

    def __post_init__(self):
        check_range(self, ["distillation_alpha"], low=0, most=1)
        check_range(self, ["distillation_tau"], above=0)
        if (self.teacher_name_or_path is None) != (self.distillation_type == "none"):
            raise UsageError("a teacher_name_or_path and a distillation_type (hard or soft) go together.")


@dataclass
class ClassificationArguments(TrainingArguments):
    evaluate_only: bool = HfArg(default=False, help="Train nothing: evaluate model_name_or_path as it is.")
    eval_resolutions: list[str] | None = field(
        default=None,
        metadata={
            "help": "Sizes of images, one side or HEIGHTxWIDTH, to evaluate at; the first one while training."
            " Default: the model's."
        },
    )
    base_learning_rate: float = HfArg(
        default=5e-4, help="Peak of the schedule for 512 images per update; scaled in proportion to these."
    )
    final_learning_rate: float = HfArg(default=1e-5, help="What it falls to, by half a cosine, at the last update.")
    warmup_learning_rate: float = HfArg(default=1e-6, help="What it rises from, linearly.")
    warmup_epochs: float = HfArg(default=5.0, help="Passes over the data in which it rises.")
    weight_decay: float = HfArg(
        default=0.05, help="AdamW's weight decay; biases, norms, decays, learned tokens and positions are exempt."
    )
    max_grad_norm: float = HfArg(default=0.0, help="Norm that gradients are clipped to; 0 clips nothing.")
    label_smoothing: float = HfArg(default=0.1, help="Share of every label that is spread over all classes.")
    ema_decay: float = HfArg(
        default=0.0,
        help="Decay per update of the averaged weights that are evaluated and left as the model; 0 averages nothing.",
    )
    num_train_epochs: float = HfArg(default=300.0, help="Passes over the data, where max_steps is not given.")
    eval_steps: int | None = HfArg(
        default=None, help="Updates between two evaluations. Default: one pass over the data."
    )

    def __post_init__(self):
        super().__post_init__()
        check_range(self, ["label_smoothing", "ema_decay"], low=0, below=1)
        check_range(self, ["final_learning_rate", "warmup_learning_rate", "warmup_epochs"], low=0)
        check_range(self, ["base_learning_rate"], above=0)


@dataclass
class Arguments(ArgumentGroups):
    """All arguments of a run."""

    model: ModelArguments
    data: DataArguments
    augmentation: AugmentationArguments
    distillation: DistillationArguments
    training: ClassificationArguments


# Model


def load_model(args: ModelArguments, names: list[str]) -> PreTrainedModel:
    """A new classifier, or one to continue from, with a class for every name.

    Weights that know the same classes keep the order of theirs; a head for another number of classes is a new one.
    """
    if len(names) < 2:
        raise UsageError(f"a classifier needs two classes, the training data have only {names[0]}.")
    loading = {}
    if args.model_name_or_path:
        known = load_pretrained_config(args).id2label
        loading["ignore_mismatched_sizes"] = len(known) != len(names)
        if set(known.values()) == set(names):
            names = [known[label] for label in range(len(names))]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: label for label, name in enumerate(names)}}
    return build_model(args, AutoModelForImageClassification, labels, **loading)


def parse_size(text: str) -> tuple[int, int]:
    """Height and width from `224` or `96x192`."""
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise UsageError(f"a resolution is one side or HEIGHTxWIDTH, got {text}.")
    return int(sides[0]), int(sides[-1])


def format_size(size: tuple[int, int]) -> str:
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def native_size(config: PreTrainedConfig) -> tuple[int, int]:
    """Height and width of the images that a model is made for."""
    size = getattr(config, "image_size", None)
    if size is None:
        raise UsageError(f"the configuration of {config.model_type} has no image_size: give --config image_size=224.")
    return as_pair(size)


def classify(model: nn.Module, pixel_values: Tensor, interpolate: bool = False) -> Tensor:
    """Logits (batch, classes) in float32; `interpolate` is for images of another size than the model's."""
    options = {"interpolate_pos_encoding": True} if interpolate else {}
    return model(pixel_values=pixel_values, **options).logits.float()


def needs_interpolation(model: PreTrainedModel, size: tuple[int, int]) -> bool:
    """Whether the model has another size of its own, and can interpolate its position embeddings."""
    accepts = "interpolate_pos_encoding" in inspect.signature(type(model).forward).parameters
    has_size = getattr(model.config, "image_size", None) is not None
    return accepts and has_size and native_size(model.config) != size


@torch.no_grad()
def check_takes_images(model: PreTrainedModel, size: tuple[int, int], role: str) -> None:
    """Find out now, not after training, that a model does not take images of this size."""
    was_training = model.training
    try:
        image = torch.zeros(1, num_channels(model.config), *size)
        classify(model.eval(), image, needs_interpolation(model, size))
    except (ValueError, RuntimeError) as error:
        reason = f"{role} does not take images of {format_size(size)}: {one_line(error)}"
        raise UsageError(reason) from error
    model.train(was_training)


# Distillation


@dataclass
class Teacher:
    """A trained classifier that sees the student's images, normalised as it is used to.

    Args:
        model: the classifier, frozen.
        scale, shift: (channels, 1, 1); from the student's normalisation to its own.
        interpolate: whether its own size is another.
    """

    model: PreTrainedModel
    scale: Tensor
    shift: Tensor
    interpolate: bool

    @torch.no_grad()
    def __call__(self, pixel_values: Tensor) -> Tensor:
        return classify(self.model, pixel_values * self.scale + self.shift, self.interpolate)


def load_teacher(name: str, student: PreTrainedModel, processor: ViTImageProcessor, device: torch.device) -> Teacher:
    """The teacher for a student whose images are normalised as `processor` does it.

    Raises:
        UsageError: it cannot be loaded, or its classes, channels or size are not the student's.
    """
    try:
        model = AutoModelForImageClassification.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"cannot load the teacher {name}: {why_not_loaded(error)}") from error
    config, student_config = model.config, student.config
    if config.num_labels != student_config.num_labels:
        raise UsageError(f"the teacher has {config.num_labels} labels, the student {student_config.num_labels}.")
    check_same_classes(config, student_config)
    if num_channels(config) != num_channels(student_config):
        raise UsageError(
            f"the teacher takes images of {num_channels(config)} channels, the student {num_channels(student_config)}."
        )
    size = native_size(student_config)
    check_takes_images(model, size, f"the teacher {name}")
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (processor.image_mean, processor.image_std))
    own = saved_statistics(name, num_channels(config)) or (processor.image_mean, processor.image_std)
    own_mean, own_std = (torch.tensor(values).view(-1, 1, 1) for values in own)
    scale, shift = std / own_std, (mean - own_mean) / own_std
    model.requires_grad_(False).eval().to(device)
    return Teacher(model, scale.to(device), shift.to(device), needs_interpolation(model, size))


def check_same_classes(teacher: PreTrainedConfig, student: PreTrainedConfig) -> None:
    """Refuse classes in another order; warn of others, which may be the same under other names, as timm's are."""
    names, student_names = set(teacher.id2label.values()), set(student.id2label.values())
    if names == student_names and teacher.id2label != student.id2label:
        raise UsageError("the teacher has the student's labels in another order.")
    if names.isdisjoint(student_names):
        logger.warning(
            f"The teacher calls its first class {teacher.id2label[0]}, the student {student.id2label[0]}, and no name "
            "is the same: its classes are taken for the student's in their order."
        )


def distillation_loss(logits: Tensor, teacher_logits: Tensor, kind: str, tau: float) -> Tensor:
    """Summed over the batch; the two objectives of the DeiT paper (arXiv 2012.12877, section 4), on the class logits.

    hard: −log p_student(argmax p_teacher). soft: τ² · KL(softmax(teacher / τ) ‖ softmax(student / τ)). There is no
    distillation token, and soft distillation is a mean over images, not over images and classes as in DeiT's code.
    """
    if kind == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(-1), reduction="sum")
    student, teacher = (F.log_softmax(each / tau, dim=-1) for each in (logits, teacher_logits))
    return tau**2 * F.kl_div(student, teacher, reduction="sum", log_target=True)


@dataclass
class ClassificationLoss:
    """(1 − α) · cross-entropy + α · distillation, summed over a batch; the cross-entropy alone without a teacher."""

    label_smoothing: float
    teacher: Teacher | None
    distillation: DistillationArguments

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The labels are ids (batch,) or, mixed, probabilities (batch, classes)."""
        logits = classify(model, batch["pixel_values"])
        loss = F.cross_entropy(logits, batch["labels"], label_smoothing=self.label_smoothing, reduction="sum")
        if self.teacher is None:
            return loss
        args, teacher_logits = self.distillation, self.teacher(batch["pixel_values"])
        distilled = distillation_loss(logits, teacher_logits, args.distillation_type, args.distillation_tau)
        return (1 - args.distillation_alpha) * loss + args.distillation_alpha * distilled


# Evaluation


@dataclass
class Predictions:
    """What a model says to all images of an evaluation: logits (images, classes), and labels (images,), on the CPU."""

    logits: Tensor
    labels: Tensor

    def metrics(self) -> dict[str, float]:
        """Mean loss, and shares of images whose class is the first guess, or among five where there are more."""
        logits, labels = self.logits.double(), self.labels.numpy()
        num_classes = logits.shape[1]
        metrics = {
            "loss": F.cross_entropy(logits, self.labels).item(),
            "top1": float(accuracy_score(labels, logits.argmax(-1).numpy())),
        }
        if num_classes > 5:
            # A model that has diverged gives NaN, which scikit-learn refuses.
            scores = np.nan_to_num(logits.numpy())
            metrics["top5"] = float(top_k_accuracy_score(labels, scores, k=5, labels=range(num_classes)))
        return {**metrics, "images": len(labels)}


@dataclass
class Evaluator:
    """Predictions at one or more resolutions, each image once however many processes there are."""

    accelerator: Accelerator
    loaders: dict[str, DataLoader]  # by resolution

    @property
    def first(self) -> str:
        return next(iter(self.loaders))

    @property
    def others(self) -> list[str]:
        return list(self.loaders)[1:]

    @property
    def images(self) -> LabelledImages:
        """At the first resolution."""
        return self.loaders[self.first].dataset

    @torch.no_grad()
    def predict(self, model: PreTrainedModel, resolution: str) -> Predictions:
        was_training = model.training
        model.eval()
        interpolate = needs_interpolation(model, parse_size(resolution))
        rows = []
        for batch in evaluation_batches(self.accelerator, self.loaders[resolution], f"Evaluating at {resolution}"):
            with self.accelerator.autocast():
                logits = classify(model, batch["pixel_values"], interpolate)
            rows.append([part.cpu() for part in self.accelerator.gather_for_metrics((logits, batch["labels"]))])
        model.train(was_training)
        return Predictions(*(torch.cat(parts) for parts in zip(*rows, strict=True)))


def make_processor(arguments: Arguments, config: PreTrainedConfig, size: tuple[int, int]) -> ViTImageProcessor:
    """What evaluation does to images, at one resolution."""
    mean, std = channel_statistics(arguments.augmentation, num_channels(config), arguments.model.model_name_or_path)
    crop = crop_percentage(arguments.augmentation, arguments.model.model_name_or_path)
    return make_image_processor(size, mean, std, crop)


def make_evaluator(arguments: Arguments, accelerator: Accelerator, model: PreTrainedModel, rows: Dataset) -> Evaluator:
    """For the resolutions that are asked for, else the model's own."""
    texts = arguments.training.eval_resolutions
    sizes = [parse_size(text) for text in texts] if texts else [native_size(model.config)]
    loaders = {}
    for size in sizes:
        check_takes_images(model, size, "the model")
        transform = EvaluationTransform(make_processor(arguments, model.config, size))
        loader = DataLoader(
            labelled_images(rows, arguments.data, model.config, transform),
            batch_size=arguments.training.per_device_eval_batch_size,
            num_workers=arguments.data.dataloader_num_workers,
            pin_memory=accelerator.device.type == "cuda",
        )
        loaders[format_size(size)] = accelerator.prepare(loader)
    return Evaluator(accelerator, loaders)


def describe(metrics: dict[str, float], prefix: str = "eval_") -> str:
    top5 = f", top-5 {metrics[f'{prefix}top5']:.2%}" if f"{prefix}top5" in metrics else ""
    return (
        f"loss {metrics[f'{prefix}loss']:.4f}, top-1 {metrics[f'{prefix}top1']:.2%}{top5}"
        f" of {metrics[f'{prefix}images']} images"
    )


# Pictures


def save_pictures(folder: Path, predictions: Predictions, images: LabelledImages, config: PreTrainedConfig) -> None:
    """confusion_matrix.png and predictions.png of an evaluation on `images`; `config` names the classes."""
    names = [config.id2label[label] for label in range(config.num_labels)]
    plots = {
        "confusion_matrix.png": functools.partial(plot_confusion_matrix, predictions, names),
        "predictions.png": functools.partial(plot_predictions, predictions, images, names),
    }
    for name, plot in plots.items():
        with writing(folder / name):
            atomic_write(folder / name, plot)


def plot_confusion_matrix(predictions: Predictions, names: list[str], file: Path) -> None:
    matrix = confusion_matrix(predictions.labels, predictions.logits.argmax(-1), labels=range(len(names)))
    legible = len(names) <= MOST_CLASSES_WITH_NUMBERS
    side = max(5.0, 0.5 * len(names)) if legible else 10.0
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    display = ConfusionMatrixDisplay(matrix, display_labels=names)
    display.plot(ax=axes, include_values=legible, cmap="Blues", xticks_rotation="vertical", values_format="d")
    if not legible:
        axes.set(xticks=[], yticks=[])
    figure.savefig(file, format="png", dpi=150)


def plot_predictions(predictions: Predictions, images: LabelledImages, names: list[str], file: Path) -> None:
    """Images from all over the evaluation, as the model sees them; titles of wrong predictions are red."""
    chosen = torch.linspace(0, len(images) - 1, min(NUM_SAMPLE_PREDICTIONS, len(images))).round().int().tolist()
    columns = min(4, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    figure = Figure(figsize=(2.5 * columns, 2.8 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid:
        axes.axis("off")
    processor = images.transform.processor
    for axes, index in zip(grid, chosen, strict=False):
        pixels = images[index]["pixel_values"].movedim(0, -1)
        pixels = (pixels * torch.tensor(processor.image_std) + torch.tensor(processor.image_mean)).clamp(0, 1)
        axes.imshow(pixels.squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
        probability, predicted = predictions.logits[index].softmax(-1).max(-1)
        label = predictions.labels[index]
        title = f"{names[predicted]} ({probability:.0%})\ntrue: {names[label]}"
        axes.set_title(title, fontsize=8, color="black" if predicted == label else "red")
    figure.savefig(file, format="png", dpi=150)


# The run


@dataclass
class ClassificationRun(TrainingRun):
    loss: ClassificationLoss
    ema: AveragedModel | None
    processor: ViTImageProcessor
    evaluator: Evaluator
    latest: tuple[dict[str, float], Predictions] | None = None  # evaluation, at the first resolution

    script = "train_image_classification"
    unit = "images"
    loss_label = "loss per image"
    metric_for_best_model = "eval_top1"
    greater_is_better = True

    @property
    def final_model(self) -> PreTrainedModel:
        return super().final_model if self.ema is None else self.ema.module

    def accumulate_gradients(self, micro_batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        return backward_full_batches(self.accelerator, self.model, micro_batches, self.sum_loss)

    def sum_loss(self, batch: dict[str, Tensor]) -> Tensor:
        with self.accelerator.autocast():  # the teacher too
            return self.loss(self.model, batch)

    def update(self) -> bool:
        stop = super().update()
        if self.ema is not None:
            self.ema.update_parameters(self.accelerator.unwrap_model(self.model))
        return stop

    def compute_metrics(self) -> dict[str, float]:
        self.latest = self.evaluate_at(self.evaluator.first)
        metrics, _ = self.latest
        return {f"eval_{name}": value for name, value in metrics.items()}

    def evaluate_at(self, resolution: str) -> tuple[dict[str, float], Predictions]:
        """Of the final model, and with averaged weights also of those that are trained (`raw_`)."""
        predictions = self.evaluator.predict(self.final_model, resolution)
        metrics = predictions.metrics()
        if self.ema is not None:
            raw = self.evaluator.predict(self.accelerator.unwrap_model(self.model), resolution).metrics()
            metrics |= {f"raw_{name}": value for name, value in raw.items() if name != "images"}
        return metrics, predictions

    def describe(self, metrics: dict[str, float]) -> str:
        return describe(metrics)

    def save_processor(self, folder: Path) -> None:
        self.processor.save_pretrained(folder)

    def save_checkpoint_files(self, folder: Path) -> None:
        """The averaged weights have a folder of their own: those beside the optimizer's states are what it updates."""
        super().save_checkpoint_files(folder)
        if self.ema is not None:
            self.final_model.save_pretrained(folder / "ema")
            self.save_processor(folder / "ema")

    def load_checkpoint_files(self, folder: Path) -> None:
        if self.ema is not None:
            copy_weights(folder / "ema", self.ema.module)
            self.ema.n_averaged.fill_(1 + self.state.step)


def make_train_batches(
    arguments: Arguments, accelerator: Accelerator, images: LabelledImages, num_classes: int, start: int = 0
) -> Batches:
    """This process's micro-batches from number `start` on: full ones, without end, every pass in its own order."""
    args, augmentation = arguments.training, arguments.augmentation
    return endless_batches(
        accelerator,
        images,
        make_order(images, augmentation.repeated_augmentation, args.seed),
        MixingCollator(augmentation.mixup, augmentation.cutmix, num_classes),
        batch_size=args.per_device_train_batch_size,
        num_workers=arguments.data.dataloader_num_workers,
        seed=args.seed,
        start=start,
        unit="images",
    )


def make_order(images: LabelledImages, num_repeats: int, seed: int) -> Callable[[int], Sequence[int]]:
    """From the number of a pass to the images in it; with repeated augmentation, fewer ones several times in a row."""
    if num_repeats == 1:
        return shuffled(len(images), seed)
    sampler = RepeatAugSampler(
        images,
        num_replicas=1,
        rank=0,
        num_repeats=num_repeats,
        selected_round=0,  # else a pass leaves out up to 255 images
    )

    def order(epoch: int) -> list[int]:
        sampler.set_epoch(seed + epoch)  # which is all that it draws from
        return list(sampler)

    return order


def check_ema(decay: float, accelerator: Accelerator) -> None:
    """Refuse to average weights that are divided over processes."""
    if decay and accelerator.distributed_type == DistributedType.FSDP:
        raise UsageError("ema_decay needs whole weights on every device, which FSDP divides: give 0, or take ZeRO 2.")


def make_ema(model: PreTrainedModel, decay: float, device: torch.device) -> AveragedModel | None:
    """An average that starts at the model's weights; None for a decay of 0.

    After n updates its decay is at most (1 + n) / (10 + n): a short run must not end as an average of its first steps.
    """
    if not decay:
        return None

    def average(averaged, current, num_averaged):
        reached = min(decay, (1 + num_averaged.item()) / (10 + num_averaged.item()))
        get_ema_multi_avg_fn(reached)(averaged, current, num_averaged)

    ema = AveragedModel(model, device=device, multi_avg_fn=average)
    ema.n_averaged = ema.n_averaged.cpu()  # it is asked for at every update; a device would have to be waited for
    ema.update_parameters(model)  # the first call copies, whatever the decay
    return ema


def make_schedule(
    optimizer: torch.optim.Optimizer, args: ClassificationArguments, max_steps: int, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LRScheduler:
    num_warmup_steps = round(args.warmup_epochs * steps_per_epoch)
    return cosine_schedule(optimizer, max_steps, num_warmup_steps, args.warmup_learning_rate, args.final_learning_rate)


def load_training_data(arguments: Arguments, accelerator: Accelerator) -> tuple[PreTrainedModel, Dataset, Dataset]:
    """The model with the classes of the training rows, these, and the rows to evaluate on."""
    seed = arguments.training.seed
    load = functools.partial(load_splits, arguments.data, seed, evaluate_only=False)
    train_rows, evaluation_rows = main_process_first(accelerator, load)
    set_seed(seed)  # the same weights everywhere: averages start from them
    model = load_model(arguments.model, class_names(train_rows, arguments.data))
    return model, train_rows, evaluation_rows


def prepare(arguments: Arguments, accelerator: Accelerator, checkpoint: Checkpoint | None = None) -> ClassificationRun:
    """A run that begins, or one that goes on from a checkpoint."""
    args, distillation = arguments.training, arguments.distillation
    check_ema(args.ema_decay, accelerator)
    num_micro_batches = accumulation_steps(
        args.global_train_batch_size, args.per_device_train_batch_size, accelerator.num_processes
    )
    global_batch_size = num_micro_batches * args.per_device_train_batch_size * accelerator.num_processes
    model, train_rows, evaluation_rows = load_training_data(arguments, accelerator)
    size, num_classes = native_size(model.config), model.config.num_labels
    processor = make_processor(arguments, model.config, size)
    transform = train_transform(arguments.augmentation, size, processor.image_mean, processor.image_std)
    train = labelled_images(train_rows, arguments.data, model.config, transform)
    check_takes_images(model, size, "the model")
    evaluator = make_evaluator(arguments, accelerator, model, evaluation_rows)
    teacher = None
    if distillation.teacher_name_or_path:
        teacher = load_teacher(distillation.teacher_name_or_path, model, processor, accelerator.device)

    steps_per_epoch = max(1, len(train) // global_batch_size)
    max_steps = args.max_steps if args.max_steps > 0 else max(1, round(args.num_train_epochs * steps_per_epoch))
    state = TrainerState(**checkpoint.state) if checkpoint else TrainerState(max_steps)
    ema = make_ema(model, args.ema_decay, accelerator.device)
    optimizer = adamw(model, args, args.base_learning_rate * global_batch_size / 512)
    scheduler = make_schedule(optimizer, args, max_steps, steps_per_epoch)
    model, optimizer = prepare_training(accelerator, model, optimizer)
    make_batches = functools.partial(make_train_batches, arguments, accelerator, train, num_classes)
    if checkpoint is None:
        check_first_batch(make_batches())
    classification = ClassificationRun(
        args=replace(args, eval_steps=args.eval_steps or steps_per_epoch),
        record=arguments.flat,
        layout={"global_train_batch_size": global_batch_size, "training_images": len(train)},
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=make_batches(start=state.step * num_micro_batches),
        num_micro_batches=num_micro_batches,
        state=state,
        loss=ClassificationLoss(args.label_smoothing, teacher, distillation),
        ema=ema,
        processor=processor,
        evaluator=evaluator,
    )
    classification.resume(checkpoint)
    return classification


def train_and_save(classification: ClassificationRun, started: float) -> None:
    """The run; `started` is when the script was."""
    classification.train(started)
    evaluator = classification.evaluator
    metrics, predictions = classification.latest or classification.evaluate_at(evaluator.first)
    resolutions = {evaluator.first: metrics}
    for resolution in evaluator.others:
        resolutions[resolution], _ = classification.evaluate_at(resolution)
    is_main = classification.accelerator.is_main_process
    if is_main:
        save_pictures(classification.output_dir, predictions, evaluator.images, classification.final_model.config)
    results = classification.save_results(resolutions=resolutions)
    if is_main:
        print(f"before: {describe(results['before'])}")
        print_resolutions(resolutions)
        print(f"{results['images_per_second']:,.0f} images per second; everything is in {classification.output_dir}")


def evaluate_and_save(arguments: Arguments, accelerator: Accelerator) -> None:
    """Evaluation of a trained model, without training data."""
    if arguments.model.model_name_or_path is None:
        raise UsageError("evaluate_only needs a model_name_or_path.")
    load = functools.partial(load_splits, arguments.data, arguments.training.seed, evaluate_only=True)
    _, rows = main_process_first(accelerator, load)
    model = build_model(arguments.model, AutoModelForImageClassification, {})
    evaluator = make_evaluator(arguments, accelerator, model, rows)
    model.to(accelerator.device)
    predictions = {resolution: evaluator.predict(model, resolution) for resolution in evaluator.loaders}
    if accelerator.is_main_process:
        resolutions = {resolution: each.metrics() for resolution, each in predictions.items()}
        output_dir = Path(arguments.training.output_dir)
        save_pictures(output_dir, predictions[evaluator.first], evaluator.images, model.config)
        with writing(output_dir / "results.json"):
            write_json(output_dir / "results.json", {"resolutions": resolutions, **provenance(model, arguments.flat)})
        print_resolutions(resolutions)


def print_resolutions(resolutions: dict[str, dict[str, float]]) -> None:
    for resolution, metrics in resolutions.items():
        print(f"at {resolution}: {describe(metrics, prefix='')}")


def main() -> None:
    started = time.perf_counter()
    kinds = [kind.type for kind in fields(Arguments)]
    arguments = Arguments(*parse_arguments(kinds, None, __doc__))
    with leaving_on_sigterm(), removing_if_empty(Path(arguments.training.output_dir)):
        accelerator, checkpoint = start(arguments.training, arguments.flat, ClassificationRun.script)
        if arguments.training.evaluate_only:
            evaluate_and_save(arguments, accelerator)
        else:
            classification = prepare(arguments, accelerator, checkpoint)
            begin(accelerator, classification.script, arguments.flat, checkpoint)
    if not arguments.training.evaluate_only:
        with stopping_on_signals(accelerator):
            train_and_save(classification, started)
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
