"""Exported programs, traced once at one batch and one length, against the model's parallel form at others."""

import pytest
import torch
from modeling_checks import assert_close, build_from, outputs_of
from torch.export import Dim

from lion_transformers import (
    LionConfig,
    LionForImageClassification,
    LionForMaskedLM,
    LionForMultipleChoice,
    LionForQuestionAnswering,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionModel,
)
from lion_transformers.attention_lion import _CARRY_GROUP


onnxruntime = pytest.importorskip("onnxruntime")

CHUNK = 8
# One token, within a block, a full one, one more; as many blocks as make a group, one more; many groups.
LENGTHS = (1, 5, CHUNK, CHUNK + 1, CHUNK * _CARRY_GROUP, CHUNK * _CARRY_GROUP + 1, 900)
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TEXT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 1000, "chunk_size": CHUNK, "attn_mode": "chunk"}
IMAGE = {**SIZES, "modality": "image", "image_size": 28, "patch_size": 4, "chunk_size": CHUNK, "attn_mode": "chunk"}


def make_batch(batch, length):
    """Padding on the right, on the left, nothing but padding, and none, row by row."""
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, padding in zip(mask, (slice(length - length // 3, None), slice(length // 4), slice(None)), strict=False):
        row[padding] = 0
    return {
        "input_ids": torch.randint(TEXT["vocab_size"], (batch, length), generator=generator),
        "attention_mask": mask,
        "token_type_ids": torch.randint(2, (batch, length), generator=generator),
    }


def any_batch_and_length(batch):
    axes = {0: Dim("batch"), 1: Dim("length", max=TEXT["max_position_embeddings"])}
    return dict.fromkeys(batch, axes)


def onnx_session(model, batch, dynamic_shapes, file):
    torch.onnx.export(
        model, (), file, kwargs=batch, dynamic_shapes=dynamic_shapes, output_names=["logits"], dynamo=True,
        external_data=False, verbose=False,
    )  # fmt: skip
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda **inputs: torch.from_numpy(session.run(["logits"], {k: x.numpy() for k, x in inputs.items()})[0])


def check_at_other_sizes(run, model, tolerance):
    with torch.no_grad():
        for size in [(4, length) for length in LENGTHS] + [(1, 21), (2, 40)]:
            batch = make_batch(*size)
            actual, expected = run(**batch), outputs_of(model(**batch, attn_mode="parallel"))
            assert expected.isfinite().all()
            assert_close(actual, expected, tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# torch.export
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decay_type, strict", [("none", False), ("fixed", False), ("selective", False), ("selective", True)]
)
def test_exported_text_model_serves_every_batch_and_length(decay_type, strict):
    model, batch = build_from(LionModel, LionConfig(decay_type=decay_type, **TEXT)), make_batch(2, 20)
    program = torch.export.export(model, (), batch, dynamic_shapes=any_batch_and_length(batch), strict=strict).module()
    check_at_other_sizes(lambda **inputs: program(**inputs).last_hidden_state, model, 2e-5)
    with torch.no_grad():
        batch = make_batch(4, 200)
        pooled = program(**batch).pooler_output
        assert_close(pooled, model(**batch, attn_mode="parallel").pooler_output)


@pytest.mark.parametrize("cls", [LionForMaskedLM, LionForSequenceClassification])
def test_exported_heads_serve_every_batch_and_length(cls):
    """Also where the example has as many blocks as form groups, and as many texts as the model has heads."""
    config = LionConfig(normalize=True, **TEXT)
    model, batch = build_from(cls, config), make_batch(config.num_attention_heads, 300)
    program = torch.export.export(model, (), batch, dynamic_shapes=any_batch_and_length(batch)).module()
    check_at_other_sizes(lambda **inputs: program(**inputs).logits, model, 2e-5)


@pytest.mark.parametrize("cls", [LionForTokenClassification, LionForQuestionAnswering, LionForMultipleChoice])
def test_other_heads_are_exported_for_every_batch_and_length(cls):
    model, batch = build_from(cls, LionConfig(**TEXT)), make_batch(4, 20)
    choices = cls is LionForMultipleChoice  # (batch, choices, length)

    def shaped(batch):
        return {name: x.unflatten(0, (-1, 2)) if choices else x for name, x in batch.items()}

    axes = {0: Dim("batch"), 1 + choices: Dim("length")}
    shapes = dict.fromkeys(batch, axes)
    program = torch.export.export(model, (), shaped(batch), dynamic_shapes=shapes).module()
    with torch.no_grad():
        for size in [(2, 1), (4, CHUNK), (6, 200)]:
            batch = shaped(make_batch(*size))
            expected = outputs_of(model(**batch, attn_mode="parallel"))
            assert_close(outputs_of(program(**batch)), expected, 2e-5)


def test_exported_program_does_not_grow_with_the_square_of_the_length():
    """Blocks are put into groups, whose number alone is squared."""
    model, batch = build_from(LionModel, LionConfig(**TEXT)), make_batch(2, 20)
    program = torch.export.export(model, (), batch, dynamic_shapes={k: {1: Dim("length")} for k in batch}).module()
    sizes = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor))
            return result

    largest = []
    for length in (2048, 4096):
        with torch.no_grad(), Largest():
            program(**make_batch(2, length))
        largest.append(max(sizes))
        sizes.clear()
    assert largest[1] <= 2 * largest[0]


@pytest.mark.parametrize(
    "decay_type, scan_order", [("none", "raster"), ("fixed", "hilbert"), ("selective", "serpentine")]
)
def test_exported_image_classifier_serves_every_batch(decay_type, scan_order):
    config = LionConfig(decay_type=decay_type, scan_order=scan_order, **IMAGE)
    model, images = build_from(LionForImageClassification, config), torch.randn(2, 3, 28, 28)
    shapes = {"pixel_values": {0: Dim("batch")}}
    program = torch.export.export(model, (), {"pixel_values": images}, dynamic_shapes=shapes).module()
    with torch.no_grad():
        for batch in (1, 2, 5):
            images = torch.randn(batch, 3, 28, 28)
            assert_close(program(pixel_values=images).logits, model(images, attn_mode="parallel").logits)


# ---------------------------------------------------------------------------------------------------------------------
# ONNX
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls, decay_type",
    [
        (LionForMaskedLM, "none"),
        (LionForMaskedLM, "fixed"),
        (LionForMaskedLM, "selective"),
        (LionForSequenceClassification, "selective"),
    ],
)
def test_onnx_text_model_serves_every_batch_and_length(cls, decay_type, tmp_path):
    model, batch = build_from(cls, LionConfig(decay_type=decay_type, **TEXT)), make_batch(2, 20)
    run = onnx_session(model, batch, any_batch_and_length(batch), tmp_path / "model.onnx")
    check_at_other_sizes(run, model, 1e-4)


@pytest.mark.parametrize("decay_type, scan_order", [("none", "raster"), ("selective", "serpentine")])
def test_onnx_image_classifier_serves_every_batch(decay_type, scan_order, tmp_path):
    config = LionConfig(decay_type=decay_type, scan_order=scan_order, **IMAGE)
    model, images = build_from(LionForImageClassification, config), {"pixel_values": torch.randn(2, 3, 28, 28)}
    run = onnx_session(model, images, {"pixel_values": {0: Dim("batch")}}, tmp_path / "model.onnx")
    with torch.no_grad():
        for batch in (1, 2, 5):
            images = torch.randn(batch, 3, 28, 28)
            assert_close(run(pixel_values=images), model(images, attn_mode="parallel").logits, 1e-4)
