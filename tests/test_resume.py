"""Stopping a run of any training script and going on with it: the same examples, the same weights, nothing lost."""

import contextlib
import errno
import itertools
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import datasets
import divided_run
import numpy as np
import pandas
import PIL.Image
import pytest
import requests
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets.distributed import split_dataset_by_node
from safetensors import SafetensorError
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from tqdm import tqdm
from training_checks import TWO_CPUS, run_and_check
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lion_transformers.scripts import (
    batching,
    glue_report,
    pretrain_mlm,
    run_glue,
    train_image_classification,
    training,
)
from lion_transformers.scripts.arguments import UsageError, run
from lion_transformers.scripts.batching import DrawnCollator, DrawnExamples, shield_from_signals
from lion_transformers.scripts.checkpointing import (
    clear_output_dir,
    list_checkpoints,
    read_manifest,
    write_manifest,
    writing,
)
from lion_transformers.scripts.resuming import read_checkpoint
from lion_transformers.tokenization.corpus import load_files


pytestmark = pytest.mark.usefixtures("isolated_run")

WORDS = ["the", "a", "small", "big", "red", "cat", "dog", "bird", "sees", "likes", "eats", "in", "house", "garden"]
TINY = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,hidden_dropout_prob=0.2"
# Ten updates of eight examples in two micro-batches; 36 examples make 4 1/2 updates a pass.
UPDATES = "--max_steps 10 --global_train_batch_size 8 --per_device_train_batch_size 4 --report_to none"
EVERY_3 = "--eval_steps 3 --logging_steps 2 --output_dir out"


def write_tokenizer():
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    special = {f"{name}_token": token for name, token in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained("tokenizer")


def write_lines(file, number):
    rng = random.Random(file)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(4, 14))) for _ in range(number)]
    Path(file).write_text("\n".join(lines) + "\n")
    return lines


def mlm(*options):
    write_tokenizer()
    write_lines("train.txt", 36)
    write_lines("valid.txt", 9)
    files = "--train_file train.txt --validation_file valid.txt --tokenizer_name tokenizer --max_seq_length 16"
    return pretrain_mlm, [*files.split(), *f"--line_by_line --config {TINY}".split(), *options]


def streamed_mlm(*options):
    command = mlm("--streaming", "--shuffle_buffer_size", "10")
    for number in range(3):
        write_lines(f"{number}.txt", 12)
    return command[0], [*command[1], "--train_file", "0.txt", "1.txt", "2.txt", *options]


def packed_mlm(command):
    module, argv = command
    return module, [each.replace("--line_by_line", "--packing") for each in argv]


def without_dropout(command):
    module, argv = command
    return module, [each.replace("hidden_dropout_prob=0.2", "hidden_dropout_prob=0.0") for each in argv]


def glue():
    write_tokenizer()
    Path("data/SST-2").mkdir(parents=True)
    for split, number in {"train": 36, "dev": 9, "test": 5}.items():
        lines = write_lines("lines.txt", number)
        rows = [f"{line}\t{len(line) % 2}" if split != "test" else f"{row}\t{line}" for row, line in enumerate(lines)]
        header = "index\tsentence" if split == "test" else "sentence\tlabel"
        Path(f"data/SST-2/{split}.tsv").write_text("\n".join([header, *rows]) + "\n")
    task = "--task_name sst2 --data_dir data --tokenizer_name tokenizer --max_seq_length 16 --learning_rate 1e-3"
    return run_glue, [*task.split(), "--config", TINY]


def images():
    rng = np.random.default_rng(0)
    for folder, number in {"train": 12, "valid": 3}.items():
        for name in ["blue", "green", "red"]:
            Path(folder, name).mkdir(parents=True)
            for image in range(number):
                pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                PIL.Image.fromarray(pixels).save(Path(folder, name, f"{image}.png"))
    data = "--train_dir train --validation_dir valid --ema_decay 0.9 --warmup_epochs 1"
    return train_image_classification, [
        *data.split(),
        "--config",
        f"{TINY},modality=image,decay_type=selective,image_size=8,patch_size=4",
    ]


KINDS = {
    "text": mlm,
    "text without dropout": lambda: without_dropout(mlm()),
    "streamed text without dropout": lambda: without_dropout(streamed_mlm()),
    "text in worker processes": lambda: mlm("--dataloader_num_workers", "2"),
    "streamed text": streamed_mlm,
    "streamed text in a worker process": lambda: streamed_mlm("--dataloader_num_workers", "1"),
    "packed text": lambda: packed_mlm(mlm()),
    "streamed packed text": lambda: packed_mlm(streamed_mlm()),
    "GLUE": glue,
    "images": images,
}


class Trainer:
    """Runs a script in this process, with a look at what it sees and a hand on when it stops."""

    def __init__(self, monkeypatch, kind):
        self.monkeypatch = monkeypatch
        self.module, self.argv = KINDS[kind]()
        self.argv = [*self.argv, *UPDATES.split(), *EVERY_3.split()]
        classes = [pretrain_mlm.Pretraining, run_glue.GlueRun, train_image_classification.ClassificationRun]
        self.run_class = next(each for each in classes if each.__module__ == self.module.__name__)

    def __call__(self, *options, stop=None):
        """Weights, and by step all tensors of the micro-batches of an update.

        `stop` is (how, step): KeyboardInterrupt in the middle of the update after that step, or SIGTERM or SIGINT in
        it, or SIGTERM in the evaluation after it.
        """
        seen = {}
        how, when = stop or (None, None)
        accumulate, evaluate, backward = (
            self.run_class.accumulate_gradients,
            self.run_class.compute_metrics,
            Accelerator.backward,
        )
        backwards = []

        def spy(run, micro_batches):
            seen[run.state.step] = [{name: part.clone() for name, part in each.items()} for each in micro_batches]
            backwards.clear()
            if how in ("sigterm", "sigint") and run.state.step == when:
                signal.raise_signal(signal.Signals[how.upper()])
            return accumulate(run, micro_batches)

        def interrupted_backward(accelerator, loss):
            backwards.append(loss)
            if how == "interrupt" and when in seen and len(backwards) == 2:
                raise KeyboardInterrupt
            backward(accelerator, loss)

        def interrupted_evaluation(run):
            if how == "sigterm in evaluation" and run.state.step == when:
                signal.raise_signal(signal.SIGTERM)
            return evaluate(run)

        with self.monkeypatch.context() as patch:
            patch.setattr(self.run_class, "accumulate_gradients", spy)
            patch.setattr(Accelerator, "backward", interrupted_backward)
            patch.setattr(self.run_class, "compute_metrics", interrupted_evaluation)
            patch.setattr(sys, "argv", [self.module.__file__, *self.argv, *options])
            if how is None:
                self.module.main()
            elif how == "interrupt":
                with pytest.raises(KeyboardInterrupt):
                    self.module.main()
            else:
                with pytest.raises(SystemExit) as exit:
                    self.module.main()
                assert exit.value.code == 0
        return seen

    def folder(self, output_dir):
        return Path(output_dir, "sst2/seed-17") if self.module is run_glue else Path(output_dir)


