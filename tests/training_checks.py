"""Running the training scripts, in the test's process and as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lion_transformers.scripts.arguments import run


LAUNCH = [sys.executable, *["-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]]
# Two processes on a CPU, as README starts them.
TWO_CPUS = [*LAUNCH, "--multi_gpu"]
TORCHRUN = [sys.executable, *["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]]


def run_script(module, monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, argv)])
    module.main()


def fails_with(module, monkeypatch, capsys, *argv):
    """The one sentence of an expected failure."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, argv)])
    with pytest.raises(SystemExit) as exit:
        run(module.main)
    assert exit.value.code == 2
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    last_line = stderr.splitlines()[-1]
    assert last_line.startswith(f"{Path(module.__file__).name}: error: ")
    return last_line


def run_command(command, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    env |= {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
    return subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, timeout=300)


def run_and_check(command, tmp_path):
    result = run_command(command, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    return result
