"""scripts/train_image_classification.py: recipes, data, transforms, losses, metrics, pictures, whole runs."""

import functools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
import training_checks
import yaml
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features, Image, Value
from matplotlib.figure import Figure
from modeling_checks import assert_carries_code
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchvision.transforms import v2
from training_checks import TWO_CPUS, run_and_check
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BertConfig,
    BertForMaskedLM,
    DeiTConfig,
    DeiTForImageClassification,
    ResNetConfig,
    ViTImageProcessor,
    pipeline,
)

import lion_transformers
from lion_transformers.scripts import train_image_classification
from lion_transformers.scripts.arguments import RECIPES, UsageError, parse_arguments
from lion_transformers.scripts.checkpointing import list_checkpoints
from lion_transformers.scripts.images import (
    AugmentationArguments,
    EvaluationTransform,
    LabelledImages,
    MixingCollator,
    channel_statistics,
    class_names,
    crop_percentage,
    labelled_images,
    load_splits,
    make_image_processor,
    train_transform,
)
from lion_transformers.scripts.optimization import cosine_schedule, weight_decay_groups
from lion_transformers.scripts.train_image_classification import (
    Arguments,
    ClassificationLoss,
    DistillationArguments,
    Predictions,
    distillation_loss,
    load_model,
    load_teacher,
    make_ema,
    make_train_batches,
    native_size,
    parse_size,
    plot_confusion_matrix,
    plot_predictions,
    prepare,
)
from lion_transformers.scripts.training import ModelArguments, backward_micro_batches, make_accelerator


SCRIPT = Path(train_image_classification.__file__)
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TINY_VIT = {**TINY, "image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.0}
TINY_MODEL = ["--model_type=vit", "--config", ",".join(f"{name}={value}" for name, value in TINY_VIT.items())]
PLAIN = (
    "--horizontal_flip 0 --min_crop_scale 0.9 --randaugment_magnitude 0 --color_jitter 0 --random_erasing 0"
    " --mixup 0 --cutmix 0 --repeated_augmentation 1 --crop_pct 1 --label_smoothing 0 --warmup_epochs 0"
)
COLORS = {"blue": (30, 60, 200), "green": (40, 180, 60), "red": (210, 50, 40)}
FOLDERS = ["--train_dir", "train", "--validation_dir", "valid"]
SHORT = [*FOLDERS, "--report_to", "none", "--output_dir", "out", "--max_steps", "1"]

pytestmark = pytest.mark.usefixtures("isolated_run")
run_script = functools.partial(training_checks.run_script, train_image_classification)
fails_with = functools.partial(training_checks.fails_with, train_image_classification)


def parse(*argv):
    kinds = [kind.type for kind in fields(Arguments)]
    return Arguments(*parse_arguments(kinds, [*map(str, argv)]))


def results_in(folder):
    return json.loads(Path(folder, "results.json").read_text())


def color_image(name, seed, size=(10, 12)):
    """Noise around a colour, (height, width) of `size`."""
    noise = np.random.default_rng(seed).integers(-30, 30, (*size, 3))
    return PIL.Image.fromarray((np.array(COLORS[name]) + noise).clip(0, 255).astype(np.uint8))


@pytest.fixture
def colors():
    """./train and ./valid with a folder of images for each of three colours: 8 and 3 images a colour."""
    for split, number in {"train": 8, "valid": 3}.items():
        for name in COLORS:
            folder = Path(split, name)
            folder.mkdir(parents=True)
            for index in range(number):
                color_image(name, 100 * (split == "valid") + index).save(folder / f"{name}-{index}.png")


def vit(**config):
    torch.manual_seed(0)
    return AutoModelForImageClassification.from_config(AutoConfig.for_model("vit", **{**TINY_VIT, **config})).eval()


def lion(**config):
    torch.manual_seed(0)
    config = {**TINY, "modality": "image", "image_size": 8, "patch_size": 4, **config}
    return lion_transformers.LionForImageClassification(lion_transformers.LionConfig(**config)).eval()


# Recipes and arguments

SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
FORMS = {
    "lit": ("none", "raster"),
    "d": ("fixed", "raster"),
    "s": ("selective", "raster"),
    "d_natural": ("fixed", "serpentine"),
    "s_natural": ("selective", "serpentine"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_recipes_hold_the_papers_setting(size, form):
    arguments = parse("--recipe", f"train_image_{size}_lion_{form}", "--output_dir", "out")
    augmentation, args = arguments.augmentation, arguments.training
    hidden_size, heads = SIZES[size]
    decay_type, scan_order = FORMS[form]
    pooling = {} if form == "lit" else {"pooling": "mean"}
    assert arguments.model.model_type == "lion"
    assert arguments.model.config == {
        "modality": "image",
        "decay_type": decay_type,
        "scan_order": scan_order,
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "hidden_size": hidden_size,
        "num_hidden_layers": 12,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden_size,
        "drop_path_rate": 0.1,
        "use_cls_token": True,
        **pooling,
    }
    assert arguments.data.dataset_name == "ILSVRC/imagenet-1k"
    assert (augmentation.randaugment_magnitude, augmentation.color_jitter) == (9, 0.3)
    assert (augmentation.mixup, augmentation.cutmix, augmentation.random_erasing) == (0.8, 1.0, 0.25)
    assert (augmentation.repeated_augmentation, augmentation.crop_pct) == (3, 0.875)
    assert (augmentation.min_crop_scale, augmentation.horizontal_flip) == (0.08, 0.5)
    assert (args.num_train_epochs, args.max_steps, args.warmup_epochs) == (300, -1, 5)
    assert (args.base_learning_rate, args.warmup_learning_rate, args.final_learning_rate) == (5e-4, 1e-6, 1e-5)
    assert (args.global_train_batch_size, args.weight_decay, args.max_grad_norm) == (1024, 0.05, 0)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.999, 1e-8)
    assert (args.label_smoothing, args.ema_decay, args.mixed_precision) == (0.1, 0.99996, "bf16")
    assert arguments.distillation.distillation_type == "none"


def test_every_image_recipe_is_in_the_table():
    assert {path.stem for path in RECIPES.glob("train_image_*.yaml")} == {
        f"train_image_{size}_lion_{form}" for size in SIZES for form in FORMS
    }


def test_recipes_make_the_models_of_the_paper():
    for form, pooling in {"lit": "cls", "d": "mean", "s_natural": "mean"}.items():
        model_args = parse("--recipe", f"train_image_tiny_lion_{form}", "--output_dir", "out").model
        with torch.device("meta"):
            model = load_model(model_args, [f"class {index}" for index in range(1000)])
        assert 5e6 < model.num_parameters() < 6e6
        assert model.config.pooling == pooling
        assert (model.config.position_embedding_type == "absolute") == (form == "lit")


def test_the_demo_recipe_makes_a_model_for_digits():
    model_args = parse("--recipe", "demo_image", "--train_dir", "digits", "--output_dir", "out").model
    model = load_model(model_args, list("0123456789"))
    assert native_size(model.config) == (28, 28)
    assert model(torch.zeros(2, 3, 28, 28)).logits.shape == (2, 10)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mixup", "-1"], "mixup must be at least 0 and finite, got -1.0"),
        (["--crop_pct", "0"], "crop_pct must be above 0 and at most 1, got 0.0"),
        (["--randaugment_magnitude", "11"], "randaugment_magnitude must be at least 0 and below 11"),
        (["--ema_decay", "1"], "ema_decay must be at least 0 and below 1"),
        (["--base_learning_rate", "0"], "base_learning_rate must be above 0"),
        (["--base_learning_rate", "nan"], "base_learning_rate must be above 0"),
        (["--distillation_type", "soft"], "go together"),
        (["--teacher_name_or_path", "t"], "go together"),
        (["--distillation_tau", "0"], "distillation_tau must be above 0"),
        (["--train_dir", "d"], "give one of dataset_name, train_dir"),
        (["--max_eval_samples", "0"], "max_eval_samples must be at least 1"),
        (["--save_steps", "3", "--eval_steps", "2"], "save_steps 3 is not a multiple of eval_steps 2"),
    ],
)
def test_wrong_arguments_are_named(argv, message):
    with pytest.raises(UsageError, match=message):
        parse("--output_dir", "out", "--dataset_name", "x", *argv)


