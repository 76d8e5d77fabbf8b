"""Model cards: from what the training scripts leave, and those that are kept as examples."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from hub_server import metadata_errors
from huggingface_hub import ModelCard
from PIL import Image
from training_checks import fails_with, run_and_check, run_script

from lion_transformers import LionConfig
from lion_transformers.modeling_lion import AUTO_CLASSES
from lion_transformers.scripts import model_card, pretrain_mlm, train_image_classification
from lion_transformers.scripts.model_card import TEMPLATE, figure, make_card, variant_of, without_local_paths
from lion_transformers.tokenization import train_wordpiece_tokenizer


ROOT = Path(__file__).parents[1]
TEXTS = ["the film was good", "the film was the worst", "the end"]
SIZES = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
SECTIONS = [
    *("Intended use", "How to load it", "Training data", "Training recipe", "Evaluation", "Speed", "Limits"),
    *("Citation", "Licence"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the training scripts leave of a text model and of an image model, given absolute paths."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "texts.txt").write_text("\n".join(TEXTS * 8))
    train_wordpiece_tokenizer(TEXTS, vocab_size=48, min_frequency=1, show_progress=False).save_pretrained(folder / "t")
    for name in ("dark", "light"):
        for split in ("train", "valid"):
            (folder / split / name).mkdir(parents=True)
            for number in range(3):
                pixels = np.full((8, 8, 3), 40 * number + (130 if name == "light" else 0), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    shared = ["--max_steps", 2, "--per_device_train_batch_size", 2, "--report_to", "none"]
    text = ["--config", f"decay_type=none,{SIZES}", "--train_file", folder / "texts.txt", "--max_seq_length", 12]
    text += ["--validation_file", folder / "texts.txt", "--tokenizer_name", folder / "t", "--line_by_line"]
    image = ["--config", f"scan_order=serpentine,modality=image,image_size=8,patch_size=4,{SIZES}"]
    image += ["--train_dir", folder / "train", "--validation_dir", folder / "valid", "--eval_resolutions", 8, 16]
    for script, output, arguments in [(pretrain_mlm, "text", text), (train_image_classification, "image", image)]:
        command = [sys.executable, script.__file__, *arguments, *shared, "--output_dir", folder / output]
        run_and_check(command, folder)
    return folder


@pytest.fixture(params=["text", "image"])
def card(trained, request):
    """A folder that was trained, its results, and the card made of it."""
    folder = trained / request.param
    results = json.loads((folder / "results.json").read_text())
    return folder, results, make_card(folder, "alice/tiny", "apache-2.0")


def section(card, title):
    return re.search(rf"^## {title}\n\n(.*?)(?=^## |\Z)", card.text, re.DOTALL | re.MULTILINE)[1]


def table(text):
    """Rows of a Markdown table, without its head."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return rows[2:]


def numbers_in(text):
    return [(token, float(token.replace(",", ""))) for token in NUMBER.findall(text)]


def invented(card, folder):
    """Numbers in a card that neither the folder's files nor the template hold, to the digits that are shown."""
    files = [folder / "config.json", folder / "results.json", TEMPLATE]
    known = {value for file in files if file.exists() for _, value in numbers_in(file.read_text(encoding="utf-8"))}
    return [token for token, value in numbers_in(str(card)) if not any(shows(token, value, each) for each in known)]


def shows(token, value, known):
    """Whether a number in a text is the known one: whole numbers in full, others in four digits or all of them."""
    return value == known or (known % 1 != 0 and token == (f"{known:,.0f}" if known >= 1000 else f"{known:.4g}"))


def test_card_has_its_sections_and_metadata(card):
    folder, _, made = card
    assert re.findall(r"^## (.*)", made.text, re.MULTILINE) == SECTIONS
    assert made.text.lstrip().startswith(
        "# tiny\n\n" + ("LION-LIT: a text" if folder.name == "text" else "LION-S♮: an image")
    )
    assert made.data.library_name == "transformers" and made.data.license == "apache-2.0"
    assert made.data.pipeline_tag == ("fill-mask" if folder.name == "text" else "image-classification")
    assert made.data.tags == ["lion", "lion-lit" if folder.name == "text" else "lion-s-natural"]
    assert "The weights: `apache-2.0`." in section(made, "Licence")
    assert "arXiv:2502.16249" in section(made, "Citation")


