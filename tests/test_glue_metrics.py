"""scripts/metrics/glue: values by hand and by scikit-learn and SciPy, what is undefined, no network."""

import math
import socket
import warnings
from pathlib import Path

import evaluate
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from lion_transformers.scripts import run_glue


def compute(task, predictions, references):
    metric = evaluate.load(run_glue.METRIC, task, keep_in_memory=True)
    return metric.compute(predictions=predictions, references=references)


@pytest.mark.parametrize("task", ["sst2", "mnli", "qnli", "rte", "wnli"])
def test_accuracy_alone(task):
    assert compute(task, [0, 1, 1, 0], [0, 1, 1, 1]) == {"accuracy": 0.75, "combined_score": 0.75}


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_accuracy_and_f1(task):
    # Two true positives, one false, two missed: precision 2/3, recall 1/2, of which F1 is 2·PR/(P + R) = 4/7.
    expected = {"accuracy": 0.5, "f1": 4 / 7, "combined_score": (0.5 + 4 / 7) / 2}
    assert compute(task, [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0]) == pytest.approx(expected, rel=1e-12)


def test_matthews_correlation():
    # 3 true and 1 false positives, 2 true and 2 false negatives: (3·2 − 1·2) / √(4·5·3·4).
    predictions, references = [1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 1, 1]
    expected = 4 / math.sqrt(240)
    assert compute("cola", predictions, references) == pytest.approx(
        {"matthews_correlation": expected, "combined_score": expected}, rel=1e-12
    )


def test_pearson_and_spearman():
    # Deviations (−1, 0, 1) and (−2, 3, −1) give 1 / √(2 · 14); ranks (1, 2, 3) and (1, 3, 2) give 1 − 6·2 / (3·8).
    expected = {"pearson": 1 / math.sqrt(28), "spearmanr": 0.5}
    expected["combined_score"] = sum(expected.values()) / 2
    assert compute("stsb", [1.0, 2.0, 3.0], [0.0, 5.0, 1.0]) == pytest.approx(expected, rel=1e-12)


def test_on_many_examples_the_libraries_agree():
    rng = np.random.default_rng(0)
    predictions, references = rng.integers(0, 2, (2, 500))
    assert compute("mrpc", predictions, references)["f1"] == pytest.approx(
        sklearn.metrics.f1_score(references, predictions), rel=1e-12
    )
    assert compute("cola", predictions, references)["matthews_correlation"] == pytest.approx(
        sklearn.metrics.matthews_corrcoef(references, predictions), rel=1e-12
    )
    scores, labels = rng.normal(size=500), rng.integers(0, 6, 500) / 1.0  # with ties
    result = compute("stsb", scores, labels)
    # In float32 these would agree to 1e-7 only.
    assert result["pearson"] == pytest.approx(scipy.stats.pearsonr(scores, labels).statistic, rel=1e-12)
    assert result["spearmanr"] == pytest.approx(scipy.stats.spearmanr(scores, labels).statistic, rel=1e-12)


UNDEFINED = [
    ("cola", [1, 1, 1], [0, 1, 1], ["Matthews"]),
    ("cola", [0, 1, 1], [1, 1, 1], ["Matthews"]),
    ("cola", [1, 1], [1, 1], ["Matthews"]),
    ("mrpc", [0, 0], [0, 1], ["F1"]),
    ("qqp", [0, 0], [0, 1], ["F1"]),
    ("stsb", [2.5, 2.5, 2.5], [0.0, 1.0, 2.0], ["Pearson", "Spearman"]),
    ("stsb", [1.0, 2.0], [3.0, 3.0], ["Pearson", "Spearman"]),
    ("stsb", [1.0], [3.0], ["Pearson", "Spearman"]),
    ("stsb", [math.nan, 1.0], [3.0, 2.0], ["Pearson", "Spearman"]),
    ("stsb", [math.inf, 1.0], [3.0, 2.0], ["Pearson", "Spearman"]),
]


@pytest.mark.parametrize(("task", "predictions", "references", "named"), UNDEFINED)
def test_what_is_undefined_is_zero_with_one_warning(task, predictions, references, named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = compute(task, predictions, references)
    messages = [str(warning.message) for warning in caught if "it counts as 0" in str(warning.message)]
    assert len(messages) == len(named) == len(caught)
    for name, message in zip(named, messages, strict=True):
        assert message.startswith(f"{name}")
    undefined = [value for name, value in result.items() if name not in ["accuracy", "combined_score"]]
    assert undefined == [0.0] * len(undefined)
    assert result["combined_score"] == result.get("accuracy", 0.0) / (2 if "accuracy" in result else 1)


def test_constant_positive_predictions_have_an_f1():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compute("mrpc", [1, 1], [0, 1]) == pytest.approx(
            {"accuracy": 0.5, "f1": 2 / 3, "combined_score": 7 / 12}
        )


def test_a_task_that_glue_has_not():
    with pytest.raises(ValueError, match="GLUE has no task sst5, only cola"):
        compute("sst5", [0], [0])


def test_it_is_loaded_without_a_network(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert compute("rte", [1], [1])["accuracy"] == 1.0


def test_the_module_belongs_to_the_package():
    data = (Path(run_glue.__file__).parents[1] / "setup.cfg").read_text(encoding="utf-8")
    assert Path(run_glue.METRIC, "glue.py").is_file()
    assert "metrics/glue/glue.py" in data