TIMES = {"train_seconds", "unlogged_seconds", "tokens_per_second", "examples_per_second", "images_per_second"}


def untimed(history):
    return [{name: value for name, value in entry.items() if name not in TIMES} for entry in history]


def assert_same_batches(seen, expected):
    for step, micro_batches in seen.items():
        for batch, expected_batch in zip(micro_batches, expected[step], strict=True):
            assert batch.keys() == expected_batch.keys()
            for name, tensor in batch.items():
                assert torch.equal(tensor, expected_batch[name]), (step, name)


def assert_same_run(folder, expected):
    for name in ["model.safetensors", "checkpoint-10/model.safetensors", "checkpoint-10/ema/model.safetensors"]:
        if (expected / name).exists():
            weights, expected_weights = load_file(folder / name), load_file(expected / name)
            for key, tensor in expected_weights.items():
                torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-6, msg=f"{name} {key}")
    results, expected_results = (json.loads((each / "results.json").read_text()) for each in (folder, expected))
    assert results["best"] == pytest.approx(expected_results["best"])
    history, expected_history = (untimed(each["history"]) for each in (results, expected_results))
    assert len(history) == len(expected_history)
    for entry, expected_entry in zip(history, expected_history, strict=True):
        assert entry == pytest.approx(expected_entry, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_is_the_one_that_was_not(monkeypatch, kind):
    """Stopped in the first pass over the data and in the second, twice in a row, and in evaluations."""
    train = Trainer(monkeypatch, kind)
    expected = train("--output_dir", "whole")
    assert sorted(expected) == list(range(10))
    folder, whole = train.folder("out"), train.folder("whole")

    stops = [
        ("interrupt", 1, None, range(0, 2)),  # before there is a checkpoint, with half of the gradients accumulated
        ("interrupt", 4, 3, range(0, 5)),
        ("sigterm", 4, 5, range(3, 5)),
        ("sigterm", 5, 6, range(5, 6)),  # in the first update after going on
        ("sigterm in evaluation", 6, 6, range(0)),  # which was still to be done
        ("sigterm in evaluation", 9, 9, range(6, 9)),
        ("sigterm in evaluation", 10, 10, range(9, 10)),
        (None, None, 10, range(0)),
    ]
    for how, step, last_checkpoint, steps in stops:
        seen = train(stop=(how, step) if how else None)
        assert list(seen) == list(steps)
        assert_same_batches(seen, expected)
        if last_checkpoint is None:
            assert not list_checkpoints(folder)
        else:
            assert list_checkpoints(folder)[-1] == last_checkpoint
    assert_same_run(folder, whole)


@pytest.mark.parametrize("kind", ["text", "streamed text", "packed text"])
def test_every_evaluation_has_the_same_targets(monkeypatch, kind):
    """Those of the seed: also after a stop, drawn anew, without the cache, after other things have been drawn."""
    train, targets = Trainer(monkeypatch, kind), []
    batches_of = pretrain_mlm.evaluation_batches

    def spy(accelerator, loader):
        labels = []
        for batch in batches_of(accelerator, loader):
            labels.append(batch["labels"].flatten().tolist())
            yield batch
        targets.append(labels)

    monkeypatch.setattr(pretrain_mlm, "evaluation_batches", spy)
    train(stop=("sigterm", 4))
    assert len(targets) == 2
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "another-cache")
    load = pretrain_mlm.load_sequences
    monkeypatch.setattr(pretrain_mlm, "load_sequences", lambda *args: (torch.rand(3), load(*args))[1])
    train()
    assert len(targets) == 5 and all(each == targets[0] for each in targets)
    train("--seed", "1", "--output_dir", "other", "--max_steps", "1")
    assert targets[-1] != targets[0]


@pytest.mark.parametrize("kind", ["text", "GLUE", "images"])
def test_what_a_run_has_seen_is_not_read_again(monkeypatch, kind):
    train, read = Trainer(monkeypatch, kind), []
    take = DrawnExamples.__getitem__
    train(stop=("sigterm", 4))
    monkeypatch.setattr(DrawnExamples, "__getitem__", lambda self, key: (read.append(key[0]), take(self, key))[1])
    train()
    assert read == list(range(40, 80))  # positions: five updates of eight examples


def test_what_a_run_has_seen_of_a_stream_is_not_read_again(monkeypatch):
    """But for the block that it was in: of a thousand documents, by which `datasets` maps."""
    train = Trainer(monkeypatch, "streamed text")
    for number in range(3):
        write_lines(f"{number}.txt", 1500)
    train.argv += ["--global_train_batch_size", "512", "--per_device_train_batch_size", "256"]
    counts = Counter()

    def counted(function):
        def counting(batch, *args, **kwargs):
            counts[function.__name__] += len(next(iter(batch.values())))
            return function(batch, *args, **kwargs)

        return counting

    monkeypatch.setattr(batching, "shuffle_block", counted(batching.shuffle_block))
    monkeypatch.setattr(pretrain_mlm, "mask_by_content", counted(pretrain_mlm.mask_by_content))
    train(stop=("sigterm", 7))
    counts.clear()
    train()
    # 4096 of 4500 had been seen: the last half block is masked again, then the first of the next pass.
    assert counts["mask_by_content"] == 1500
    assert 1500 <= counts["shuffle_block"] <= 1500 + 1000 + 10  # the tokenizer has a block of its own