def test_a_source_is_required():
    with pytest.raises(UsageError, match="give one of dataset_name"):
        parse("--output_dir", "out")


def test_the_data_set_of_a_recipe_can_be_replaced():
    data_args = parse("--recipe=train_image_tiny_lion_s", "--dataset_name=", "--train_dir=x", "--output_dir=out").data
    assert data_args.source == "x"


def test_resolutions_are_sides_or_rectangles():
    assert parse_size("224") == (224, 224) and parse_size("96x192") == (96, 192)
    for text in ["x", "0", "2x", "1x2x3", "-4", "2.5"]:
        with pytest.raises(UsageError, match="one side or HEIGHTxWIDTH"):
            parse_size(text)


# Data


def load(*argv, evaluate_only=False):
    """Class names and both splits as (image, class name) pairs in their order."""
    data_args = parse("--output_dir", "out", *argv).data
    splits = load_splits(data_args, 17, evaluate_only)
    names = class_names(splits[0], data_args)
    config = AutoConfig.for_model("vit", id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})
    images = [labelled_images(rows, data_args, config, lambda image: image) for rows in splits]
    return names, *([(row["pixel_values"], names[row["labels"]]) for row in split] for split in images)


def classes(pairs):
    return Counter(name for _, name in pairs)


def test_folders_are_classes(colors):
    names, train, validation = load(*FOLDERS)
    assert names == sorted(COLORS)
    assert classes(train) == dict.fromkeys(COLORS, 8) and classes(validation) == dict.fromkeys(COLORS, 3)
    for image, name in train + validation:
        assert np.abs(np.asarray(image).mean((0, 1)) - COLORS[name]).max() < 15


def test_a_single_folder_is_split_at_random(colors):
    _, train, validation = load("--train_dir", "train", "--validation_split_percentage", "25")
    assert (len(train), len(validation)) == (18, 6)
    assert classes(train) + classes(validation) == dict.fromkeys(COLORS, 8)
    assert len(classes(validation)) > 1


def test_samples_are_drawn_from_all_over_the_data(colors):
    _, train, validation = load(*FOLDERS, "--max_train_samples", "12", "--max_eval_samples", "100")
    assert len(train) == 12 and len(classes(train)) == 3
    assert len(validation) == 9


@pytest.mark.parametrize("kind", ["feature", "struct", "bytes"])
def test_parquet_holds_images(colors, kind):
    files = sorted(Path("train").glob("*/*.png"))
    rows = {"picture": [file.read_bytes() for file in files], "label": [file.parent.name for file in files]}
    if kind != "bytes":
        rows["picture"] = [{"bytes": content, "path": None} for content in rows["picture"]]
    data = Dataset.from_dict(rows)
    if kind == "feature":
        data = data.cast_column("picture", Image())
    data.to_parquet("train.parquet")
    column = [] if kind == "feature" else ["--image_column", "picture"]
    names, train, validation = load("--train_file", "train.parquet", "--validation_file", "train.parquet", *column)
    assert names == sorted(COLORS)
    for (image, name), file in zip(validation, files, strict=True):
        assert name == file.parent.name and np.array_equal(image, PIL.Image.open(file))
    assert classes(train) == classes(validation)


def test_csv_names_images_relative_to_its_folder(colors, monkeypatch, tmp_path):
    lines = [f"{path.relative_to('train')},{path.parent.name}" for path in sorted(Path("train").glob("*/*.png"))]
    Path("train", "a.csv").write_text("\n".join(["image,color", *lines[::2]]))
    Path("train", "b.csv").write_text("\n".join(["image,color", *lines[1::2]]))
    Path("valid.csv").write_text(f"image,color\n{tmp_path / 'valid' / 'red' / 'red-0.png'},red\n")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    files = ["--train_file", "../train/a.csv", "../train/b.csv", "--validation_file", "../valid.csv"]
    names, train, validation = load(*files, "--label_column", "color")
    assert names == sorted(COLORS) and classes(train) == dict.fromkeys(COLORS, 8)
    assert np.array_equal(validation[0][0], PIL.Image.open(tmp_path / "valid" / "red" / "red-0.png"))


@pytest.mark.parametrize(
    ("labels", "expected"), [([10, 9, 1], ["1", "9", "10"]), (["b", "a", "10"], ["10", "a", "b"])]
)
def test_numbers_are_sorted_as_numbers_and_names_as_names(labels, expected):
    color_image("red", 0).save("a.png")
    lines = "\n".join(f"a.png,{label}" for label in labels)
    Path("train.csv").write_text(f"image,label\n{lines}\n")
    names, train, _ = load("--train_file", "train.csv", "--validation_file", "train.csv")
    assert names == expected
    assert [name for _, name in train] == [str(label) for label in labels]


def hub_like(folder, features, **splits):
    """A folder laid out as a data set on the Hub, with images of one colour in the split's row order."""
    Path(folder).mkdir()
    for split, rows in splits.items():
        Dataset.from_dict(rows, Features(features)).to_parquet(f"{folder}/{split}-00000-of-00001.parquet")


def test_cifar_has_a_test_split_and_its_own_columns():
    features = {"img": Image(), "fine_label": ClassLabel(names=["zebra", "ant"]), "coarse_label": Value("int64")}
    images = [color_image("red", seed) for seed in range(4)]
    train = {"img": images, "fine_label": [0, 1, 1, 0], "coarse_label": [5, 5, 5, 5]}
    hub_like("cifar", features, train=train, test={name: column[:2] for name, column in train.items()})
    names, train, validation = load("--dataset_name", "cifar")
    assert names == ["zebra", "ant"]  # the data set's own order
    assert [name for _, name in train] == ["zebra", "ant", "ant", "zebra"]
    assert [name for _, name in validation] == ["zebra", "ant"]


