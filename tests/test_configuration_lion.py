"""LionConfig: what it derives, what it refuses, and that it survives files."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, BertConfig, DistilBertConfig, ViTConfig

from lion_transformers import LionConfig, LionForImageClassification, LionForSequenceClassification, LionModel


TINY = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 96}

# decay_type, normalize, then feature_map, attention_output_norm, position_embedding_type, classifier_pooling
DERIVED = [
    ("none", False, "identity", True, "absolute", "cls"),
    ("fixed", False, "identity", False, "none", "mean"),
    ("selective", False, "identity", False, "none", "mean"),
    ("none", True, "elu", False, "absolute", "cls"),
    ("fixed", True, "silu", False, "none", "mean"),
    ("selective", True, "silu", False, "none", "mean"),
]


def fields(config):
    """Everything that a configuration file holds, but for what says where it came from."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("transformers_version", "_name_or_path")
    }


@pytest.mark.parametrize(("decay_type", "normalize", "feature_map", "output_norm", "positions", "pooling"), DERIVED)
def test_recipe_follows_from_decay_type_and_normalize(
    decay_type, normalize, feature_map, output_norm, positions, pooling
):
    config = LionConfig(decay_type=decay_type, normalize=normalize)
    assert config.feature_map == feature_map
    assert config.attention_output_norm is output_norm
    assert config.position_embedding_type == positions
    assert config.classifier_pooling == pooling
    assert config.norm_position == "post"


def test_plain_default_is_the_text_recipe_of_lion_s_at_the_base_size():
    config = LionConfig()
    assert (config.modality, config.decay_type, config.normalize) == ("text", "selective", False)
    assert (config.attn_mode, config.chunk_size) == ("auto", 64)
    # BERT base, name by name
    bert = BertConfig()
    shared = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
    ]
    shared += ["hidden_dropout_prob", "max_position_embeddings", "type_vocab_size", "initializer_range"]
    shared += ["layer_norm_eps", "pad_token_id", "classifier_dropout", "tie_word_embeddings"]
    assert {name: getattr(config, name) for name in shared} == {name: getattr(bert, name) for name in shared}


@pytest.mark.parametrize("decay_type", ["none", "fixed", "selective"])
@pytest.mark.parametrize(
    "chosen",
    [
        {"feature_map": "elu", "normalize": True},
        {"feature_map": "silu", "normalize": True},
        {"feature_map": "elu"},
        {"attention_output_norm": True},
        {"attention_output_norm": False},
        {"position_embedding_type": "none"},
        {"position_embedding_type": "absolute"},
        {"classifier_pooling": "cls"},
        {"classifier_pooling": "mean"},
        {"norm_position": "pre"},
    ],
    ids=str,
)
def test_what_is_set_is_not_derived(decay_type, chosen):
    config = LionConfig(decay_type=decay_type, **chosen)
    assert {name: getattr(config, name) for name in chosen} == chosen


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("modality", "audio", ["text"]),
        ("decay_type", "select", ["none", "fixed", "selective"]),
        ("decay_init", "random", ["paper", "multiscale"]),
        ("attn_mode", "recurrent", ["auto", "parallel", "chunk", "rnn"]),
        ("feature_map", "relu", ["identity", "elu", "silu"]),
        ("norm_position", "middle", ["pre", "post"]),
        ("position_embedding_type", "rotary", ["absolute", "none"]),
        ("classifier_pooling", "max", ["cls", "mean"]),
        ("scan_order", "zigzag", ["raster", "serpentine", "hilbert"]),
        ("direction", "left", ["both", "forward", "backward", "alternate"]),
        ("diagonal", "once", ["balanced", "doubled"]),
    ],
)
def test_unknown_choice_is_refused_with_field_value_and_choices(field, value, accepted):
    with pytest.raises(StrictDataclassError) as refusal:
        LionConfig(**{field: value})
    for part in [field, value, *accepted]:
        assert part in str(refusal.value)


def test_two_names_of_one_field_must_agree():
    assert LionConfig(pooling="cls", classifier_pooling="cls").pooling == "cls"
    with pytest.raises(ValueError, match='are the same field: got "cls" and "mean"'):
        LionConfig(pooling="cls", classifier_pooling="mean")


@pytest.mark.parametrize("modality", ["text", "image"])
@pytest.mark.parametrize("decay_type", ["none", "fixed", "selective"])
def test_the_first_token_is_not_pooled_where_it_sees_only_itself(decay_type, modality):
    config = LionConfig(modality=modality, decay_type=decay_type, direction="forward")
    assert config.classifier_pooling == "mean"
    with pytest.raises(StrictDataclassError, match=r'must be "mean" with `direction="forward"`.* got "cls"'):
        LionConfig(modality=modality, decay_type=decay_type, direction="forward", classifier_pooling="cls")
    for direction in ("backward", "alternate"):
        assert LionConfig(modality=modality, direction=direction, pooling="cls").classifier_pooling == "cls"


