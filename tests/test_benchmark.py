import json
import math
import sys

import pytest
import torch

from lion_transformers.scripts import benchmark
from lion_transformers.scripts.arguments import UsageError


def run_benchmark(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, arguments)])
    benchmark.main()


def test_ratio_is_the_median_of_pairs_with_quartiles():
    """Pairs 2, 1, 4, 3, 5; a machine that slows down half-way slows both of a pair."""
    assert benchmark.paired_ratio([2.0, 10.0, 40.0, 3.0, 5.0], [1.0, 10.0, 10.0, 1.0, 1.0]) == {
        "median": 3.0,
        "ratio": "3.00 (2.00 to 4.00)",
    }


def test_calls_alternate_after_a_warm_up():
    calls = []
    times = benchmark.alternate([lambda: calls.append("a"), lambda: calls.append("b")], 3)
    assert calls == ["a", "b"] * 4
    assert [len(seconds) for seconds in times] == [3, 3]


@pytest.mark.parametrize("median, code", [(1.29, 0), (1.3, 1), (math.inf, 1)])
def test_decay_fails_at_its_limit(monkeypatch, tmp_path, median, code):
    monkeypatch.setattr(benchmark, "paired_ratio", lambda *times: {"median": median, "ratio": f"{median}"})
    arguments = ("decay", "--length", 32, "--repetitions", 1, "--output_dir", tmp_path)
    if code:
        with pytest.raises(SystemExit, match=str(code)):
            run_benchmark(monkeypatch, *arguments)
    else:
        run_benchmark(monkeypatch, *arguments)
    content = json.loads((tmp_path / "decay.json").read_text())
    cases = {(row["mode"], row["decay"], row["pass"]) for row in content["rows"]}
    assert len(cases) == 3 * 2 * 2
    assert content["settings"]["length"] == 32 and content["machine"]["torch"] == torch.__version__


def test_strong_and_weak_decays_differ_in_nothing_else():
    class Arguments:
        batch_size, heads, head_dim = 1, 2, 4

    for decay in ("fixed", "selective"):
        strong, weak = (benchmark.make_inputs(Arguments, 8, decay, strength) for strength in (-5.0, -0.01))
        assert all(torch.equal(x, y) for x, y in zip(strong[:3], weak[:3], strict=True))
        assert strong[3].shape == weak[3].shape == {"fixed": (2,), "selective": (1, 2, 8)}[decay]
        assert (strong[3] == -5).all() and (weak[3] == -0.01).all()


def test_forms_reports_every_form_and_the_crossover(monkeypatch, tmp_path, capsys):
    arguments = ("--lengths", 16, 8, "--heads", 2, "--head_dim", 4, "--repetitions", 1, "--output_dir", tmp_path)
    run_benchmark(monkeypatch, "forms", *arguments)
    rows = json.loads((tmp_path / "forms.json").read_text())["rows"]
    assert [row["length"] for row in rows if row["decay"] == "none"] == [8, 8, 16, 16]
    assert all(set(row["seconds"]) == set(benchmark.MODES) for row in rows)
    assert (tmp_path / "forms.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("wins") == 6


def test_crossover_is_the_longest_length_at_which_parallel_wins():
    rows = [
        {"decay": "fixed", "pass": "forward", "length": length, "median": median}
        for length, median in [(64, 2.0), (128, 1.1), (256, 0.7), (8192, None)]
    ]
    assert benchmark.describe_crossover(rows, "fixed", "forward") == "parallel wins up to 128 tokens"
    assert "chunk wins" in benchmark.describe_crossover(rows[2:], "fixed", "forward")


def test_sizes_below_one_are_refused(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="--repetitions must be at least 1"):
        run_benchmark(monkeypatch, "decay", "--repetitions", 0, "--output_dir", tmp_path)
