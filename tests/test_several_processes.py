"""Weights divided over processes (FSDP), and configuration files of Accelerate for it."""

import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from test_resume import Trainer, assert_same_run
from training_checks import run_and_check
from transformers import AutoModelForMaskedLM

from lion_transformers import LionConfig, LionModel
from lion_transformers.scripts import pretrain_mlm
from lion_transformers.scripts.checkpointing import list_checkpoints


CONFIGS = Path(pretrain_mlm.__file__).parent / "accelerate"
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]

pytestmark = pytest.mark.usefixtures("isolated_run")


@pytest.mark.parametrize("machines", [1, 2])
def test_configuration_files_are_read_by_accelerate(machines):
    file = CONFIGS / f"fsdp2{'_several_machines' if machines > 1 else ''}.yaml"
    config = load_config_from_file(str(file))
    assert config.num_machines == machines and config.num_processes == 8 * machines
    assert config.distributed_type == "FSDP" and config.fsdp_config["fsdp_version"] == 2
    layer = config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"]
    model = LionModel(LionConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    assert {type(each).__name__ for each in model.layers} == {layer} and layer in model._no_split_modules


def test_every_configuration_file_is_tested():
    assert len(list(CONFIGS.iterdir())) == 2


# Accelerate divides weights over GPUs only; on CPUs the test says to it what it would say to itself.
FSDP = """
import os, signal
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from lion_transformers.scripts import pretrain_mlm, training
from lion_transformers.scripts.arguments import run

make = training.make_accelerator
accumulate = pretrain_mlm.Pretraining.accumulate_gradients
train = pretrain_mlm.Pretraining.train

def make_dividing_accelerator(args):
    accelerator = make(args)
    for state in [PartialState(), accelerator.state]:
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    return accelerator

def train_parts(training):
    parts = [parameter.to_local().numel() for parameter in training.model.parameters()]
    assert sum(parts) < 0.6 * training.final_model.num_parameters()
    train(training)

def stop_one_process(training, micro_batches):
    if os.environ["RANK"] == "1" and training.state.step == int(os.environ["STOP"]):
        os.kill(os.getpid(), signal.SIGTERM)
    return accumulate(training, micro_batches)

training.make_accelerator = make_dividing_accelerator
pretrain_mlm.Pretraining.train = train_parts
pretrain_mlm.Pretraining.accumulate_gradients = stop_one_process
run(pretrain_mlm.main)
"""


@pytest.mark.slow  # two launches of two processes
def test_weights_divided_over_two_processes_are_trained_saved_whole_and_resumed(monkeypatch, tmp_path):
    """Stopped after step 5 and resumed: the run of one process."""
    train = Trainer(monkeypatch, "text")
    train.argv = [each.replace("hidden_dropout_prob=0.2", "hidden_dropout_prob=0.0") for each in train.argv]
    train("--output_dir", "whole")
    Path("divided.py").write_text(FSDP)
    config = ["--config_file", CONFIGS / "fsdp2.yaml", "--num_processes", "2"]
    for stop in [4, 99]:
        monkeypatch.setenv("STOP", str(stop))
        run_and_check([*LAUNCH, *config, "divided.py", *train.argv], tmp_path)
        assert list_checkpoints(Path("out"))[-1] == min(stop + 1, 10)
    assert_same_run(Path("out"), Path("whole"))
    weights = AutoModelForMaskedLM.from_pretrained("out").state_dict()
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in AutoModelForMaskedLM.from_pretrained("whole").state_dict().items()
    }