@pytest.mark.parametrize("decay_type", ["none", "fixed", "selective"])
def test_normalize_refuses_the_identity_map(decay_type):
    with pytest.raises(StrictDataclassError) as refusal:
        LionConfig(decay_type=decay_type, normalize=True, feature_map="identity")
    for part in ["normalize=True", "feature_map", "identity", "elu", "silu"]:
        assert part in str(refusal.value)


def test_hidden_size_must_be_a_multiple_of_the_heads():
    with pytest.raises(StrictDataclassError, match=r"`hidden_size` \(50\).*`num_attention_heads` \(3\)"):
        LionConfig(hidden_size=50, num_attention_heads=3)
    assert LionConfig(hidden_size=51, num_attention_heads=3).hidden_size == 51


@pytest.mark.parametrize(
    "field",
    [
        *["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "chunk_size", "vocab_size"],
        *["type_vocab_size", "num_channels"],
    ],
)
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused(field, value):
    with pytest.raises(StrictDataclassError, match=f"`{field}` must be at least 1, got {value}"):
        LionConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("chunk_size", "64"), ("normalize", "yes"), ("hidden_size", 48.5)])
def test_wrong_types_are_refused(field, value):
    with pytest.raises(StrictDataclassError, match=rf"{field}.*got {type(value).__name__} .*{value}"):
        LionConfig(**{field: value})


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("max_position_embedding", "max_position_embeddings"),
        ("decay_typ", "decay_type"),
        ("decay_types", "decay_type"),
        ("attn_modes", "attn_mode"),
        ("chunksize", "chunk_size"),
        ("normalise", "normalize"),
        ("num_attention_head", "num_attention_heads"),
        ("num_hidden_layer", "num_hidden_layers"),
        ("hiden_size", "hidden_size"),
        ("feature_maps", "feature_map"),
        ("norm_positions", "norm_position"),
        ("classifier_poling", "classifier_pooling"),
        ("tie_word_embedding", "tie_word_embeddings"),
        ("attention_output_norms", "attention_output_norm"),
        ("scan_orders", "scan_order"),
        ("image_sizes", "image_size"),
        ("patchsize", "patch_size"),
        ("use_cls_tokens", "use_cls_token"),
        ("droppath_rate", "drop_path_rate"),
        ("num_channel", "num_channels"),
        ("poolings", "pooling"),
        ("directions", "direction"),
        ("diagonals", "diagonal"),
    ],
)
def test_misspelt_field_is_refused_with_the_name_meant(misspelt, meant):
    with pytest.raises(ValueError, match=rf"`{misspelt}`.*did you mean `{meant}`"):
        LionConfig(**{misspelt: 1})


def test_misspelt_field_in_a_file_is_refused(tmp_path):
    LionConfig(**TINY).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"decay_type"', '"decay_typ"'))
    with pytest.raises(ValueError, match="did you mean `decay_type`"):
        LionConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("auto", [LionConfig, AutoConfig, AutoModel], ids=lambda auto: auto.__name__)