@pytest.fixture
def listening_to_ctrl_c():
    """A shell starts what runs in its background deaf to Ctrl-C, and tests may run there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening_to_ctrl_c")
@pytest.mark.parametrize("kind", ["text", "GLUE", "images"])
def test_ctrl_c_stops_a_run_as_sigterm_does(monkeypatch, kind):
    train = Trainer(monkeypatch, kind)
    train(stop=("sigint", 4))
    assert list_checkpoints(train.folder("out"))[-1] == 5
    assert list(train("--resume_from_checkpoint", "latest")) == list(range(5, 10))


@pytest.mark.usefixtures("listening_to_ctrl_c")
def test_a_second_ctrl_c_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt), training.stopping_on_signals(SimpleNamespace()):
        signal.raise_signal(signal.SIGINT)
        assert training._stop.is_set()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not training._stop.is_set()


@pytest.mark.usefixtures("listening_to_ctrl_c")
def test_a_run_that_was_started_deaf_to_ctrl_c_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with training.stopping_on_signals(SimpleNamespace()):
        signal.raise_signal(signal.SIGINT)
        assert not training._stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert training._stop.is_set()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


LOADERS = {"text": "load_sequences", "GLUE": "load_task", "images": "load_splits"}


@pytest.mark.parametrize("kind", LOADERS)
def test_sigterm_before_training_ends_a_run_at_once(monkeypatch, capsys, kind):
    """With nothing left of it; a run that has been there keeps what it has."""
    train = Trainer(monkeypatch, kind)
    load, handler = getattr(train.module, LOADERS[kind]), signal.getsignal(signal.SIGTERM)

    def interrupted(*args, **kwargs):
        try:
            signal.raise_signal(signal.SIGTERM)
            return load(*args, **kwargs)
        finally:
            raise TimeoutError  # as `datasets` does where it has processes

    for stop, folders in [(None, []), (4, [3, 5])]:
        if stop:
            train(stop=("sigterm", stop))
        with monkeypatch.context() as patch:
            patch.setattr(train.module, LOADERS[kind], interrupted)
            patch.setattr(sys, "argv", [train.module.__file__, *train.argv])
            with pytest.raises(SystemExit) as exit:
                train.module.main()
        assert exit.value.code == 0 and signal.getsignal(signal.SIGTERM) is handler
        assert "stopped with nothing to save; the same command starts again" in capsys.readouterr().out
        assert list_checkpoints(train.folder("out")) == folders and Path("out").exists() == bool(folders)


@pytest.mark.parametrize("kind", ["text", "GLUE", "images"])
def test_a_run_that_fails_before_it_writes_leaves_no_folder(monkeypatch, capsys, kind):
    train = Trainer(monkeypatch, kind)
    Path("there").mkdir()
    wrong = ["--config", "num_attention_heads=3"]
    for folder in ["new/deep", "there", "there/deep"]:
        sentence(train, capsys, *wrong, "--output_dir", folder)
        assert not Path("new").exists() and Path("there").exists() and not list(Path("there").iterdir())


def test_an_interrupted_script_says_so_without_a_traceback(capsys):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit:
        run(interrupted)
    assert exit.value.code == 130 and capsys.readouterr().err.endswith(": error: interrupted.\n")


def test_the_tracker_has_every_step_once(monkeypatch):
    """Also those that were logged after the checkpoint that the run went on from."""
    train = Trainer(monkeypatch, "text")
    train("--report_to", "tensorboard", stop=("interrupt", 5))  # steps 4 and 5 are done again
    train("--report_to", "tensorboard")
    events = EventAccumulator("out/runs/pretrain_mlm").Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 3, 4, 6, 8, 9, 10]
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 3, 6, 9, 10]


def test_seconds_and_units_are_counted_over_all_that_a_run_was_stopped_in(monkeypatch):
    train = Trainer(monkeypatch, "text")
    train("--output_dir", "whole")
    with monkeypatch.context() as patch:
        clock = itertools.count(step=100.0)
        patch.setattr(time, "perf_counter", lambda: next(clock))
        train(stop=("sigterm", 4))
    first_leg = json.loads(Path("out/checkpoint-5/trainer_state.json").read_text())["wall_seconds"]
    assert first_leg > 1000
    train(stop=("sigterm", 6))
    train()
    results, whole = (json.loads(Path(folder, "results.json").read_text()) for folder in ("out", "whole"))
    assert first_leg < results["wall_seconds"] < first_leg + 100
    assert results["tokens"] == whole["tokens"] and results["steps"] == whole["steps"]
    assert results["tokens_per_second"] < whole["tokens"] / 100  # the seconds of training are among them


@pytest.mark.parametrize("moment", ["predict_test_sets", "save_results", "save_model"])
def test_glue_that_is_sent_sigterm_at_the_end_of_a_run_stops_before_the_next(monkeypatch, moment):
    """Test sets are evaluated anew, what is being saved is saved; the other run is not begun."""
    train = Trainer(monkeypatch, "GLUE")
    train.argv += ["--seeds", "1", "2"]
    function = getattr(run_glue.GlueRun, moment)

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(run_glue.GlueRun, moment, interrupted)
        patch.setattr(sys, "argv", [train.module.__file__, *train.argv])
        with pytest.raises(SystemExit) as exit:
            run_glue.main()
    assert exit.value.code == 0
    assert list_checkpoints(Path("out/sst2/seed-1"))[-1] == 10 and not Path("out/sst2/seed-2").exists()
    assert Path("out/sst2/seed-1/results.json").exists() == (moment != "predict_test_sets")
    assert not Path("out/glue.json").exists()
    assert list(train()) == list(range(10))  # of the second run alone
    for seed in (1, 2):
        assert json.loads(Path(f"out/sst2/seed-{seed}/results.json").read_text())["steps"] == 10
        assert len(Path(f"out/sst2/seed-{seed}/predictions/SST-2.tsv").read_text().splitlines()) == 6
    assert Path("out/glue.json").exists()


# What a run refuses to go on from


@pytest.mark.parametrize("kind", ["text", "GLUE", "images"])
def test_where_there_is_no_checkpoint_none_can_be_gone_on_from(monkeypatch, capsys, kind):
    train = Trainer(monkeypatch, kind)
    message = failure(train, capsys, "--resume_from_checkpoint", "latest")
    assert message.endswith("error: output_dir out has no checkpoint to resume from.")
    message = failure(train, capsys, "--resume_from_checkpoint", "latest", "--overwrite_output_dir")
    assert message.endswith("begins anew, resume_from_checkpoint goes on: give one of them.")


@pytest.fixture
def train(monkeypatch):
    """A Trainer whose run has stopped after step 7, with checkpoints of steps 6 (the best) and 7."""
    train = Trainer(monkeypatch, "text")
    train(stop=("sigterm", 6))
    assert list_checkpoints(Path("out")) == [6, 7]
    return train


def failure(train, capsys, *options):
    """The one sentence of a run that is refused, which has left the checkpoints as they are."""
    before = sorted(Path(".").rglob("checkpoint-*"))
    message = sentence(train, capsys, *options)
    assert sorted(Path(".").rglob("checkpoint-*")) == before
    return message


def sentence(train, capsys, *options):
    """The last line of a run that fails."""
    with train.monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [train.module.__file__, *train.argv, *options])
        with pytest.raises(SystemExit) as exit:
            run(train.module.main)
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message.splitlines()[-1]


def truncate(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def change_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "trainer_state.json", "random_states_0.pkl"])
@pytest.mark.parametrize("damage", [truncate, change_a_byte, Path.unlink])
def test_a_damaged_checkpoint_is_refused_and_the_older_one_offered(train, capsys, name, damage):
    damage(Path("out/checkpoint-7", name))
    message = failure(train, capsys)
    assert f"out/checkpoint-7/{name} is {'missing' if damage is Path.unlink else 'damaged'}" in message
    assert message.endswith("give --resume_from_checkpoint out/checkpoint-6, which is whole.")
    truncate(Path("out/checkpoint-6/config.json"))
    assert "no older checkpoint that is whole" in failure(train, capsys)


@pytest.mark.parametrize("damage", [truncate, change_a_byte, Path.unlink])
def test_a_checkpoint_without_its_manifest_is_no_checkpoint(train, capsys, damage):
    damage(Path("out/checkpoint-7/manifest.json"))
    assert "--resume_from_checkpoint out/checkpoint-6, which is whole." in failure(train, capsys)


def test_no_byte_of_a_manifest_can_change(tmp_path):
    (tmp_path / "weights").write_bytes(b"1234")
    write_manifest(tmp_path, script="pretrain_mlm", arguments={"learning_rate": 1e-3, "betas": (0.9, 0.95)})
    manifest = tmp_path / "manifest.json"
    content = manifest.read_bytes()
    assert read_manifest(tmp_path)["arguments"] == {"learning_rate": 1e-3, "betas": [0.9, 0.95]}
    for place in range(len(content)):
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        if not content[place : place + 1].isspace():
            manifest.write_bytes(changed)
            with pytest.raises(UsageError, match=r"manifest\.json is (missing or )?damaged"):
                read_manifest(tmp_path)


def test_a_run_goes_on_from_the_checkpoint_that_is_named(train, capsys):
    truncate(Path("out/checkpoint-7/optimizer.bin"))
    assert list(train("--resume_from_checkpoint", "out/checkpoint-6")) == list(range(6, 10))
    assert list_checkpoints(Path("out"))[-1] == 10
    assert list(train("--resume_from_checkpoint", "out/checkpoint-9", "--output_dir", "elsewhere")) == [9]
    assert list_checkpoints(Path("elsewhere")) == [10]


@pytest.mark.parametrize("kind", ["GLUE", "images"])
def test_other_runs_go_on_from_the_checkpoint_that_is_named_too(monkeypatch, kind):
    train = Trainer(monkeypatch, kind)
    train.argv += ["--save_total_limit", "5"]
    train(stop=("sigterm", 6))
    folder = train.folder("out")
    assert list_checkpoints(folder)[-1] == 7
    assert list(train("--resume_from_checkpoint", str(folder / "checkpoint-6"))) == list(range(6, 10))
    assert 7 not in list_checkpoints(folder)  # of the time line that has been left


@pytest.mark.parametrize("kind", ["text", "images"])
def test_copies_of_an_example_are_drawn_by_their_positions(monkeypatch, kind):
    train = Trainer(monkeypatch, kind)
    if kind == "text":
        Path("train.txt").write_text("the small cat sees a big dog in the red house\n" * 36)
    for file in Path("train").rglob("*.png"):
        file.write_bytes(Path("train/blue/0.png").read_bytes())
    seen = train("--max_steps", "3")
    name = "labels" if kind == "text" else "pixel_values"
    rows = torch.cat([batch[name].flatten(1) for batches in seen.values() for batch in batches])
    assert len(rows) == 24 and len(rows.unique(dim=0)) > 12


def test_what_is_drawn_follows_from_the_seed_and_the_position():
    class Draws:
        def __getitem__(self, index):
            return torch.rand(()).item()

    def of_example(seed, position):
        return DrawnExamples(Draws(), seed)[position, 0][1]

    def of_batch(seed, position):
        return DrawnCollator(lambda _: torch.rand(()).item(), seed)([(position, None), (9, None)])

    draws = {(of, *key): of(*key) for of in (of_example, of_batch) for key in [(1, 0), (1, 1), (2, 0), (2, 1)]}
    assert len(set(draws.values())) == 8
    assert all(of(*key) == draw for (of, *key), draw in draws.items())


def test_a_checkpoint_of_another_script_is_refused(train, capsys):
    images = Trainer(train.monkeypatch, "images")
    message = (
        "out/checkpoint-7 is a checkpoint of pretrain_mlm.py, from which train_image_classification.py cannot go on"
    )
    assert message in failure(images, capsys)
    assert message in failure(
        images, capsys, "--output_dir", "elsewhere", "--resume_from_checkpoint", "out/checkpoint-7"
    )


def test_a_checkpoint_of_streamed_text_is_refused_where_it_is_indexed(train, capsys):
    train.argv = Trainer(train.monkeypatch, "streamed text").argv
    assert "out/checkpoint-7 was made with " in failure(train, capsys)


def test_results_of_glue_that_are_damaged_are_named(monkeypatch, capsys):
    train = Trainer(monkeypatch, "GLUE")
    train()
    Path("other").mkdir()
    Path("other/glue.json").write_bytes(Path("out/glue.json").read_bytes())
    results = Path("out/sst2/seed-17/results.json")
    for file, options in [(results, []), (Path("other/glue.json"), ["--compare", "other"])]:
        truncate(file)
        message = failure(train, capsys, *options)
        assert message.endswith(f"{file} is damaged: delete it, and the call that wrote it makes it again.")
        file.unlink()
        assert list(train()) == [] and results.exists()


def test_the_latest_checkpoint_is_the_one_of_the_highest_step(train):
    assert list(train("--resume_from_checkpoint", "latest", "--save_total_limit", "5")) == [7, 8, 9]
    assert list_checkpoints(Path("out")) == [6, 7, 9, 10]
    assert list(train("--resume_from_checkpoint", "latest")) == []  # 10, not 9


def test_a_run_begins_anew_when_it_is_told_to(train, capsys):
    """But only once it is known that it can: until then nothing of the earlier run is lost."""
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    for wrong in ["--config=num_attention_heads=3", "--train_file=nowhere.txt", "--per_device_train_batch_size=40"]:
        failure(train, capsys, "--overwrite_output_dir", "--global_train_batch_size", "40", wrong)
        assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before
    assert list(train("--overwrite_output_dir")) == list(range(10))
    assert list_checkpoints(Path("out")) == [9, 10]


def test_checkpoints_of_other_runs_are_refused(train, capsys):
    assert "out/checkpoint-7 was made with config {'hidden_size': 16" in failure(
        train, capsys, "--config", "num_hidden_layers=2"
    )
    assert "was made with learning_rate 0.0008, not 0.1: go on with that, give another output_dir" in failure(
        train, capsys, "--learning_rate", "0.1"
    )
    assert "was made with max_steps 10, not 20" in failure(train, capsys, "--max_steps", "20")
    assert "was made with global_train_batch_size 8, not 16" in failure(
        train, capsys, "--global_train_batch_size", "16"
    )
    assert "begins anew, resume_from_checkpoint goes on: give one" in failure(
        train, capsys, "--overwrite_output_dir", "--resume_from_checkpoint", "latest"
    )
    assert "there is no folder nowhere to resume from" in failure(train, capsys, "--resume_from_checkpoint", "nowhere")
    assert "other has no checkpoint to resume from" in failure(
        train, capsys, "--resume_from_checkpoint", "latest", "--output_dir", "other"
    )
    assert "tokenizer/manifest.json is missing" in failure(
        train, capsys, "--resume_from_checkpoint", "tokenizer", "--output_dir", "other"
    )
    write_lines("train.txt", 35)
    assert "was made with training_sequences 36, not 35" in failure(train, capsys)


def test_a_batch_may_be_divided_otherwise(monkeypatch):
    """The same positions, in batches of two instead of four and with worker processes: the same weights to 1e-6."""
    train = Trainer(monkeypatch, "text without dropout")
    train("--output_dir", "whole")
    train(stop=("sigterm", 4))
    train("--per_device_train_batch_size", "2", "--dataloader_num_workers", "1", "--logging_steps", "2")
    assert_same_run(Path("out"), Path("whole"))


# Streams


@pytest.mark.parametrize(("ending", "workers"), [("txt", "0"), ("csv", "0"), ("jsonl", "0"), ("csv", "1")])
def test_a_broken_file_of_a_stream_is_named(monkeypatch, capsys, ending, workers):
    train = Trainer(monkeypatch, "streamed text")
    for name in ["good", "broken", "valid"]:
        write_table(f"{name}.{ending}", write_lines("lines.txt", 9))
    with Path(f"broken.{ending}").open("ab") as file:
        file.write({"txt": b"\xff\xfe", "csv": b"a,b,c,d\n", "jsonl": b'{"text": \n'}[ending])
    files = ["--train_file", f"good.{ending}", f"broken.{ending}", "--validation_file", f"valid.{ending}"]
    message = failure(train, capsys, *files, "--dataloader_num_workers", workers)
    assert message.startswith(f"pretrain_mlm.py: error: cannot read broken.{ending}: ")
    files[1], files[4] = files[4], files[2]  # of the validation text
    message = failure(train, capsys, *files)
    assert re.match(f"pretrain_mlm.py: error: cannot (load|read) broken.{ending}: ", message)


def test_a_stream_that_breaks_off_costs_no_checkpoint(monkeypatch, capsys):
    """A CSV file is read by 10,000 rows: the one that is wrong is met in the fifth update."""
    train = Trainer(monkeypatch, "streamed text")
    write_table("valid.csv", write_lines("lines.txt", 9))
    write_table("late.csv", write_lines("lines.txt", 12_000))
    whole = Path("late.csv").read_text()
    Path("late.csv").write_text(whole + "a,b,c,d\n")
    batches = "--global_train_batch_size 2048 --per_device_train_batch_size 1024 --eval_steps 1 --max_steps 5"
    files = "--train_file late.csv --validation_file valid.csv"
    options = [*batches.split(), *files.split()]
    assert sentence(train, capsys, *options).startswith("pretrain_mlm.py: error: cannot read late.csv: ")
    assert list_checkpoints(Path("out"))[-1] == 4
    Path("late.csv").write_text(whole)
    assert list(train(*options)) == [4]


def write_table(file, lines):
    rows = pandas.DataFrame({"text": lines})
    if file.endswith("txt"):
        Path(file).write_text("\n".join(lines) + "\n")
    elif file.endswith("csv"):
        rows.to_csv(file, index=False)
    else:
        rows.to_json(file, orient="records", lines=True)


def targets_of_a_pass(epoch=0, workers=0, rank=0, world=1, files=("0.txt", "1.txt")):
    """Tokens of a sequence → what is to be predicted of it, in the order in which a process meets them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained("tokenizer")
    args = pretrain_mlm.DataArguments(streaming=True, line_by_line=True, shuffle_buffer_size=10, max_seq_length=16)
    stream = pretrain_mlm.masked_stream(load_files(files), tokenizer, args, 17, epoch)
    loader = DataLoader(split_dataset_by_node(stream, rank, world), batch_size=None, num_workers=workers)
    rows = [{name: list(map(int, row[name])) for name in ("input_ids", "labels")} for row in loader]
    return {
        tuple(
            token if label == -100 else label for token, label in zip(row["input_ids"], row["labels"], strict=True)
        ): (row["labels"])
        for row in rows
    }


