import csv
import json
import sys

import pandas as pd
import pytest

from lion_transformers.scripts import demo_glue
from lion_transformers.tokenization import train_wordpiece_tokenizer


GOOD, BAD = 'a "great" film with the best story', "a boring film and the\tworst acting"


@pytest.fixture
def demo_dir(tmp_path):
    """What `make demo` leaves behind, but for the pretrained model."""
    folder = tmp_path / "demo"
    (folder / "data").mkdir(parents=True)
    for split in ("train", "validation"):
        rows = pd.DataFrame({"text": [GOOD, BAD] * 40, "label": [1, 0] * 40})
        rows.to_csv(folder / "data" / f"{split}.csv", index=False)
    tokenizer = train_wordpiece_tokenizer([GOOD, BAD], vocab_size=60, min_frequency=1, show_progress=False)
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def run_demo(monkeypatch, tmp_path, *arguments):
    folders = ["--output_dir", str(tmp_path / "out"), "--demo_dir", str(tmp_path / "demo")]
    monkeypatch.setattr(sys, "argv", ["demo_glue.py", *folders, *arguments])
    demo_glue.main()


def recipe(tmp_path, name, text):
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    return str(path)


def test_reviews_become_the_files_of_sst2(demo_dir, tmp_path):
    demo_glue.write_sst2(demo_dir / "data", tmp_path / "glue")
    for split in ("train", "dev"):
        with open(tmp_path / "glue" / "SST-2" / f"{split}.tsv", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        assert rows[0] == ["sentence", "label"] and len(rows) == 81
        assert rows[1:3] == [[GOOD, "1"], [BAD.replace("\t", " "), "0"]]


def record_calls(monkeypatch):
    """Commands instead of runs; each leaves what the demo looks for."""
    calls = []

    def record(script, *arguments):
        calls.append([script.name, *map(str, arguments)])

    monkeypatch.setattr(demo_glue, "call", record)
    monkeypatch.setattr(demo_glue, "report", lambda folder, runs, is_pretrained: calls.append([is_pretrained]))
    return calls


def test_without_a_checkpoint_all_models_start_from_scratch(demo_dir, tmp_path, monkeypatch):
    calls = record_calls(monkeypatch)
    run_demo(monkeypatch, tmp_path)
    *finetunings, (is_pretrained,) = calls
    assert is_pretrained is False
    assert [command[0] for command in finetunings] == ["run_glue.py"] * 4
    assert all("--model_name_or_path" not in command for command in finetunings)
    assert [command[-1] for command in finetunings] == [
        str(tmp_path / "out" / "from-scratch" / name) for name in demo_glue.MODELS
    ]


def test_the_checkpoint_of_the_demo_is_used_and_the_others_get_the_same_budget(demo_dir, tmp_path, monkeypatch):
    (demo_dir / "pretrained").mkdir()
    (demo_dir / "pretrained" / "results.json").write_text("{}")
    calls = record_calls(monkeypatch)
    run_demo(monkeypatch, tmp_path)
    pretrainings = [command for command in calls if command[0] == "pretrain_mlm.py"]
    assert [command[command.index("--output_dir") + 1] for command in pretrainings] == [
        str(tmp_path / "out" / "pretrained" / name) for name in ("bert", "lion-lit", "lion-d")
    ]
    assert all(command[command.index("--recipe") + 1] == "demo_pretrain" for command in pretrainings)
    starts = [c[c.index("--model_name_or_path") + 1] for c in calls if c[0] == "run_glue.py"]
    assert starts == [command[command.index("--output_dir") + 1] for command in pretrainings] + [
        str(demo_dir / "pretrained")
    ]
    # Runs from scratch that an earlier call has left are no obstacle.
    assert all("/out/from-pretrained/" in command[-1] for command in calls if command[0] == "run_glue.py")


def test_the_table_has_every_model_with_its_seeds(demo_dir, tmp_path, monkeypatch, capsys):
    """All of it, with models of a few parameters."""
    size = "{hidden_size: 24, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 24}"
    short = f"config: {size}\nmax_seq_length: 12\nseeds: [1, 2]\nmax_steps: 1\nreport_to: none\n"
    run_demo(monkeypatch, tmp_path, "--recipe", recipe(tmp_path, "finetune", short))
    results = json.loads((tmp_path / "out" / "demo-glue.json").read_text())
    assert results["pretrained"] is False and list(results["models"]) == ["bert", "lion-lit", "lion-d", "lion-s"]
    for summary in results["models"].values():
        accuracy = summary["tasks"]["sst2"]["metrics"]["accuracy"]
        values = [seed["accuracy"] for seed in summary["tasks"]["sst2"]["seeds"].values()]
        assert len(values) == 2 and accuracy["mean"] == pytest.approx(sum(values) / 2)
        assert accuracy["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    table = (tmp_path / "out" / "demo-glue.md").read_text()
    assert table.splitlines()[0] == "| task | metric | bert | lion-lit | lion-d | lion-s |" and "±" in table
    assert (tmp_path / "out" / "demo-glue.png").read_bytes().startswith(b"\x89PNG")
    assert table.splitlines()[2] in capsys.readouterr().out

    before = [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").rglob("results.json"))]
    run_demo(monkeypatch, tmp_path, "--recipe", recipe(tmp_path, "finetune", short))
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").rglob("results.json"))] == before


@pytest.mark.slow
def test_the_demo_learns(tmp_path, monkeypatch):
    """From scratch, on the real reviews: minutes. In so few steps only models with decays get beyond the majority."""
    run_demo(monkeypatch, tmp_path)
    results = json.loads((tmp_path / "out" / "demo-glue.json").read_text())
    accuracies = {
        name: each["tasks"]["sst2"]["metrics"]["accuracy"]["mean"] for name, each in results["models"].items()
    }
    assert list(accuracies) == ["bert", "lion-lit", "lion-d", "lion-s"]
    assert min(accuracies["lion-d"], accuracies["lion-s"]) > 0.529  # that of the more frequent class