def test_imagenet_is_evaluated_on_its_validation_split():
    features = {"image": Image(), "label": ClassLabel(names=["tench", "goldfish", "shark"])}
    rows = {"image": [color_image("red", 0)] * 2, "label": [1, 0]}
    hub_like("imagenet", features, train=rows, validation=rows, test={**rows, "label": [-1, -1]})
    names, _, validation = load("--dataset_name", "imagenet")
    assert names == ["tench", "goldfish", "shark"]  # also the class without an image
    assert [name for _, name in validation] == ["goldfish", "tench"]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_get_the_channels_of_the_model(mode, channels):
    for index, name in enumerate(["a", "b"]):
        Path("train", name).mkdir(parents=True)
        ending = "jpg" if mode == "CMYK" else "png"
        color_image("green", index).convert(mode).save(Path("train", name, f"x.{ending}"))
    data_args = parse("--output_dir", "out", "--train_dir", "train", "--validation_dir", "train").data
    _, rows = load_splits(data_args, 17, False)
    config = AutoConfig.for_model("vit", num_channels=channels, id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1})
    images = labelled_images(rows, data_args, config, v2.PILToTensor())
    expected = PIL.Image.open(f"train/b/x.{ending}").convert({1: "L", 3: "RGB"}[channels])
    assert images[1]["pixel_values"].shape == (channels, 10, 12)
    assert torch.equal(images[1]["pixel_values"], v2.PILToTensor()(expected))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named(colors, monkeypatch, capsys, workers):
    file = Path("train", "green", "green-5.png")
    file.write_bytes(file.read_bytes()[:200])
    argv = [*TINY_MODEL, *SHORT, "--per_device_train_batch_size", "24", "--dataloader_num_workers", workers]
    message = fails_with(monkeypatch, capsys, *argv, "--repeated_augmentation", "1")
    assert message.startswith("train_image_classification.py: error: cannot read the image /")
    assert "train/green/green-5.png: " in message


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_images_of_more_than_8_bits_are_refused(mode):
    """Pillow would cut their values off at 255."""
    for name in "ab":
        Path("train", name).mkdir(parents=True)
        pixels = np.full((8, 8), 300, dtype={"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode])
        PIL.Image.fromarray(pixels).save(Path("train", name, "x.tiff"))
    data_args = parse("--output_dir", "out", "--train_dir", "train", "--validation_dir", "train").data
    _, rows = load_splits(data_args, 17, False)
    config = AutoConfig.for_model("vit", id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1})
    images = labelled_images(rows, data_args, config, v2.PILToTensor())
    with pytest.raises(UsageError, match=f"row 1 of the images has mode {mode}.*, more than 8 bits a channel"):
        images[1]


def test_a_class_without_images_is_named(colors, monkeypatch, capsys):
    Path("train", "violet", "light").mkdir(parents=True)
    assert "the folder train/violet has no images" in fails_with(monkeypatch, capsys, *TINY_MODEL, *SHORT)


def test_an_empty_label_is_no_class(colors, monkeypatch, capsys):
    rows = [f"train/{color}/{color}-{i}.png,{color if i else ''}" for color in ("green", "red") for i in range(2)]
    Path("images.csv").write_text("\n".join(["image,label", *rows]))
    argv = [*TINY_MODEL, "--train_file", "images.csv", "--output_dir", "out", "--validation_split_percentage", "50"]
    assert re.search(r"row \d has no label", fails_with(monkeypatch, capsys, *argv))


# Transforms


def kinds(**arguments):
    transform = train_transform(AugmentationArguments(**arguments), (8, 8), [0.5] * 3, [0.5] * 3)
    return {type(each).__name__: each for each in transform.transforms}


def test_transforms_are_those_of_the_recipe_and_can_be_switched_off():
    assert list(kinds()) == [
        *["ToImage", "RandomResizedCrop", "RandomHorizontalFlip", "RandAugment", "ColorJitter"],
        *["ToDtype", "Normalize", "RandomErasing", "ToPureTensor"],
    ]
    assert {"RandAugment", "ColorJitter"}.isdisjoint(kinds(randaugment_magnitude=0, color_jitter=0))
    assert kinds(horizontal_flip=0.2)["RandomHorizontalFlip"].p == 0.2
    assert kinds(min_crop_scale=0.3)["RandomResizedCrop"].scale == (0.3, 1.0)
    assert kinds(random_erasing=0.1)["RandomErasing"].p == 0.1
    jitter = kinds()["ColorJitter"]
    assert jitter.brightness == jitter.contrast == jitter.saturation == (0.7, 1.3) and jitter.hue is None


def test_randaugment_of_magnitude_9_of_10_rotates_by_27_degrees():
    randaugment = kinds()["RandAugment"]
    magnitudes, _ = randaugment._AUGMENTATION_SPACE["Rotate"]
    magnitudes = magnitudes(randaugment.num_magnitude_bins, 224, 224)
    assert magnitudes[randaugment.magnitude] == pytest.approx(27.0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(8, 8), (4, 12)])
def test_training_images_are_normalised_tensors_of_the_models_size(channels, size):
    torch.manual_seed(0)
    image = color_image("red", 0, (20, 16)).convert({1: "L", 3: "RGB"}[channels])
    mean, std = channel_statistics(AugmentationArguments(), channels, None)
    transform = train_transform(AugmentationArguments(), size, mean, std)
    for _ in range(50):
        tensor = transform(image)
        assert type(tensor) is torch.Tensor and tensor.dtype == torch.float32 and tensor.shape == (channels, *size)
    # With nothing left to chance but the crop, a uniform image shows the normalisation.
    off = AugmentationArguments(randaugment_magnitude=0, color_jitter=0, random_erasing=0)
    uniform = PIL.Image.new(image.mode, (20, 16), 51 if channels == 1 else (51, 102, 204))
    expected = (torch.tensor([0.2, 0.4, 0.8][:channels]) - torch.tensor(mean)) / torch.tensor(std)
    actual = train_transform(off, size, mean, std)(uniform)
    torch.testing.assert_close(actual, expected.view(-1, 1, 1).expand(channels, *size))


def test_evaluation_crops_the_centre():
    image = color_image("blue", 0, (300, 500))
    processor = make_image_processor((224, 224), [0.5, 0.4, 0.3], [0.2, 0.3, 0.4], crop_pct=0.875)
    oracle = v2.Compose(
        [
            v2.ToImage(),
            v2.Resize(256, interpolation=v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(224),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]),
        ]
    )
    torch.testing.assert_close(EvaluationTransform(processor)(image), oracle(image).as_subclass(torch.Tensor))


def test_evaluation_of_rectangles_resizes_both_sides():
    image = color_image("blue", 0, (30, 30))
    processor = make_image_processor((8, 16), [0.0] * 3, [1.0] * 3, crop_pct=0.8)
    whole = v2.functional.resize(v2.functional.pil_to_tensor(image), [10, 20], v2.InterpolationMode.BICUBIC)
    expected = whole[:, 1:-1, 2:-2] / 255
    torch.testing.assert_close(EvaluationTransform(processor)(image), expected)


def test_statistics_follow_the_channels_and_the_pretrained_model():
    grey, color = (channel_statistics(AugmentationArguments(), channels, None) for channels in (1, 3))
    assert grey == ([0.5], [0.5])
    assert color == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    ViTImageProcessor(image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]).save_pretrained("model")
    assert channel_statistics(AugmentationArguments(), 3, "model") == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    given = AugmentationArguments(image_mean=[0.7, 0.8, 0.9])
    assert channel_statistics(given, 3, "model") == ([0.7, 0.8, 0.9], [0.4, 0.5, 0.6])
    with pytest.raises(UsageError, match="need 1 finite numbers each"):
        channel_statistics(given, 1, None)
    with pytest.raises(UsageError, match="images have 1 or 3 channels, the model has num_channels 4"):
        channel_statistics(given, 4, None)


def mixed_batches(mixup, cutmix, number=40):
    """Batches of images whose every pixel is the image's number, which is its class too."""
    torch.manual_seed(0)
    rows = [{"pixel_values": torch.full((3, 8, 8), float(label)), "labels": label} for label in range(4)]
    collate = MixingCollator(mixup, cutmix, num_classes=4)
    return [collate(rows) for _ in range(number)]


def is_cutmix(batch):
    """CutMix leaves every pixel as it was in one of two images; MixUp makes all pixels of an image alike."""
    return all(torch.equal(image, image.round()) for image in batch["pixel_values"])


