"""Labelled images for training and evaluation: from the Hub, from folders, from Parquet and CSV.

Augmentation is torchvision's; evaluation is the image processor that is saved with the model, so that a pipeline sees
what the evaluation saw.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Image, Value, concatenate_datasets, load_dataset
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms import InterpolationMode, v2
from transformers import AutoImageProcessor, PreTrainedConfig, ViTImageProcessor
from transformers.hf_argparser import HfArg
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling

from lion_transformers.scripts.arguments import UsageError, one_line
from lion_transformers.scripts.reading import hold_out, loading
from lion_transformers.scripts.training import check_range
from lion_transformers.tokenization.corpus import files_arguments


PIL_MODES = {1: "L", 3: "RGB"}  # by number of channels
IMAGE_COLUMNS = ["image", "img"]
LABEL_COLUMNS = ["label", "fine_label", "labels"]
DEFAULT_CROP_PCT = 0.875


@dataclass
class DataArguments:
    _argument_group_name = "data"

    dataset_name: str | None = HfArg(
        default=None, help="Hub name or folder of a data set: ILSVRC/imagenet-1k, uoft-cs/cifar10 ..."
    )
    dataset_config_name: str | None = HfArg(default=None, help="Its configuration.")
    train_dir: str | None = HfArg(default=None, help="Folder with a folder of images for every class.")
    validation_dir: str | None = HfArg(default=None, help="A second one, to evaluate on.")
    train_file: list[str] | None = field(
        default=None,
        metadata={"help": "Parquet files with images, or CSV files with paths relative to the folder of the CSV."},
    )
    validation_file: list[str] | None = field(
        default=None, metadata={"help": "Files of the same kind to evaluate on."}
    )
    image_column: str | None = HfArg(
        default=None, help=f"Column with images or paths. Default: the one that is, or {' or '.join(IMAGE_COLUMNS)}."
    )
    label_column: str | None = HfArg(
        default=None, help=f"Column with class names or numbers. Default: {', '.join(LABEL_COLUMNS)}."
    )
    validation_split_percentage: float = HfArg(
        default=5.0, help="Share held out where nothing else is given to evaluate on."
    )
    max_train_samples: int | None = HfArg(default=None, help="Train on so many images, drawn at random.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on so many images, drawn at random.")
    dataloader_num_workers: int = HfArg(default=0, help="Processes that load and transform images, per device.")

    def __post_init__(self):
        check_range(self, ["validation_split_percentage"], low=0, below=100)
        check_range(self, ["max_train_samples", "max_eval_samples"], low=1)
        check_range(self, ["dataloader_num_workers"], low=0)
        if sum(map(bool, (self.dataset_name, self.folders, self.files))) != 1:
            raise UsageError("give one of dataset_name, train_dir (validation_dir), train_file (validation_file).")

    @property
    def folders(self) -> dict[str, str] | None:
        """The folder of each split, where there are folders."""
        return _given(train=self.train_dir, validation=self.validation_dir)

    @property
    def files(self) -> dict[str, list[str]] | None:
        """The files of each split, where there are files."""
        return _given(train=self.train_file, validation=self.validation_file)

    @property
    def source(self) -> str:
        """Where the images come from, in words."""
        if self.dataset_name:
            return self.dataset_name
        return " ".join(self.folders.values() if self.folders else chain(*self.files.values()))


def _given(**splits: Any) -> dict[str, Any] | None:
    return {split: value for split, value in splits.items() if value} or None


@dataclass
class AugmentationArguments:
    _argument_group_name = "images"

    image_mean: list[float] | None = field(
        default=None,
        metadata={"help": "Mean of each channel of pixels from 0 to 1. Default: ImageNet's; 0.5 for grey."},
    )
    image_std: list[float] | None = field(
        default=None, metadata={"help": "Standard deviation of the same. Default: ImageNet's; 0.5 for grey."}
    )
    min_crop_scale: float = HfArg(default=0.08, help="Smallest share of an image's area that a training crop has.")
    horizontal_flip: float = HfArg(default=0.5, help="Probability that a training image is mirrored.")
    randaugment_magnitude: int = HfArg(default=9, help="Strength of RandAugment, of 10; 0 switches it off.")
    color_jitter: float = HfArg(
        default=0.3, help="Largest relative change of brightness, contrast and saturation; 0 switches it off."
    )
    random_erasing: float = HfArg(default=0.25, help="Probability that a rectangle is replaced with noise.")
    mixup: float = HfArg(
        default=0.8, help="α of MixUp; 0 switches it off. With CutMix, every batch gets one of the two."
    )
    cutmix: float = HfArg(default=1.0, help="α of CutMix; 0 switches it off.")
    repeated_augmentation: int = HfArg(
        default=3,
        help="Times that an image is in the data, each augmented on its own; a pass stays as long as with 1.",
    )
    crop_pct: float | None = HfArg(
        default=None,
        help="Share of a resized image's side that evaluation crops from its centre. Default: that of the processor of"
        f" model_name_or_path, else {DEFAULT_CROP_PCT}.",
    )

    def __post_init__(self):
        check_range(self, ["horizontal_flip", "random_erasing"], low=0, most=1)
        check_range(self, ["randaugment_magnitude"], low=0, below=11)
        check_range(self, ["color_jitter", "mixup", "cutmix"], low=0)
        check_range(self, ["repeated_augmentation"], low=1)
        check_range(self, ["min_crop_scale", "crop_pct"], above=0, most=1)


# Data: splits with a column of images and one of labels → images and ids of classes


def load_splits(args: DataArguments, seed: int, evaluate_only: bool) -> tuple[Dataset | None, Dataset]:
    """Rows to train on (None if `evaluate_only`) and to evaluate on, as they are in the source.

    Without a validation split the test split is taken, without that a random part of the training rows.
    """
    with loading(args.source):
        splits = _read_splits(args)
    for name, rows in splits.items():
        if len(rows) == 0:
            raise UsageError(f"the {name} split of {args.source} is empty.")
    validation = splits.get("validation", splits.get("test"))
    if evaluate_only:
        if validation is None:
            raise UsageError(f"{args.source} has nothing to evaluate on: give a validation_dir or validation_file.")
        return None, _sample(validation, args.max_eval_samples, seed)
    if "train" not in splits:
        raise UsageError(f"{args.source} has no train split, only {', '.join(splits)}.")
    train = splits["train"]
    if validation is None:
        train, validation = hold_out(train, args.validation_split_percentage, seed, args.source)
    return _sample(train, args.max_train_samples, seed), _sample(validation, args.max_eval_samples, seed)


def _read_splits(args: DataArguments) -> dict[str, Dataset]:
    if args.dataset_name:
        return load_dataset(args.dataset_name, args.dataset_config_name)
    if args.folders:
        return {split: _read_folder(folder) for split, folder in args.folders.items()}
    return {
        split: concatenate_datasets([_read_file(file, args.image_column) for file in files])
        for split, files in args.files.items()
    }


def _read_folder(folder: str) -> Dataset:
    if not Path(folder).is_dir():
        raise UsageError(f"there is no folder {folder}.")
    for part in sorted(Path(folder).iterdir()):
        if part.is_dir() and not any(path.is_file() for path in part.rglob("*")):
            raise UsageError(f"the folder {part} has no images.")
    # Not by data_dir, which would look for splits in the names of the folders.
    files = {"train": str(Path(escape(folder), "**"))}
    with loading(folder):
        return load_dataset("imagefolder", data_files=files, drop_labels=False, split="train")


def _read_file(file: str, image_column: str | None) -> Dataset:
    with loading(file):
        rows = load_dataset(**files_arguments(train=[file]), split="train")
    column = find_image_column(rows, image_column, file)
    if _is_text(rows.features[column]):
        rows = rows.map(_resolve_paths, batched=True, fn_kwargs={"column": column, "file": file})
    return rows.cast_column(column, Image())


def _resolve_paths(batch: dict[str, list], column: str, file: str) -> dict[str, list[str]]:
    if not all(batch[column]):
        raise UsageError(f"{file} has a row without {column}.")
    paths = [Path(file).parent / path for path in batch[column]]
    for path in paths:
        if not path.is_file():
            raise UsageError(f"there is no image {path}, which {file} names.")
    return {column: [str(path) for path in paths]}


def _sample(rows: Dataset, number: int | None, seed: int) -> Dataset:
    """At random: the first rows of a folder of classes are all of one class."""
    if number is None or number >= len(rows):
        return rows
    return rows.shuffle(seed=seed).select(range(number))


def find_image_column(rows: Dataset, image_column: str | None, source: str) -> str:
    """The column that is asked for, else the only one of images, else one that is called so."""
    if image_column is None:
        decoded = [name for name, feature in rows.features.items() if isinstance(feature, Image)]
        candidates = decoded if len(decoded) == 1 else [name for name in IMAGE_COLUMNS if name in rows.features]
        if not candidates:
            columns = ", ".join(rows.column_names)
            raise UsageError(f"cannot tell which of {columns} in {source} holds images: give image_column.")
        return candidates[0]
    return _existing_column(rows, image_column, source)


def find_label_column(rows: Dataset, label_column: str | None, source: str) -> str:
    """The column that is asked for, or the first that is called like one of labels; of class names or numbers."""
    column = label_column or next((name for name in LABEL_COLUMNS if name in rows.features), None)
    if column is None:
        columns = ", ".join(rows.column_names)
        raise UsageError(f"cannot tell which of {columns} in {source} holds labels: give label_column.")
    feature = rows.features[_existing_column(rows, column, source)]
    is_number = isinstance(feature, Value) and feature.dtype.startswith(("int", "uint"))
    if not (isinstance(feature, ClassLabel) or is_number or _is_text(feature)):
        kind = getattr(feature, "dtype", type(feature).__name__)
        raise UsageError(f"column {column} of {source} holds {kind}, neither class names nor numbers.")
    return column


def _is_text(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string")


def _existing_column(rows: Dataset, column: str, source: str) -> str:
    if column not in rows.features:
        raise UsageError(f"{source} has no column {column}; its columns are {', '.join(rows.column_names)}.")
    return column


def num_channels(config: PreTrainedConfig) -> int:
    """Of the images that a model takes; models that do not say take colour."""
    return getattr(config, "num_channels", 3)


def class_names(rows: Dataset, args: DataArguments) -> list[str]:
    """Names of all classes in the order of their ids: as the data set has it, or sorted (numbers as numbers)."""
    column = find_label_column(rows, args.label_column, args.source)
    feature = rows.features[column]
    if isinstance(feature, ClassLabel):
        return list(feature.names)
    return [str(value) for value in sorted(set(_column(rows, column)))]


def labels_by_name(rows: Dataset, label_column: str) -> list[str]:
    """The name of the class of every row."""
    feature, values = rows.features[label_column], _column(rows, label_column)
    if not isinstance(feature, ClassLabel):
        return [str(value) for value in values]
    if min(values) < 0:  # as the test splits of competitions have it
        raise UsageError(f"column {label_column} holds {min(values)}: these images have no labels to evaluate on.")
    return [feature.names[value] for value in values]


def _column(rows: Dataset, column: str) -> list:
    values = rows.select_columns([column])[:][column]
    for row, value in enumerate(values):
        if value is None or value == "":
            raise UsageError(f"row {row} has no {column}.")
    return values


@dataclass
class LabelledImages(torch.utils.data.Dataset):
    """Images with the ids of their classes.

    Args:
        images: a column of decoded images.
        labels: as many ids.
        transform: makes a tensor of (channels, height, width) from an image.
        mode: Pillow's mode that images are converted to.
    """

    images: Dataset
    labels: list[int]
    transform: Callable[[Any], Tensor]
    mode: str = "RGB"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.transform(self._decode(index)), "labels": self.labels[index]}

    def _decode(self, index: int) -> Any:
        (column,) = self.images.column_names
        try:
            image = self.images[index][column]
        except Exception as error:  # Pillow's decoders raise whatever they come across
            path = self.images.cast_column(column, Image(decode=False))[index][column]["path"]
            raise UsageError(f"cannot read the image {path or 'without a name'}: {one_line(error)}") from error
        if image is None:
            raise UsageError(f"column {column} has a row without an image.")
        if image.mode.startswith(("I", "F")):  # Pillow would cut values above 255 off
            raise UsageError(
                f"row {index} of the images has mode {image.mode}, more than 8 bits a channel: convert it first."
            )
        return image.convert(self.mode)


def labelled_images(
    rows: Dataset, args: DataArguments, config: PreTrainedConfig, transform: Callable[[Any], Tensor]
) -> LabelledImages:
    """Images with as many channels as the model has, and the ids that its configuration gives to their classes.

    Raises:
        UsageError: a class that the configuration has not.
    """
    names = labels_by_name(rows, find_label_column(rows, args.label_column, args.source))
    # Not label2id, which timm's models lack where two classes share a name.
    ids = {name: label for label, name in config.id2label.items()}
    if unknown := sorted(set(names) - set(ids)):
        raise UsageError(
            f"the label {unknown[0]} in {args.source} is not among the {len(ids)} that the model has"
            " or the training data have."
        )
    column = find_image_column(rows, args.image_column, args.source)
    images = rows.select_columns([column]).cast_column(column, Image())
    return LabelledImages(images, [ids[name] for name in names], transform, PIL_MODES[num_channels(config)])


# Transforms: image → (channels, height, width)


def channel_statistics(
    args: AugmentationArguments, channels: int, pretrained: str | None
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel: those asked for, those of the pretrained model, or the default.

    Raises:
        UsageError: there are not as many as channels, a deviation that is not positive, a number of channels that no
            image has.
    """
    if channels not in PIL_MODES:
        raise UsageError(f"images have 1 or 3 channels, the model has num_channels {channels}.")
    defaults = ([0.5], [0.5]) if channels == 1 else (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    saved = saved_statistics(pretrained, channels) if pretrained else None
    mean, std = saved or defaults
    mean, std = args.image_mean or mean, args.image_std or std
    if not len(mean) == len(std) == channels or min(std) <= 0 or not all(map(math.isfinite, [*mean, *std])):
        raise UsageError(f"image_mean and image_std need {channels} finite numbers each, the latter above 0.")
    return list(mean), list(std)


def saved_statistics(name: str, channels: int) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation that a pretrained model's image processor normalises with, if it has one."""
    processor = _saved_processor(name)
    if processor is None:
        return None
    if hasattr(processor, "data_config"):  # timm's
        return processor.data_config["mean"], processor.data_config["std"]
    if not processor.do_normalize:
        return [0.0] * channels, [1.0] * channels
    return processor.image_mean, processor.image_std


def crop_percentage(args: AugmentationArguments, pretrained: str | None) -> float:
    """The share that is asked for, that of the pretrained model's image processor, or the default."""
    if args.crop_pct is not None:
        return args.crop_pct
    processor = _saved_processor(pretrained) if pretrained else None
    if processor is None:
        return DEFAULT_CROP_PCT
    if hasattr(processor, "data_config"):  # timm's
        return processor.data_config["crop_pct"]
    if not getattr(processor, "do_center_crop", False):
        return 1.0
    return processor.crop_size["height"] / (processor.size.get("shortest_edge") or processor.size["height"])


def _saved_processor(name: str) -> Any | None:
    try:
        return AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def train_transform(
    args: AugmentationArguments, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]
) -> v2.Compose:
    """Random crop, flip, RandAugment, colour jitter, normalisation and erasing, to (channels, *size) in float32."""
    crop = v2.RandomResizedCrop(size, scale=(args.min_crop_scale, 1.0), interpolation=InterpolationMode.BICUBIC)
    transforms = [v2.ToImage(), crop, v2.RandomHorizontalFlip(args.horizontal_flip)]
    if args.randaugment_magnitude:
        transforms.append(
            v2.RandAugment(
                magnitude=args.randaugment_magnitude,
                num_magnitude_bins=11,  # from 0 to 10, as recipes count ("m9"), not to torchvision's 30
                interpolation=InterpolationMode.BILINEAR,
                fill=[round(255 * value) for value in mean],
            )
        )
    if args.color_jitter:  # also beside RandAugment, where timm, which trained DeiT, leaves it out
        transforms.append(v2.ColorJitter(args.color_jitter, args.color_jitter, args.color_jitter))
    transforms += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    transforms += [v2.RandomErasing(args.random_erasing, value="random"), v2.ToPureTensor()]
    return v2.Compose(transforms)


