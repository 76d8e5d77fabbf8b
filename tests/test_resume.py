"""Stopping a run of any training script and going on with it: the same examples, the same weights, nothing lost."""

import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lion_transformers.scripts import pretrain_mlm, run_glue, train_image_classification
from lion_transformers.scripts.arguments import run
from lion_transformers.scripts.checkpointing import list_checkpoints


pytestmark = pytest.mark.usefixtures("isolated_run")

WORDS = "the a small big red cat dog bird fish sees likes eats in house garden".split()
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
    "text in worker processes": lambda: mlm("--dataloader_num_workers", "2"),
    "streamed text": streamed_mlm,
    "streamed text in a worker process": lambda: streamed_mlm("--dataloader_num_workers", "1"),
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

        `stop` is (how, step): KeyboardInterrupt in the middle of the update after that step, or SIGTERM in it, or
        SIGTERM in the evaluation after it.
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
            if how == "sigterm" and run.state.step == when:
                os.kill(os.getpid(), signal.SIGTERM)
            return accumulate(run, micro_batches)

        def interrupted_backward(accelerator, loss):
            backwards.append(loss)
            if how == "interrupt" and when in seen and len(backwards) == 2:
                raise KeyboardInterrupt
            backward(accelerator, loss)

        def interrupted_evaluation(run):
            if how == "sigterm in evaluation" and run.state.step == when:
                os.kill(os.getpid(), signal.SIGTERM)
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
