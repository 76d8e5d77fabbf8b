import json
import sys

import pandas as pd
import pytest
from training_checks import fails_with

from lion_transformers import LionConfig, LionForMaskedLM
from lion_transformers.scripts import demo, demo_glue, demo_image
from lion_transformers.scripts.arguments import UsageError, call
from lion_transformers.tokenization import train_wordpiece_tokenizer


TEXTS = ["the film was good", "the film was the worst", "the end"]


@pytest.fixture
def finished_steps(tmp_path):
    """What the four steps leave behind, of a model that has learnt nothing."""
    data, pretrained, finetuned = (tmp_path / name for name in ("data", "pretrained", "finetuned"))
    for folder in (data, pretrained, finetuned, tmp_path / "tokenizer"):
        folder.mkdir()
    pd.DataFrame({"text": TEXTS, "label": [1, 0, 0]}).to_csv(data / "validation.csv", index=False)
    tokenizer = train_wordpiece_tokenizer(TEXTS, vocab_size=60, min_frequency=1, show_progress=False)
    tokenizer.save_pretrained(pretrained)
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    config = LionConfig(
        vocab_size=60, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    LionForMaskedLM(config).save_pretrained(pretrained)
    measured = {"eval_masked_accuracy": 0.25, "eval_loss": 5.5}
    results = {"before": {**measured, "eval_masked_accuracy": 0.0}, "after": measured, "tokens_per_second": 1234.5}
    (pretrained / "results.json").write_text(json.dumps(results))
    (finetuned / "results.json").write_text(json.dumps({"eval_accuracy": 0.75}))
    return tmp_path


def run_demo(monkeypatch, folder):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output_dir", str(folder)])
    demo.main()


def test_finished_steps_are_not_repeated_and_the_report_has_their_figures(finished_steps, monkeypatch, capsys):
    monkeypatch.setattr(demo, "call", lambda *command: pytest.fail(f"ran {command}"))
    run_demo(monkeypatch, finished_steps)
    results = json.loads((finished_steps / "demo.json").read_text())
    assert results["masked_accuracy_before"] == 0.0
    assert results["masked_accuracy_after"] == 0.25
    assert results["sentiment_accuracy"] == 0.75
    assert results["majority_class_share"] == pytest.approx(2 / 3)
    assert results["most_frequent_token_share"] == pytest.approx(4 / 11)  # "the", of 11 words that are tokens
    assert results["tokens_per_second"] == 1234.5
    assert 0 <= results["largest_difference_between_forms"] < 1e-4
    assert list(results["fill_mask"]) == demo.PROMPTS and all(len(x) == 3 for x in results["fill_mask"].values())
    printed = capsys.readouterr().out
    assert printed.count("is there already") == 4
    for words in ("0.0% before, 25.0% after", "75.0% (66.7%", "1,234 tokens per second", demo.PROMPTS[0]):
        assert words in printed


def test_a_step_that_did_not_finish_is_done_again(finished_steps, monkeypatch):
    class Called(Exception):
        pass

    def call(*command):
        raise Called(*command)

    monkeypatch.setattr(demo, "call", call)
    (finished_steps / "pretrained" / "results.json").unlink()
    with pytest.raises(Called) as called:
        run_demo(monkeypatch, finished_steps)
    assert "pretrain_mlm.py" in str(called.value) and "--overwrite_output_dir" in str(called.value)


def test_forms_that_disagree_fail_the_demo(finished_steps, monkeypatch):
    monkeypatch.setattr(demo, "compare_forms", lambda folder: 0.01)
    with pytest.raises(UsageError, match=r"three forms differ by 1\.0e-02"):
        run_demo(monkeypatch, finished_steps)


def test_a_script_that_fails_ends_the_demo():
    with pytest.raises(UsageError, match="exit code 3"):
        call("-c", "raise SystemExit(3)")


def test_reviews_are_clean_and_held_out_ones_are_not_trained_on(tmp_path):
    demo.write_reviews(tmp_path / "data")
    train, held_out = (pd.read_csv(tmp_path / "data" / f"{name}.csv") for name in ("train", "validation"))
    assert len(held_out) == demo.NUM_HELD_OUT and len(train) > 31_000
    assert not set(train["text"]) & set(held_out["text"])
    assert not train["text"].str.contains("<br").any()
    assert set(train["label"]) == {0, 1} and abs(train["label"].mean() - 0.5) < 0.01


@pytest.mark.slow
def test_the_demo_learns(tmp_path, monkeypatch):
    """All of it, on the real reviews: minutes."""
    run_demo(monkeypatch, tmp_path)
    results = json.loads((tmp_path / "demo.json").read_text())
    assert results["masked_accuracy_before"] < 0.01
    assert results["masked_accuracy_after"] > 3 * results["most_frequent_token_share"]
    assert results["sentiment_accuracy"] > results["majority_class_share"] + 0.1
    assert results["largest_difference_between_forms"] < 1e-4
    assert results["peak_memory_gib"] < 4


@pytest.mark.parametrize("module", [demo, demo_image, demo_glue], ids=lambda module: module.__name__)
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys, module):
    (tmp_path / "file").write_text("")
    error = fails_with(module, monkeypatch, capsys, "--output_dir", tmp_path / "file")
    assert f"error: cannot write into output_dir {tmp_path / 'file'}: " in error
