"""Several processes: configuration files of Accelerate, weights and states divided (FSDP, ZeRO), failures of one."""

import os
import socket
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import divided_run
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin, DistributedType
from safetensors.torch import load_file
from test_resume import Trainer, assert_same_run, failure
from training_checks import LAUNCH, TORCHRUN, TWO_CPUS, run_and_check, run_command

from lion_transformers import LionConfig, LionModel
from lion_transformers.scripts import pretrain_mlm, run_glue, train_image_classification, training
from lion_transformers.scripts.arguments import UsageError, is_first_to_say
from lion_transformers.scripts.checkpointing import claim_output_dir, list_checkpoints, make_output_dir
from lion_transformers.scripts.training import (
    TrainingArguments,
    TrainingRun,
    check_processes,
    configure_deepspeed,
    form_of_optimizer_states,
)


CONFIGS = Path(pretrain_mlm.__file__).parent / "accelerate"

pytestmark = pytest.mark.usefixtures("isolated_run")


def config_file(kind, machines):
    return CONFIGS / f"{kind}{'_several_machines' if machines > 1 else ''}.yaml"


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize(("kind", "name"), [("fsdp2", "FSDP"), ("zero2", "DEEPSPEED")])
def test_configuration_files_are_read_by_accelerate(kind, name, machines):
    config = load_config_from_file(str(config_file(kind, machines)))
    assert config.num_machines == machines and config.num_processes == 8 * machines
    assert config.distributed_type == name


@pytest.mark.parametrize("machines", [1, 2])
def test_fsdp_divides_layers(machines):
    fsdp = load_config_from_file(str(config_file("fsdp2", machines))).fsdp_config
    model = LionModel(LionConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    layer = fsdp["fsdp_transformer_layer_cls_to_wrap"]
    assert fsdp["fsdp_version"] == 2
    assert {type(each).__name__ for each in model.layers} == {layer} and layer in model._no_split_modules


def test_every_configuration_file_is_tested():
    names = {config_file(kind, machines).name for kind in ["fsdp2", "zero2"] for machines in [1, 2]}
    assert {path.name for path in CONFIGS.iterdir()} == names


# What DeepSpeed is told, without DeepSpeed


class DeepSpeedStandIn:
    """As much of an Accelerator as is asked for, of two processes."""

    distributed_type = DistributedType.DEEPSPEED
    num_processes = 2

    def __init__(self, stage=2):
        self.deepspeed_plugin = DeepSpeedPlugin(zero_stage=stage)
        self.deepspeed_plugin.set_mixed_precision("bf16")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_deepspeed_is_told_what_the_arguments_say(precision):
    accelerator = DeepSpeedStandIn()
    options = {"per_device_train_batch_size": 3, "max_grad_norm": 0.5, "mixed_precision": precision}
    configure_deepspeed(accelerator, TrainingArguments("out", **options))
    config = accelerator.deepspeed_plugin.deepspeed_config
    assert config["train_micro_batch_size_per_gpu"] == 3 and config["train_batch_size"] == 6
    assert config["gradient_accumulation_steps"] == 1 and config["gradient_clipping"] == 0.5
    assert config["zero_optimization"]["stage"] == 2
    # Weights stay in float32: it is the forward pass alone that is in another precision.
    assert not config["bf16"]["enabled"] and not config["fp16"]["enabled"]
    assert config["torch_autocast"]["enabled"] == (precision == "bf16")


def test_what_deepspeed_does_not_do_here_is_refused():
    with pytest.raises(UsageError, match="give ZeRO stage 1 or 2, or take FSDP2"):
        configure_deepspeed(DeepSpeedStandIn(stage=3), TrainingArguments("out"))
    with pytest.raises(UsageError, match="mixed_precision fp16 does not go with DeepSpeed"):
        configure_deepspeed(DeepSpeedStandIn(), TrainingArguments("out", mixed_precision="fp16"))


def test_a_checkpoint_knows_how_its_states_are_divided(monkeypatch, capsys):
    forms = {
        form_of_optimizer_states(SimpleNamespace(distributed_type=DistributedType[name], num_processes=processes))
        for name, processes in [
            ("DEEPSPEED", 2),
            ("DEEPSPEED", 4),
            ("FSDP", 2),
            ("FSDP", 4),
            ("NO", 1),
            ("MULTI_GPU", 4),
        ]
    }
    assert forms == {"DeepSpeed's of 2 processes", "DeepSpeed's of 4 processes", "FSDP's", "whole"}
    train = Trainer(monkeypatch, "text")
    train(stop=("sigterm", 2))
    monkeypatch.setattr(training, "form_of_optimizer_states", lambda accelerator: "FSDP's")
    assert "checkpoint-3 was made with optimizer_states whole, not FSDP's: go on with that" in failure(train, capsys)


def test_averages_of_divided_weights_are_refused():
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP)
    arguments = SimpleNamespace(training=SimpleNamespace(ema_decay=0.9), distillation=None)
    with pytest.raises(UsageError, match="ema_decay needs whole weights on every device"):
        train_image_classification.prepare(arguments, accelerator)