def test_model_index_holds_the_evaluation(card, tmp_path):
    folder, results, made = card
    made.save(tmp_path / "README.md")
    read = ModelCard.load(tmp_path / "README.md").data
    assert read.model_name == "tiny"
    metrics = {each.metric_name: (each.metric_type, each.metric_value) for each in read.eval_results}
    if folder.name == "text":
        after = results["after"]
        assert metrics == {
            "loss": ("loss", after["eval_loss"]),
            "perplexity": ("perplexity", after["eval_perplexity"]),
            "masked accuracy": ("accuracy", after["eval_masked_accuracy"]),
        }
        assert {each.dataset_name for each in read.eval_results} == {"texts.txt"}
    else:
        assert {name for name in metrics if "8 pixels" in name} == {
            f"{metric} at 8 pixels" for metric in ("loss", "top-1 accuracy")
        }
        for resolution in ("8", "16"):
            value = results["resolutions"][resolution]["top1"]
            assert metrics[f"top-1 accuracy at {resolution} pixels"] == ("accuracy", value)
        assert {each.dataset_name for each in read.eval_results} == {"valid"}
    assert {each.task_type for each in read.eval_results} == {read.pipeline_tag}


def test_tables_hold_figures_before_and_after_and_speed(card):
    folder, results, made = card
    rows = {name: (after, before) for name, after, before in table(section(made, "Evaluation"))}
    loss = rows["loss" if folder.name == "text" else "loss at 8 pixels"]
    assert loss == (f"{results['after']['eval_loss']:.4g}", f"{results['before']['eval_loss']:.4g}")
    if folder.name == "image":
        assert rows["loss at 16 pixels"][1] == ""  # not measured before training
    unit = "tokens" if folder.name == "text" else "images"
    speed = dict(table(section(made, "Speed")))
    assert float(speed["training throughput"].split()[0].replace(",", "")) == pytest.approx(
        results[f"{unit}_per_second"], rel=1e-3
    )
    assert speed["seen in training"] == f"{results[unit]:,} {unit} in 2 steps"
    architecture = dict(table(made.text.partition("## ")[0]))
    assert architecture["parameters"] == f"{results['model']['parameters']:,}"
    assert architecture["`hidden_size`"] == "`16`"


def test_no_figure_is_invented(card):
    folder, _, made = card
    assert invented(made, folder) == []
    made.text += "\nIt reaches 98.7 %."
    assert invented(made, folder) == ["98.7"]


@pytest.mark.parametrize(
    ("token", "known", "is_shown"),
    [
        *(("144,218", 144218, True), ("144,217", 144218, False), ("17", 17, True), ("17", 16.6, False)),
        *(("241", 241.00436, True), ("242", 241.5, False), ("2,345", 2344.6, True), ("0.7453", 0.7453333, True)),
        *(("0.745", 0.7453333, False), ("5e-05", 0.00005, True), ("6e-05", 0.00005, False)),
    ],
)
def test_a_number_is_shown_by_its_digits(token, known, is_shown):
    assert shows(token, float(token.replace(",", "")), known) == is_shown


def test_recipe_is_what_the_script_was_given(card):
    folder, results, made = card
    text = section(made, "Training recipe")
    script = "pretrain_mlm" if folder.name == "text" else "train_image_classification"
    assert f"`scripts/{script}.py`" in text and f"torch {results['versions']['torch']}" in text
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    assert recipe["max_steps"] == 2 and recipe["seed"] == 17
    assert recipe["config"] == results["arguments"]["config"]
    assert not {"output_dir", "train_file", "train_dir", "report_to", "model_name_or_path"} & set(recipe)
    given = results["arguments"]
    assert all(recipe[name] == given[name] for name in recipe if name != "tokenizer_name")  # which is a local path
    data = dict(table(section(made, "Training data")))
    if folder.name == "text":
        assert data == {"training files": "`texts.txt`", "evaluation files": "`texts.txt`"}
    else:
        assert data == {"training images": "`train`", "evaluation images": "`valid`"}