def test_misspelt_field_beside_a_file_is_refused(tmp_path, auto):
    AutoModel.from_config(LionConfig(**TINY)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LionConfig has no field `decay_typ`: did you mean `decay_type`"):
        auto.from_pretrained(tmp_path, decay_typ="none")
    loaded = auto.from_pretrained(tmp_path, decay_type="none")
    assert getattr(loaded, "config", loaded).decay_type == "none"


@pytest.mark.parametrize("other", [BertConfig, ViTConfig, DistilBertConfig], ids=lambda other: other.model_type)
def test_unrelated_unknown_keys_pass(other):
    """Transformers' own tests set fields that a family does not have, and files carry other tools' notes."""
    known = set(LionConfig().to_dict())
    foreign = {name: value for name, value in other().to_dict().items() if name not in known}
    foreign |= {"my_note": "kept", "foo": 3, "bos_token_id": 1, "num_labels": 5, "_private": 1}
    config = LionConfig(**foreign)
    assert (config.my_note, config.foo, config.num_labels) == ("kept", 3, 5)


NON_DEFAULT = {
    **TINY,
    "decay_init": "paper",
    "attn_mode": "rnn",
    "chunk_size": 7,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.3,
    "attention_probs_dropout_prob": 0.25,
    "max_position_embeddings": 99,
    "type_vocab_size": 5,
    "initializer_range": 0.5,
    "layer_norm_eps": 1e-3,
    "qkv_bias": False,
    "direction": "alternate",
    "diagonal": "doubled",
    "drop_path_rate": 0.2,
    "pad_token_id": 2,
    "classifier_dropout": 0.125,
    "tie_word_embeddings": False,
    "norm_position": "pre",
    "num_labels": 4,
    "my_note": "kept",
}


@pytest.mark.parametrize("from_pretrained", [LionConfig.from_pretrained, AutoConfig.from_pretrained])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay_type", ["none", "fixed", "selective"])
def test_save_and_load_gives_equal_fields(tmp_path, decay_type, normalize, from_pretrained):
    config = LionConfig(decay_type=decay_type, normalize=normalize, **NON_DEFAULT)
    config.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert type(loaded) is LionConfig
    assert fields(loaded) == fields(config)
    assert {name: getattr(loaded, name) for name in NON_DEFAULT} == NON_DEFAULT
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "lion"


def test_overrides_at_loading_win_over_the_file(tmp_path):
    LionConfig(**TINY, attn_mode="rnn", chunk_size=7).save_pretrained(tmp_path)
    config = LionConfig.from_pretrained(tmp_path, attn_mode="chunk", num_labels=5)
    assert (config.attn_mode, config.chunk_size, config.num_labels) == ("chunk", 7, 5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"attn_mode": "recurrent"}, "attn_mode"),
        ({"normalize": True}, "feature_map"),  # the saved map is the identity
        ({"chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
    ],
    ids=str,
)
def test_overrides_at_loading_are_checked_before_there_is_a_model(tmp_path, override, message):
    LionModel(LionConfig(**TINY)).save_pretrained(tmp_path)
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        LionModel.from_pretrained(tmp_path, **override)


def test_a_field_set_later_is_checked():
    config = LionConfig(**TINY)
    with pytest.raises(StrictDataclassError, match="attn_mode"):
        config.attn_mode = "recurrent"
    assert config.attn_mode == "auto"


# ---------------------------------------------------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------------------------------------------------

each_decay = pytest.mark.parametrize("decay_type", ["none", "fixed", "selective"])

# decay_type, use_cls_token, then feature_map, position_embedding_type, classifier_pooling
DERIVED_FOR_IMAGES = [
    ("none", True, "elu", "absolute", "cls"),
    ("none", False, "elu", "absolute", "mean"),
    ("fixed", True, "silu", "none", "mean"),
    ("fixed", False, "silu", "none", "mean"),
    ("selective", True, "silu", "none", "mean"),
    ("selective", False, "silu", "none", "mean"),
]


@pytest.mark.parametrize(("decay_type", "use_cls_token", "feature_map", "positions", "pooling"), DERIVED_FOR_IMAGES)
def test_image_recipe_follows_from_decay_type_and_cls_token(
    decay_type, use_cls_token, feature_map, positions, pooling
):
    config = LionConfig(modality="image", decay_type=decay_type, use_cls_token=use_cls_token)
    assert (config.normalize, config.norm_position, config.attention_output_norm) == (True, "pre", False)
    assert (config.layer_norm_eps, config.hidden_dropout_prob) == (1e-6, 0.0)
    assert config.feature_map == feature_map
    assert config.position_embedding_type == positions
    assert config.classifier_pooling == config.pooling == pooling
    assert (config.scan_order, config.direction, config.diagonal) == ("raster", "both", "balanced")
    assert (config.qkv_bias, config.drop_path_rate) == (True, 0.0)


def test_defaults_of_images_are_those_of_vit():
    config, vit = LionConfig(modality="image"), ViTConfig()
    shared = ["image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    shared += ["intermediate_size", "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "qkv_bias"]
    shared += ["initializer_range"]
    assert {name: getattr(config, name) for name in shared} == {name: getattr(vit, name) for name in shared}


@each_decay
@pytest.mark.parametrize(
    "chosen",
    [
        {"normalize": False, "feature_map": "identity"},
        {"feature_map": "elu"},
        {"feature_map": "silu"},
        {"attention_output_norm": True},
        {"norm_position": "post"},
        {"position_embedding_type": "none"},
        {"position_embedding_type": "absolute"},
        {"classifier_pooling": "cls"},
        {"classifier_pooling": "mean"},
        {"hidden_dropout_prob": 0.1},
        {"layer_norm_eps": 1e-12},
    ],
    ids=str,
)
def test_what_is_set_for_images_is_not_derived(decay_type, chosen):
    config = LionConfig(modality="image", decay_type=decay_type, **chosen)
    assert {name: getattr(config, name) for name in chosen} == chosen