def places(targets):
    return [[label != -100 for label in labels] for labels in targets.values()]


def test_targets_of_a_stream_differ_from_pass_to_pass_and_process_to_process_not_with_workers(monkeypatch):
    write_tokenizer()
    for number in range(2):  # sequences of one length, whose places to predict can be compared
        rng = random.Random(number)
        Path(f"{number}.txt").write_text("\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(40)) + "\n")
    alone = targets_of_a_pass()
    assert len(alone) == 80 and targets_of_a_pass() == alone
    assert targets_of_a_pass(workers=1) == targets_of_a_pass(workers=2) == alone
    other_pass = targets_of_a_pass(epoch=1)
    assert other_pass.keys() == alone.keys() and sum(other_pass[each] != alone[each] for each in alone) > 70
    ranks = [targets_of_a_pass(rank=rank, world=2) for rank in range(2)]
    assert {**ranks[0], **ranks[1]} == alone
    assert sum(one != other for one, other in zip(*map(places, ranks), strict=True)) > 35


def test_copies_of_a_sequence_have_targets_of_their_own():
    write_tokenizer()
    Path("copies.txt").write_text((" ".join(WORDS[:12]) + "\n") * 40)
    tokenizer = PreTrainedTokenizerFast.from_pretrained("tokenizer")
    args = pretrain_mlm.DataArguments(streaming=True, line_by_line=True, max_seq_length=16)
    labels = [row["labels"] for row in pretrain_mlm.masked_stream(load_files(["copies.txt"]), tokenizer, args, 17, 0)]
    assert len(labels) == 40 and len(set(map(tuple, labels))) > 35


def test_a_pass_over_a_stream_begins_without_reading_it():
    write_tokenizer()
    read = []

    def documents():
        for number in range(30):
            read.append(number)
            yield {"text": "the cat sees a bird", "label": number}

    tokenizer = PreTrainedTokenizerFast.from_pretrained("tokenizer")
    args = pretrain_mlm.DataArguments(streaming=True, line_by_line=True, shuffle_buffer_size=10, max_seq_length=16)
    unread = datasets.IterableDataset.from_generator(documents)
    stream = pretrain_mlm.masked_stream(unread, tokenizer, args, 17, 0)
    assert not read
    assert set(next(iter(stream))) == {"input_ids", "attention_mask", "labels"} and len(read) == 30


# What goes wrong with the disk and with the numbers


def without_room(function, path=""):
    """`function`, during which no file can grow, if the end of `path` is the name of what it is to write."""

    def limited(*args, **kwargs):
        if not any(str(each).endswith(path) for each in [*args, *kwargs.values()]):
            return function(*args, **kwargs)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
        try:
            return function(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    return limited


@pytest.mark.parametrize(
    ("owner", "name", "path"),
    [
        (torch, "save", "optimizer.bin"),
        (PreTrainedModel, "save_pretrained", ""),
        (training, "write_json", "_state.json"),
    ],
)
def test_a_full_disk_is_one_sentence_and_costs_nothing_that_was_there(train, capsys, owner, name, path):
    with train.monkeypatch.context() as patch:
        patch.setattr(owner, name, without_room(getattr(owner, name), path))
        message = failure(train, capsys)
    assert "error: cannot write out/checkpoint-9: " in message
    assert message.endswith(
        "; out/checkpoint-7 is complete: make room there, or make it writable, then start again with the same command."
    )
    assert not list(Path("out").glob(".*"))
    assert list(train()) == [7, 8, 9]


@pytest.mark.parametrize(
    ("kind", "owner", "name", "path", "file"),
    [
        ("text", PreTrainedModel, "save_pretrained", ".model.unfinished", "model"),
        ("text", training, "plot_losses", "", "loss_curve.png"),
        ("text", training, "write_json", "results.json", "results.json"),
        ("images", train_image_classification, "plot_confusion_matrix", "", "confusion_matrix.png"),
        ("GLUE", Path, "write_text", ".SST-2.tsv.unfinished", "predictions/SST-2.tsv"),
        ("GLUE", glue_report, "plot", "", "glue.png"),
    ],
)
def test_a_full_disk_at_the_end_of_a_run_costs_no_update(monkeypatch, capsys, kind, owner, name, path, file):
    train = Trainer(monkeypatch, kind)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, without_room(getattr(owner, name), path))
        message = sentence(train, capsys)
    folder = Path("out") if owner is glue_report else train.folder("out")
    assert f"error: cannot write {folder / file}: " in message and "File too large" in message
    assert message.endswith("make room there, or make it writable, then start again with the same command.")
    assert not (folder / file).exists() and not (folder / "results.json").exists()
    assert not list(folder.rglob(".*unfinished"))
    assert list(train()) == []
    assert json.loads((train.folder("out") / "results.json").read_text())["steps"] == 10


def test_no_room_for_the_log_or_for_the_batch_that_is_not_finite_is_one_sentence(monkeypatch, capsys):
    train = Trainer(monkeypatch, "text")
    with_loss({4: float("nan")}, train)
    for owner, name, file in [(Accelerator, "log", "runs"), (training, "save_file", "nonfinite-batch-5-process-0.sa")]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            assert f"error: cannot write out/{file}" in sentence(train, capsys, "--max_nonfinite_steps", "0")


def test_a_full_cache_is_named(train, capsys):
    with train.monkeypatch.context() as patch:
        patch.setattr(datasets.Dataset, "map", full)
        message = sentence(train, capsys)
    cache = datasets.config.HF_DATASETS_CACHE
    assert f"error: cannot write into {cache}, where datasets keeps what it has read: [Errno 28] No space" in message
    assert message.endswith("make room there, or set HF_DATASETS_CACHE to another folder.")


def test_a_checkpoint_has_its_manifest_before_its_name(monkeypatch):
    published, replace = [], os.replace

    def look_and_replace(source, destination):
        if Path(destination).name.startswith("checkpoint-"):
            published.append(read_checkpoint(Path(source)).state["step"])
        replace(source, destination)

    monkeypatch.setattr(os, "replace", look_and_replace)
    Trainer(monkeypatch, "text")()
    assert published == [3, 6, 9, 10]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(monkeypatch):
    """A computer that loses its power may have done a rename and not what was written before it."""
    events, replace, flush = [], os.replace, os.fsync

    def identity(file):
        return os.stat(file).st_dev, os.stat(file).st_ino

    def spy_on_fsync(descriptor):
        events.append(identity(descriptor))
        flush(descriptor)

    def spy_on_replace(source, destination):
        parts = frozenset(identity(each) for each in [source, *Path(source).rglob("*")])
        events.append((Path(destination).name, parts, identity(Path(destination).parent)))
        replace(source, destination)

    monkeypatch.setattr(os, "fsync", spy_on_fsync)
    monkeypatch.setattr(os, "replace", spy_on_replace)
    Trainer(monkeypatch, "text")("--max_steps", "3")
    renamed = {event[0]: number for number, event in enumerate(events) if isinstance(event[0], str)}
    assert {"checkpoint-3", "model.safetensors", "results.json"} <= renamed.keys()
    for name, number in renamed.items():
        _, parts, parent = events[number]
        assert parts <= set(events[:number]) and parent in events[number + 1 :], name


def test_a_full_disk_is_one_sentence_whatever_is_written(capsys):
    with pytest.raises(SystemExit) as exit:
        run(full)
    message = (
        "error: [Errno 28] No space left on device: 'cache/file': make room there, or make it writable, then start"
    )
    assert exit.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        run(lambda: Path("nowhere").read_text())


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device", "cache/file")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        SafetensorError("invalid tensor"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        requests.ConnectionError("Max retries exceeded with url: /log"),
    ],
    ids=repr,
)
def test_only_a_file_that_cannot_be_written_is_called_so(tmp_path, error):
    with pytest.raises(type(error), match=re.escape(str(error))), writing(tmp_path / "checkpoint-1"):
        raise error


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_done(train, capsys):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    with train.monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", read_only)
        assert failure(train, capsys).endswith("cannot write into output_dir out: Read-only file system.")
    Path("file").touch()
    message = failure(train, capsys, "--output_dir", "file/out")
    assert message.endswith("cannot write into output_dir file/out: Not a directory.")