def test_no_local_path_is_told(card, trained):
    _, results, made = card
    assert str(trained) in json.dumps(results)
    assert str(trained) not in str(made)


def test_code_of_the_cards_runs(trained, tmp_path):
    blocks = []
    for name in ("text", "image"):
        blocks += re.findall(r"```python\n(.*?)```", make_card(trained / name, f"alice/{name}", None).text, re.DOTALL)
    assert len(blocks) == 6
    code = "\n".join([*blocks, "print(*outputs.logits.shape)"]).replace('"alice/', f'"{trained}/')
    assert run_and_check([sys.executable, "-c", code], tmp_path).stdout.splitlines()[-1] == "1 2"


def test_card_without_results_has_no_figures(trained, tmp_path):
    (tmp_path / "config.json").write_text((trained / "text" / "config.json").read_text())
    made = make_card(tmp_path, "alice/tiny", None)
    assert re.findall(r"^## (.*)", made.text, re.MULTILINE) == [
        *("Intended use", "How to load it", "Limits", "Citation", "Licence")
    ]
    assert "model-index" not in str(made) and "parameters" not in str(made)
    assert "has not stated their licence" in section(made, "Licence")
    assert invented(made, tmp_path) == []


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/home/alice/data/train.csv", "train.csv"),
        ("/home/alice/data/", "data"),
        ("/home/al ice/my data/train.csv", "train.csv"),
        ("/home/al,ice/train.csv", "train.csv"),
        ("//server/share/train.csv", "train.csv"),
        (r"C:\Users\alice\train.csv", "train.csv"),
        ("C:/Users/alice/train.csv", "train.csv"),
        (r"\\server\share\data\train.csv", "train.csv"),
        ("~/train.csv", "train.csv"),
        ("~alice/train.csv", "train.csv"),
        ("../../alice/train.csv", "train.csv"),
        ("file:///home/alice/train.csv", "train.csv"),
        ("a/../../../home/alice/train.csv", "train.csv"),
        ("a/../../../home/..", ".."),
        ("data_dir=/home/alice", "data_dir=alice"),
        ("data_dir=/home/alice/data/", "data_dir=data"),
        ("data_dir=a/../../home/alice/data", "data_dir=data"),
        ("csv:/home/alice/train.csv", "csv:train.csv"),
        ("sqlite:////home/alice/train.db", "sqlite:train.db"),
        ("read '/home/alice/train.csv'", "read 'train.csv'"),
        ("/home/alice/a.csv,/home/alice/b.csv", "b.csv"),
        ("one\n/home/alice/a.csv\ntwo /home/alice/b.csv", "one\na.csv\ntwo b.csv"),
        ("https://alice:secret@example.org/train.csv", "https://example.org/train.csv"),
        ("https://alice@example.org/train.csv", "https://example.org/train.csv"),
        ("s3://key:sec/r@t@bucket/train.csv", "s3://bucket/train.csv"),
        ("outputs/demo/data/train.csv", "outputs/demo/data/train.csv"),
        ("./train.csv", "./train.csv"),
        ("allenai/c4", "allenai/c4"),
        ("https://example.org/train.csv", "https://example.org/train.csv"),
        ("https://example.org/user@name", "https://example.org/user@name"),
        ("s3://bucket/train.csv", "s3://bucket/train.csv"),
        ("mean / sum, 1/2, and/or, a...b, </s>", "mean / sum, 1/2, and/or, a...b, </s>"),
        (0.5, 0.5),
        (None, None),
    ],
)
def test_local_paths_keep_their_last_part(path, kept):
    assert without_local_paths({"arguments": [path, {path: path}]}) == {"arguments": [kept, {kept: kept}]}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"decay_type": "none"}, "LION-LIT"),
        ({"decay_type": "fixed"}, "LION-D"),
        ({"decay_type": "selective"}, "LION-S"),
        ({"decay_type": "fixed", "modality": "image", "scan_order": "serpentine"}, "LION-D♮"),
        ({"decay_type": "selective", "modality": "image", "scan_order": "serpentine"}, "LION-S♮"),
        ({"decay_type": "selective", "modality": "image", "scan_order": "hilbert"}, "LION-S"),
    ],
)
def test_variants_have_the_names_of_the_paper(settings, name):
    assert variant_of(LionConfig(**settings)) == name


