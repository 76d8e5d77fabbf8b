"""The LION image models: values against independent references, every grid, and what Transformers expects."""

import itertools
import math
import re
import warnings

import numpy as np
import pytest
import torch
from modeling_checks import (
    DECAYS,
    GOLDEN_IMAGES,
    MODES,
    assert_close,
    assert_gives_golden_outputs,
    assert_same_state,
    below,
    build_from,
    cross_entropy,
    decay_parameters,
    fill_with_constants,
    gradients,
    load_golden,
    outputs_of,
    reference_attention,
    relative_error,
    softmax,
    squared_error,
)
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
    pipeline,
)

from lion_transformers import (
    SCAN_ORDERS,
    LionConfig,
    LionForImageClassification,
    LionForMaskedImageModeling,
    LionForMaskedLM,
    LionForMultipleChoice,
    LionForQuestionAnswering,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionModel,
)
from lion_transformers.modeling_lion import LionDropPath


SCANS = tuple(SCAN_ORDERS)
AUTO_CLASSES = {
    LionModel: AutoModel,
    LionForImageClassification: AutoModelForImageClassification,
    LionForMaskedImageModeling: AutoModelForMaskedImageModeling,
}
CLASSES = tuple(AUTO_CLASSES)
TEXT_HEADS = (
    LionForMaskedLM,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionForQuestionAnswering,
    LionForMultipleChoice,
)
# What stands before the patches and what the pooler takes
POOLING = {
    "cls": {"pooling": "cls"},
    "mean": {"pooling": "mean"},
    "mean without cls": {"pooling": "mean", "use_cls_token": False},
}

each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
each_decay = pytest.mark.parametrize("decay_type", DECAYS)
each_mode = pytest.mark.parametrize("mode", MODES)
each_scan = pytest.mark.parametrize("scan_order", SCANS)
each_pooling = pytest.mark.parametrize("pooling", POOLING)


def tiny_config(decay_type="selective", **overrides):
    """A native grid of 3 rows and 5 columns, of patches that are no squares either."""
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "image_size": (12, 10),
        "patch_size": (4, 2),
        "chunk_size": 8,
        "num_labels": 3,
    }
    return LionConfig(modality="image", decay_type=decay_type, **{**sizes, **overrides})


def build(cls, decay_type="selective", *, seed=0, dtype=torch.float32, **overrides):
    return build_from(cls, tiny_config(decay_type, **overrides), seed=seed, dtype=dtype)


def make_images(height=12, width=10, *, batch=2, channels=3, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, channels, height, width, generator=generator, dtype=torch.float64).to(dtype)


def make_patch_mask(patches, batch=2, seed=4):
    mask = torch.rand(batch, patches, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[:, 0] = True
    return mask


def inputs_for(cls, height=12, width=10, **options):
    images = {"pixel_values": make_images(height, width, **options)}
    if cls is LionForMaskedImageModeling:
        images["bool_masked_pos"] = make_patch_mask(math.ceil(height / 4) * math.ceil(width / 2))
    return images


def targets_for(cls):
    return {"labels": torch.tensor([2, 0])} if cls is LionForImageClassification else {}


# ---------------------------------------------------------------------------------------------------------------------
# Values: checkpoints of the public reference, a float64 loop, ViT
# ---------------------------------------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("name", GOLDEN_IMAGES)
def test_checkpoint_of_the_public_reference_gives_its_outputs(name, mode):
    assert_gives_golden_outputs(load_golden(name), name, mode)


def patches_by_hand(images, patch):
    """Rows of pixels (channel, row, column) of each patch, zeros beyond the lower and right edges."""
    batch, channels, height, width = images.shape
    rows, columns = math.ceil(height / patch[0]), math.ceil(width / patch[1])
    padded = torch.zeros(batch, channels, rows * patch[0], columns * patch[1], dtype=images.dtype)
    padded[:, :, :height, :width] = images
    patches = [
        padded[:, :, r * patch[0] : (r + 1) * patch[0], c * patch[1] : (c + 1) * patch[1]].reshape(batch, -1)
        for r in range(rows)
        for c in range(columns)
    ]
    return torch.stack(patches, 1), (rows, columns)


def walk_by_hand(config, grid):
    """Permutations of an image's tokens; `None` where they are walked over as they stand."""
    if config.scan_order == "raster":
        return None
    walks = [permutation(*grid).tolist() for permutation in SCAN_ORDERS[config.scan_order]]
    if config.use_cls_token:
        walks = [[0, *(token + 1 for token in walk)] for walk in walks]
    return torch.tensor(walks)


def reference_encoder(model, images, masked=None, positions=None):
    """Hidden states after every layer, attention matrices and pooled vector, in plain float64 and the loop."""
    config, state = model.config, {name: x.double() for name, x in model.state_dict().items()}

    def norm(x, name):
        return nn.functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def linear(x, name):
        return x @ state[f"{name}.weight"].flatten(1).T + state[f"{name}.bias"]

    def feed_forward(x, name):
        x = linear(x, f"{name}.fc1")
        return linear(x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), f"{name}.fc2")

    patches, grid = patches_by_hand(images.double(), config.patch_size)
    x = linear(patches, "embeddings.projection")
    if masked is not None:
        x[masked] = state["embeddings.mask_token"].flatten()
    if config.use_cls_token:
        x = torch.cat([state["embeddings.cls_token"].repeat(len(x), 1, 1), x], 1)
    if config.position_embedding_type == "absolute":
        x = x + (state["embeddings.position_embeddings"] if positions is None else positions)
    states, matrices = [x], []
    everything = torch.ones(x.shape[:2])
    for i in range(config.num_hidden_layers):
        name, pre = f"layers.{i}", config.norm_position == "pre"
        weights = below(state, f"{name}.attention.")
        attention_input = norm(x, f"{name}.attention_norm") if pre else x
        attended, matrix = reference_attention(
            config, weights, attention_input, everything, order=walk_by_hand(config, grid), layer=i
        )
        attended = linear(attended, f"{name}.attention.out_proj")
        if pre:
            x = x + attended
            x = x + feed_forward(norm(x, f"{name}.mlp_norm"), f"{name}.mlp")
        else:
            x = norm(x + attended, f"{name}.attention_norm")
            x = norm(x + feed_forward(x, f"{name}.mlp"), f"{name}.mlp_norm")
        states.append(x)
        matrices.append(matrix)
    if config.norm_position == "pre":
        states[-1] = norm(x, "final_norm")
    pooled = states[-1][:, 0] if config.classifier_pooling == "cls" else states[-1].mean(1)
    return states, matrices, pooled


