import json
import sys

import numpy as np
import pytest
from PIL import Image
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTImageProcessor

from lion_transformers import LionConfig, LionForImageClassification
from lion_transformers.scripts import demo_image
from lion_transformers.scripts.arguments import KeyValues, UsageError


SIZES = {
    "image_size": 28,
    "patch_size": 14,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": 10,
}


def finish_model(folder, name, accuracy):
    """What training leaves behind, of a model that has learnt nothing."""
    output = folder / demo_image.slug(name)
    if name == "ViT":
        model = ViTForImageClassification(ViTConfig(**SIZES))
    else:
        settings = {**demo_image.MODELS, **demo_image.ABLATION}[name]
        model = LionForImageClassification(LionConfig(modality="image", **SIZES, **KeyValues(settings[1])))
    model.save_pretrained(output)
    ViTImageProcessor(size={"height": 28, "width": 28}).save_pretrained(output)
    history = [{"step": 0, "eval_top1": 0.1}, {"step": 0, "loss": 2.3}, {"step": 9, "eval_top1": accuracy}]
    results = {"after": history[-1], "images": 5000, "images_per_second": 250.0, "history": history}
    results["model"] = {"parameters": model.num_parameters()}
    (output / "results.json").write_text(json.dumps(results))


@pytest.fixture
def folder(tmp_path):
    for digit in range(10):
        for number in range(2):
            file = tmp_path / "data" / "validation" / str(digit) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(10 * digit + number).integers(0, 256, (28, 28), dtype=np.uint8)
            Image.fromarray(pixels).save(file)
    return tmp_path


def run_demo(monkeypatch, folder, *arguments):
    monkeypatch.setattr(sys, "argv", ["demo_image.py", "--output_dir", str(folder), *arguments])
    demo_image.main()


@pytest.fixture
def trained(monkeypatch):
    """Names of the models' folders, in the order of training; training gives every model the same accuracy."""
    folders = []

    def call(script, *arguments):
        output = arguments[arguments.index("--output_dir") + 1]
        folders.append(output.name)
        names = {demo_image.slug(name): name for name in {**demo_image.MODELS, **demo_image.ABLATION}}
        finish_model(output.parent, names[output.name], accuracy=0.9)

    monkeypatch.setattr(demo_image, "call", call)
    return folders


def test_every_model_is_trained_once_and_the_table_has_its_figures(folder, trained, monkeypatch, capsys):
    finish_model(folder, "LION-D", accuracy=0.905)
    run_demo(monkeypatch, folder)
    assert trained == ["vit", "lion-lit", "lion-s", "lion-d-natural", "lion-s-natural"]
    rows = {row["model"]: row for row in json.loads((folder / "demo-image.json").read_text())}
    assert list(rows) == list(demo_image.MODELS)
    assert rows["LION-D"]["accuracy"] == 0.905 and rows["ViT"]["accuracy"] == 0.9
    assert rows["LION-D"]["training_seconds"] == 20.0
    assert rows["LION-D"]["curve"] == [[0, 0.1], [9, 0.905]]
    assert rows["ViT"]["largest_difference_between_forms"] is None
    assert all(0 < rows[name]["largest_difference_between_forms"] < 1e-4 for name in rows if name != "ViT")
    printed = capsys.readouterr().out
    assert "LION-D: lion-d is there already" not in printed and "LION-D: " in printed
    assert f"| LION-D | {rows['LION-D']['parameters']:,} | 90.5% | 20 s |" in printed
    assert "The best LION, LION-D: 90.5%; ViT: 90.0%" in printed
    assert (folder / "demo-image.png").read_bytes().startswith(b"\x89PNG")
    run_demo(monkeypatch, folder)
    assert len(trained) == 5


def test_models_are_those_of_the_paper():
    made = {
        name: LionConfig(modality="image", **KeyValues(settings[1]))
        for name, settings in demo_image.MODELS.items()
        if name != "ViT"
    }
    kinds = {name: (config.decay_type, config.scan_order) for name, config in made.items()}
    assert kinds == {
        "LION-LIT": ("none", "raster"),
        "LION-D": ("fixed", "raster"),
        "LION-S": ("selective", "raster"),
        "LION-D♮": ("fixed", "serpentine"),
        "LION-S♮": ("selective", "serpentine"),
    }


def test_ablation_trains_directions_and_the_doubled_diagonal(folder, trained, monkeypatch):
    run_demo(monkeypatch, folder, "--ablation")
    models = {name: AutoModelForImageClassification.from_pretrained(folder / name).config for name in trained}
    assert {name: (config.direction, config.diagonal) for name, config in models.items()} == {
        "lion-s-both-directions": ("both", "balanced"),
        "lion-s-forward-only": ("forward", "balanced"),
        "lion-s-backward-only": ("backward", "balanced"),
        "lion-s-in-turn": ("alternate", "balanced"),
        "lion-s-doubled-diagonal": ("both", "doubled"),
    }
    assert {config.scan_order for config in models.values()} == {"raster"}
    assert len(json.loads((folder / "ablation.json").read_text())) == 5


@pytest.mark.parametrize(("accuracy", "fails"), [(0.85, False), (0.9099, False), (0.9101, True)])
def test_more_than_a_point_below_vit_fails_the_demo(folder, trained, monkeypatch, accuracy, fails):
    finish_model(folder, "ViT", accuracy)
    if not fails:
        run_demo(monkeypatch, folder)
        return
    with pytest.raises(UsageError, match="points below ViT"):
        run_demo(monkeypatch, folder)
    assert (folder / "demo-image.json").exists()


def test_forms_that_disagree_fail_the_demo(folder, trained, monkeypatch):
    monkeypatch.setattr(demo_image, "compare_forms", lambda output, data: 0.01)
    with pytest.raises(UsageError, match=r"three forms differ by 1\.0e-02"):
        run_demo(monkeypatch, folder)


def test_digits_are_split_by_class_and_kept_as_they_are(tmp_path):
    pixels, digits = demo_image.mnist_data()
    demo_image.write_digits(tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    for split, each in [("train", 400), ("validation", 100)]:
        counts = {path.name: len(list(path.iterdir())) for path in (tmp_path / "data" / split).iterdir()}
        assert counts == {str(digit): each for digit in range(10)}
    originals = {image.astype(np.uint8).tobytes() for image in pixels[digits == 7]}
    files = list(tmp_path.glob("data/*/7/*.png"))
    assert {np.asarray(Image.open(file)).tobytes() for file in files} == originals


@pytest.mark.slow
def test_the_demo_learns(tmp_path, monkeypatch):
    """All of it: minutes."""
    run_demo(monkeypatch, tmp_path)
    rows = json.loads((tmp_path / "demo-image.json").read_text())
    assert all(row["accuracy"] > 0.8 for row in rows)