CLASSES = [(modality, *names) for names in AUTO_CLASSES.items() for modality in names[1].input_modalities]


@pytest.mark.parametrize(("modality", "auto_class", "model_class"), CLASSES)
def test_every_class_has_a_card_that_loads_it(tmp_path, modality, auto_class, model_class):
    LionConfig(modality=modality, architectures=[model_class.__name__]).save_pretrained(tmp_path)
    made = make_card(tmp_path, "alice/tiny", None)
    assert f"import {auto_class}\n" in made.text and f'{auto_class}.from_pretrained("alice/tiny"' in made.text
    by_modality = {"text": "feature-extraction", "image": "image-feature-extraction"}
    assert (
        made.data.pipeline_tag
        == {
            "AutoModel": by_modality[modality],
            "AutoModelForImageClassification": "image-classification",
            "AutoModelForMaskedImageModeling": "masked-image-modeling",
            "AutoModelForMaskedLM": "fill-mask",
            "AutoModelForMultipleChoice": "multiple-choice",
            "AutoModelForQuestionAnswering": "question-answering",
            "AutoModelForSequenceClassification": "text-classification",
            "AutoModelForTokenClassification": "token-classification",
        }[auto_class]
    )


def test_results_of_trainer_are_read(tmp_path):
    """As make demo writes them of the finetuned model: no arguments, no counts."""
    LionConfig(architectures=["LionForSequenceClassification"]).save_pretrained(tmp_path)
    results = {"eval_accuracy": 0.745, "eval_runtime": 3.5, "eval_samples_per_second": 99.0}
    (tmp_path / "results.json").write_text(json.dumps(results))
    made = make_card(tmp_path, "alice/tiny", None)
    assert table(section(made, "Evaluation")) == [["accuracy", "0.745"]]
    (result,) = made.data.eval_results
    assert (result.metric_value, result.dataset_name, result.dataset_type) == (0.745, "not recorded", "not-recorded")
    assert metadata_errors(str(made)) == []