@pytest.mark.parametrize("decay_type, other", [("none", "mean"), ("selective", "cls")])
@pytest.mark.parametrize("name", ["pooling", "classifier_pooling"])
@pytest.mark.parametrize("modality", ["text", "image"])
def test_pooling_is_another_name_of_classifier_pooling(tmp_path, modality, name, decay_type, other):
    default = LionConfig(modality=modality, decay_type=decay_type, **TINY)
    assert default.classifier_pooling == default.pooling != other
    config = LionConfig(modality=modality, decay_type=decay_type, **TINY, **{name: other})
    assert config.classifier_pooling == config.pooling == other
    assert "pooling" not in config.to_dict()

    setattr(default, name, other)
    assert default.classifier_pooling == default.pooling == other

    LionConfig(modality=modality, decay_type=decay_type, **TINY).save_pretrained(tmp_path)
    for cls in (LionConfig, AutoConfig):
        loaded = cls.from_pretrained(tmp_path, **{name: other})
        assert loaded.classifier_pooling == loaded.pooling == other
    head = LionForImageClassification if modality == "image" else LionForSequenceClassification
    head(LionConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    model = head.from_pretrained(tmp_path, **{name: other})
    assert model.config.classifier_pooling == model.lion.pooler.pooling == other

    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["classifier_pooling"]
    path.write_text(json.dumps({**content, name: other}))
    assert LionConfig.from_pretrained(tmp_path).classifier_pooling == other


@pytest.mark.parametrize("name", ["pooling", "classifier_pooling"])
def test_pooling_is_checked_under_both_names(tmp_path, name):
    with pytest.raises(StrictDataclassError, match="max"):
        LionConfig(modality="image", **{name: "max"})
    config = LionConfig(modality="image", **TINY)
    LionForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match="max"):
        LionForImageClassification.from_pretrained(tmp_path, **{name: "max"})
    with pytest.raises(StrictDataclassError, match="max"):  # at the latest when a model is built
        setattr(config, name, "max")
        LionModel(config)


@pytest.mark.parametrize("name", ["pooling", "classifier_pooling"])
def test_cls_pooling_needs_a_cls_token(tmp_path, name):
    config = LionConfig(modality="image", use_cls_token=False, **TINY)
    with pytest.raises(StrictDataclassError, match=r'classifier_pooling="cls".*`use_cls_token` must be True'):
        LionConfig(modality="image", use_cls_token=False, **{name: "cls"})
    LionForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises((StrictDataclassError, ValueError), match="use_cls_token"):
        LionForImageClassification.from_pretrained(tmp_path, **{name: "cls"})


@pytest.mark.parametrize("scan_order", ["serpentine", "hilbert"])
def test_text_has_no_scan_order(scan_order):
    with pytest.raises(StrictDataclassError, match=f'`scan_order` must be "raster" for text.*got "{scan_order}"'):
        LionConfig(scan_order=scan_order)
    assert LionConfig(modality="image", scan_order=scan_order).scan_order == scan_order


@pytest.mark.parametrize("name", ["image_size", "patch_size"])
@pytest.mark.parametrize(
    "size", [0, -4, (16, 0), [16, -1], [16], [16, 16, 16], (16,), "16", 16.5, None, True], ids=str
)
def test_sizes_that_are_neither_a_side_nor_a_pair_are_refused(name, size):
    with pytest.raises(StrictDataclassError, match=name):
        LionConfig(modality="image", **{name: size})


@pytest.mark.parametrize(
    "image_size, patch_size, grid",
    [
        (224, 16, (14, 14)),
        ((32, 48), 16, (2, 3)),
        ([32, 48], [8, 16], (4, 3)),
        (225, 16, (15, 15)),
        ((1, 33), (16, 32), (1, 2)),
    ],
)
def test_patch_grid_has_height_first_and_counts_incomplete_patches(image_size, patch_size, grid):
    assert LionConfig(modality="image", image_size=image_size, patch_size=patch_size).patch_grid == grid


@pytest.mark.parametrize("rate", [-0.1, 1, 1.0, 1.5])
def test_drop_path_rate_outside_of_zero_to_one_is_refused(rate):
    with pytest.raises(StrictDataclassError, match=f"`drop_path_rate` must be at least 0 and below 1, got {rate}"):
        LionConfig(modality="image", drop_path_rate=rate)
    assert LionConfig(modality="image", drop_path_rate=0.99).drop_path_rate == 0.99