# Runs of two processes

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
ZERO = pytest.param("zero2", "DEEPSPEED", marks=needs_deepspeed)
KINDS = pytest.mark.parametrize(("kind", "name"), [("fsdp2", "FSDP"), ZERO])


def train_divided(kind, name, script, argv, tmp_path):
    config = ["--config_file", config_file(kind, 1)]
    return run_and_check([*LAUNCH, *config, divided_run.__file__, name, script, *argv], tmp_path)


def trainer(monkeypatch, script, *options):
    """Runs without what is drawn by the process or by the micro-batch; clipped, to half or less."""
    train = Trainer(monkeypatch, script)
    train.argv = [each.replace("hidden_dropout_prob=0.2", "hidden_dropout_prob=0.0") for each in train.argv]
    train.argv += ["--max_grad_norm", "0.1", *options]
    return train


def assert_same_folder(folder, whole):
    """The folder of one process: the files, the weights under their names, each once, the configuration."""
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
    assert (folder / "config.json").read_text() == (whole / "config.json").read_text()
    shapes, expected = (
        {name: tensor.shape for name, tensor in load_file(each / "model.safetensors").items()}
        for each in [folder, whole]
    )
    assert shapes == expected


@pytest.mark.slow  # two launches of two processes
@KINDS
def test_a_divided_run_is_stopped_and_resumed(kind, name, monkeypatch, tmp_path):
    """Stopped after step 5, with an update left out before: the run of one process, two micro-batches an update."""
    train = trainer(monkeypatch, "text", "--per_device_train_batch_size", "2")
    monkeypatch.setenv("NAN", "2")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "update", divided_run.disturbed(TrainingRun.update))
        train("--output_dir", "whole")
    for stop in [4, 99]:
        monkeypatch.setenv("STOP", str(stop))
        train_divided(kind, name, "text", train.argv, tmp_path)
        assert list_checkpoints(Path("out"))[-1] == min(stop + 1, 10)
    assert_same_run(Path("out"), Path("whole"))
    assert_same_folder(Path("out"), Path("whole"))


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("script", ["GLUE", "images"])
def test_a_divided_run_of_the_other_scripts(kind, name, script, monkeypatch, tmp_path):
    options = []
    if script == "images":  # averages are of whole weights, which FSDP has none of
        options = ["--mixup", "0", "--cutmix", "0", "--ema_decay", "0.9" if name == "DEEPSPEED" else "0"]
    train = trainer(monkeypatch, script, *options)
    train("--output_dir", "whole")
    train_divided(kind, name, script, train.argv, tmp_path)
    assert_same_run(train.folder("out"), train.folder("whole"))
    assert_same_folder(train.folder("out"), train.folder("whole"))


# The second process has a folder of its own, where what it writes is seen.
APART = """
import importlib, os, sys
from lion_transformers.scripts import run_glue
from lion_transformers.scripts.arguments import run

if os.environ["RANK"] == "1":
    os.chdir("second")
run_glue.GlueRun.load_best_model_at_end = False  # which is in the folder of the first
run(importlib.import_module(sys.argv.pop(1)).main)
"""


@pytest.mark.parametrize("script", ["text", "GLUE", "images"])
def test_two_processes_train_as_one_and_one_writes(script, monkeypatch, tmp_path):
    options = ["--mixup", "0", "--cutmix", "0"] if script == "images" else []
    train = trainer(monkeypatch, script, *options)
    Path("second").mkdir()
    for path in set(tmp_path.iterdir()) - {tmp_path / "second"}:
        Path("second", path.name).symlink_to(path)
    monkeypatch.setattr(run_glue.GlueRun, "load_best_model_at_end", False)
    train("--output_dir", "one")
    Path("apart.py").write_text(APART)
    run_and_check([*TWO_CPUS, "apart.py", train.module.__name__, *train.argv, "--output_dir", "both"], tmp_path)
    assert_same_run(train.folder("both"), train.folder("one"))
    written = [path for path in Path("second/both").rglob("*") if not path.is_dir()]
    assert len(written) == 4 and {path.name for path in written} == {"random_states_1.pkl"}


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_what_would_not_be_divided_is_refused(kind, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    whole = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, num_processes=1)
    with pytest.raises(UsageError, match=f"{kind} divides over GPUs only, .* start it without that --config_file"):
        check_processes(whole)
    check_processes(SimpleNamespace(distributed_type=DistributedType[kind], num_processes=1))