@pytest.mark.parametrize(
    ("arguments", "name", "kind"),
    [
        ({"dataset_name": "allenai/c4", "dataset_config_name": "en"}, "allenai/c4", "allenai/c4"),
        ({"dataset_name": "imdb"}, "imdb", "imdb"),
        ({"dataset_name": "outputs/demo/my data"}, "outputs/demo/my data", "my-data"),
        ({"validation_dir": "outputs/demo/data/validation"}, "outputs/demo/data/validation", "validation"),
        ({"validation_file": ["a/x.csv", "a/y.csv"]}, "a/x.csv, a/y.csv", "x.csv-y.csv"),
        ({"train_file": "a/x.csv"}, "what was held out of a/x.csv", "what-was-held-out-of-x.csv"),
        ({"train_file": "文.csv"}, "what was held out of 文.csv", "what-was-held-out-of-.csv"),
        ({"validation_file": "文"}, "文", "not-recorded"),
    ],
)
def test_data_set_has_a_type_that_the_hub_takes(tmp_path, arguments, name, kind):
    LionConfig().save_pretrained(tmp_path)
    results = {"eval_loss": 1.5, "arguments": arguments}
    (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
    made = make_card(tmp_path, "alice/tiny", None)
    (result,) = made.data.eval_results
    assert (result.dataset_name, result.dataset_type) == (name, kind)
    assert result.dataset_config == arguments.get("dataset_config_name")
    assert metadata_errors(str(made)) == []


@pytest.mark.parametrize(
    "results",
    [
        *({}, {"before": None}, {"after": None}, {"arguments": None}, {"arguments": 3}, {"versions": [1]}),
        *({"model": None}, {"model": {"parameters": "many"}}, {"resolutions": {"28": None}}, {"resolutions": [28]}),
        *({"eval_x": "text"}, {"eval_x": None}, {"eval_x": True}, {"eval_x": [1.5]}, {"steps": 4}),
        *({"tokens_per_second": 3}, {"images_per_second": 3, "images": 6, "steps": None, "wall_seconds": 1}),
        {"arguments": {"dataset_name": ["a"], "dataset_config_name": {"a": 1}, "validation_file": 3}},
    ],
)
def test_results_of_another_shape_are_left_out(tmp_path, results):
    LionConfig().save_pretrained(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps({"eval_loss": 1.5, **results}))
    made = make_card(tmp_path, "alice/tiny", None)
    evaluated = [] if "resolutions" in results and isinstance(results["resolutions"], dict) else [["loss", "1.5"]]
    assert (table(section(made, "Evaluation")) if evaluated else []) == evaluated
    assert "Speed" not in made.text and "before training" not in made.text and "parameters" not in made.text
    assert metadata_errors(str(made)) == []


def test_script_writes_the_card_once(trained, tmp_path, monkeypatch, capsys):
    arguments = [trained / "text", "--repo_id", "alice/tiny", "--output_file", tmp_path / "card.md"]
    run_script(model_card, monkeypatch, *arguments)
    assert (tmp_path / "card.md").read_text().rstrip() == str(make_card(trained / "text", "alice/tiny", None)).rstrip()
    assert "exists: move it away first" in fails_with(model_card, monkeypatch, capsys, *arguments)
    LionConfig().save_pretrained(tmp_path / "untrained")
    run_script(model_card, monkeypatch, tmp_path / "untrained", "--repo_id", "alice/tiny")
    assert (tmp_path / "untrained" / "README.md").is_file()


def test_a_card_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys):
    def refuse(file, write):
        raise PermissionError(13, "Permission denied", str(file))

    LionConfig().save_pretrained(tmp_path)
    monkeypatch.setattr(model_card, "atomic_write", refuse)
    message = fails_with(model_card, monkeypatch, capsys, tmp_path, "--repo_id", "alice/tiny")
    assert f"cannot write {tmp_path / 'README.md'}" in message
    assert "repo_id must be user/name" in fails_with(
        model_card, monkeypatch, capsys, tmp_path, "--repo_id", "my model"
    )


def test_figures_of_a_run_on_glue_are_its_metrics(tmp_path):
    LionConfig(architectures=["LionForSequenceClassification"]).save_pretrained(tmp_path)
    after = {
        "eval_loss": 0.5,
        "eval_accuracy": 0.75,
        "eval_f1": 0.8,
        "eval_combined_score": 0.775,
        "eval_examples": 40,
    }
    results = {"before": after, "after": after, "steps": 3, "examples": 48, "examples_per_second": 12.5}
    (tmp_path / "results.json").write_text(json.dumps({**results, "wall_seconds": 9.0, "arguments": {"seed": 19}}))
    card = make_card(tmp_path, "alice/tiny", None)
    assert {each.metric_name: each.metric_value for each in card.data.eval_results} == {
        "loss": 0.5,
        "accuracy": 0.75,
        "f1": 0.8,
    }
    assert "12.5 examples per second" in card.text and "`scripts/run_glue.py`" in card.text


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", '{"model_type": "bert"}', "a model of type bert, not a LION model"),
        ("config.json", "{", "is not the configuration of a LION model"),
        ("config.json", "[]", "config.json must hold names and values, got list."),
        ("results.json", "{", "results.json cannot be read: Expecting"),
        ("results.json", "[1]", "results.json must hold names and values"),
        ("results.json", '{"after": {"eval_loss": NaN}}', "NaN is not a finite number"),
        ("results.json", '{"steps": -Infinity}', "-Infinity is not a finite number"),
        ("results.json", '{"eval_loss": 1e999}', "1e999 is not a finite number"),
    ],
)
def test_files_that_cannot_be_read_are_one_sentence(tmp_path, monkeypatch, capsys, file, content, sentence):
    LionConfig().save_pretrained(tmp_path)
    (tmp_path / file).write_text(content) if content else (tmp_path / file).unlink()
    assert sentence in fails_with(model_card, monkeypatch, capsys, tmp_path, "--repo_id", "alice/tiny")