IMAGE_NON_DEFAULT = {
    **{name: value for name, value in NON_DEFAULT.items() if name != "norm_position"},
    "image_size": [24, 40],
    "patch_size": [8, 4],
    "num_channels": 1,
    "use_cls_token": False,
    "norm_position": "post",
    "id2label": {0: "cat", 1: "dog", 2: "bird", 3: "ant"},
}


@pytest.mark.parametrize("from_pretrained", [LionConfig.from_pretrained, AutoConfig.from_pretrained])
@pytest.mark.parametrize("scan_order", ["raster", "serpentine", "hilbert"])
@each_decay
def test_image_fields_survive_a_file(tmp_path, decay_type, scan_order, from_pretrained):
    config = LionConfig(modality="image", decay_type=decay_type, scan_order=scan_order, **IMAGE_NON_DEFAULT)
    config.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert type(loaded) is LionConfig
    assert fields(loaded) == fields(config)
    assert {name: getattr(loaded, name) for name in IMAGE_NON_DEFAULT} == IMAGE_NON_DEFAULT
    assert loaded.patch_grid == (3, 10)


def test_a_pair_of_sides_survives_a_file_whether_list_or_tuple(tmp_path):
    LionConfig(modality="image", image_size=(24, 40), patch_size=(8, 4)).save_pretrained(tmp_path)
    loaded = LionConfig.from_pretrained(tmp_path)
    assert (tuple(loaded.image_size), tuple(loaded.patch_size)) == ((24, 40), (8, 4))
    assert LionConfig.from_pretrained(tmp_path, image_size=32).patch_grid == (4, 8)


def vit_parameters(width, depth, *, heads=0, orders=0, gates=False, positions=0, labels=1000):
    """Parameters of a ViT of patches of 16 × 16 pixels with a CLS token, and of its decays, counted by hand."""
    patches = 3 * 16 * 16 * width + width
    layer = 2 * 2 * width  # norms
    layer += width * 3 * width + 3 * width + width * width + width  # queries, keys, values; output
    layer += width * 4 * width + 4 * width + 4 * width * width + width  # feed-forward
    layer += orders * heads * (width + 1 if gates else 1)
    return patches + width + positions * width + depth * layer + 2 * width + labels * width + labels


@pytest.mark.parametrize(
    "size, width, heads, millions", [("tiny", 192, 3, 5.7), ("small", 384, 6, 22.05), ("base", 768, 12, 86.6)]
)
def test_image_sizes_of_the_paper_have_its_parameter_counts(size, width, heads, millions):
    def count(**fields):
        with torch.device("meta"):
            model = LionForImageClassification(LionConfig.from_size(size, modality="image", num_labels=1000, **fields))
        return sum(parameter.numel() for parameter in model.parameters())

    lit = count(decay_type="none")
    assert lit == vit_parameters(width, 12, positions=197)
    assert lit / 1e6 == pytest.approx(millions, abs=0.05)
    assert count(decay_type="fixed") == vit_parameters(width, 12, heads=heads, orders=1)
    assert count(decay_type="fixed", scan_order="serpentine") == vit_parameters(width, 12, heads=heads, orders=2)
    assert count(decay_type="selective") == vit_parameters(width, 12, heads=heads, orders=1, gates=True)
    assert count(decay_type="selective", scan_order="serpentine") == vit_parameters(
        width, 12, heads=heads, orders=2, gates=True
    )
    assert count(decay_type="selective", scan_order="hilbert") == count(decay_type="selective")


@pytest.mark.parametrize("size, width, layers, heads", [("base", 768, 12, 12), ("large", 1024, 24, 16)])
def test_text_sizes_are_those_of_bert(size, width, layers, heads):
    config = LionConfig.from_size(size)
    assert config.modality == "text"
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (width, layers, heads)
    assert config.intermediate_size == 4 * width


def test_fields_go_along_with_a_size_and_win_over_it():
    config = LionConfig.from_size(
        "small", modality="image", decay_type="fixed", scan_order="serpentine", num_hidden_layers=3, pooling="cls"
    )
    assert (config.hidden_size, config.num_hidden_layers, config.decay_type) == (384, 3, "fixed")
    assert (config.scan_order, config.classifier_pooling) == ("serpentine", "cls")


@pytest.mark.parametrize(
    "size, modality", [("huge", "image"), ("large", "image"), ("tiny", "text"), ("base", "audio")]
)
def test_unknown_sizes_are_refused_with_those_of_each_modality(size, modality):
    with pytest.raises(ValueError) as refusal:
        LionConfig.from_size(size, modality=modality)
    for part in [f"'{size}'", f"'{modality}'", "'tiny' (image)", "'small' (image)", "'large' (text)"]:
        assert part in str(refusal.value)
