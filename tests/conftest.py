import sys
from pathlib import Path

import pytest
import torch

import lion_transformers


# pytest takes the repository's root, which is a package, for one named like its folder, and would import all of it a
# second time: the Auto classes would then hand out classes of that copy.
sys.modules.setdefault(Path(lion_transformers.__file__).parent.name, lion_transformers)


@pytest.fixture
def poisoned_memory():
    """Memory that is allocated without being written holds NaN, so that a row left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
