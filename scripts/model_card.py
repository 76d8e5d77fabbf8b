"""Write the model card of a trained model, to be read and mended before it is published.

    python scripts/model_card.py outputs/demo/pretrained --repo_id user/lion-s-reviews --license apache-2.0

The card becomes README.md in the folder, or `--output_file`. Every figure in it comes from the folder's config.json
and results.json; what they do not hold is left out.
"""

import argparse
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id

from lion_transformers import LionConfig
from lion_transformers.configuration_lion import as_pair
from lion_transformers.modeling_lion import AUTO_CLASSES
from lion_transformers.scripts.arguments import Parser, UsageError, one_line, run
from lion_transformers.scripts.checkpointing import atomic_write
from lion_transformers.scripts.standalone import PROCESSORS


TEMPLATE = Path(__file__).parents[1] / "model_cards" / "lion.md.jinja"
VARIANTS = {"none": "LION-LIT", "fixed": "LION-D", "selective": "LION-S"}
# Class of the model: its task, by the Hub's name where there is one.
TASKS = {
    "LionForImageClassification": "image-classification",
    "LionForMaskedImageModeling": "masked-image-modeling",
    "LionForMaskedLM": "fill-mask",
    "LionForMultipleChoice": "multiple-choice",
    "LionForQuestionAnswering": "question-answering",
    "LionForSequenceClassification": "text-classification",
    "LionForTokenClassification": "token-classification",
}
FEATURES = {"text": "feature-extraction", "image": "image-feature-extraction"}
# Class of the model: the script that trains it.
SCRIPTS = {
    "LionForImageClassification": "scripts/train_image_classification.py",
    "LionForMaskedLM": "scripts/pretrain_mlm.py",
    "LionForSequenceClassification": "scripts/run_glue.py",
}
ARCHITECTURE = [
    "decay_type",
    "direction",
    "diagonal",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
]
ARCHITECTURE_BY_MODALITY = {"text": ["vocab_size"], "image": ["scan_order", "image_size", "patch_size"]}
# Argument: what it is called in the table of the data.
DATA = {
    "dataset_name": "data set",
    "dataset_config_name": "its configuration",
    "train_file": "training files",
    "train_dir": "training images",
    "validation_file": "evaluation files",
    "validation_dir": "evaluation images",
}
# Arguments that are no part of the recipe: where things are, and how often they are written.
BOOKKEEPING = [
    *("output_dir", "overwrite_output_dir", "report_to", "logging_steps", "eval_steps", "save_steps"),
    *("save_total_limit", "preprocessing_num_workers", "dataloader_num_workers", "evaluate_only"),
]
ACCURACIES = {"accuracy": "accuracy", "masked_accuracy": "masked accuracy", "top1": "top-1 accuracy"}
ACCURACIES["top5"] = "top-5 accuracy"
# What stands among the metrics without being one.
COUNTS = ["targets", "images", "examples", "runtime", "samples_per_second", "steps_per_second", "combined_score"]
# User and password of a URL; a password may hold what would end it.
USER_INFO = re.compile(r"(?<=://)(?:[^\s@/:]*:\S*|[^\s@/]*)@")
# A path that tells of the machine it is on, up to its last part, wherever it stands in a text: as it may hold any
# character, it ends with the line. What follows the colon of a URL is none, but where the URL names no host.
LOCAL_PATH = re.compile(
    r"""(?<![\w./\\<-])
    (?: file: | ~[\w.-]*[/\\] | (?<!:)/(?=\S) | /(?=[^\s/]|//) | [A-Za-z]:[/\\] | \\\\(?=[\w?.])
      | \.\.[/\\] | [^\s=:,;'"]*?[/\\]\.\.(?:[/\\]|$) )
    (?: .*[/\\] )?""",
    re.VERBOSE | re.MULTILINE,
)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a trained model")
    parser.add_argument("--repo_id", required=True, help="name that it will have on the Hub: user/name")
    parser.add_argument("--license", help="licence of the weights, by the Hub's name: apache-2.0, cc-by-4.0 ...")
    parser.add_argument("--output_file", type=Path, help="default: README.md in the folder")
    arguments = parser.parse_args()
    output_file = arguments.output_file or arguments.folder / "README.md"
    check_repo_id(arguments.repo_id)
    card = make_card(arguments.folder, arguments.repo_id, arguments.license)
    if output_file.exists():
        raise UsageError(f"{output_file} exists: move it away first, it may have been written by hand.")
    try:
        atomic_write(output_file, card.save)
    except OSError as error:
        raise UsageError(f"cannot write {output_file}: {one_line(error)}") from error
    print(f"The card is in {output_file}.")


