"""A training script whose weights, or states of the optimizer, are divided over processes on CPUs.

    accelerate launch --config_file FILE --num_processes 2 divided_run.py FSDP|DEEPSPEED text|GLUE|images ARGUMENTS …

Accelerate divides over GPUs only; here it is told what it would find out there. The environment says what happens in
the second process: SIGTERM in the update after step STOP, gradients that are not finite in the one after step NAN.
"""

import os
import signal
import sys
from unittest import mock

from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin

from lion_transformers.scripts import pretrain_mlm, run_glue, train_image_classification, training
from lion_transformers.scripts.arguments import run


SCRIPTS = {"text": pretrain_mlm, "GLUE": run_glue, "images": train_image_classification}


def dividing_accelerator(kind, **arguments):
    accelerator = Accelerator(**arguments)
    state = accelerator.state
    PartialState().distributed_type = state.distributed_type = DistributedType[kind]
    if kind == "FSDP":
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
    elif state.deepspeed_plugins is None:
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
        state.deepspeed_plugins = DeepSpeedPlugin()
        state.deepspeed_plugins.set_mixed_precision(arguments["mixed_precision"])
        state.deepspeed_plugins.select(_from_accelerator_state=True)
    accelerator.deepspeed_engine_wrapped = None
    return accelerator


def check_divided(run):
    """Each process holds about a half of the weights (FSDP) or of the states of the optimizer (ZeRO)."""
    if run.accelerator.distributed_type == DistributedType.FSDP:
        parts = [parameter.to_local() for parameter in run.model.parameters()]
    else:
        parts = [part for group in run.optimizer.param_groups for part in group["params"]]
    assert 0.4 < sum(part.numel() for part in parts) / run.final_model.num_parameters() < 0.6


def disturbed(update):
    """What an update of a run becomes by STOP and NAN."""
    backward = Accelerator.backward

    def disturbed_update(run):
        is_second = run.accelerator.process_index == run.accelerator.num_processes - 1
        if is_second and run.state.step == int(os.environ.get("STOP", -1)):
            signal.raise_signal(signal.SIGTERM)
        factor = float("nan") if is_second and run.state.step == int(os.environ.get("NAN", -1)) else 1.0
        with mock.patch.object(Accelerator, "backward", lambda self, loss: backward(self, factor * loss)):
            return update(run)

    return disturbed_update


def main():
    kind, script = sys.argv.pop(1), sys.argv.pop(1)
    train = training.TrainingRun.train
    training.Accelerator = lambda **arguments: dividing_accelerator(kind, **arguments)
    training.TrainingRun.train = lambda run, started: (check_divided(run), train(run, started))
    training.TrainingRun.update = disturbed(training.TrainingRun.update)
    run(SCRIPTS[script].main)


if __name__ == "__main__":
    main()