def with_loss(factors, train):
    """Multiply the loss after each number of updates by a factor."""
    accumulate = train.run_class.accumulate_gradients

    def changed(run, micro_batches):
        with train.monkeypatch.context() as patch:
            factor = factors.get(run.state.step, 1.0)
            backward = Accelerator.backward
            patch.setattr(Accelerator, "backward", lambda accelerator, loss: backward(accelerator, loss * factor))
            loss, counts = accumulate(run, micro_batches)
        return loss * factor, counts

    train.monkeypatch.setattr(train.run_class, "accumulate_gradients", changed)


@pytest.mark.parametrize("kind", ["text", "GLUE", "images"])
def test_updates_that_are_not_finite_are_left_out(monkeypatch, kind):
    """Also over a stop: the weights are those of a run that has seen the same batches and updates."""
    train = Trainer(monkeypatch, kind)
    with_loss({3: float("nan"), 4: float("inf"), 8: float("nan")}, train)
    limit = ["--max_nonfinite_steps", "2"]
    train("--output_dir", "whole", *limit)
    train(*limit, stop=("sigterm", 3))
    train(*limit)
    folder = train.folder("out")
    assert_same_run_but_for_losses(folder, train.folder("whole"))
    weights = load_file(folder / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    optimizer = torch.load(folder / "checkpoint-10/optimizer.bin", weights_only=True)
    assert {int(each["step"]) for each in optimizer["state"].values()} == {7}


def test_an_update_of_which_the_gradient_alone_is_not_finite_is_left_out(monkeypatch):
    monkeypatch.setenv("NAN", "4")
    monkeypatch.setattr(training.TrainingRun, "update", divided_run.disturbed(training.TrainingRun.update))
    Trainer(monkeypatch, "text")()
    assert all(tensor.isfinite().all() for tensor in load_file("out/model.safetensors").values())
    optimizer = torch.load("out/checkpoint-10/optimizer.bin", weights_only=True)
    assert {int(each["step"]) for each in optimizer["state"].values()} == {9}


@pytest.mark.parametrize("kind", ["text", "GLUE", "images"])
def test_a_run_whose_last_updates_were_left_out_says_so(monkeypatch, capsys, kind):
    train = Trainer(monkeypatch, kind)
    train("--output_dir", "whole")
    assert "warning: the last" not in capsys.readouterr().out
    with_loss({step: float("nan") for step in [5, 8, 9]}, train)
    train()
    assert capsys.readouterr().out.count("warning: the last 2 of 10 updates were left out, because the loss or") == 1


def assert_same_run_but_for_losses(folder, expected):
    weights, expected_weights = (load_file(each / "model.safetensors") for each in (folder, expected))
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["text", "GLUE", "images"])
def test_too_many_updates_in_a_row_that_are_not_finite_end_the_run(monkeypatch, capsys, kind):
    train = Trainer(monkeypatch, kind)
    expected = train("--output_dir", "whole")
    with_loss({step: float("nan") for step in [1, 2, 5, 6, 7, 8]}, train)
    train.argv += ["--max_nonfinite_steps", "2"]
    message = sentence(train, capsys)
    folder = train.folder("out")
    files = folder / "nonfinite-batch-8-process-*.safetensors"  # the same sentence in every process
    assert f"was not finite in 3 updates in a row, up to step 8, whose batches are in {files}: look at th" in message
    batch = load_file(folder / "nonfinite-batch-8-process-0.safetensors")
    assert len(batch) == sum(map(len, expected[7]))
    for number, micro_batch in enumerate(expected[7]):
        for name, tensor in micro_batch.items():
            assert torch.equal(batch[f"{number}.{name}"], tensor)
    assert list_checkpoints(folder) == [3, 6]