def assert_equals_reference(model, images, **kwargs):
    states, matrices, pooled = reference_encoder(model, images)
    for mode in MODES:
        with torch.no_grad():
            output = model(pixel_values=images, attn_mode=mode, output_hidden_states=True, **kwargs)
        assert len(output.hidden_states) == len(states) == model.config.num_hidden_layers + 1
        for actual, expected in zip(output.hidden_states, states, strict=True):
            assert_close(actual, expected, 1e-9)
        assert torch.equal(output.last_hidden_state, output.hidden_states[-1])
        assert_close(output.pooler_output, pooled, 1e-9)
    with torch.no_grad():
        attentions = model(pixel_values=images, output_attentions=True, **kwargs).attentions
    assert len(attentions) == len(matrices)
    for actual, expected in zip(attentions, matrices, strict=True):
        assert actual.shape == (len(images), 3, states[0].shape[1], states[0].shape[1])
        assert_close(actual, expected, 1e-9)


@each_pooling
@each_scan
@each_decay
def test_encoder_equals_a_float64_loop_over_the_definition(decay_type, scan_order, pooling):
    model = build(LionModel, decay_type, scan_order=scan_order, dtype=torch.float64, **POOLING[pooling])
    assert_equals_reference(model, make_images(dtype=torch.float64))


VARIANTS = {
    "post-norm": {"norm_position": "post"},
    "not normalised": {"normalize": False},
    "identity map": {"normalize": False, "feature_map": "identity"},
    "norm on the attention output": {"attention_output_norm": True},
    "positions": {"position_embedding_type": "absolute"},
    "positions without cls": {"position_embedding_type": "absolute", "use_cls_token": False},
    "no positions": {"position_embedding_type": "none"},
    "no biases on queries, keys and values": {"qkv_bias": False},
    "the other map": {"feature_map": "silu"},
    "elu map": {"feature_map": "elu"},
    "forward": {"direction": "forward"},
    "backward": {"direction": "backward"},
    "forward and backward in turn": {"direction": "alternate", "num_hidden_layers": 3},
    "diagonal counted twice": {"diagonal": "doubled"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "decay_type, scan_order", [("none", "hilbert"), ("fixed", "serpentine"), ("selective", "serpentine")]
)
def test_variants_of_the_encoder_equal_the_loop(decay_type, scan_order, variant):
    model = build(LionModel, decay_type, scan_order=scan_order, dtype=torch.float64, **VARIANTS[variant])
    assert_equals_reference(model, make_images(dtype=torch.float64))


@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (3, 5), (7, 4), (14, 14)], ids=str)
@each_scan
@pytest.mark.parametrize("decay_type", ["fixed", "selective"])
def test_encoder_equals_the_loop_on_other_grids(decay_type, scan_order, grid):
    model = build(LionModel, decay_type, scan_order=scan_order, dtype=torch.float64, num_hidden_layers=1)
    assert_equals_reference(model, make_images(4 * grid[0], 2 * grid[1], batch=1, dtype=torch.float64))


class DefinedAttention(nn.Module):
    """Stands in for ViT's attention up to its output projection, which stays ViT's own."""

    def __init__(self, config, weights, order, output):
        super().__init__()
        self.arguments, self.output = (config, weights, order), output

    def forward(self, hidden_states, *args, **kwargs):
        config, weights, order = self.arguments
        everything = torch.ones(hidden_states.shape[:2])
        attended, matrix = reference_attention(config, weights, hidden_states, everything, order=order)
        return self.output(attended), matrix


VIT_NAMES = [
    ("embeddings.projection", "embeddings.patch_embeddings.projection"),
    ("attention.out_proj", "attention.o_proj"),
    ("attention_norm", "layernorm_before"),
    ("mlp_norm", "layernorm_after"),
    ("final_norm", "layernorm"),
]


@each_scan
@each_decay
def test_all_but_the_operator_is_vit(decay_type, scan_order):
    model = build(
        LionModel,
        decay_type,
        scan_order=scan_order,
        position_embedding_type="absolute",
        use_cls_token=True,
        dtype=torch.float64,
        image_size=12,
        patch_size=4,
    )
    config, state = model.config, model.state_dict()
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size"]
    names += ["patch_size", "layer_norm_eps", "hidden_dropout_prob"]
    vit = ViTModel(ViTConfig(**{name: getattr(config, name) for name in names}), add_pooling_layer=False)
    vit = vit.double().eval()
    renamed = {}
    for name, value in state.items():
        for ours, theirs in VIT_NAMES:
            name = name.replace(ours, theirs)
        renamed[name] = value
    missing, unexpected = vit.load_state_dict(renamed, strict=False)
    assert all(name.split(".attention.")[1][:6] in ("q_proj", "k_proj", "v_proj") for name in missing)
    assert all("qkv_proj" in name or "decay_bias" in name for name in unexpected)
    for i, layer in enumerate(vit.layers):
        weights, order = below(state, f"layers.{i}.attention."), walk_by_hand(config, (3, 3))
        layer.attention = DefinedAttention(config, weights, order, layer.attention.o_proj)
    for size, kwargs in ((12, {}), (20, {"interpolate_pos_encoding": True})):
        if size == 20:
            for i, layer in enumerate(vit.layers):
                weights, order = below(state, f"layers.{i}.attention."), walk_by_hand(config, (5, 5))
                layer.attention = DefinedAttention(config, weights, order, layer.attention.output)
        images = make_images(size, size, dtype=torch.float64)
        with torch.no_grad():
            expected, actual = vit(images, **kwargs), model(pixel_values=images, **kwargs)
        assert_close(actual.last_hidden_state, expected.last_hidden_state, 1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Three forms
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(3, 5), (5, 3), (1, 1), (9, 7), (14, 14)], ids=str)
@each_scan
@each_decay
def test_three_forms_agree_in_logits_and_in_every_gradient(decay_type, scan_order, grid):
    model = build(LionForImageClassification, decay_type, scan_order=scan_order, dtype=torch.float64)
    images = make_images(4 * grid[0], 2 * grid[1], dtype=torch.float64)
    batch = {"pixel_values": images, "interpolate_pos_encoding": True}
    logits, expected = gradients(model, batch, attn_mode="parallel")
    assert len(expected) == len(list(model.parameters()))
    for mode in ("chunk", "rnn"):
        actual_logits, actual = gradients(model, batch, attn_mode=mode)
        assert_close(actual_logits, logits, 1e-9)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-7, atol=1e-10, msg=name)