@pytest.mark.parametrize(("mixup", "cutmix", "shares"), [(0.8, 0, {0}), (0, 1.0, {1}), (0.8, 1.0, None)])
def test_labels_are_mixed_as_images_are(mixup, cutmix, shares):
    batches = mixed_batches(mixup, cutmix)
    share = sum(map(is_cutmix, batches)) / len(batches)
    assert share in shares if shares else 0.25 < share < 0.75
    for batch in batches:
        assert batch["labels"].shape == (4, 4)
        torch.testing.assert_close(batch["labels"].sum(1), torch.ones(4))
        # The mean pixel is the mixture of two classes' numbers, and so is the mean label.
        means = batch["labels"] @ torch.arange(4.0)
        torch.testing.assert_close(batch["pixel_values"].mean((1, 2, 3)), means, rtol=1e-4, atol=1e-4)
    pairs = {tuple(row.nonzero().flatten().tolist()) for batch in batches for row in batch["labels"]}
    assert len([pair for pair in pairs if len(pair) == 2]) == 6  # not only neighbours are mixed


def test_nothing_is_mixed_when_both_are_off():
    (batch,) = mixed_batches(0, 0, number=1)
    assert batch["labels"].tolist() == [0, 1, 2, 3]


# Repeated augmentation


def pass_over(num_images, num_repeats, rank=0, num_processes=1, epochs=1):
    """Labels, which number the images, of whole passes over the data in one of `num_processes`."""
    picture = PIL.Image.new("RGB", (8, 8))
    data = Dataset.from_dict({"image": [picture] * num_images}, Features({"image": Image()}))
    images = LabelledImages(data, list(range(num_images)), v2.PILToTensor())
    arguments = parse("--dataset_name=x", "--output_dir=out", "--report_to=none", "--mixup=0", "--cutmix=0")
    arguments.training.per_device_train_batch_size = 5
    arguments.augmentation.repeated_augmentation = num_repeats
    accelerator = SimpleNamespace(num_processes=num_processes, process_index=rank, device=torch.device("cpu"))
    batches = make_train_batches(arguments, accelerator, images, num_classes=2)
    per_pass = num_images // num_processes // 5
    return [[label for _ in range(per_pass) for label in next(batches)["labels"].tolist()] for _ in range(epochs)]


def test_repeated_augmentation_shows_a_third_of_the_images_three_times():
    first, second = pass_over(300, 3, epochs=2)
    assert len(first) == 300 and sorted(Counter(first).values()) == [3] * 100
    assert set(first) != set(second)


def test_copies_of_repeated_augmentation_go_to_different_processes():
    ranks = [pass_over(30, 3, rank, 3)[0] for rank in range(3)]
    assert [len(labels) for labels in ranks] == [10, 10, 10]
    assert all(len(set(labels)) == 10 for labels in ranks) and ranks[0] == ranks[1] == ranks[2]


def test_without_repetition_a_pass_shows_every_image_once():
    first, second = pass_over(30, 1, epochs=2)
    assert sorted(first) == sorted(second) == list(range(30)) and first != second


# Losses


def softmax(row):
    exponentials = [math.exp(value) for value in row]
    return [value / sum(exponentials) for value in exponentials]


LOGITS = [[0.5, -1.0, 2.0], [0.1, 0.2, 0.3]]
TEACHER_LOGITS = [[1.5, 0.0, -1.0], [-0.2, 0.4, 1.0]]


def test_cross_entropy_smooths_mixed_labels_and_is_summed(monkeypatch):
    labels = [[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]]
    expected = 0.0
    for row, targets in zip(LOGITS, labels, strict=True):
        for probability, target in zip(softmax(row), targets, strict=True):
            expected -= (0.9 * target + 0.1 / 3) * math.log(probability)
    model = SimpleNamespace(logits=torch.tensor(LOGITS))
    loss = ClassificationLoss(0.1, None, DistillationArguments())
    batch = {"pixel_values": None, "labels": torch.tensor(labels)}
    assert loss(lambda pixel_values: model, batch).item() == pytest.approx(expected, rel=1e-6)
    batch["labels"] = torch.tensor([0, 2])
    hard = sum(-0.9 * math.log(softmax(row)[label]) for row, label in zip(LOGITS, [0, 2], strict=True))
    hard -= sum(0.1 / 3 * math.log(p) for row in LOGITS for p in softmax(row))
    assert loss(lambda pixel_values: model, batch).item() == pytest.approx(hard, rel=1e-6)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_soft_distillation_is_the_divergence_of_the_teachers_probabilities(tau):
    expected = 0.0
    for student, teacher in zip(LOGITS, TEACHER_LOGITS, strict=True):
        p, q = (softmax([value / tau for value in row]) for row in (teacher, student))
        expected += tau**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    loss = distillation_loss(torch.tensor(LOGITS), torch.tensor(TEACHER_LOGITS), "soft", tau)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_hard_distillation_takes_the_teachers_best_class():
    expected = -math.log(softmax(LOGITS[0])[0]) - math.log(softmax(LOGITS[1])[2])
    loss = distillation_loss(torch.tensor(LOGITS), torch.tensor(TEACHER_LOGITS), "hard", 1.0)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_alpha_weighs_labels_against_the_teacher(kind):
    logits, teacher_logits = torch.tensor(LOGITS), torch.tensor(TEACHER_LOGITS)
    args = DistillationArguments("teacher", kind, distillation_alpha=0.3, distillation_tau=2.0)
    loss = ClassificationLoss(0.0, lambda pixel_values: teacher_logits, args)
    actual = loss(
        lambda pixel_values: SimpleNamespace(logits=logits), {"pixel_values": None, "labels": torch.tensor([1, 1])}
    )
    labelled = -math.log(softmax(LOGITS[0])[1]) - math.log(softmax(LOGITS[1])[1])
    distilled = distillation_loss(logits, teacher_logits, kind, 2.0).item()
    assert actual.item() == pytest.approx(0.7 * labelled + 0.3 * distilled, rel=1e-6)


def student_processor():
    return make_image_processor((8, 8), [0.5, 0.4, 0.3], [0.2, 0.3, 0.4], crop_pct=1.0)


@pytest.mark.parametrize(
    "statistics", [{"image_mean": [0.1] * 3, "image_std": [0.6] * 3}, {"do_normalize": False}, None]
)
def test_the_teacher_sees_images_as_it_normalises_them(statistics):
    teacher = vit(num_labels=3)
    teacher.save_pretrained("teacher")
    own = student_processor()
    if statistics:
        own = ViTImageProcessor(size={"height": 8, "width": 8}, resample=3, **statistics)
        own.save_pretrained("teacher")
    image = color_image("green", 0, (8, 8))
    loaded = load_teacher("teacher", vit(num_labels=3), student_processor(), torch.device("cpu"))
    actual = loaded(EvaluationTransform(student_processor())(image)[None])
    torch.testing.assert_close(actual, teacher(EvaluationTransform(own)(image)[None]).logits, rtol=1e-4, atol=1e-5)
    assert not actual.requires_grad and not loaded.model.training


