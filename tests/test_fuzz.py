"""Random cases: the operator's forms against the float64 loop, and configurations that are refused by name or run.

`make test` draws a few hundred, `make fuzz` ten thousand of each.
"""

import math
import re

import torch
from folder_tasks import outputs_of
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from oracle import loop_attention

from lion_transformers import (
    LionConfig,
    LionForImageClassification,
    LionForMaskedLM,
    LionForSequenceClassification,
    lion_attention,
)
from lion_transformers.attention_lion import ATTENTION_MODES, DIAGONALS, DIRECTIONS


# ---------------------------------------------------------------------------------------------------------------------
# The operator
# ---------------------------------------------------------------------------------------------------------------------

# Relative root mean square, and the largest difference beside the largest value.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@st.composite
def operator_cases(draw):
    """Arguments of `lion_attention` but for its mode and its dtype, in float64."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length = draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 130])))
    head_dim, value_dim = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    options = {
        "chunk_size": draw(st.integers(1, 150)),
        "direction": draw(st.sampled_from(DIRECTIONS)),
        "diagonal": draw(st.sampled_from(DIAGONALS)),
        "normalize": draw(st.booleans()),
    }
    if draw(st.booleans()):
        masked = draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
        options["key_mask"] = uniform(batch, length) >= masked
    orders = draw(st.sampled_from([None, None, 1, 2]))
    if orders is not None:
        order = torch.stack([torch.randperm(length, generator=generator) for _ in range(orders)])
        options["scan"] = (order, order.argsort(-1))
    elif draw(st.booleans()):
        ends = uniform(batch, length) < draw(st.sampled_from([0.02, 0.2, 0.9]))
        options["segment_ids"] = ends.cumsum(-1) % draw(st.integers(2, 5))
    several = () if orders is None else (orders,)
    shape = {"none": None, "fixed": (*several, heads), "selective": (*several, batch, heads, length)}[
        draw(st.sampled_from(["none", "fixed", "selective"]))
    ]
    # From decays that never forget to ones that forget at once, of all strengths in one case.
    log_decay = None if shape is None else -draw(st.sampled_from([1e-4, 0.1, 3.0, 100.0])) * uniform(*shape) ** 3
    # Positive, as `normalize` needs.
    q, k = uniform(batch, heads, length, head_dim) + 0.05, uniform(batch, heads, length, head_dim) + 0.05
    v = uniform(batch, heads, length, value_dim) - 0.3
    return (q, k, v, log_decay), options


def expected_output(inputs, options):
    options = {name: value for name, value in options.items() if name not in ("chunk_size", "scan")}
    return loop_attention(*inputs, **options)


@given(case=operator_cases(), dtype=st.sampled_from(list(TOLERANCES)))
def test_the_three_forms_agree_with_the_loop(case, dtype):
    (q, k, v, log_decay), options = case
    q, k, v = (x.to(dtype) for x in (q, k, v))
    order = {"order": options["scan"][0]} if "scan" in options else {}
    expected = expected_output((q, k, v, log_decay), {**options, **order})
    for mode in ATTENTION_MODES:
        output = lion_attention(q, k, v, log_decay, mode=mode, **options)
        assert output.dtype == dtype and output.shape == v.shape
        assert output.isfinite().all(), mode
        error = (output.double() - expected).abs()
        assert error.max() <= TOLERANCES[dtype] * (1 + expected.abs().max()), mode
        if "key_mask" in options:
            assert (output[~options["key_mask"].any(-1)] == 0).all(), mode


# ---------------------------------------------------------------------------------------------------------------------
# The configuration
# ---------------------------------------------------------------------------------------------------------------------

SMALL_SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 8,
    "vocab_size": 20,
    "max_position_embeddings": 12,
    "image_size": 8,
    "patch_size": 4,
}

# What may stand in each field; of sizes and rates also what is nonsense.
COUNTS = st.integers(-1, 12)
RATES = st.one_of(st.sampled_from([0, 0.0, 0.1, 1.0]), st.floats(-1.0, 2.0), st.just(math.nan))
SIDES = st.one_of(COUNTS, st.lists(COUNTS, max_size=3))
FIELDS = {
    "modality": st.sampled_from(["text", "image", "audio"]),
    "decay_type": st.sampled_from(["none", "fixed", "selective", "learned"]),
    "decay_init": st.sampled_from(["paper", "multiscale", "zeros"]),
    "attn_mode": st.sampled_from(["auto", "parallel", "chunk", "rnn", "fast"]),
    "chunk_size": COUNTS,
    "feature_map": st.sampled_from([None, "identity", "elu", "silu", "relu"]),
    "normalize": st.sampled_from([None, True, False, "yes"]),
    "direction": st.sampled_from(["both", "forward", "backward", "alternate", "left"]),
    "diagonal": st.sampled_from(["balanced", "doubled", "once"]),
    "attention_output_norm": st.sampled_from([None, True, False]),
    "norm_position": st.sampled_from([None, "pre", "post", "middle"]),
    "position_embedding_type": st.sampled_from([None, "absolute", "none", "rotary"]),
    "vocab_size": st.integers(-1, 30),
    "hidden_size": st.integers(-1, 24),
    "num_hidden_layers": st.integers(-1, 3),
    "num_attention_heads": st.integers(-1, 6),
    "intermediate_size": COUNTS,
    "hidden_act": st.sampled_from(["gelu", "relu", "silu", "tanh", "swiglu", ""]),
    "hidden_dropout_prob": RATES,
    "attention_probs_dropout_prob": RATES,
    "max_position_embeddings": st.integers(-1, 30),
    "type_vocab_size": COUNTS,
    "initializer_range": st.floats(-0.1, 0.5),
    "layer_norm_eps": st.sampled_from([None, 1e-12, 1e-5, 0.0, -1.0, math.nan]),
    "drop_path_rate": RATES,
    "qkv_bias": st.sampled_from([True, False, 1]),
    "pad_token_id": st.one_of(st.none(), st.integers(-2, 30)),
    "classifier_dropout": st.one_of(st.none(), RATES),
    "classifier_pooling": st.sampled_from([None, "cls", "mean", "max"]),
    "sparse_prediction": st.booleans(),
    "tie_word_embeddings": st.booleans(),
    "image_size": SIDES,
    "patch_size": SIDES,
    "num_channels": st.integers(-1, 4),
    "use_cls_token": st.sampled_from([True, False, "no"]),
    "scan_order": st.sampled_from(["raster", "serpentine", "hilbert", "zigzag"]),
    "num_labels": st.integers(1, 4),
}


def test_every_field_of_the_configuration_is_drawn():
    assert set(LionConfig.__annotations__) - {"model_type", "attribute_map"} <= set(FIELDS)


@st.composite
def configurations(draw):
    """Some fields of `LionConfig` by name, beside small sizes."""
    names = draw(st.lists(st.sampled_from(list(FIELDS)), max_size=6, unique=True))
    return {**SMALL_SIZES, **{name: draw(FIELDS[name]) for name in names}}


@given(fields=configurations())
def test_a_configuration_is_refused_by_name_or_its_models_run(fields):
    try:
        config = LionConfig(**fields)
        heads = [LionForImageClassification]
        if config.modality == "text":
            heads = [LionForMaskedLM, LionForSequenceClassification]
        models = [head(config).eval() for head in heads]
    except (ValueError, StrictDataclassError) as error:
        at_fault = {name for name, value in fields.items() if value != SMALL_SIZES.get(name, FIELDS)}
        assert at_fault & set(re.findall(r"\w+", str(error))), str(error)
        return
    inputs = make_inputs(config)
    for model in models:
        with torch.no_grad():
            assert outputs_of(model(**inputs)).isfinite().all()


def make_inputs(config):
    torch.manual_seed(0)
    if config.modality == "image":
        size = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        return {"pixel_values": torch.randn(2, config.num_channels, *size)}
    length = min(9, config.max_position_embeddings)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 + 1 :] = 0
    return {"input_ids": torch.randint(config.vocab_size, (2, length)), "attention_mask": mask}