@each_scan
@each_decay
@each_class
def test_forms_agree_in_every_class_in_float32(cls, decay_type, scan_order):
    model, batch = build(cls, decay_type, scan_order=scan_order), inputs_for(cls)
    logits, expected = gradients(model, batch, attn_mode="parallel")
    for mode in ("chunk", "rnn"):
        actual_logits, actual = gradients(model, batch, attn_mode=mode)
        assert_close(actual_logits, logits)
        assert max(relative_error(actual[name], x) for name, x in expected.items() if x.norm() > 1e-3) < 1e-4


@each_class
def test_form_is_chosen_in_the_config_by_method_and_per_call(cls, operator_calls):
    def modes_of(model, **kwargs):
        operator_calls.clear()
        model(**inputs_for(cls), **kwargs)
        return [call["mode"] for call in operator_calls]

    model = build(cls, attn_mode="rnn")
    assert modes_of(model) == ["rnn"] * 2
    assert modes_of(model, attn_mode="chunk") == ["chunk"] * 2
    model.set_attn_mode("parallel")
    assert modes_of(model) == ["parallel"] * 2
    with pytest.raises(ValueError, match="`attn_mode` must be one of"):
        modes_of(model, attn_mode="fast")


@pytest.mark.parametrize("mode", ["chunk", "rnn"])
def test_attention_maps_of_another_form_warn_once(mode, warned):
    model, images = build(LionModel, attn_mode=mode, scan_order="serpentine"), make_images()
    output = model(pixel_values=images, output_attentions=True)
    assert len(output.attentions) == 2 and len(warned()) == 1
    assert_close(output.last_hidden_state, model(pixel_values=images).last_hidden_state)


@each_mode
@each_scan
@each_decay
def test_uninitialised_memory_never_shows(decay_type, scan_order, mode, poisoned_memory):
    model, batch = (
        build(LionForMaskedImageModeling, decay_type, scan_order=scan_order),
        inputs_for(LionForMaskedImageModeling),
    )
    output, grads = gradients(model, batch, attn_mode=mode)
    assert output.isfinite().all() and all(gradient.isfinite().all() for gradient in grads.values())


# ---------------------------------------------------------------------------------------------------------------------
# Grids, padding, positions
# ---------------------------------------------------------------------------------------------------------------------

SIDES = range(3, 21)