def test_a_teacher_of_timm_is_normalised_as_its_configuration_says():
    config = AutoConfig.for_model("timm_wrapper", architecture="regnety_002", num_labels=3)
    AutoModelForImageClassification.from_config(config).save_pretrained("teacher")
    saved = json.loads(Path("teacher/config.json").read_text())
    saved["pretrained_cfg"] = {"mean": [0.1] * 3, "std": [0.6] * 3, "input_size": [3, 32, 32]}
    Path("teacher/config.json").write_text(json.dumps(saved))
    student = vit(num_labels=3, image_size=32)
    teacher = load_teacher("teacher", student, student_processor(), torch.device("cpu"))
    torch.testing.assert_close(teacher.scale.flatten(), torch.tensor([0.2, 0.3, 0.4]) / 0.6)
    torch.testing.assert_close(teacher.shift.flatten(), (torch.tensor([0.5, 0.4, 0.3]) - 0.1) / 0.6)
    assert teacher(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_a_teacher_of_timm_may_have_two_classes_of_one_name():
    """As ImageNet's cranes: then its configuration has no label2id at all."""
    config = AutoConfig.for_model("timm_wrapper", architecture="regnety_002", num_labels=3)
    AutoModelForImageClassification.from_config(config).save_pretrained("teacher")
    saved = json.loads(Path("teacher/config.json").read_text())
    Path("teacher/config.json").write_text(json.dumps({**saved, "label_names": ["crane", "heron", "crane"]}))
    assert AutoConfig.from_pretrained("teacher").label2id is None
    student = vit(num_labels=3, image_size=32)
    teacher = load_teacher("teacher", student, student_processor(), torch.device("cpu"))
    assert teacher(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize(("names", "warned"), [("xyz", True), ("abz", False), ("abc", False)])
def test_a_teacher_with_other_names_is_pointed_out(names, warned, caplog):
    def labelled(names):
        return {"id2label": dict(enumerate(names)), "label2id": {name: label for label, name in enumerate(names)}}

    vit(**labelled(names)).save_pretrained("teacher")
    load_teacher("teacher", vit(**labelled("abc")), student_processor(), torch.device("cpu"))
    assert warned == ("calls its first class x, the student a, and no name is the same" in caplog.text)


def test_a_teacher_of_another_size_interpolates_its_positions():
    vit(num_labels=3, image_size=16).save_pretrained("teacher")
    teacher = load_teacher("teacher", vit(num_labels=3), student_processor(), torch.device("cpu"))
    assert teacher(torch.zeros(2, 3, 8, 8)).shape == (2, 3)


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"num_labels": 4}, "the teacher has 4 labels, the student 3"),
        ({"id2label": {0: "b", 1: "a", 2: "c"}}, "the student's labels in another order"),
        ({"num_channels": 1}, "the teacher takes images of 1 channels, the student 3"),
    ],
)
def test_a_teacher_must_fit_the_student(teacher, message):
    if "id2label" in teacher:
        teacher["label2id"] = {name: label for label, name in teacher["id2label"].items()}
    vit(**{"num_labels": 3, **teacher}).save_pretrained("teacher")
    student = vit(id2label={0: "a", 1: "b", 2: "c"}, label2id={"a": 0, "b": 1, "c": 2})
    with pytest.raises(UsageError, match=message):
        load_teacher("teacher", student, student_processor(), torch.device("cpu"))
    with pytest.raises(UsageError, match="cannot load the teacher nowhere"):
        load_teacher("nowhere", student, student_processor(), torch.device("cpu"))


def test_accumulated_gradients_are_those_of_one_large_batch():
    model = vit(num_labels=3)
    images, labels = torch.randn(7, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2, 2])
    torch.nn.functional.cross_entropy(model(images).logits, labels, label_smoothing=0.1).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    accelerator = Accelerator(cpu=True)
    batches = [{"pixel_values": images[rows], "labels": labels[rows]} for rows in (slice(0, 4), slice(4, 7))]
    loss = functools.partial(ClassificationLoss(0.1, None, DistillationArguments()), model)
    backward_micro_batches(accelerator, model, batches, loss, torch.tensor(7))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


# Optimisation


def exempt_names(model):
    exempt = {id(parameter) for parameter in weight_decay_groups(model, 0.1)[1]["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in exempt and parameter.ndim > 1}


def test_learned_tokens_and_positions_of_images_are_not_decayed():
    tokens = {"embeddings.cls_token", "embeddings.position_embeddings"}
    assert exempt_names(vit()) == {f"vit.{name}" for name in tokens}
    deit = DeiTForImageClassification(DeiTConfig(**TINY_VIT))
    assert exempt_names(deit) == {f"deit.{name}" for name in [*tokens, "embeddings.distillation_token"]}
    assert exempt_names(lion(decay_type="none")) == {f"lion.{name}" for name in tokens}
    assert exempt_names(lion(decay_type="fixed")) == {"lion.embeddings.cls_token"}
    masked = lion_transformers.LionForMaskedImageModeling(lion(decay_type="none").config)
    assert exempt_names(masked) == {f"lion.{name}" for name in [*tokens, "embeddings.mask_token"]}
    # The positions of text are decayed, as in BERT.
    assert exempt_names(BertForMaskedLM(BertConfig(**TINY))) == set()


def optimizer_of(rate):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def test_cosine_schedule_has_a_warmup_and_a_floor():
    steps, warmup, peak, start, floor = 1000, 50, 1e-3, 1e-6, 1e-5
    at = cosine_schedule(optimizer_of(peak), steps, warmup, start, floor).lr_lambdas[0]
    for step in [0, 1, 25, 49, 50, 51, 500, 998, 999]:
        if step < warmup:
            expected = start + (peak - start) * step / (warmup - 1)
        else:
            done = (step - warmup + 1) / (steps - warmup)
            expected = floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2
        assert at(step) * peak == pytest.approx(expected, rel=1e-9)
    assert at(0) * peak == pytest.approx(start) and at(49) == 1.0 and at(999) * peak == pytest.approx(floor)


def test_cosine_schedule_of_short_runs_and_small_rates():
    at = cosine_schedule(optimizer_of(1e-3), 3, 100, 1e-4, 0.0).lr_lambdas[0]
    assert [at(step) for step in range(3)] == pytest.approx([0.1, 1.0, 0.0])
    at = cosine_schedule(optimizer_of(1e-7), 10, 2, 1e-6, 1e-5).lr_lambdas[0]
    assert [at(step) for step in range(10)] == pytest.approx([1.0] * 10)


def test_the_rate_is_scaled_with_the_batch_and_the_warmup_counted_in_passes(colors):
    argv = [*TINY_MODEL, *FOLDERS, "--output_dir", "out", "--report_to", "none"]
    batches = "--global_train_batch_size 8 --per_device_train_batch_size 4 --num_train_epochs 4 --warmup_epochs 2"
    arguments = parse(*argv, *batches.split(), "--base_learning_rate", "0.64")
    classification = prepare(arguments, make_accelerator(arguments.training))
    assert classification.optimizer.defaults["lr"] == pytest.approx(0.64 * 8 / 512)
    assert classification.num_micro_batches == 2
    assert classification.state.max_steps == 4 * 3  # 24 images, 8 at once
    assert classification.args.eval_steps == classification.args.save_steps == 3
    at = classification.scheduler.lr_lambdas[0]
    assert at(4) < 1.0 == at(5) > at(6)


@pytest.mark.parametrize(
    ("updates_before", "decays"),
    [
        (0, (2 / 11, 3 / 12, 4 / 13)),  # few updates are averaged over few of them
        (1_000_000, (0.9, 0.9, 0.9)),
        (79, (81 / 90, 0.9, 0.9)),  # where the two meet: (1 + 80) / (10 + 80) = 0.9
    ],
)
def test_averaged_weights_follow_the_closed_form(updates_before, decays):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    ema = make_ema(model, 0.9, torch.device("cpu"))
    assert ema.module.weight.item() == 1.0
    expected = 1.0
    ema.n_averaged += updates_before
    for value, decay in zip([3.0, -2.0, 5.0], decays, strict=True):
        torch.nn.init.constant_(model.weight, value)
        ema.update_parameters(model)
        expected = decay * expected + (1 - decay) * value
    assert ema.module.weight.item() == pytest.approx(expected, rel=1e-6)
    assert make_ema(model, 0.0, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"do_center_crop": False, "size": {"height": 8, "width": 8}}, 1.0),
        ({"do_center_crop": True, "size": {"shortest_edge": 10}, "crop_size": {"height": 8, "width": 8}}, 0.8),
        ({"do_center_crop": True, "size": {"height": 16, "width": 20}, "crop_size": {"height": 8, "width": 10}}, 0.5),
    ],
)
def test_a_pretrained_model_is_evaluated_with_the_crop_of_its_processor(processor, expected):
    ViTImageProcessor(**processor).save_pretrained("model")
    assert crop_percentage(AugmentationArguments(), "model") == expected
    assert crop_percentage(AugmentationArguments(crop_pct=0.7), "model") == 0.7
    assert crop_percentage(AugmentationArguments(), None) == 0.875