# A real run, killed


def run_forked(module, argv, seconds=300):
    """Run the script in a child and kill it after so many seconds. Returns the status it ended with."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            tqdm.set_lock(threading.RLock())  # that of the parent, if it is killed with it, stays locked for both
            sys.argv = [module.__file__, *argv]
            module.main()
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("kind", ["text", "GLUE", "images"])
def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(monkeypatch, kind):
    """Before there is any; with all of one but its name; with the weights, but not what they consist of."""
    train = Trainer(monkeypatch, kind)
    train("--output_dir", "whole")
    folder, replace = train.folder("out"), os.replace
    moments = [
        (".checkpoint-3.unfinished/trainer_state.json", []),
        ("checkpoint-6", [3]),
        (".checkpoint-9.unfinished/manifest.json", [3, 6]),
    ]
    for file, left in moments:

        def replace_or_die(source, destination, file=file):
            if Path(destination) == folder / file:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, destination)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace_or_die)
            assert run_forked(train.module, train.argv) == signal.SIGKILL
        assert len(list(folder.glob(".checkpoint-*.unfinished/model.safetensors"))) == 1
        assert list_checkpoints(folder) == left
    assert list(train()) == list(range(6, 10))
    assert not list(folder.glob(".*"))
    assert_same_run(folder, train.folder("whole"))


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_at_any_moment_goes_on_from_a_whole_checkpoint(monkeypatch, kills):
    """A checkpoint after every update: most moments are in one that is being written."""
    train = Trainer(monkeypatch, "text")
    argv = [*train.argv, "--eval_steps", "1", "--max_steps", "5000", "--save_total_limit", "3"]
    moments = random.Random(0)
    started = time.monotonic()
    assert run_forked(train.module, [*argv, "--max_steps", "10", "--output_dir", "timed"]) == 0
    ten_steps = time.monotonic() - started
    reached = 0
    for _ in range(kills):
        assert run_forked(train.module, argv, moments.uniform(0.3, 2.5) * ten_steps) == signal.SIGKILL
        steps = list_checkpoints(Path("out"))
        for step in steps:
            read_checkpoint(Path(f"out/checkpoint-{step}"))
        assert max(steps, default=0) >= reached
        reached = max(steps, default=0)
    assert reached > 0
    stop = reached + 5
    seen = train("--eval_steps", "1", "--max_steps", "5000", stop=("sigterm", stop))
    assert list(seen) == list(range(reached, stop + 1))
    expected = train(*["--eval_steps", "1000", "--max_steps", "5000", "--output_dir", "whole"], stop=("sigterm", stop))
    assert_same_batches(seen, expected)
    name = f"checkpoint-{stop + 1}/model.safetensors"
    weights, expected_weights = load_file(f"out/{name}"), load_file(f"whole/{name}")
    for key, tensor in expected_weights.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-6, msg=key)


# Half precision


def test_the_scale_of_the_gradients_goes_on(monkeypatch):
    """fp16 with its gradient scaler, on a CPU: doubled after three updates, halved by the fifth, which overflows."""
    make, scalers = training.make_accelerator, []

    def make_scaling_accelerator(args):
        AcceleratorState._reset_state()  # which refuses another precision than the last run's
        accelerator = make(args)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        scalers.append(accelerator.scaler)
        return accelerator

    monkeypatch.setattr(training, "make_accelerator", make_scaling_accelerator)
    monkeypatch.setenv("NAN", "4")
    monkeypatch.setattr(training.TrainingRun, "update", divided_run.disturbed(training.TrainingRun.update))
    train = Trainer(monkeypatch, "text")
    train("--output_dir", "whole")
    for stop, scale, tracker in [(1, 2.0**8, 2), (5, 2.0**8, 1), (None, 2.0**9, 2)]:
        train(stop=("sigterm", stop) if stop else None)
        state = scalers[-1].state_dict()
        assert (state["scale"], state["_growth_tracker"]) == (scale, tracker)
    assert_same_run(Path("out"), Path("whole"))
    assert scalers[0].state_dict() == scalers[-1].state_dict()


# Two processes

ONE_IS_STOPPED = """
import importlib, os, signal, sys, torch
from lion_transformers.scripts import pretrain_mlm, training
from lion_transformers.scripts.arguments import run