def test_two_processes_of_which_one_was_started_are_refused(monkeypatch, tmp_path):
    """Without --multi_gpu, Accelerate leaves it to MPI to start processes on a machine that has no GPUs."""
    result = run_command([*LAUNCH, pretrain_mlm.__file__, *Trainer(monkeypatch, "text").argv], tmp_path)
    assert result.returncode != 0 and not list_checkpoints(Path("out"))
    assert "error: accelerate launch has started one process alone: give --multi_gpu and, where" in result.stderr


def test_one_process_on_a_cluster_is_not_refused(monkeypatch):
    """Clusters set the address of a machine for every job."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = SimpleNamespace(distributed_type=DistributedType.NO, num_processes=1)
    check_processes(alone)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(UsageError, match="one process alone"):
        check_processes(alone)


def test_fsdp_without_gpus_is_refused(monkeypatch, tmp_path):
    launch = [*LAUNCH, "--config_file", config_file("fsdp2", 1), pretrain_mlm.__file__]
    result = run_command([*launch, *Trainer(monkeypatch, "text").argv], tmp_path)
    assert result.returncode != 0 and not list_checkpoints(Path("out"))
    assert result.stderr.count("pretrain_mlm.py: error: FSDP divides over GPUs only") == 1


# Starting together, failing alone


@pytest.mark.parametrize("anonymous", [True, False])
def test_an_output_dir_that_another_process_is_trying_is_not_taken_for_used(anonymous, monkeypatch, tmp_path):
    """The file by which a process sees that it can write has a name for a moment, on some file systems."""
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", anonymous)
    seen = []

    def look_and_unlink(path):
        seen.append(Path(path).name)
        claim_output_dir(tmp_path / "out", overwrite=False)
        unlink(path)

    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", look_and_unlink)
    make_output_dir(tmp_path / "out")
    assert len(seen) == (0 if anonymous else 1) and not os.listdir(tmp_path / "out")
    Path(tmp_path / "out", "notes.txt").touch()
    with pytest.raises(UsageError, match="is not empty"):
        claim_output_dir(tmp_path / "out", overwrite=False)


FAILING = """
import os
from lion_transformers.scripts import pretrain_mlm, training
from lion_transformers.scripts.arguments import UsageError, run

update = training.TrainingRun.update

def fails(run):
    if os.environ["RANK"] in os.environ["FAILING"] and run.state.step == 3:
        raise UsageError("this batch is bad.")
    return update(run)

training.TrainingRun.update = fails
run(pretrain_mlm.main)
"""


@pytest.mark.parametrize(
    ("failing", "options", "sentence"),
    [
        ("1", [], "failing.py: error: this batch is bad."),
        ("0 1", [], "failing.py: error: this batch is bad."),
        ("", ["--max_step", "3"], "failing.py: error: unknown argument --max_step: did you mean max_steps"),
        (
            "",
            ["--learning_rate", "1e30", "--max_nonfinite_steps", "0"],
            "failing.py: error: the loss or its gradient was not finite in 1 updates in a row, up to step",
        ),
    ],
    ids=["the second process", "both", "both, before they meet", "both, of their own batches"],
)
def test_what_any_process_has_to_say_is_said_once(failing, options, sentence, monkeypatch, tmp_path):
    monkeypatch.setenv("FAILING", failing)
    Path("failing.py").write_text(FAILING)
    result = run_command([*TORCHRUN, "failing.py", *Trainer(monkeypatch, "text").argv, *options], tmp_path)
    assert result.returncode != 0
    assert result.stderr.count(sentence) == 1


def test_the_first_process_that_asks_the_store_says_a_sentence(monkeypatch):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    assert [is_first_to_say(sentence) for sentence in "aba"] == [True, True, False]


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", ""), ("MASTER_PORT", ""), ("MASTER_ADDR", "127.0.0.1")])
def test_a_sentence_is_said_where_no_store_can_be_asked(name, value, monkeypatch):
    """And TCPStore, which would wait and print its stack, is not even tried."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = str(server.getsockname()[1])
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free, name: value}
    for each, given in where.items():
        monkeypatch.setenv(each, given)
    tried = []
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *_, **__: tried.append(1))
    assert is_first_to_say("a") and not tried
    monkeypatch.delattr(torch.distributed, "TCPStore")
    assert is_first_to_say("a")