# Metrics and pictures


def test_metrics_by_hand():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(40, 8, generator=generator), torch.randint(0, 7, (40,), generator=generator)
    loss = top1 = top5 = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        better = sum(value > row[label] for value in row)
        loss -= math.log(softmax(row)[label])
        top1, top5 = top1 + (better == 0), top5 + (better < 5)
    expected = {"loss": loss / 40, "top1": top1 / 40, "top5": top5 / 40, "images": 40}
    assert Predictions(logits, labels).metrics() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("num_classes", "has_top5"), [(2, False), (5, False), (6, True)])
def test_five_guesses_need_more_than_five_classes(num_classes, has_top5):
    metrics = Predictions(torch.randn(9, num_classes), torch.zeros(9, dtype=torch.long)).metrics()
    assert ("top5" in metrics) == has_top5


def test_a_model_that_has_diverged_can_be_evaluated():
    metrics = Predictions(torch.full((3, 6), math.nan), torch.tensor([1, 2, 3])).metrics()
    assert math.isnan(metrics["loss"]) and metrics["top1"] == 0


@pytest.fixture
def figures(monkeypatch):
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    return saved


@pytest.mark.parametrize(("num_classes", "numbered"), [(3, True), (20, True), (21, False)])
def test_the_confusion_matrix_is_numbered_where_that_is_legible(figures, num_classes, numbered):
    labels = torch.tensor([0, 0, 1, 2])
    logits = torch.nn.functional.one_hot(torch.tensor([0, 1, 1, 0]), num_classes).float()
    plot_confusion_matrix(Predictions(logits, labels), [f"c{i}" for i in range(num_classes)], Path("x"))
    axes = figures[0].axes[0]
    counts = np.asarray(axes.images[0].get_array())
    assert counts[:3, :3].tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0]] and counts.sum() == 4
    assert len(axes.texts) == (num_classes**2 if numbered else 0)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == (
        [f"c{i}" for i in range(num_classes)] if numbered else []
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_sample_predictions_show_images_and_mark_what_is_wrong(figures, channels):
    pictures = [PIL.Image.new("RGB", (8, 8), (10 * index, 0, 0)) for index in range(20)]
    mode = {1: "L", 3: "RGB"}[channels]
    data = Dataset.from_dict({"image": pictures}, Features({"image": Image(mode=mode)}))
    labels = [index % 2 for index in range(20)]
    mean, std = channel_statistics(AugmentationArguments(), channels, None)
    transform = EvaluationTransform(make_image_processor((8, 8), mean, std, 1.0))
    images = LabelledImages(data, labels, transform, mode)
    logits = torch.tensor([[math.log(3.0), 0.0]] * 20)  # always the first class, with 75 %
    plot_predictions(Predictions(logits, torch.tensor(labels)), images, ["cat", "dog"], Path("x"))
    axes = figures[0].axes
    assert len(axes) == 16
    titles = [each.title.get_text() for each in axes]
    for title, each in zip(titles, axes, strict=True):
        predicted, true = title.split("\n")
        assert predicted == "cat (75%)" and true in ("true: cat", "true: dog")
        assert each.title.get_color() == ("black" if true == "true: cat" else "red")
    assert {"true: cat", "true: dog"} == {title.split("\n")[1] for title in titles}
    for each, index in [(axes[0], 0), (axes[15], 19)]:
        shown = torch.as_tensor(np.asarray(each.images[0].get_array())).float()
        original = torch.from_numpy(np.array(pictures[index].convert(mode))) / 255
        torch.testing.assert_close(shown, original, rtol=0, atol=1e-5)


# The model


def test_a_finetuned_model_gets_a_head_for_new_classes():
    vit(num_labels=7).save_pretrained("model")
    model = load_model(ModelArguments(model_name_or_path="model"), ["x", "y"])
    assert model.config.id2label == {0: "x", 1: "y"} and model.classifier.weight.shape == (2, 16)
    name = "vit.embeddings.patch_embeddings.projection.weight"
    assert torch.equal(model.state_dict()[name], vit(num_labels=7).state_dict()[name])


def test_a_model_that_knows_the_classes_keeps_their_order():
    vit(id2label={0: "y", 1: "x"}, label2id={"y": 0, "x": 1}).save_pretrained("model")
    model = load_model(ModelArguments(model_name_or_path="model"), ["x", "y"])
    assert model.config.label2id == {"y": 0, "x": 1}


def test_one_class_is_none():
    with pytest.raises(UsageError, match="needs two classes, the training data have only cat"):
        load_model(ModelArguments("vit"), ["cat"])


# Whole runs


@pytest.fixture
def digits():
    """./train and ./valid with grey digits of 8 × 8: 600 and 120."""
    data = load_digits()
    for index, (pixels, label) in enumerate(zip(data.images[:720], data.target[:720], strict=True)):
        folder = Path("valid" if index >= 600 else "train", str(label))
        folder.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(folder / f"{index}.png")


def test_a_run_learns_digits_and_leaves_every_file(digits, monkeypatch, capsys):
    config = "image_size=8,patch_size=4,num_channels=1,hidden_size=64,num_hidden_layers=1,num_attention_heads=2"
    model = ["--model_type", "vit", "--config", f"{config},intermediate_size=128"]
    training = (
        "--output_dir out --global_train_batch_size 32 --per_device_train_batch_size 16 --num_train_epochs 8"
        " --base_learning_rate 5e-2 --warmup_epochs 1 --per_device_eval_batch_size 50 --logging_steps 9"
        " --ema_decay 0.8"
    )
    run_script(monkeypatch, *model, *FOLDERS, *PLAIN.split(), *training.split(), "--eval_resolutions", "8", "12")
    out, results = Path("out"), results_in("out")
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith("checkpoint-")) == sorted(
        [
            *["config.json", "model.safetensors", "preprocessor_config.json", "results.json", "runs"],
            *["loss_curve.png", "confusion_matrix.png", "predictions.png"],
        ]
    )
    for picture in out.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(next((out / "runs").rglob("events.out.tfevents*")).parent)).Reload()
    tags = {"train/loss", "train/learning_rate", "train/images_per_second", "eval/loss", "eval/top1", "eval/raw_top5"}
    assert tags <= set(events.Tags()["scalars"])
    steps_per_epoch = 600 // 32
    assert [event.step for event in events.Scalars("eval/top1")] == [steps_per_epoch * epoch for epoch in range(9)]

    before, after = results["before"], results["after"]
    assert before["eval_top1"] < 0.3 and after["eval_top1"] > 0.6
    assert before["eval_loss"] == pytest.approx(math.log(10), abs=0.2) and after["eval_loss"] < 1.5
    assert after["eval_top5"] > 0.9 and after["eval_images"] == 120
    assert after["eval_raw_loss"] != after["eval_loss"]
    assert results["steps"] == 8 * steps_per_epoch and results["images"] == results["steps"] * 32
    assert results["images_per_second"] > 0
    assert list(results["resolutions"]) == ["8", "12"]
    assert results["resolutions"]["8"] == {
        name.removeprefix("eval_"): value for name, value in after.items() if name.startswith("eval_")
    }
    assert results["resolutions"]["12"]["loss"] != after["eval_loss"] and results["resolutions"]["12"]["images"] == 120
    output = capsys.readouterr()
    assert f"at 12: loss {results['resolutions']['12']['loss']:.4f}" in output.out
    assert "Training: 100%" in output.err and "Evaluating at 8" in output.err

    # The best of the checkpoints is the one of the highest top-1 share, the earliest of equals.
    evaluations = [entry for entry in results["history"] if "eval_top1" in entry][1:]
    best = max(evaluations, key=lambda entry: entry["eval_top1"])
    assert results["best"] == {"step": best["step"], "eval_top1": best["eval_top1"]}
    assert {results["best"]["step"], results["steps"]} <= set(list_checkpoints(out))

    # The model is the average; a checkpoint has it in a folder of its own, beside what is trained.
    checkpoint = out / f"checkpoint-{results['steps']}"
    states = [
        AutoModelForImageClassification.from_pretrained(folder).state_dict()
        for folder in (out, checkpoint / "ema", checkpoint)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])
    for folder in (out, checkpoint, checkpoint / "ema"):
        assert list(AutoImageProcessor.from_pretrained(folder).image_mean) == [0.5]
    assert {"optimizer.bin", "trainer_state.json"} <= {path.name for path in checkpoint.iterdir()}

    # Without training data, the saved model gives the reported figures again.
    evaluation = "--evaluate_only --validation_dir valid --report_to none --output_dir again"
    run_script(monkeypatch, *evaluation.split(), "--model_name_or_path", "out", "--eval_resolutions", "8", "12")
    again = results_in("again")["resolutions"]
    for resolution, metrics in again.items():
        reported = results["resolutions"][resolution]
        assert metrics == pytest.approx({name: reported[name] for name in metrics}, rel=1e-5)
    assert {path.name for path in Path("again").iterdir()} == {
        *["results.json", "confusion_matrix.png", "predictions.png"]
    }