def minimal(cls, decay_type, **overrides):
    """Width and depth of next to nothing; a native grid of 5 × 7 patches of 2 × 2 pixels."""
    sizes = {"hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 6}
    return build(cls, decay_type, **{**sizes, "image_size": (10, 14), "patch_size": 2, **overrides})


@pytest.mark.parametrize("height", SIDES)
@pytest.mark.parametrize("scan_order", ["raster", "serpentine"])
@each_decay
def test_f12_every_grid(decay_type, scan_order, height):
    model = minimal(LionForImageClassification, decay_type, scan_order=scan_order, position_embedding_type="absolute")
    bare = minimal(LionForImageClassification, decay_type, scan_order=scan_order, position_embedding_type="none")
    for width in SIDES:
        images = make_images(2 * height, 2 * width)
        with torch.no_grad():
            for m in (model, bare):
                output = m(pixel_values=images, interpolate_pos_encoding=True, output_hidden_states=True)
                assert output.logits.shape == (2, 3) and output.logits.isfinite().all()
                assert output.hidden_states[-1].shape == (2, 1 + height * width, 6)
            assert torch.equal(bare(pixel_values=images).logits, output.logits)
            if (height, width) == (5, 7):
                plain = model(pixel_values=images).logits
                assert torch.equal(model(pixel_values=images, interpolate_pos_encoding=True).logits, plain)
                assert torch.equal(model(pixel_values=images, interpolate_pos_encoding=False).logits, plain)
                continue
            for kwargs in ({}, {"interpolate_pos_encoding": False}):
                with pytest.raises(
                    ValueError, match=f"{2 * height}×{2 * width} pixels.* 10×14.*interpolate_pos_encod"
                ):
                    model(pixel_values=images, **kwargs)


@pytest.mark.parametrize("scan_order", SCANS)
@each_decay
def test_images_of_any_size_pass_as_they_are_or_with_interpolation(decay_type, scan_order):
    model = minimal(LionForImageClassification, decay_type, scan_order=scan_order, image_size=224, patch_size=16)
    kwargs = {"interpolate_pos_encoding": True} if decay_type == "none" else {}
    with torch.no_grad():
        for side in (224, 384, 1024):
            output = model(pixel_values=make_images(side, side, batch=1), output_hidden_states=True, **kwargs)
            assert output.hidden_states[-1].shape[1] == (side // 16) ** 2 + 1
            assert output.logits.isfinite().all()


@pytest.mark.parametrize("use_cls_token", [True, False])
@pytest.mark.parametrize("grid", [(3, 5), (5, 3), (4, 8), (10, 10), (2, 1)], ids=str)
def test_positions_are_interpolated_as_torch_does(grid, use_cls_token):
    model = build(LionModel, "none", use_cls_token=use_cls_token, dtype=torch.float64)
    table = model.embeddings.position_embeddings.detach()
    assert table.shape == (1, 15 + use_cls_token, 24)
    images = make_images(4 * grid[0], 2 * grid[1], dtype=torch.float64)
    as_image = table[:, use_cls_token:].reshape(1, 3, 5, 24).permute(0, 3, 1, 2)
    as_image = nn.functional.interpolate(as_image, size=grid, mode="bicubic", align_corners=False)
    expected = torch.cat([table[:, : int(use_cls_token)], as_image.flatten(2).mT], 1)
    states, _, pooled = reference_encoder(model, images, positions=expected)
    with torch.no_grad():
        output = model(pixel_values=images, interpolate_pos_encoding=True)
    assert_close(output.last_hidden_state, states[-1], 1e-9)
    assert_close(output.pooler_output, pooled, 1e-9)


def test_half_precision_positions_are_interpolated(tmp_path):
    model, images = build(LionModel, "none"), make_images(16, 16)
    model.save_pretrained(tmp_path)
    half = LionModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        actual = half(pixel_values=images, interpolate_pos_encoding=True).last_hidden_state
        expected = model(pixel_values=images, interpolate_pos_encoding=True).last_hidden_state
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, expected) < 4e-2


@pytest.mark.parametrize("size", [(12, 10), (11, 10), (12, 9), (9, 9), (1, 1), (13, 11)], ids=str)
@each_decay
@each_class
def test_incomplete_patches_are_filled_with_zeros_below_and_to_the_right(cls, decay_type, size):
    model = build(cls, decay_type)
    height, width = (math.ceil(side / patch) * patch for side, patch in zip(size, (4, 2), strict=True))
    images = make_images(*size)
    padded = torch.zeros(2, 3, height, width)
    padded[:, :, : size[0], : size[1]] = images
    with torch.no_grad():
        actual = outputs_of(model(pixel_values=images, interpolate_pos_encoding=True))
        expected = outputs_of(model(pixel_values=padded, interpolate_pos_encoding=True))
    if cls is LionForMaskedImageModeling:
        assert actual.shape == images.shape
        expected = expected[:, :, : size[0], : size[1]]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("channels", [1, 3, 5])
@each_class
def test_number_of_channels(cls, channels):
    model = build(cls, num_channels=channels)
    batch = inputs_for(cls, channels=channels)
    output = outputs_of(model(**batch))
    assert output.isfinite().all()
    encoder = build(LionModel, num_channels=channels, dtype=torch.float64)
    assert_equals_reference(encoder, make_images(channels=channels, dtype=torch.float64))
    for wrong in (channels + 1, 2):
        with pytest.raises(ValueError, match=rf"`pixel_values`.*{channels} channels.*\(2, {wrong}, 12, 10\)"):
            model(pixel_values=make_images(channels=wrong))


@pytest.mark.parametrize("shape", [(3, 12, 10), (12, 10), (1, 2, 3, 12, 10)], ids=str)
@each_class
def test_images_of_another_rank_are_refused(cls, shape):
    with pytest.raises(ValueError, match="`pixel_values` must be"):
        build(cls)(pixel_values=torch.zeros(shape))


@each_class
def test_images_are_needed(cls):
    with pytest.raises(ValueError, match="pixel_values"):
        build(cls)()


@each_class
def test_images_of_another_dtype_are_taken(cls):
    model, batch = build(cls), inputs_for(cls)
    expected = outputs_of(model(**batch))
    batch["pixel_values"] = batch["pixel_values"].double()
    assert_close(outputs_of(model(**batch)), expected)


# ---------------------------------------------------------------------------------------------------------------------
# CLS, decays, directions
# ---------------------------------------------------------------------------------------------------------------------


@each_scan
def test_cls_token_is_no_step_under_selective_decay_and_position_zero_under_a_fixed_one(scan_order, operator_calls):
    """What patches see of the CLS token: all gates between, and its own only where it is one for all."""
    for decay_type in ("selective", "fixed"):
        operator_calls.clear()
        model = build(LionModel, decay_type, scan_order=scan_order, normalize=False, num_hidden_layers=1)
        seen = model(pixel_values=make_images(), output_attentions=True).attentions[0]
        call = operator_calls[0]
        scores = call["q"] @ call["k"].mT * call["scale"]
        orders, decays = walk_by_hand(model.config, (3, 5)), call["log_decay"].detach().exp()
        if orders is None:
            orders, decays = torch.arange(16)[None], decays[None]
        for patch in range(1, 16):
            expected = 0
            for order, decay in zip(orders, decays, strict=True):
                step = order.tolist().index(patch)
                if decay_type == "fixed":
                    expected = expected + (decay**step)[None] / len(orders)  # as many steps as it lies away
                else:
                    between = order[1:step]
                    expected = expected + decay[..., between].prod(-1) / len(orders)
            assert_close(seen[..., patch, 0], scores[..., patch, 0] * expected, 1e-5)
        if decay_type == "selective":
            log_decay = call["log_decay"]
            assert log_decay[..., 0].eq(0).all() and log_decay[..., 1:].lt(0).all()


def test_without_a_cls_token_every_gate_counts(operator_calls):
    build(LionModel, use_cls_token=False, scan_order="serpentine")(pixel_values=make_images())
    for call in operator_calls:
        assert call["log_decay"].shape == (2, 2, 3, 15) and call["log_decay"].lt(0).all()


@pytest.mark.parametrize(
    "direction, sees_before, sees_after",
    [("both", True, True), ("forward", True, False), ("backward", False, True), ("alternate", True, True)],
)
@pytest.mark.parametrize("scan_order", ["raster", "hilbert"])
@each_mode
@each_decay
def test_direction_says_which_patches_a_patch_depends_on(
    decay_type, mode, scan_order, direction, sees_before, sees_after
):
    model = build(LionModel, decay_type, direction=direction, scan_order=scan_order, dtype=torch.float64)
    images = make_images(batch=1, dtype=torch.float64).requires_grad_()
    walk = SCAN_ORDERS[scan_order][0](3, 5).tolist()
    middle = 7
    states = model(pixel_values=images, attn_mode=mode).last_hidden_state
    states[0, 1 + walk[middle]].mul(torch.arange(1.0, 25)).sum().backward()
    reach = patches_by_hand(images.grad.abs(), (4, 2))[0].amax((0, 2)) > 1e-10
    reach = reach[walk]  # as visited
    assert reach[middle]
    assert reach[middle - 1] == sees_before and reach[middle + 1] == sees_after
    assert reach[:middle].any() == sees_before and reach[middle + 1 :].any() == sees_after


def test_directions_in_turn_are_forward_in_even_layers_and_backward_in_odd_ones(operator_calls):
    build(LionModel, direction="alternate", num_hidden_layers=3)(pixel_values=make_images())
    assert [call["direction"] for call in operator_calls] == ["forward", "backward", "forward"]


@pytest.mark.parametrize("scan_order", SCANS)
@pytest.mark.parametrize("decay_type", ["fixed", "selective"])
def test_multiscale_time_constants_reach_from_four_patches_to_all(decay_type, scan_order):
    config = tiny_config(
        decay_type, scan_order=scan_order, decay_init="multiscale", image_size=(48, 64), patch_size=(4, 2)
    )
    patches = 12 * 32
    expected = [math.exp(-1 / (4 * (patches / 4) ** (head / 2))) for head in range(3)] * len(SCAN_ORDERS[scan_order])
    expected = torch.tensor(expected, dtype=torch.float64)
    for layer in LionModel(config).layers:
        if decay_type == "fixed":
            decays = layer.attention.decay_bias.double().sigmoid()
        else:
            decays = 1 - layer.attention.decay_bias_proj.bias.double().sigmoid()
        torch.testing.assert_close(1 - decays, 1 - expected, rtol=1e-4, atol=0)


def test_every_order_has_decays_of_its_own():
    for scan_order, orders in (("raster", 1), ("serpentine", 2), ("hilbert", 1)):
        fixed, selective = (decay_parameters(build(LionModel, d, scan_order=scan_order)) for d in DECAYS[1:])
        assert {tuple(p.shape) for p in fixed.values()} == {(3 * orders,)}
        assert {tuple(p.shape) for p in selective.values()} == {(3 * orders,), (3 * orders, 24)}
    assert not decay_parameters(build(LionModel, "none", scan_order="serpentine"))


# ---------------------------------------------------------------------------------------------------------------------
# Drop path, initial values
# ---------------------------------------------------------------------------------------------------------------------


def test_drop_path_rates_rise_linearly_over_the_layers():
    def rates(**overrides):
        return [layer.drop_path.p for layer in LionModel(tiny_config(**overrides)).layers]

    assert rates(num_hidden_layers=5, drop_path_rate=0.2) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert rates(num_hidden_layers=1, drop_path_rate=0.2) == [0]
    assert rates() == [0, 0]


def test_drop_path_drops_whole_examples_and_keeps_the_mean():
    layer, x = LionDropPath(0.3).train(), torch.randn(4000, 3, 2, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    output = layer(x)
    dropped = output.eq(0).flatten(1).all(1)
    assert_close(output[~dropped], x[~dropped] / 0.7)
    assert abs(dropped.double().mean().item() - 0.3) < 4 * (0.3 * 0.7 / 4000) ** 0.5
    assert torch.equal(layer.eval()(x), x)
    assert layer.train()(x.bfloat16()).dtype == torch.bfloat16


def test_drop_path_acts_on_both_branches_of_a_layer_in_training_only():
    model, images = build(LionModel, drop_path_rate=0.5), make_images(batch=64)
    plain = build(LionModel)
    with torch.no_grad():
        assert torch.equal(model(pixel_values=images).last_hidden_state, plain(pixel_values=images).last_hidden_state)
        layer, x = model.layers[1], torch.randn(64, 7, 24, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        output = layer.train()(x)

        def branches(attention, feed_forward):
            y = x + attention * layer.attention(layer.attention_norm(x))[0]
            return y + feed_forward * layer.mlp(layer.mlp_norm(y))

        outcomes = torch.stack([branches(*scales) for scales in itertools.product((0.0, 2.0), repeat=2)])
    hits = (outcomes - output).abs().amax((2, 3)) < 1e-4  # (4, batch)
    assert hits.any(0).all()  # every example is one of the four
    assert hits.sum(1).ge(4).all()  # and about sixteen are each


@each_decay
def test_initial_values(decay_type):
    torch.manual_seed(0)
    config = tiny_config(decay_type, hidden_size=96, position_embedding_type="absolute")
    embeddings = LionForMaskedImageModeling(config).lion.embeddings
    assert embeddings.mask_token.eq(0).all()
    assert 0.014 < embeddings.cls_token.std() < 0.026
    assert 0.018 < embeddings.position_embeddings.std() < 0.022
    assert 0.018 < embeddings.projection.weight.std() < 0.022
    assert embeddings.projection.bias.eq(0).all()


def test_queries_keys_and_values_go_without_biases_where_told():
    model = LionModel(tiny_config(qkv_bias=False))
    assert all(layer.attention.qkv_proj.bias is None for layer in model.layers)
    assert all(layer.attention.out_proj.bias is not None for layer in model.layers)


def test_mask_token_is_there_where_it_is_used():
    assert LionModel(tiny_config()).embeddings.mask_token is None
    assert LionModel(tiny_config(), use_mask_token=True).embeddings.mask_token.shape == (1, 1, 24)
    with pytest.raises(ValueError, match=r"`bool_masked_pos` needs a mask token.*LionForMaskedImageModeling"):
        build(LionModel)(pixel_values=make_images(), bool_masked_pos=make_patch_mask(15))


# ---------------------------------------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------------------------------------


@each_decay
@pytest.mark.parametrize("cls", CLASSES[1:], ids=lambda cls: cls.__name__)
@each_scan
def test_every_parameter_gets_a_gradient(cls, decay_type, scan_order):
    model = build(cls, decay_type, scan_order=scan_order).train()
    model(**inputs_for(cls), **targets_for(cls)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and parameter.grad.ne(0).any(), name


def test_loss_is_the_mean_cross_entropy():
    model, labels = build(LionForImageClassification), torch.tensor([2, 0])
    output = model(pixel_values=make_images(), labels=labels)
    losses = [cross_entropy(row, label) for row, label in zip(output.logits, labels.tolist(), strict=True)]
    assert output.loss.item() == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert model(pixel_values=make_images()).loss is None
    counted = model(pixel_values=make_images(), labels=labels, num_items_in_batch=torch.tensor(1000)).loss
    assert counted.item() == pytest.approx(sum(losses) / 1000, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.long, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(2,), (2, 1), (1,), (1, 1)], ids=str)
def test_f13_regression_loss_is_the_mean_squared_error_for_labels_of_any_shape(shape, dtype):
    model = build(LionForImageClassification, num_labels=1)
    labels = torch.tensor([2.0, -1.0])[: shape[0]].reshape(shape).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = model(pixel_values=make_images(batch=shape[0]), labels=labels)
        output.loss.backward()
    assert output.loss.item() == pytest.approx(squared_error(output.logits, labels) / shape[0], rel=1e-5)


def test_regression_to_several_numbers_and_several_labels_at_once():
    labels = torch.tensor([[1.0, 0, 1], [0, 0, 0]])
    output = build(LionForImageClassification, problem_type="regression")(pixel_values=make_images(), labels=labels)
    assert output.loss.item() == pytest.approx(squared_error(output.logits, labels) / 6, rel=1e-5)
    output = build(LionForImageClassification, problem_type="multi_label_classification")(
        pixel_values=make_images(), labels=labels
    )
    p = output.logits.double().sigmoid()
    expected = -torch.where(labels == 1, p.log(), (1 - p).log()).mean()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def reconstruction_by_hand(model, images, masked):
    """Reconstruction and loss, patch by patch and pixel by pixel."""
    config, state = model.config, model.state_dict()
    states, _, _ = reference_encoder(model.lion, images, masked)
    tokens = states[-1][:, 1:] if config.use_cls_token else states[-1]
    patches = tokens @ state["decoder.weight"].double().T + state["decoder.bias"].double()
    (p, q), columns = config.patch_size, math.ceil(images.shape[3] / config.patch_size[1])
    reconstruction, errors = torch.zeros_like(images, dtype=torch.float64), []
    for b, c, y, x in itertools.product(*map(range, images.shape)):
        patch = (y // p) * columns + x // q
        pixel = patches[b, patch, (c * p + y % p) * q + x % q]
        reconstruction[b, c, y, x] = pixel
        if masked[b, patch]:
            errors.append(abs(pixel.item() - images[b, c, y, x].item()))
    return reconstruction, sum(errors) / len(errors)


@pytest.mark.parametrize("size", [(12, 10), (11, 9), (8, 14), (5, 4)], ids=str)
@pytest.mark.parametrize("use_cls_token", [True, False])
@each_decay
def test_masked_image_loss_is_the_mean_error_over_masked_pixels(decay_type, use_cls_token, size):
    options = {"use_cls_token": use_cls_token, "position_embedding_type": "none", "dtype": torch.float64}
    model = build(LionForMaskedImageModeling, decay_type, scan_order="serpentine", **options)
    images = make_images(*size, dtype=torch.float64)
    masked = make_patch_mask(math.ceil(size[0] / 4) * math.ceil(size[1] / 2))
    expected, loss = reconstruction_by_hand(model, images, masked)
    for mode in MODES:
        with torch.no_grad():
            output = model(pixel_values=images, bool_masked_pos=masked, attn_mode=mode)
            assert_close(
                model(pixel_values=images, bool_masked_pos=masked.int(), attn_mode=mode).loss, output.loss, 1e-12
            )
        assert output.reconstruction.shape == images.shape
        assert_close(output.reconstruction, expected, 1e-9)
        assert output.loss.item() == pytest.approx(loss, rel=1e-9)


def test_without_masked_patches_the_masked_image_loss_is_zero():
    model, images = build(LionForMaskedImageModeling).train(), make_images()
    output = model(pixel_values=images, bool_masked_pos=torch.zeros(2, 15, dtype=torch.bool))
    assert output.loss.item() == 0
    output.loss.backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())
    unmasked = model(pixel_values=images)
    assert unmasked.loss is None and torch.equal(unmasked.reconstruction, output.reconstruction)


def test_what_is_masked_is_not_seen():
    model, images, masked = build(LionForMaskedImageModeling), make_images(), make_patch_mask(15)
    changed = images.clone()
    for b, patch in masked.nonzero().tolist():
        changed[b, :, 4 * (patch // 5) :, 2 * (patch % 5) :][:, :4, :2] += 5
    with torch.no_grad():
        outputs = [model(pixel_values=x, bool_masked_pos=masked) for x in (images, changed)]
    assert torch.equal(outputs[0].reconstruction, outputs[1].reconstruction)
    assert not torch.equal(outputs[0].loss, outputs[1].loss)


@pytest.mark.parametrize("shape", [(2, 16), (1, 15), (15,), (2, 3, 5), (2, 14)], ids=str)
def test_patch_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"`bool_masked_pos` must be \(batch, patches\) = \(2, 15\), got shape"):
        build(LionForMaskedImageModeling)(
            pixel_values=make_images(), bool_masked_pos=torch.ones(shape, dtype=torch.bool)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masked_image_loss_of_many_pixels_keeps_its_digits_in_half_precision(dtype):
    """The sum over a batch of images is beyond the largest number of float16."""
    model = minimal(LionForMaskedImageModeling, "fixed", patch_size=16)
    images, masked = make_images(160, 160, batch=2), torch.ones(2, 100, dtype=torch.bool)
    with torch.no_grad():
        expected = model(pixel_values=images, bool_masked_pos=masked).loss
        actual = model.to(dtype)(images, bool_masked_pos=masked).loss
    assert actual.item() == pytest.approx(expected.item(), rel=2e-2)


@pytest.mark.parametrize("use_reentrant", [False, True])
@each_mode
@pytest.mark.parametrize("decay_type", ["fixed", "selective"])
def test_gradient_checkpointing_recomputes_and_gives_equal_gradients(decay_type, mode, use_reentrant, operator_calls):
    model = build(LionForImageClassification, decay_type, scan_order="serpentine").train()
    batch = inputs_for(LionForImageClassification)
    _, expected = gradients(model, batch, attn_mode=mode)
    assert len(operator_calls) == 2
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    _, actual = gradients(model, batch, attn_mode=mode)
    assert len(operator_calls) == 2 + 2 * 2
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient)


@each_mode
@each_scan
@each_decay
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_models_follow_the_float32_one(tmp_path, dtype, decay_type, scan_order, mode):
    model, images = build(LionForImageClassification, decay_type, scan_order=scan_order), make_images(batch=8)
    model.save_pretrained(tmp_path)
    half = LionForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    decays = decay_parameters(model)
    for name, parameter in half.named_parameters():
        assert parameter.dtype == (torch.float32 if name in decays else dtype), name
    assert all(torch.equal(parameter, decays[name]) for name, parameter in decay_parameters(half).items())
    with torch.no_grad():
        actual = half(pixel_values=images, attn_mode=mode).logits
        expected = model(pixel_values=images).logits
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < (4e-2 if dtype == torch.bfloat16 else 5e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Saving and loading
# ---------------------------------------------------------------------------------------------------------------------


@each_scan
@each_decay
@each_class
def test_f8_every_parameter_survives_a_file(tmp_path, cls, decay_type, scan_order):
    model = fill_with_constants(cls(tiny_config(decay_type, scan_order=scan_order)))
    model.save_pretrained(tmp_path)
    for loader in (cls, AUTO_CLASSES[cls]):
        loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is cls
        assert_same_state(loaded.state_dict(), model.state_dict())
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert tuple(loaded.config.image_size) == (12, 10) and tuple(loaded.config.patch_size) == (4, 2)
        assert loaded.main_input_name == "pixel_values"


@each_class
@each_decay
def test_auto_class_gives_bit_equal_outputs(tmp_path, cls, decay_type):
    model, batch = build(cls, decay_type, scan_order="serpentine"), inputs_for(cls)
    model.save_pretrained(tmp_path)
    loaded = AUTO_CLASSES[cls].from_pretrained(tmp_path)
    assert type(loaded) is type(AUTO_CLASSES[cls].from_config(model.config)) is cls
    with torch.no_grad():
        assert torch.equal(outputs_of(loaded(**batch)), outputs_of(model(**batch)))


@each_decay
@pytest.mark.parametrize("target", CLASSES, ids=lambda cls: f"to {cls.__name__}")
@pytest.mark.parametrize("source", CLASSES, ids=lambda cls: f"from {cls.__name__}")
def test_f8_encoder_passes_between_all_classes(tmp_path, source, target, decay_type):
    saved = fill_with_constants(source(tiny_config(decay_type, scan_order="serpentine")))
    saved.save_pretrained(tmp_path)
    expected = getattr(saved, "lion", saved).state_dict()
    for loader in (target, AUTO_CLASSES[target]):
        model, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        loaded = getattr(model, "lion", model).state_dict()
        fresh = loaded.keys() - expected.keys()
        assert fresh <= {"embeddings.mask_token"}
        assert_same_state(
            {name: x for name, x in loaded.items() if name not in fresh},
            {name: x for name, x in expected.items() if name in loaded},
        )
        assert all(loaded[name].eq(0).all() for name in fresh)
        new = {name for name in model.state_dict() if name.startswith(("classifier", "decoder"))}
        if source is not target:
            assert {name.removeprefix("lion.") for name in info["missing_keys"]} == {*new, *fresh}
            for name in new:
                parameter = model.state_dict()[name]
                assert parameter.isfinite().all() and parameter.abs().max() <= 0.2, name
                assert not name.endswith("bias") or parameter.eq(0).all(), name
        assert outputs_of(model(**inputs_for(target))).isfinite().all()


@each_decay
def test_a_saved_form_pooling_and_scan_order_come_back(tmp_path, decay_type):
    model = build(LionForImageClassification, decay_type, attn_mode="rnn", pooling="mean", scan_order="hilbert")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert (loaded.config.attn_mode, loaded.config.pooling, loaded.config.scan_order) == ("rnn", "mean", "hilbert")
    other = AutoModelForImageClassification.from_pretrained(tmp_path, pooling="cls", attn_mode="chunk")
    images = make_images()
    with torch.no_grad():
        states = model.lion(pixel_values=images).last_hidden_state
        assert_close(loaded(pixel_values=images).logits, model.classifier(states.mean(1)))
        assert_close(other(pixel_values=images).logits, model.classifier(states[:, 0]))


def test_sizes_in_the_error_are_those_of_the_images_not_of_whole_patches():
    model = build(LionModel, "none", image_size=(11, 9))
    with pytest.raises(ValueError, match=r"13×10 pixels.* 11×9: pass `interpolate_pos_encoding=True`"):
        model(pixel_values=make_images(13, 10))


@pytest.mark.parametrize("images", [[1, 2], np.zeros((1, 3, 12, 10)), Image.new("RGB", (10, 12))], ids=type)
def test_images_that_are_no_tensors_are_refused(images):
    with pytest.raises(TypeError, match="`pixel_values` must be a tensor, as image processors make, got <class"):
        build(LionModel)(pixel_values=images)


@pytest.mark.parametrize("shape", [(3, 12, 10), (1, 1, 12, 10), (1, 3, 0, 10), (0, 3, 12, 10)])
def test_images_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=re.escape(f"(batch, 3 channels, height, width), got shape {shape}")):
        build(LionModel)(pixel_values=torch.zeros(shape))


def test_a_model_refuses_what_it_does_not_read():
    images, ids = make_images(), torch.ones(2, 5, dtype=torch.long)
    reads_images = build(LionModel)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 8}
    reads_text = LionModel(LionConfig(vocab_size=10, **sizes))
    for inputs in ({}, {"input_ids": ids}, {"pixel_values": images, "input_ids": ids}):
        with pytest.raises(ValueError, match=r"must specify pixel_values .*: the model reads images"):
            reads_images(**inputs)
    for inputs in ({"pixel_values": images}, {"pixel_values": images, "input_ids": ids}):
        with pytest.raises(ValueError, match="no pixel_values: the model reads text"):
            reads_text(**inputs)


@pytest.mark.parametrize("cls", TEXT_HEADS, ids=lambda cls: cls.__name__)
def test_text_heads_refuse_an_image_configuration(cls):
    with pytest.raises(ValueError, match=f'{cls.__name__} needs a configuration with modality="text", got "image"'):
        cls(tiny_config())


@pytest.mark.parametrize("cls", CLASSES[1:], ids=lambda cls: cls.__name__)
def test_image_heads_refuse_a_text_configuration(tmp_path, cls):
    text = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 8}
    config = LionConfig(vocab_size=10, **text)
    with pytest.raises(ValueError, match=f'{cls.__name__} needs a configuration with modality="image", got "text"'):
        cls(config)
    LionModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='modality="image"'):
        AUTO_CLASSES[cls].from_pretrained(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile
# ---------------------------------------------------------------------------------------------------------------------


DECAYS_AND_SCANS = [
    ("none", "serpentine"),
    ("fixed", "serpentine"),
    ("selective", "raster"),
    ("selective", "serpentine"),
    ("selective", "hilbert"),
]


@pytest.mark.parametrize("mode", ["parallel", "chunk"])
@pytest.mark.parametrize("decay_type, scan_order", DECAYS_AND_SCANS)
def test_compiled_model_needs_one_graph_for_each_size(decay_type, scan_order, mode):
    model = build(LionForImageClassification, decay_type, scan_order=scan_order, num_hidden_layers=1)
    kwargs = {"attn_mode": mode, "interpolate_pos_encoding": True}
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for size in ((12, 10), (10, 16), (12, 10), (10, 16)):
            images = make_images(*size)
            assert_close(compiled(images, **kwargs).logits, model(images, **kwargs).logits)
    torch._dynamo.reset()
    assert counter.frame_count == 2


@pytest.mark.parametrize("mode", ["parallel", "chunk"])
def test_compiled_gradients_equal_eager_ones(mode):
    model = build(LionForImageClassification, scan_order="serpentine", num_hidden_layers=1)
    batch = inputs_for(LionForImageClassification)
    logits, expected = gradients(model, batch, attn_mode=mode)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    actual_logits, actual = gradients(model, batch, attn_mode=mode)
    torch._dynamo.reset()
    assert_close(actual_logits, logits)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, 1e-4)


@each_scan
def test_a_model_run_in_inference_mode_can_be_trained_afterwards(scan_order):
    model, images = build(LionForImageClassification, scan_order=scan_order), make_images(4 * 6, 2 * 11)
    with torch.inference_mode():
        expected = model(pixel_values=images).logits
    output = model(pixel_values=images, labels=torch.tensor([0, 1]))
    output.loss.backward()
    assert_close(output.logits, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Image processor, pipelines, Trainer
# ---------------------------------------------------------------------------------------------------------------------

LABELS = {0: "cat", 1: "dog", 2: "bird"}


def make_picture(seed=0, size=(37, 23)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


@pytest.fixture(params=DECAYS)
def saved(request, tmp_path):
    """Folders in which a model lies beside its image processor, by class."""

    def save(cls):
        model = build(cls, request.param, scan_order="serpentine", image_size=24, patch_size=8, id2label=LABELS)
        model.save_pretrained(tmp_path)
        ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
        return model, tmp_path

    return save


def test_image_processor_is_found_beside_the_model(saved):
    model, folder = saved(LionForImageClassification)
    processor = AutoImageProcessor.from_pretrained(folder)
    batch = processor([make_picture(), make_picture(1)], return_tensors="pt")
    assert batch["pixel_values"].shape == (2, 3, 24, 24)
    assert model(**batch).logits.shape == (2, 3)


def test_image_classification_pipeline(saved):
    model, folder = saved(LionForImageClassification)
    pictures = [make_picture(), make_picture(1)]
    classify = pipeline("image-classification", model=str(folder), device="cpu")
    assert type(classify.model) is LionForImageClassification
    for picture, results in zip(pictures, classify(pictures, top_k=3, batch_size=2), strict=True):
        pixels = ViTImageProcessor(size={"height": 24, "width": 24})(picture, return_tensors="pt")
        with torch.no_grad():
            probabilities = softmax(model(**pixels).logits[0].tolist())
        scores = {result["label"]: result["score"] for result in results}
        assert scores == pytest.approx({LABELS[i]: p for i, p in enumerate(probabilities)}, rel=1e-3)


@pytest.mark.parametrize("pool", [True, False])
def test_image_feature_extraction_pipeline(saved, pool):
    model, folder = saved(LionModel)
    extract = pipeline("image-feature-extraction", model=str(folder), device="cpu", pool=pool)
    assert type(extract.model) is LionModel
    pixels = ViTImageProcessor(size={"height": 24, "width": 24})(make_picture(), return_tensors="pt")
    with torch.no_grad():
        output = model(**pixels)
    expected = output.pooler_output if pool else output.last_hidden_state
    assert_close(extract(make_picture(), return_tensors=True), expected)


def digits(part):
    images, labels = load_digits(return_X_y=True)
    rows = slice(0, 600) if part == "train" else slice(600, 800)
    return [
        {"pixel_values": torch.tensor(x, dtype=torch.float32).view(1, 8, 8) / 8 - 1, "labels": int(y)}
        for x, y in zip(images[rows], labels[rows], strict=True)
    ]


def make_trainer(model, folder, **arguments):
    arguments = {"per_device_train_batch_size": 32, "learning_rate": 3e-3, "max_steps": 120, **arguments}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "seed": 0}
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), logging_steps=1, **quiet, **arguments),
        train_dataset=digits("train"),
        eval_dataset=digits("test"),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )


@pytest.mark.parametrize(
    "decay_type, scan_order", [("none", "raster"), ("fixed", "serpentine"), ("selective", "hilbert")]
)
def test_trainer_learns_digits_saves_and_reloads(tmp_path, decay_type, scan_order):
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": (4, 2), "num_channels": 1, "num_labels": 10}
    sizes |= {"hidden_size": 48, "initializer_range": 0.1}
    model = LionForImageClassification(tiny_config(decay_type, scan_order=scan_order, **sizes))
    decays = {name: parameter.detach().clone() for name, parameter in decay_parameters(model).items()}
    trainer = make_trainer(model, tmp_path)
    names = trainer.get_decay_parameter_names(model)
    assert "lion.layers.0.attention.qkv_proj.weight" in names
    assert not [name for name in names if name in decays]
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.6  # a tenth by chance
    assert all(not torch.equal(p, decays[name]) for name, p in decay_parameters(model).items())

    trainer.save_model()
    images = torch.stack([example["pixel_values"] for example in digits("test")])
    with torch.no_grad():
        expected = model.eval()(images).logits
        for loader in (LionForImageClassification, AutoModelForImageClassification):
            assert torch.equal(loader.from_pretrained(tmp_path)(images).logits, expected)
