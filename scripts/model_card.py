"""Write the model card of a trained model, to be read and mended before it is published.

    python scripts/model_card.py outputs/demo/pretrained --repo_id user/lion-s-reviews --license apache-2.0

The card becomes README.md in the folder, or `--output_file`. Every figure in it comes from the folder's config.json
and results.json; what they do not hold is left out.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import StrictDataclassError

from lion_transformers import LionConfig
from lion_transformers.configuration_lion import as_pair
from lion_transformers.modeling_lion import AUTO_CLASSES
from lion_transformers.scripts.arguments import Parser, UsageError, one_line, run
from lion_transformers.scripts.checkpointing import atomic_write


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
PROCESSORS = {"tokenizer_config.json": "AutoTokenizer", "preprocessor_config.json": "AutoImageProcessor"}
# Class of the model: the script that trains it.
SCRIPTS = {
    "LionForImageClassification": "scripts/train_image_classification.py",
    "LionForMaskedLM": "scripts/pretrain_mlm.py",
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
COUNTS = ["targets", "images", "runtime", "samples_per_second", "steps_per_second"]


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a trained model")
    parser.add_argument("--repo_id", required=True, help="name that it will have on the Hub: user/name")
    parser.add_argument("--license", help="licence of the weights, by the Hub's name: apache-2.0, cc-by-4.0 ...")
    parser.add_argument("--output_file", type=Path, help="default: README.md in the folder")
    arguments = parser.parse_args()
    output_file = arguments.output_file or arguments.folder / "README.md"
    card = make_card(arguments.folder, arguments.repo_id, arguments.license)
    if output_file.exists():
        raise UsageError(f"{output_file} exists: move it away first, it may have been written by hand.")
    atomic_write(output_file, card.save)
    print(f"The card is in {output_file}.")


def make_card(folder: Path, repo_id: str, license: str | None) -> ModelCard:
    """The card of the model in `folder`.

    Args:
        folder: a saved model, with the results.json of its training if there is one.
        repo_id: its name on the Hub.
        license: of the weights; the card says so where it is not known.

    Raises:
        UsageError: config.json or results.json cannot be read.
    """
    config, results = read_config(folder), read_results(folder)
    arguments = results.get("arguments", {})
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
        recipe=as_recipe(arguments) if "steps" in results else None,
        versions=", ".join(f"{name} {version}" for name, version in results.get("versions", {}).items()),
        evaluation=evaluation_table(results),
        evaluation_data=evaluation_data(arguments),
        trained="before" in results,
        speed=speed_table(results),
    )


# Reading the folder


def read_config(folder: Path) -> LionConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{folder} holds no config.json: give the folder of a saved model.")
    try:
        settings, _ = LionConfig.get_config_dict(folder, local_files_only=True)
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
        return without_local_paths(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {one_line(error)}") from error


def without_local_paths(value: Any) -> Any:
    """Paths that tell of the machine they are on keep their last part only."""
    if isinstance(value, dict):
        return {name: without_local_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_local_paths(item) for item in value]
    return PureWindowsPath(value).name if isinstance(value, str) and is_local(value) else value


def is_local(text: str) -> bool:
    # PureWindowsPath reads separators of both kinds, but an absolute path of its own only.
    return text.startswith(("/", "~", "..", "file:")) or PureWindowsPath(text).is_absolute()


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
    parameters = results.get("model", {}).get("parameters")
    return {"parameters": figure(parameters), **table} if parameters else table


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
    before = metrics_of(results.get("before", {}))
    if "resolutions" not in results:
        final = metrics_of(results.get("after", results))
        return [measurement(name, value, before.get(name)) for name, value in final.items() if is_metric(name)]
    return [
        measurement(name, value, before.get(name) if number == 0 else None, f" at {resolution} pixels")
        for number, (resolution, metrics) in enumerate(results["resolutions"].items())  # the first is the model's own
        for name, value in metrics.items()
        if is_metric(name)
    ]


def metrics_of(evaluation: dict[str, float]) -> dict[str, float]:
    return {name[5:]: value for name, value in evaluation.items() if name.startswith("eval_")}


def is_metric(name: str) -> bool:
    return name not in COUNTS and not name.startswith("raw_")  # of weights that were not kept


def measurement(name: str, value: float, before: float | None, place: str = "") -> Measurement:
    kind = "accuracy" if name in ACCURACIES else name
    return Measurement(kind, ACCURACIES.get(name, name.replace("_", " ")) + place, value, before)


def model_index(results: dict[str, Any], task: str) -> list[EvalResult]:
    arguments = results.get("arguments", {})
    dataset = arguments.get("dataset_name") or evaluation_data(arguments).replace("`", "") or "not recorded"
    return [
        EvalResult(
            task_type=task,
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_config=arguments.get("dataset_config_name"),
            metric_type=each.type,
            metric_name=each.name,
            metric_value=each.value,
        )
        for each in measurements(results)
    ]


def evaluation_table(results: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"name": each.name, "value": figure(each.value), "before": "" if each.before is None else figure(each.before)}
        for each in measurements(results)
    ]


def speed_table(results: dict[str, Any]) -> dict[str, str]:
    table = {}
    for unit in ("tokens", "images"):
        if f"{unit}_per_second" in results:
            table["training throughput"] = f"{figure(results[f'{unit}_per_second'])} {unit} per second"
            table["seen in training"] = f"{figure(results[unit])} {unit} in {figure(results['steps'])} steps"
            table["the whole run"] = f"{figure(results['wall_seconds'])} seconds"
    return table


def figure(value: float) -> str:
    """Four digits, all of them in whole numbers."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def as_code(value: Any) -> str:
    values = value if isinstance(value, list | tuple) else [value]
    return ", ".join(f"`{each}`" for each in values)


if __name__ == "__main__":
    run(main)