@pytest.mark.parametrize("license", ["nonsense licence: x", "Apache-2.0", "mit\n", ""])
def test_a_licence_that_the_hub_does_not_take_is_refused(tmp_path, monkeypatch, capsys, license):
    LionConfig().save_pretrained(tmp_path)
    message = fails_with(model_card, monkeypatch, capsys, tmp_path, "--repo_id", "alice/tiny", "--license", license)
    assert "the Hub names licences by small letters, digits, - and ." in message
    assert not (tmp_path / "README.md").exists()


# ---------------------------------------------------------------------------------------------------------------------
# What comes with the package
# ---------------------------------------------------------------------------------------------------------------------

KEPT = {path.stem: path for path in (ROOT / "model_cards").glob("*.md")}


def test_there_is_a_card_of_every_demo_model():
    images = [f"{name}-digits" for name in ("lion-lit", "lion-d", "lion-s", "lion-d-natural", "lion-s-natural")]
    assert set(KEPT) == {"lion-s-reviews", "lion-s-sentiment", *images}


@pytest.mark.parametrize("path", KEPT.values(), ids=KEPT)
def test_kept_cards_are_whole(path):
    kept = ModelCard.load(path)
    of_trainer = path.stem == "lion-s-sentiment"  # whose results.json holds neither recipe nor speed
    sections = [name for name in SECTIONS if not of_trainer or name not in ("Training recipe", "Speed")]
    assert re.findall(r"^## (.*)", kept.text, re.MULTILINE) == sections
    assert kept.data.model_name == path.stem and f'"lion-transformers/{path.stem}"' in kept.text
    accuracy = {each.metric_name: each.metric_value for each in kept.data.eval_results}
    if path.stem == "lion-s-reviews":
        assert kept.data.pipeline_tag == "fill-mask" and 0.1 < accuracy["masked accuracy"] < 0.5
    elif path.stem == "lion-s-sentiment":
        assert kept.data.pipeline_tag == "text-classification" and 0.6 < accuracy["accuracy"] < 1
    else:
        assert kept.data.pipeline_tag == "image-classification" and 0.8 < accuracy["top-1 accuracy at 28 pixels"] < 1
        assert kept.data.tags[1] == path.stem.removesuffix("-digits")
    assert not re.search(r"[\s`\"'](/|~/|[A-Z]:\\)\w", str(kept))


@pytest.mark.parametrize("path", KEPT.values(), ids=KEPT)
def test_kept_cards_show_the_figures_of_their_metadata(path):
    kept = ModelCard.load(path)
    shown = {name: value for name, value, *_ in table(section(kept, "Evaluation"))}
    assert shown == {each.metric_name: figure(each.metric_value) for each in kept.data.eval_results}
    assert metadata_errors(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", KEPT.values(), ids=KEPT)
def test_kept_cards_follow_the_template(path, tmp_path):
    """Its fixed sentences, as far as even a card of nothing but a configuration has them; `make cards` mends them."""
    bare = []
    for modality in ("text", "image"):
        LionConfig(modality=modality).save_pretrained(tmp_path / modality)
        bare.append(make_card(tmp_path / modality, "alice/tiny", "mit").text.splitlines())
    template = TEMPLATE.read_text(encoding="utf-8").splitlines()
    always = [line for line in template if line and all(line in lines for lines in bare)]
    assert len(always) > 20
    text = path.read_text(encoding="utf-8")
    assert not [line for line in always if line not in text]


def test_the_wheel_has_the_template(tmp_path):
    ignored = shutil.ignore_patterns(".*", "build", "outputs", "tests", "*.egg-info")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", tmp_path, source], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "lion_transformers/model_cards/lion.md.jinja" in names and "lion_transformers/scripts/publish.py" in names
