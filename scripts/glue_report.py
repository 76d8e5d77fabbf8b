"""What finished runs of scripts/run_glue.py amount to: a table, a chart and the files that the benchmark takes."""

import functools
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lion_transformers.scripts.arguments import UsageError
from lion_transformers.scripts.checkpointing import atomic_write, write_json, writing
from lion_transformers.scripts.glue import TASKS


METRIC_TITLES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews_correlation": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearmanr": "Spearman correlation",
}
LEFT_OUT_OF_AVERAGE = ["wnli"]
NOTES = (
    "Times 100: mean over seeds ± sample standard deviation (number of seeds). The GLUE average is the mean over all"
    " tasks but WNLI, in which a task of several figures counts with their mean."
)


def run_folder(output_dir: Path, task: str, seed: int) -> Path:
    return output_dir / task / f"seed-{seed}"


def finished_runs(output_dir: Path, task: str) -> dict[int, dict[str, Any]]:
    """Seed → results of the complete runs of a task."""
    files = sorted((output_dir / task).glob("seed-*/results.json"))
    runs = [read_results(file) for file in files]
    return {run["seed"]: run for run in sorted(runs, key=lambda run: run["seed"])}


def read_results(file: Path) -> dict[str, Any]:
    """What a call of GLUE has written.

    Raises:
        UsageError: it is damaged.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is damaged: delete it, and the call that wrote it makes it again.") from error


def best_seed(runs: dict[int, dict[str, Any]]) -> int:
    return max(runs, key=lambda seed: runs[seed]["after"]["eval_combined_score"])


def summarise(output_dir: Path) -> dict[str, Any]:
    """Mean and standard deviation (None for a single seed) of every metric over seeds, and the GLUE average.

    The average is None as long as a task is missing, WNLI aside.
    """
    finished = {task: finished_runs(output_dir, task) for task in TASKS}
    tasks = {task: _summarise_task(runs) for task, runs in finished.items() if runs}
    averaged = [task for task in TASKS if task not in LEFT_OUT_OF_AVERAGE]
    scores = [tasks[task]["metrics"]["combined_score"]["mean"] for task in averaged if task in tasks]
    return {"tasks": tasks, "average": statistics.mean(scores) if len(scores) == len(averaged) else None}


def _summarise_task(runs: dict[int, dict[str, Any]]) -> dict[str, Any]:
    seeds = {seed: _metrics(run["after"]) for seed, run in runs.items()}
    names = next(iter(seeds.values()))
    metrics = {name: _mean_and_deviation([metrics[name] for metrics in seeds.values()]) for name in names}
    return {"metrics": metrics, "best_seed": best_seed(runs), "seeds": seeds}


def _metrics(evaluation: dict[str, float]) -> dict[str, float]:
    names = [name for name in evaluation if name.startswith("eval_") and name not in ["eval_loss", "eval_examples"]]
    return {name.removeprefix("eval_"): evaluation[name] for name in names}


def _mean_and_deviation(values: list[float]) -> dict[str, float | None]:
    return {"mean": statistics.mean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def read_summaries(folders: list[str], name: str) -> dict[str, dict[str, Any]]:
    """Name of the folder → summary, of earlier calls that are compared with the one called `name`.

    Raises:
        UsageError: there is no summary, or two have one name.
    """
    summaries = {}
    for folder in folders:
        file = Path(folder, "glue.json")
        if not file.is_file():
            raise UsageError(f"{folder} has no glue.json to compare with.")
        compared = Path(folder).resolve().name
        if compared == name or compared in summaries:
            raise UsageError(f"two folders to compare are called {compared}, by which the table tells them apart.")
        summaries[compared] = next(iter(read_results(file)["models"].values()))  # its own
    return summaries


def write_report(output_dir: Path, compared: dict[str, dict[str, Any]]) -> str:
    """glue.md, glue.json, glue.png and the submission in `output_dir`. Returns the table."""
    summaries = {output_dir.resolve().name: summarise(output_dir), **compared}
    table = f"{make_table(summaries)}\n{NOTES}\n"
    with writing(output_dir / "glue.json"):
        write_json(output_dir / "glue.json", {"models": summaries})
    with writing(output_dir / "glue.md"):
        atomic_write(output_dir / "glue.md", lambda file: file.write_text(table, encoding="utf-8"))
    with writing(output_dir / "glue.png"):
        atomic_write(output_dir / "glue.png", functools.partial(plot, summaries))
    with writing(output_dir / "submission"):
        collect_submission(output_dir)
    return table


def make_table(summaries: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for every metric of every task, a column for every summary."""
    lines = [["task", "metric", *summaries], ["---"] * (2 + len(summaries))]
    for name, task in TASKS.items():
        found = [summary["tasks"].get(name) for summary in summaries.values()]
        metrics = next((list(each["metrics"]) for each in found if each), [])
        for metric in metrics:
            if metric != "combined_score":
                cells = [_cell(each, metric) if each else "" for each in found]
                lines.append([task.title, _metric_title(metric), *cells])
    averages = [summary["average"] for summary in summaries.values()]
    if any(average is not None for average in averages):
        cells = ["" if average is None else f"{100 * average:.1f}" for average in averages]
        lines.append(["GLUE average", "", *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _metric_title(name: str) -> str:
    """MNLI's begin with the part of the evaluation set."""
    metric = next(metric for metric in METRIC_TITLES if name.endswith(metric))
    part = name.removesuffix(metric).rstrip("_")
    return f"{METRIC_TITLES[metric]}, {part}" if part else METRIC_TITLES[metric]


def _cell(summary: dict[str, Any], metric: str) -> str:
    values = summary["metrics"][metric]
    deviation = "" if values["std"] is None else f" ± {100 * values['std']:.1f}"
    return f"{100 * values['mean']:.1f}{deviation} ({len(summary['seeds'])})"


def plot(summaries: dict[str, dict[str, Any]], file: Path) -> None:
    """A group of bars for every task, a bar for every summary: the mean of the task's metrics."""
    names = [name for name in TASKS if any(name in summary["tasks"] for summary in summaries.values())]
    figure = Figure(figsize=(max(5.0, 1.1 * len(names) + 2), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(summaries)
    for number, (label, summary) in enumerate(summaries.items()):
        bars = [(place, summary["tasks"][name]) for place, name in enumerate(names) if name in summary["tasks"]]
        scores = [task["metrics"]["combined_score"] for _, task in bars]
        axes.bar(
            [place + (number - (len(summaries) - 1) / 2) * width for place, _ in bars],
            [100 * score["mean"] for score in scores],
            width,
            yerr=[100 * (score["std"] or 0.0) for score in scores],
            capsize=3,
            label=label,
        )
    axes.set(xticks=range(len(names)), xticklabels=[TASKS[name].title for name in names], ylabel="score × 100")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=150)


def write_predictions(folder: Path, name: str, predictions: list[str]) -> None:
    """A file of a submission: the number of every row of the test set, and what is predicted of it."""
    lines = ["index\tprediction", *(f"{index}\t{prediction}" for index, prediction in enumerate(predictions))]
    with writing(folder / name):
        folder.mkdir(exist_ok=True)
        atomic_write(folder / name, lambda file: file.write_text("\n".join(lines) + "\n", encoding="utf-8"))


def collect_submission(output_dir: Path) -> None:
    """The test predictions of every task's best seed, in one folder, and nothing else."""
    for stale in (output_dir / "submission").glob("*.tsv"):
        stale.unlink()
    for task in TASKS:
        runs = finished_runs(output_dir, task)
        if not runs:
            continue
        for file in (run_folder(output_dir, task, best_seed(runs)) / "predictions").glob("*.tsv"):
            (output_dir / "submission").mkdir(exist_ok=True)
            atomic_write(output_dir / "submission" / file.name, functools.partial(_copy, file))


def _copy(source: Path, file: Path) -> None:
    file.write_bytes(source.read_bytes())
