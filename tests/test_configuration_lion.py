"""LionConfig: what it derives, what it refuses, and that it survives files."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, BertConfig, DistilBertConfig, ViTConfig

from lion_transformers import LionConfig, LionModel


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
    ],
)
def test_unknown_choice_is_refused_with_field_value_and_choices(field, value, accepted):
    with pytest.raises(StrictDataclassError) as refusal:
        LionConfig(**{field: value})
    for part in [field, value, *accepted]:
        assert part in str(refusal.value)


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
    "field", ["hidden_size", "num_attention_heads", "chunk_size", "vocab_size", "type_vocab_size"]
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
