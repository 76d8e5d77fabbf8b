"""Conversion of original checkpoints: what is refused. Values are compared in the tests of the models."""

import json

import pytest
import torch
from modeling_checks import GOLDEN

from lion_transformers.scripts.convert_original import convert_original_checkpoint


ENTRIES = {entry["name"]: entry for entry in json.loads((GOLDEN / "manifest.json").read_text())}


def load(name):
    entry = ENTRIES[name]
    checkpoint = torch.load(GOLDEN / entry["checkpoint"], weights_only=True)
    state = checkpoint["model"] if entry["task"] == "image" else checkpoint["state"]["model"]
    return dict(state), entry["official"], entry["task"]


@pytest.mark.parametrize(
    ("name", "lost", "missing"),
    [
        ("vision_lit", "norm.bias", "lion.final_norm.bias"),
        ("vision_selective", "blocks.1.attn.a_i.weight", "lion.layers.1.attention.decay_bias_proj.weight"),
        ("mlm_s", "bert.encoder.layer.0.intermediate.dense.weight", "lion.layers.0.mlp.fc1.weight"),
    ],
)
def test_a_missing_tensor_is_named(name, lost, missing):
    state, original, task = load(name)
    (full_name,) = [key for key in state if key.endswith(lost) and key.removesuffix(lost) in ("", "model.")]
    del state[full_name]
    with pytest.raises(ValueError, match=f"it lacks {missing}$"):
        convert_original_checkpoint(state, original, task)


def test_a_tensor_that_nothing_takes_is_named():
    state, original, task = load("vision_lit")
    state["blocks.0.attn.gate"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"it has lion\.layers\.0\.attn\.gate$"):
        convert_original_checkpoint(state, original, task)


def test_orders_are_joined_rows_before_columns():
    state, original, task = load("vision_decay_s")
    model = convert_original_checkpoint(state, original, task)
    rows, columns = (state[f"blocks.1.attn.{name}"] for name in ("a_i", "a2_i"))
    assert model.lion.layers[1].attention.decay_bias.tolist() == [*rows.tolist(), *columns.tolist()]
    assert not model.training
