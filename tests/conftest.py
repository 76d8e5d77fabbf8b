import sys
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from hypothesis import settings
from transformers.utils import logging

import lion_transformers
from lion_transformers import lion_attention, modeling_lion


# pytest takes the repository's root, which is a package, for one named like its folder, and would import all of it a
# second time: the Auto classes would then hand out classes of that copy.
sys.modules.setdefault(Path(lion_transformers.__file__).parent.name, lion_transformers)

# Random cases: the same few hundred in every run of the suite, new ones every night.
settings.register_profile("suite", max_examples=300, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=10_000, deadline=None)
settings.load_profile("suite")


@pytest.fixture
def isolated_run(tmp_path, monkeypatch):
    """No network, no shared cache, and a fresh Accelerate for every test of a script."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield
    for state in [AcceleratorState, GradientState, PartialState]:
        state._reset_state()


@pytest.fixture
def poisoned_memory():
    """Memory that is allocated without being written holds NaN, so that a row left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def operator_calls(monkeypatch):
    """Arguments of every call of the operator, which still does its work."""
    calls = []

    def spy(q, k, v, log_decay=None, **kwargs):
        calls.append({"q": q, "k": k, "v": v, "log_decay": log_decay, **kwargs})
        return lion_attention(q, k, v, log_decay, **kwargs)

    monkeypatch.setattr(modeling_lion, "lion_attention", spy)
    return calls


@pytest.fixture
def warned(caplog):
    """Messages of the model's logger; "once" starts anew with the test."""
    logging.warning_once.cache_clear()
    return lambda: [record.message for record in caplog.records if record.name == modeling_lion.__name__]