update, backward = training.TrainingRun.update, training.backward_micro_batches

def stop_one_process(training_run):
    if os.environ["RANK"] == "1" and training_run.state.step == int(os.environ["STOP"]):
        signal.raise_signal(signal.SIGTERM)
    return update(training_run)

def note_noise(*args):
    with torch.random.fork_rng(), open(f"noise-{os.environ['RANK']}.txt", "a") as file:
        print(torch.rand(3).tolist(), file=file)
    return backward(*args)

training.TrainingRun.update = stop_one_process
training.backward_micro_batches = pretrain_mlm.backward_micro_batches = note_noise
run(importlib.import_module(sys.argv.pop(1)).main)
"""


def train_on_two(train, stop, tmp_path, *options):
    """A run of two processes, of which one is sent SIGTERM in the update after step `stop`.

    Returns what noise each process would have drawn in each update, those of earlier runs first.
    """
    Path("two.py").write_text(ONE_IS_STOPPED)
    train.monkeypatch.setenv("STOP", str(stop))
    run_and_check([*TWO_CPUS, "two.py", train.module.__name__, *train.argv, *options], tmp_path)
    return {rank: Path(f"noise-{rank}.txt").read_text().splitlines() for rank in "01"}


@pytest.mark.parametrize("kind", ["text", "GLUE", "images"])
def test_a_run_goes_on_with_another_number_of_processes(monkeypatch, tmp_path, kind):
    """Alone up to step 3, two processes up to step 7, then alone: the run of one, without what a process draws."""
    train = Trainer(monkeypatch, kind)
    _, train.argv = without_dropout((train.module, train.argv))
    train.argv += ["--mixup", "0", "--cutmix", "0"] if kind == "images" else []
    expected = train("--output_dir", "whole")
    train(stop=("sigterm", 2))
    train_on_two(train, 6, tmp_path)
    folder = train.folder("out")
    assert list_checkpoints(folder)[-1] == 7
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= set(os.listdir(folder / "checkpoint-7"))
    assert_same_batches(train(), expected)
    assert_same_run(folder, train.folder("whole"))


def test_two_processes_go_on_with_noise_of_their_own(monkeypatch, tmp_path):
    """With dropout, which each process draws for each update."""
    train = Trainer(monkeypatch, "text")
    expected = train_on_two(train, 99, tmp_path, "--output_dir", "whole")
    assert len({*expected["0"], *expected["1"]}) == 20
    train_on_two(train, 4, tmp_path)
    assert train_on_two(train, 99, tmp_path) == {rank: noise * 2 for rank, noise in expected.items()}
    assert_same_run(Path("out"), Path("whole"))


@contextlib.contextmanager
def two_by_hand(command, tmp_path):
    """Two processes of one run, without a launcher that would speak for them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    env |= {"ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen([sys.executable, *command], env={**env, "RANK": rank, "LOCAL_RANK": rank}, **pipes)
        for rank in "01"
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def output_of_two(processes, exit_code):
    """What both have written once they have ended; no traceback is in it."""
    output = "".join(process.communicate(timeout=300)[0] for process in processes)
    assert [process.returncode for process in processes] == [exit_code] * 2, output
    assert "Traceback" not in output
    return output


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        (
            "streamed text",
            "--train_file 0.txt empty.txt",
            "small for one batch of 4 sequences on each of 2 devices: give more of them",
        ),
        ("text", "--train_file empty.txt", "the training text is too small for one sequence of 16 tokens."),
        ("GLUE", "--data_dir nowhere", "error: there is no "),
        ("images", "--train_dir nowhere", "error: there is no "),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused_by_all(monkeypatch, tmp_path, kind, options, sentence):
    """Too few for each of two processes, or none, or not what they should be, as the first process sees first."""
    train = Trainer(monkeypatch, kind)
    Path("empty.txt").write_text("\n")
    with two_by_hand([train.module.__file__, *train.argv, *options.split()], tmp_path) as processes:
        assert sentence in output_of_two(processes, exit_code=2)


READING = """
import time
from pathlib import Path
from lion_transformers.scripts import pretrain_mlm
from lion_transformers.scripts.arguments import run

def read_for_ever(*_):
    Path("reading").touch()
    time.sleep(3600)

pretrain_mlm.load_sequences = read_for_ever
run(pretrain_mlm.main)
"""


def test_sigterm_before_training_ends_both_processes(monkeypatch, tmp_path):
    """The first is reading data, the second waits for it."""
    train = Trainer(monkeypatch, "text")
    Path("reading.py").write_text(READING)
    with two_by_hand(["reading.py", *train.argv], tmp_path) as processes:
        while not Path("reading").exists():
            assert all(process.poll() is None for process in processes), output_of_two(processes, exit_code=0)
            time.sleep(0.05)
        for process in processes:
            process.terminate()
        assert "stopped with nothing to save" in output_of_two(processes, exit_code=0)
    assert not Path("out").exists()


def test_a_stream_cannot_be_divided_otherwise(monkeypatch, capsys):
    train = Trainer(monkeypatch, "streamed text")
    train(stop=("sigterm", 2))
    for name, value, other in [("per_device_train_batch_size", 4, 2), ("dataloader_num_workers", 0, 1)]:
        message = f"out/checkpoint-3 was made with {name} {value}, not {other}: go on with that"
        assert message in failure(train, capsys, f"--{name}", str(other))


def test_a_stream_goes_on_with_as_many_processes_alone(monkeypatch):
    train = Trainer(monkeypatch, "streamed text")
    train(stop=("sigterm", 2))
    checkpoint = read_checkpoint(Path("out/checkpoint-3"))
    checkpoint.check_layout(checkpoint.layout)
    with pytest.raises(UsageError, match="out/checkpoint-3 was made with num_processes 1, not 2: go on with that"):
        checkpoint.check_layout({**checkpoint.layout, "num_processes": 2})


@pytest.mark.usefixtures("listening_to_ctrl_c")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_all_processes_of_a_run_is_one_to_the_run(monkeypatch, tmp_path, name):
    """As clusters and terminals send it: to the workers of the loader, too."""
    train = Trainer(monkeypatch, "text in worker processes")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, train.module.__file__, *train.argv, "--max_steps", "100000"]
    child = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while not list_checkpoints(Path("out")):
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.05)
        os.killpg(child.pid, signal.Signals[name])
        _, stderr = child.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 0 and "Traceback" not in stderr
    for step in list_checkpoints(Path("out")):
        read_checkpoint(Path(f"out/checkpoint-{step}"))
    last = list_checkpoints(Path("out"))[-1]
    assert list(train("--max_steps", "100000", stop=("sigterm", last))) == [last]


def test_workers_of_a_loader_leave_ctrl_c_to_their_run():
    class Ignores:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    (ignores,) = DataLoader(Ignores(), num_workers=1, worker_init_fn=shield_from_signals)
    assert ignores


def test_a_checkpoint_of_elsewhere_costs_no_other_run_its_own(tmp_path):
    for folder in ("here/checkpoint-7", "there/checkpoint-3"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here" / "checkpoint-7-kept").mkdir()
    checkpoint = str(tmp_path / "there" / "checkpoint-3")
    args = training.TrainingArguments(output_dir=str(tmp_path / "here"), resume_from_checkpoint=checkpoint)
    with pytest.raises(UsageError, match="holds checkpoints of another run"):
        training.start(args, {}, "pretrain_mlm")
    clear_output_dir(tmp_path / "here")
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["checkpoint-7-kept"]