def make_image_processor(
    size: tuple[int, int], mean: Sequence[float], std: Sequence[float], crop_pct: float
) -> ViTImageProcessor:
    """Resize to `size` / `crop_pct`, crop `size` from the centre, normalise.

    Squares are cut from images whose shorter side is resized; for other shapes, both sides are, whatever the aspect.
    """
    height, width = size
    resized = [int(side / crop_pct) for side in size]
    return ViTImageProcessor(
        size={"shortest_edge": resized[0]} if height == width else {"height": resized[0], "width": resized[1]},
        do_center_crop=True,
        crop_size={"height": height, "width": width},
        resample=PILImageResampling.BICUBIC,
        do_convert_rgb=len(mean) == 3,
        image_mean=list(mean),
        image_std=list(std),
    )


@dataclass
class EvaluationTransform:
    processor: ViTImageProcessor

    def __call__(self, image: Any) -> Tensor:
        return self.processor(images=image, return_tensors="pt")["pixel_values"][0]


class MixingCollator:
    """Batches of which each is mixed by MixUp or CutMix, with labels of (batch, classes), unless both are off."""

    def __init__(self, mixup: float, cutmix: float, num_classes: int):
        mixes = [(v2.MixUp, mixup), (v2.CutMix, cutmix)]
        self.mixes = [mix(alpha=alpha, num_classes=num_classes) for mix, alpha in mixes if alpha]

    def __call__(self, rows: Iterable[dict[str, Any]]) -> dict[str, Tensor]:
        batch = default_collate(list(rows))
        if not self.mixes:
            return batch
        # Neighbours get mixed, and repeated augmentation makes copies of one image neighbours.
        order = torch.randperm(len(batch["labels"]))
        pixel_values, labels = v2.RandomChoice(self.mixes)(batch["pixel_values"][order], batch["labels"][order])
        return {"pixel_values": pixel_values, "labels": labels}