def test_lion_is_trained_from_a_recipe_and_serves_a_pipeline(colors, monkeypatch):
    recipe = {
        "model_type": "lion",
        "config": {**TINY, "modality": "image", "image_size": 8, "patch_size": 2, "decay_type": "selective"},
        "train_dir": "train",
        "validation_dir": "valid",
        "num_train_epochs": 8,
        "global_train_batch_size": 12,
        "per_device_train_batch_size": 12,
        "base_learning_rate": "0.2",
        "warmup_epochs": 1,
        "mixed_precision": "bf16",
        "crop_pct": 1.0,
        "report_to": ["none"],
        "eval_resolutions": [8, 12, "4x8"],
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_script(
        monkeypatch,
        "--recipe",
        "recipe.yaml",
        "--output_dir",
        "out",
        "--config",
        "scan_order=serpentine",
        *PLAIN.split(),
    )
    results = results_in("out")
    assert results["after"]["eval_loss"] < 0.6 * results["before"]["eval_loss"]
    assert results["after"]["eval_top1"] == 1.0
    assert list(results["resolutions"]) == ["8", "12", "4x8"]
    assert "eval_top5" not in results["after"] and "eval_raw_top1" not in results["after"]
    assert not Path("out/runs").exists()
    model = AutoModelForImageClassification.from_pretrained("out").eval()
    assert type(model).__name__ == "LionForImageClassification" and model.config.scan_order == "serpentine"
    assert model.config.label2id == {"blue": 0, "green": 1, "red": 2} and model.dtype == torch.float32

    # The pipeline reads a file as the evaluation did: its predictions have the loss that was reported, but for bf16.
    classifier = pipeline("image-classification", model="out", top_k=3)
    losses = []
    for file in sorted(Path("valid").glob("*/*.png")):
        scores = {guess["label"]: guess["score"] for guess in classifier(str(file))}
        losses.append(-math.log(scores[file.parent.name]))
    assert np.mean(losses) == pytest.approx(results["after"]["eval_loss"], rel=0.03, abs=0.01)


@pytest.mark.parametrize("crop_pct", [1.0, 0.8])
def test_the_saved_processor_is_the_evaluation(colors, monkeypatch, crop_pct):
    run_script(monkeypatch, *TINY_MODEL, *SHORT, *PLAIN.split(), "--crop_pct", crop_pct)
    for folder in ["out", "out/checkpoint-1"]:
        classifier = pipeline("image-classification", model=folder, top_k=3)
        losses = []
        for file in sorted(Path("valid").glob("*/*.png")):
            scores = {guess["label"]: guess["score"] for guess in classifier(str(file))}
            losses.append(-math.log(scores[file.parent.name]))
        assert np.mean(losses) == pytest.approx(results_in("out")["after"]["eval_loss"], rel=1e-5)


def test_a_model_of_one_channel_has_a_processor_for_grey_images(digits, monkeypatch):
    run_script(monkeypatch, *TINY_MODEL, "--config", "num_channels=1", *SHORT, *PLAIN.split())
    processor, model = (
        AutoImageProcessor.from_pretrained("out"),
        AutoModelForImageClassification.from_pretrained("out"),
    )
    files = sorted(Path("valid").glob("*/*.png"))
    pixels = processor(images=[PIL.Image.open(file) for file in files], return_tensors="pt")["pixel_values"]
    labels = torch.tensor([model.config.label2id[file.parent.name] for file in files])
    loss = torch.nn.functional.cross_entropy(model(pixels).logits, labels).item()
    assert results_in("out")["after"]["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_teacher_teaches(colors, monkeypatch):
    """With labels out of the loss (α = 1), a student comes to say what its teacher says, right or wrong."""
    teacher = vit(id2label={0: "blue", 1: "green", 2: "red"}, label2id={"blue": 0, "green": 1, "red": 2})
    torch.nn.init.zeros_(teacher.classifier.weight)
    teacher.classifier.bias.data = torch.tensor([0.0, 4.0, 0.0])  # always green
    teacher.save_pretrained("teacher")
    training = "--num_train_epochs 10 --base_learning_rate 0.5 --report_to none --per_device_train_batch_size 12"
    distillation = "--teacher_name_or_path teacher --distillation_alpha 1 --distillation_type"
    for kind in ["hard", "soft"]:
        argv = [
            *TINY_MODEL,
            *FOLDERS,
            *PLAIN.split(),
            *training.split(),
            *distillation.split(),
            kind,
            "--output_dir",
            kind,
        ]
        run_script(monkeypatch, *argv, "--mixup", "0.8")
        model = AutoModelForImageClassification.from_pretrained(kind)
        assert (model(torch.randn(20, 3, 8, 8)).logits.argmax(-1) == 1).all()
        assert results_in(kind)["after"]["eval_top1"] == pytest.approx(1 / 3)


def test_every_folder_of_a_run_carries_the_code_of_its_model(colors, monkeypatch):
    lion = ["--config", ",".join(f"{name}={value}" for name, value in {**TINY_VIT, "modality": "image"}.items())]
    run_script(monkeypatch, *lion, *SHORT, *PLAIN.split(), "--ema_decay", "0.5")
    for folder in ("out", "out/checkpoint-1", "out/checkpoint-1/ema"):
        assert_carries_code(folder)


def test_any_classifier_of_transformers_is_trained(colors, monkeypatch):
    """Without position embeddings, and without a size or a way to interpolate of its own."""
    resnet = ["--model_type", "resnet", "--config", "{image_size: 32, embedding_size: 8, hidden_sizes: [8, 8]}"]
    resnet += ["--config", "{depths: [1, 1], layer_type: basic}"]
    run_script(monkeypatch, *resnet, *SHORT, "--ema_decay", "0.5", "--eval_resolutions", "32", "48")
    results = results_in("out")
    assert results["model"]["class"] == "ResNetForImageClassification"
    assert list(results["resolutions"]) == ["32", "48"]


def test_a_rectangular_model_is_trained_on_rectangles(colors, monkeypatch):
    config = "{modality: image, decay_type: none, image_size: [4, 8]}"
    run_script(
        *(monkeypatch, *TINY_MODEL, "--model_type", "lion", "--config", config, *SHORT),
        *("--eval_resolutions", "4x8", "8"),
    )
    assert list(results_in("out")["resolutions"]) == ["4x8", "8"]
    processor = AutoImageProcessor.from_pretrained("out")
    assert (processor.crop_size["height"], processor.crop_size["width"]) == (4, 8)


def test_a_square_model_is_evaluated_on_rectangles(colors, monkeypatch):
    """Also on one whose height is the model's own."""
    run_script(monkeypatch, *TINY_MODEL, *SHORT, "--eval_resolutions", "8x12", "8", "4")
    assert list(results_in("out")["resolutions"]) == ["8x12", "8", "4"]


def test_two_runs_with_one_seed_are_equal(colors, monkeypatch):
    histories = []
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        steps = ["--max_steps", "3", "--logging_steps", "1", "--seed", seed, "--output_dir", name]
        run_script(monkeypatch, *TINY_MODEL, *SHORT, *steps)
        histories.append([entry.get("loss", entry.get("eval_loss")) for entry in results_in(name)["history"]])
    assert histories[0] == histories[1] != histories[2]


def test_a_run_on_two_processes(colors, monkeypatch, tmp_path):
    vit(
        id2label=dict(enumerate(sorted(COLORS))), label2id={c: i for i, c in enumerate(sorted(COLORS))}
    ).save_pretrained("model")
    arguments = ["--model_name_or_path", "model", *FOLDERS, "--report_to", "none", "--crop_pct", "1"]
    arguments += ["--per_device_eval_batch_size", "2"]
    run_script(monkeypatch, *arguments, "--max_steps", "1", "--output_dir", "alone")
    training = "--num_train_epochs 6 --global_train_batch_size 8 --per_device_train_batch_size 2 --ema_decay 0.5"
    training += " --base_learning_rate 0.2 --warmup_epochs 1 --output_dir both --repeated_augmentation 2"
    training += " --eval_resolutions 8 12 --mixup 0 --cutmix 0 --randaugment_magnitude 0"
    run_and_check([*TWO_CPUS, SCRIPT, *arguments, *training.split()], tmp_path)
    run_script(monkeypatch, *arguments, *training.replace("both", "one").split())
    alone, both, one = results_in("alone"), results_in("both"), results_in("one")
    losses, expected = ([entry["loss"] for entry in each["history"] if "loss" in entry] for each in (both, one))
    assert len(losses) == 6 and losses == pytest.approx(expected, rel=1e-5)
    # Nine images do not divide by two processes: none is counted twice.
    assert both["before"]["eval_images"] == 9
    for name, value in alone["before"].items():
        assert both["before"][name] == pytest.approx(value, rel=1e-5), name
    assert both["after"]["eval_loss"] < 0.9 * both["before"]["eval_loss"]
    assert both["steps"] == 18 and both["images"] == 18 * 8
    assert {"8", "12"} == set(both["resolutions"])
    states = {path.name for path in Path("both/checkpoint-18").iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl", "model.safetensors", "ema"} <= states


def test_expected_failures_are_one_sentence(colors, monkeypatch, capsys):
    def failure(*changes):
        return fails_with(monkeypatch, capsys, *TINY_MODEL, *SHORT, *changes)

    def file_failure(header, *rows, **arguments):
        Path("table.csv").write_text("\n".join([header, *rows, *rows]) + "\n")
        names = [part for name, value in arguments.items() for part in (f"--{name}", value)]
        files = ["--train_file", "table.csv", "--output_dir", "out", "--max_steps", "1"]
        return fails_with(monkeypatch, capsys, *TINY_MODEL, *files, *names)

    Path("empty").mkdir()
    Path("more/green").mkdir(parents=True)
    Path("more/yellow").mkdir(parents=True)
    for name in ("green", "yellow"):
        color_image("green", 0).save(f"more/{name}/1.png")
    vit(num_labels=4).save_pretrained("teacher")

    Path("one.csv").write_text("image,label\ntrain/red/red-0.png,1\n")
    assert "one.csv has 1 rows, of which validation_split_percentage 5.0 leaves none to train on" in fails_with(
        monkeypatch, capsys, *TINY_MODEL, "--train_file=one.csv", "--output_dir=out"
    )
    assert "there is no folder nowhere" in failure("--train_dir", "nowhere")
    assert "error: empty has no rows" in failure("--train_dir", "empty")
    assert "the label yellow in train more is not among the 3" in failure("--validation_dir", "more")
    assert "cannot load nobody/nothing" in fails_with(
        monkeypatch, capsys, *TINY_MODEL, "--output_dir=out", "--dataset_name=nobody/nothing"
    )
    image = "train/red/red-0.png"
    assert "cannot tell which of picture, label in table.csv holds images" in file_failure(
        "picture,label", f"{image},1"
    )
    assert "cannot tell which of image, class in table.csv holds labels" in file_failure("image,class", f"{image},1")
    assert "table.csv has no column x; its columns are image, label" in file_failure(
        "image,label", f"{image},1", label_column="x"
    )
    assert "holds float64, neither class names nor numbers" in file_failure("image,label", f"{image},1.5")
    assert "there is no image missing.png, which table.csv names" in file_failure("image,label", "missing.png,1")
    assert "There is no file 'x.csv'" in file_failure("image,label", f"{image},1", validation_file="x.csv")
    assert "needs two classes, the training data have only 1" in file_failure("image,label", f"{image},1")

    assert "unknown model_type vitt" in failure("--model_type", "vitt")
    assert "cannot make the model vit" in failure("--config", "hidden_size=many")
    assert "the configuration of resnet has no hidden_size: did you mean hidden_sizes?" in failure(
        "--model_type", "resnet"
    )
    with pytest.raises(UsageError, match="of resnet has no image_size: give --config image_size=224"):
        native_size(ResNetConfig())
    assert "the model does not take images of 2" in failure("--eval_resolutions", "2")
    assert "a resolution is one side or HEIGHTxWIDTH, got big" in failure("--eval_resolutions", "big")
    assert "the teacher has 4 labels, the student 3" in failure(
        "--teacher_name_or_path", "teacher", "--distillation_type", "soft"
    )
    assert "too small for one batch of 100 images" in failure("--per_device_train_batch_size", "100")
    assert "is not a multiple of 8" in failure("--global_train_batch_size", "12")
    assert "evaluate_only needs a model_name_or_path" in failure("--evaluate_only")
    assert "has nothing to evaluate on" in fails_with(
        monkeypatch, capsys, "--evaluate_only", "--model_name_or_path=teacher", "--train_dir=train", "--output_dir=out"
    )
    assert "the label blue in valid is not among the 4" in fails_with(
        monkeypatch,
        capsys,
        "--evaluate_only",
        "--model_name_or_path=teacher",
        "--validation_dir=valid",
        "--output_dir=out",
    )


def test_a_failure_of_the_command_has_exit_code_2():
    command = [sys.executable, SCRIPT, "--output_dir", "out", "--recipe", "none-such"]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "there is no recipe none-such" in result.stderr
