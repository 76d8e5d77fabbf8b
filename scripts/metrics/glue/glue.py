"""The metrics of the GLUE benchmark, as a module of `evaluate` that needs no network.

    metric = evaluate.load("scripts/metrics/glue", "mrpc")
    metric.compute(predictions=[0, 1], references=[0, 1])

`evaluate` copies this file to its cache and imports it there: nothing of this project can be imported here.
"""

import math
import warnings
from collections.abc import Callable

import evaluate
import numpy as np
from datasets import Features, Value
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


DESCRIPTION = "The metrics of GLUE's tasks, each between -1 and 1, and their mean."
INPUTS = """
Args:
    predictions: ids of classes; scores for stsb.
    references: the labels, of the same kind.
Returns:
    cola: matthews_correlation; mrpc, qqp: accuracy, f1; stsb: pearson, spearmanr; the other tasks: accuracy. For all,
    combined_score is their mean. A correlation that is undefined, because predictions or references are constant or
    not finite, is 0, with a warning; so is the F1 of predictions without a positive.
"""
CITATION = """
@inproceedings{wang2019glue,
  title={{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author={Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.},
  booktitle={ICLR},
  year={2019}
}
"""


def accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    return float(accuracy_score(references, predictions))


def f1(predictions: np.ndarray, references: np.ndarray) -> float:
    if not predictions.any():
        return _zero("F1", "no prediction is positive")
    return float(f1_score(references, predictions))


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    if _is_constant(predictions) or _is_constant(references):
        return _zero("Matthews correlation")
    return float(matthews_corrcoef(references, predictions))


def pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    return _correlation("Pearson correlation", pearsonr, predictions, references)


def spearman(predictions: np.ndarray, references: np.ndarray) -> float:
    return _correlation("Spearman correlation", spearmanr, predictions, references)


def _correlation(name: str, correlate: Callable, predictions: np.ndarray, references: np.ndarray) -> float:
    defined = np.isfinite(predictions).all() and not _is_constant(predictions) and not _is_constant(references)
    value = float(correlate(predictions, references).statistic) if defined else math.nan
    return value if math.isfinite(value) else _zero(name, "predictions or references are all equal or not finite")


def _is_constant(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())


def _zero(name: str, reason: str = "predictions or references are all equal") -> float:
    warnings.warn(f"{name} is undefined, because {reason}: it counts as 0.", stacklevel=2)
    return 0.0


METRICS = {
    "cola": {"matthews_correlation": matthews_correlation},
    "mrpc": {"accuracy": accuracy, "f1": f1},
    "qqp": {"accuracy": accuracy, "f1": f1},
    "stsb": {"pearson": pearson, "spearmanr": spearman},
    **{task: {"accuracy": accuracy} for task in ["sst2", "mnli", "qnli", "rte", "wnli"]},
}


class Glue(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in METRICS:
            raise ValueError(f"GLUE has no task {self.config_name}, only {', '.join(METRICS)}.")
        value = Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        # Not by `format="numpy"`, which makes float32 of them.
        predictions, references = np.array(predictions), np.array(references)
        metrics = {name: metric(predictions, references) for name, metric in METRICS[self.config_name].items()}
        return {**metrics, "combined_score": sum(metrics.values()) / len(metrics)}