def check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(f"repo_id must be user/name: {one_line(error)}") from error
    if "/" not in repo_id:
        raise UsageError(f"repo_id must be user/name, got {repo_id}.")


def make_card(folder: Path, repo_id: str, license: str | None) -> ModelCard:
    """The card of the model in `folder`.

    Args:
        folder: a saved model, with the results.json of its training if there is one.
        repo_id: its name on the Hub.
        license: of the weights; the card says so where it is not known.

    Raises:
        UsageError: config.json or results.json cannot be read; the Hub has no licence of that form.
    """
    if license is not None and not re.fullmatch(r"[a-z0-9.-]+", license):
        raise UsageError(f"the Hub names licences by small letters, digits, - and ., got {license!r}.")
    config, results = read_config(folder), read_results(folder)
    arguments = mapping(results, "arguments")
    model_class, variant, name = class_name(config), variant_of(config), repo_id.split("/")[-1]
    task = TASKS.get(model_class, FEATURES[config.modality])
    metadata = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=task,
        tags=["lion", variant.lower().replace("♮", "-natural")],
        model_name=name,
        eval_results=model_index(results, task) or None,
    )
    return ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        title=name,
        repo_id=repo_id,
        variant=variant,
        modality=config.modality,
        task=task,
        license=license,
        config=config,
        image_size=as_pair(config.image_size),
        architecture=architecture_table(config, results),
        auto_class=next(name for name, cls in AUTO_CLASSES.items() if cls.__name__ == model_class),
        processor=next((name for file, name in PROCESSORS.items() if (folder / file).is_file()), None),
        arguments=arguments,
        data={label: as_code(arguments[key]) for key, label in DATA.items() if arguments.get(key)},
        script=SCRIPTS.get(model_class),
        recipe=as_recipe(arguments) if "steps" in results and arguments else None,
        versions=", ".join(f"{name} {version}" for name, version in mapping(results, "versions").items()),
        evaluation=evaluation_table(results),
        evaluation_data=evaluation_data(arguments),
        trained=bool(mapping(results, "before")),
        speed=speed_table(results),
    )


# Reading the folder


def read_config(folder: Path) -> LionConfig:
    path = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is {'a file' if folder.exists() else 'not there'}: give the folder of a saved model."
        )
    if not path.is_file():
        checkpoints = sorted(path.parent.name for path in folder.glob("*/config.json"))
        found = f", such as {checkpoints[-1]} in it" if checkpoints else ""
        raise UsageError(f"{folder} holds no config.json: give the folder of a saved model{found}.")
    try:
        settings, _ = LionConfig.get_config_dict(folder, local_files_only=True)
        if not isinstance(settings, dict):
            raise UsageError(f"{path} must hold names and values, got {type(settings).__name__}.")
        if settings.get("model_type") != LionConfig.model_type:
            raise UsageError(f"{folder} holds a model of type {settings.get('model_type')}, not a LION model.")
        return LionConfig.from_dict(settings)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise UsageError(f"{path} is not the configuration of a LION model: {one_line(error)}") from error


def read_results(folder: Path) -> dict[str, Any]:
    """What results.json holds, without local paths; nothing where there is no such file."""
    path = folder / "results.json"
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        results = json.loads(text, parse_float=finite, parse_constant=finite)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(results, dict):
        raise UsageError(f"{path} must hold names and values, as the training scripts write them.")
    return without_local_paths(results)


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def mapping(results: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of the results; empty where there is none."""
    value = results.get(name)
    return value if isinstance(value, dict) else {}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def without_local_paths(value: Any) -> Any:
    """Paths that tell of the machine they are on keep their last part only; URLs lose user and password."""
    if isinstance(value, dict):
        return {without_local_paths(name): without_local_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_local_paths(item) for item in value]
    return public(value) if isinstance(value, str) else value


def public(text: str) -> str:
    text = USER_INFO.sub("", text)
    return LOCAL_PATH.sub("", text.rstrip("/\\")) if LOCAL_PATH.search(text) else text


# What the card says


def class_name(config: LionConfig) -> str:
    """Of the model that was saved."""
    name = (config.architectures or ["LionModel"])[0]
    if name not in {cls.__name__ for cls in AUTO_CLASSES.values()}:
        raise UsageError(f"config.json names the architecture {name}, which is none of LION's.")
    return name


def variant_of(config: LionConfig) -> str:
    """The paper's name."""
    has_decay = config.decay_type != "none"
    return VARIANTS[config.decay_type] + ("♮" if has_decay and config.scan_order == "serpentine" else "")


def architecture_table(config: LionConfig, results: dict[str, Any]) -> dict[str, str]:
    names = [*ARCHITECTURE, *ARCHITECTURE_BY_MODALITY[config.modality]]
    table = {f"`{name}`": as_code(getattr(config, name)) for name in names}
    parameters = mapping(results, "model").get("parameters")
    return {"parameters": figure(parameters), **table} if is_number(parameters) else table


def as_recipe(arguments: dict[str, Any]) -> str:
    left_out = {*DATA, *BOOKKEEPING}
    kept = {name: value for name, value in arguments.items() if value is not None and name not in left_out}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True).rstrip()


def evaluation_data(arguments: dict[str, Any]) -> str:
    """What was evaluated on, in words; empty where that is not known."""
    for name in ("validation_file", "validation_dir"):
        if arguments.get(name):
            return as_code(arguments[name])
    held_out = next(
        (arguments[name] for name in ("dataset_name", "train_file", "train_dir") if arguments.get(name)), ""
    )
    return held_out and f"what was held out of {as_code(held_out)}"


@dataclass
class Measurement:
    type: str  # by the Hub's name
    name: str
    value: float
    before: float | None = None  # training


def measurements(results: dict[str, Any]) -> list[Measurement]:
    """The metrics of the final model: at every resolution where there are several."""
    before = metrics_of(mapping(results, "before"))
    resolutions = mapping(results, "resolutions")
    if not resolutions:
        final = metrics_of(mapping(results, "after") or results)
        return [measurement(name, value, before.get(name)) for name, value in final.items()]
    return [
        measurement(name, value, before.get(name) if number == 0 else None, f" at {resolution} pixels")
        for number, resolution in enumerate(resolutions)  # the first is the model's own
        for name, value in mapping(resolutions, resolution).items()
        if is_metric(name, value)
    ]


def metrics_of(evaluation: dict[str, Any]) -> dict[str, float]:
    names = [name for name in evaluation if name.startswith("eval_")]
    return {name[5:]: evaluation[name] for name in names if is_metric(name[5:], evaluation[name])}


def is_metric(name: str, value: Any) -> bool:
    return is_number(value) and name not in COUNTS and not name.startswith("raw_")  # of weights that were not kept


def measurement(name: str, value: float, before: float | None, place: str = "") -> Measurement:
    kind = "accuracy" if name in ACCURACIES else name
    return Measurement(kind, ACCURACIES.get(name, name.replace("_", " ")) + place, value, before)


def model_index(results: dict[str, Any], task: str) -> list[EvalResult]:
    arguments = mapping(results, "arguments")
    name = str(arguments.get("dataset_name") or "")
    dataset = name or evaluation_data(arguments).replace("`", "") or "not recorded"
    dataset_config = arguments.get("dataset_config_name")
    return [
        EvalResult(
            task_type=task,
            dataset_type=name if re.fullmatch(r"([\w-]+/)?[\w.-]+", name, re.ASCII) else slug(dataset),
            dataset_name=dataset,
            dataset_config=None if dataset_config is None else str(dataset_config),
            metric_type=each.type,
            metric_name=each.name,
            metric_value=each.value,
        )
        for each in measurements(results)
    ]


def slug(dataset: str) -> str:
    """A data set as the Hub can take it for a type: without folders, in the characters that names there have."""
    last_parts = re.sub(r"[^\s,]*/(?=[^\s,])", "", dataset)
    return re.sub(r"[^\w.-]+", "-", last_parts, flags=re.ASCII).strip("-") or "not-recorded"


def evaluation_table(results: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"name": each.name, "value": figure(each.value), "before": "" if each.before is None else figure(each.before)}
        for each in measurements(results)
    ]


def speed_table(results: dict[str, Any]) -> dict[str, str]:
    for unit in ("tokens", "images", "examples"):
        speed, seen, steps, seconds = map(results.get, (f"{unit}_per_second", unit, "steps", "wall_seconds"))
        if all(map(is_number, (speed, seen, steps, seconds))):
            return {
                "training throughput": f"{figure(speed)} {unit} per second",
                "seen in training": f"{figure(seen)} {unit} in {figure(steps)} steps",
                "the whole run": f"{figure(seconds)} seconds",
            }
    return {}


def figure(value: float) -> str:
    """Four digits, all of them in whole numbers."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def as_code(value: Any) -> str:
    values = value if isinstance(value, list | tuple) else [value]
    return ", ".join(f"`{each}`" for each in values)


if __name__ == "__main__":
    run(main)
