"""What models and scripts refuse: one error that names the field and what it accepts.

More of the scripts' failures are in the tests of each script, of the configuration and of the operator in theirs.
"""

import functools
import json
import re
from pathlib import Path

import accelerate
import pandas
import PIL.Image
import pytest
import torch
import training_checks
from accelerate.utils import LoggerType
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForImageClassification, BertConfig

from lion_transformers import (
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
from lion_transformers.scripts import pretrain_mlm, run_glue, train_image_classification
from lion_transformers.scripts.arguments import UsageError
from lion_transformers.scripts.training import ModelArguments, build_model, load_config
from lion_transformers.tokenization import build_character_tokenizer


SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 8}
TEXT = {**SIZES, "vocab_size": 50, "max_position_embeddings": 16, "num_labels": 3}
IMAGE = {**SIZES, "modality": "image", "image_size": 8, "patch_size": 4, "num_labels": 3}
IDS = torch.arange(1, 17).view(2, 8)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
EMBEDDINGS = torch.linspace(-1, 1, 2 * 8 * 24).view(2, 8, 24)


def changed(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


def full(value, *shape, dtype=torch.int64):
    return torch.full(shape or (2, 8), value, dtype=dtype)


@functools.cache
def build(cls, **config):
    modality = IMAGE if "Image" in cls.__name__ or config.pop("image", False) else TEXT
    return cls(LionConfig(**{**modality, **config})).eval()


# ---------------------------------------------------------------------------------------------------------------------
# Inputs of models
# ---------------------------------------------------------------------------------------------------------------------

OUT_OF_VOCABULARY = "`input_ids` must be at least 0 and below `vocab_size` = 50, got values from"
IDS_SHAPE = "`input_ids` must be (batch, length), both at least 1, got shape"
EMBEDDINGS_SHAPE = "`inputs_embeds` must be (batch, length, hidden_size = 24), batch and length at least 1, got shape"
MASK_VALUES = "`attention_mask` must be 1 for tokens that take part and 0 for others, got values from"
POSITIONS = "`position_ids` must be at least 0 and below `max_position_embeddings` = 16, got values from"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": changed(IDS, 50)}, f"{OUT_OF_VOCABULARY} 1 to 50"),
        ({"input_ids": changed(IDS, -1)}, f"{OUT_OF_VOCABULARY} -1 to 16"),
        ({"input_ids": IDS.float()}, "`input_ids` must be int64 or int32, got torch.float32"),
        ({"input_ids": IDS.bool()}, "`input_ids` must be int64 or int32, got torch.bool"),
        ({"input_ids": IDS[0]}, f"{IDS_SHAPE} (8,)"),
        ({"input_ids": IDS[None]}, f"{IDS_SHAPE} (1, 2, 8)"),
        ({"input_ids": IDS[:0]}, f"{IDS_SHAPE} (0, 8)"),
        ({"input_ids": IDS[:, :0]}, f"{IDS_SHAPE} (2, 0)"),
        ({"inputs_embeds": EMBEDDINGS[..., :23]}, f"{EMBEDDINGS_SHAPE} (2, 8, 23)"),
        ({"inputs_embeds": EMBEDDINGS[0]}, f"{EMBEDDINGS_SHAPE} (8, 24)"),
        ({"inputs_embeds": EMBEDDINGS[:0]}, f"{EMBEDDINGS_SHAPE} (0, 8, 24)"),
        ({"inputs_embeds": changed(EMBEDDINGS, torch.nan)}, "`inputs_embeds` must be finite, got NaN"),
        ({"inputs_embeds": changed(EMBEDDINGS, torch.inf)}, "`inputs_embeds` must be finite, got NaN or infinite"),
        (
            {"input_ids": IDS, "attention_mask": full(1, 2, 7)},
            "`attention_mask` must be (batch, length) = (2, 8), got",
        ),
        (
            {"input_ids": IDS, "attention_mask": full(2)},
            f"{MASK_VALUES} 2 to 2: neither an additive mask nor one that",
        ),
        ({"input_ids": IDS, "attention_mask": full(-1)}, f"{MASK_VALUES} -1 to -1"),
        ({"inputs_embeds": EMBEDDINGS.long()}, "`inputs_embeds` must be floating point, got torch.int64"),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 2, 2, 3, 3, 3, 0]] * 2)}, f"{MASK_VALUES} 0 to 3"),
        ({"input_ids": IDS, "attention_mask": full(torch.nan, dtype=torch.float32)}, f"{MASK_VALUES} nan to nan"),
        ({"input_ids": IDS, "attention_mask": full(0.5, dtype=torch.float32)}, f"{MASK_VALUES} 0.5 to 0.5"),
        (
            {"input_ids": IDS, "token_type_ids": full(2)},
            "`token_type_ids` must be at least 0 and below `type_vocab_si",
        ),
        (
            {"input_ids": IDS, "token_type_ids": full(-1)},
            "`token_type_ids` must be at least 0 and below `type_vocab_s",
        ),
        (
            {"input_ids": IDS, "token_type_ids": full(0, 2, 7)},
            "`token_type_ids` must be (batch, length) = (2, 8), got",
        ),
        (
            {"input_ids": IDS, "token_type_ids": full(0).float()},
            "`token_type_ids` must be int64 or int32, got torch.f",
        ),
        ({"input_ids": IDS, "position_ids": torch.arange(9, 17)[None]}, f"{POSITIONS} 9 to 16"),
        ({"input_ids": IDS, "position_ids": -torch.arange(8)[None]}, f"{POSITIONS} -7 to 0"),
        (
            {"input_ids": IDS, "position_ids": torch.arange(8.0)[None]},
            "`position_ids` must be integers, got torch.flo",
        ),
        ({"input_ids": IDS, "position_ids": torch.arange(7)[None]}, "`position_ids` must be (batch, length) = (2, 8)"),
        (
            {"input_ids": full(1, 1, 17)},
            "17 tokens, but absolute position embeddings end at `max_position_embeddings`",
        ),
        ({"input_ids": full(1, 1, 17), "seq_idx": full(0, 1, 17)}, f"{POSITIONS} 0 to 16"),
        ({"input_ids": IDS, "seq_idx": full(0).float()}, "`seq_idx` must be integers, got torch.float32"),
        ({"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0.0, 8.0])}, "`cu_seq_lens_q` must be integers, got"),
        (
            {"input_ids": IDS[:1], "cu_seq_lens_q": full(0, 0)},
            "`cu_seq_lens_q` must be (sequences + 1,), got shape (0",
        ),
        (
            {"input_ids": IDS[:1], "cu_seq_lens_q": full(0, 1, 2)},
            "`cu_seq_lens_q` must be (sequences + 1,), got shape",
        ),
        (
            {"input_ids": IDS, "attn_mode": "fast"},
            "`attn_mode` must be one of 'auto', 'parallel', 'chunk', 'rnn', got",
        ),
    ],
)
def test_inputs_of_text_models(inputs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(LionModel, decay_type="none")(**inputs)


TEXT_HEADS = [
    *[LionModel, LionForMaskedLM, LionForSequenceClassification, LionForTokenClassification],
    *[LionForQuestionAnswering, LionForMultipleChoice],
]


@pytest.mark.parametrize("cls", TEXT_HEADS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": changed(IDS, 50)}, f"{OUT_OF_VOCABULARY} 1 to 50"),
        ({"input_ids": changed(IDS, -1)}, f"{OUT_OF_VOCABULARY} -1 to 16"),
        ({"input_ids": IDS.float()}, "`input_ids` must be int64 or int32, got torch.float32"),
        ({"input_ids": IDS[:0], "attention_mask": None}, f"{IDS_SHAPE} (0, 8)"),
        ({"input_ids": IDS[:, :0], "attention_mask": None}, f"{IDS_SHAPE} (2, 0)"),
        ({"attention_mask": full(1, 2, 7)}, "`attention_mask` must be (batch, length) = (2, 8), got shape (2, 7)"),
        ({"attention_mask": full(2)}, f"{MASK_VALUES} 2 to 2"),
        ({"attention_mask": full(0.5, dtype=torch.float32)}, f"{MASK_VALUES} 0.5 to 0.5"),
        (
            {"token_type_ids": full(2)},
            "`token_type_ids` must be at least 0 and below `type_vocab_size` = 2, got values",
        ),
        ({"token_type_ids": full(0, 2, 7)}, "`token_type_ids` must be (batch, length) = (2, 8), got shape (2, 7)"),
        ({"position_ids": torch.arange(9, 17).expand(2, 8)}, f"{POSITIONS} 9 to 16"),
        ({"position_ids": full(0.0, dtype=torch.float32)}, "`position_ids` must be integers, got torch.float32"),
        (
            {"input_ids": full(1, 2, 17), "attention_mask": None},
            "The sequence has 17 tokens, but absolute position embeddings end at `max_position_embeddings` = 16",
        ),
        ({"attn_mode": "fast"}, "`attn_mode` must be one of 'auto', 'parallel', 'chunk', 'rnn', got 'fast'"),
        (
            {"input_ids": None, "inputs_embeds": changed(EMBEDDINGS, torch.nan)},
            "`inputs_embeds` must be finite, got NaN or infinite values",
        ),
        ({"input_ids": None}, "You must specify exactly one of input_ids or inputs_embeds"),
    ],
)
def test_every_text_head_refuses_what_its_encoder_does(cls, changes, message):
    inputs = {"input_ids": IDS, "attention_mask": full(1), **changes}
    if cls is LionForMultipleChoice:  # (batch, choices, length)
        inputs = {name: x[:, None] if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        build(cls, decay_type="none")(**inputs)


@pytest.mark.parametrize(
    "name", ["input_ids", "attention_mask", "token_type_ids", "position_ids", "seq_idx", "labels"]
)
@pytest.mark.parametrize("cls", [LionForMaskedLM, LionForSequenceClassification, LionForMultipleChoice])
def test_lists_are_no_tensors(cls, name):
    ids = IDS[:, None] if cls is LionForMultipleChoice else IDS
    message = f"`{name}` must be a tensor, got <class 'list'>: give tokenizers return_tensors='pt'"
    with pytest.raises(TypeError, match=re.escape(message)):
        build(cls)(**{"input_ids": ids, name: ids.tolist()})


@pytest.mark.parametrize("decay_type", ["fixed", "selective"])
def test_without_a_table_positions_have_no_end_but_are_integers(decay_type):
    model = build(LionModel, decay_type=decay_type)
    assert model(full(1, 1, 40), position_ids=1000 + torch.arange(40)[None]).last_hidden_state.isfinite().all()
    with pytest.raises(ValueError, match=re.escape("`position_ids` must be integers, got torch.float32")):
        model(IDS, position_ids=torch.arange(8.0)[None])


def test_token_ids_may_be_int32():
    model = build(LionModel)
    assert torch.equal(model(IDS.int()).last_hidden_state, model(IDS).last_hidden_state)


@pytest.mark.parametrize("cls", [LionModel, LionForImageClassification, LionForMaskedImageModeling])
@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (PIXELS[:, :2], "`pixel_values` must be (batch, 3 channels, height, width), got shape (2, 2, 8, 8)"),
        (PIXELS[:0], "`pixel_values` must be (batch, 3 channels, height, width), got shape (0, 3, 8, 8)"),
        (changed(PIXELS, torch.nan), "`pixel_values` must be finite, got NaN or infinite values"),
        (changed(PIXELS, -torch.inf), "`pixel_values` must be finite, got NaN or infinite values"),
        (changed(PIXELS, torch.nan).bfloat16(), "`pixel_values` must be finite, got NaN or infinite values"),
        (PIXELS.to(torch.uint8), "`pixel_values` must be floating point, as image processors make, got torch.uint8"),
    ],
)
def test_images(cls, pixels, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(cls, image=True)(pixel_values=pixels)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 5).bool(), "`bool_masked_pos` must be (batch, patches) = (2, 4), got shape (2, 5)"),
        (torch.ones(4).bool(), "`bool_masked_pos` must be (batch, patches) = (2, 4), got shape (4,)"),
        (
            full(0.5, 2, 4, dtype=torch.float32),
            "`bool_masked_pos` must be 1 for patches that are masked and 0 for othe",
        ),
        (
            full(2, 2, 4),
            "`bool_masked_pos` must be 1 for patches that are masked and 0 for others, got values from 2 to",
        ),
    ],
)
def test_masks_of_patches(mask, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(LionForMaskedImageModeling)(pixel_values=PIXELS, bool_masked_pos=mask)


@pytest.mark.parametrize("cls", [LionModel, LionForImageClassification, LionForMaskedImageModeling])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (full(1, 2, 4), "`attention_mask` must be (batch, length) = (2, 5), got shape (2, 4)"),  # the CLS token is one
        (full(3, 2, 5), f"{MASK_VALUES} 3 to 3"),
    ],
)
def test_masks_of_images(cls, mask, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(cls, image=True)(pixel_values=PIXELS, attention_mask=mask)


ANY_LABEL = "from 0 to {}, or -100 where nothing is to be predicted, got"


@pytest.mark.parametrize(
    ("cls", "config", "labels", "message"),
    [
        (LionForMaskedLM, {}, changed(IDS, 50), f"`labels` must be {ANY_LABEL.format(49)} 50"),
        (LionForMaskedLM, {}, changed(IDS, -1), f"`labels` must be {ANY_LABEL.format(49)} -1"),
        (LionForMaskedLM, {}, IDS[:, :7], "`labels` must be of shape (2, 8), one for each output, got (2, 7)"),
        (LionForMaskedLM, {}, IDS.T, "`labels` must be of shape (2, 8), one for each output, got (8, 2)"),
        (LionForMaskedLM, {}, IDS.float(), "`labels` must be int64, got torch.float32"),
        (LionForMaskedLM, {"sparse_prediction": True}, IDS[:, :7], "`labels` must be of shape (2, 8), one for each"),
        (LionForTokenClassification, {}, full(3), f"`labels` must be {ANY_LABEL.format(2)} 3"),
        (
            LionForTokenClassification,
            {},
            full(0, 2),
            "`labels` must be of shape (2, 8), one for each output, got (2,)",
        ),
        (LionForSequenceClassification, {}, full(3, 2), f"`labels` must be {ANY_LABEL.format(2)} 3"),
        (LionForSequenceClassification, {}, full(-1, 2), f"`labels` must be {ANY_LABEL.format(2)} -1"),
        (LionForSequenceClassification, {}, full(0, 3), "`labels` must be of shape (2,), one for each output, got (3"),
        (LionForSequenceClassification, {}, full(0, 1, 2), "`labels` must be of shape (2,), one for each output, got"),
        (LionForSequenceClassification, {}, full(0, 2).int(), "`labels` must be int64, got torch.int32"),
        (
            LionForSequenceClassification,
            {"problem_type": "multi_label_classification"},
            full(0, 2).float(),
            "`labels` must be (outputs, num_labels) = (2, 3), got shape (2,) of torch.float32 (class ids are int64)",
        ),
        (
            LionForSequenceClassification,
            {"problem_type": "multi_label_classification"},
            full(0, 2, 3),
            "`labels` must be floating point for several labels at once, got torch.int64",
        ),
        (LionForSequenceClassification, {"num_labels": 1}, full(0, 3).float(), "(outputs, num_labels) = (2, 1), got"),
        (LionForSequenceClassification, {"num_labels": 1}, full(torch.nan, 2, dtype=torch.float32), "must be finite"),
        (
            LionForSequenceClassification,
            {},
            full(torch.inf, 2, 3, dtype=torch.float32),
            "`labels` must be finite, got",
        ),
    ],
)
def test_labels_of_text_models(cls, config, labels, message):
    model = build(cls, **config)
    with pytest.raises(ValueError, match=re.escape(message)):
        model(IDS, labels=labels)


def test_floating_labels_of_the_shape_of_classes_are_refused_by_a_model_that_has_not_seen_any():
    model = LionForSequenceClassification(LionConfig(**TEXT))
    with pytest.raises(ValueError, match=re.escape("(outputs, num_labels) = (2, 3), got shape (2,) of torch.float32")):
        model(IDS, labels=torch.zeros(2))


def test_labels_of_choices_may_have_an_axis_of_one():
    model, labels = build(LionForMultipleChoice), torch.tensor([1, 0])
    ids = torch.stack([IDS, IDS.flip(-1)])
    assert torch.equal(model(ids, labels=labels[:, None]).loss, model(ids, labels=labels).loss)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_labels_of_sequences_may_have_an_axis_of_one(num_labels):
    model = build(LionForSequenceClassification, num_labels=num_labels)
    labels = full(0, 2)
    assert torch.equal(model(IDS, labels=labels[:, None]).loss, model(IDS, labels=labels).loss)


def test_choices():
    model = build(LionForMultipleChoice)
    with pytest.raises(
        ValueError, match=re.escape("`input_ids` must be (batch, num_choices, length), got shape (2, 8)")
    ):
        model(IDS)
    with pytest.raises(ValueError, match=re.escape(f"`labels` must be {ANY_LABEL.format(1)} 2")):
        model(IDS[None], labels=torch.tensor([2]))
    with pytest.raises(ValueError, match=re.escape("`labels` must be of shape (1,), one for each output, got (2,)")):
        model(IDS[None], labels=torch.tensor([0, 1]))


def test_ends_of_answers():
    model, good = build(LionForQuestionAnswering), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=re.escape("`start_positions` must be of shape (2,), one for each output")):
        model(IDS, start_positions=good[:1], end_positions=good)
    with pytest.raises(ValueError, match=re.escape("`end_positions` must be int64, got torch.float32")):
        model(IDS, start_positions=good, end_positions=good.float())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (full(3, 2), f"`labels` must be {ANY_LABEL.format(2)} 3"),
        (full(0, 3), "`labels` must be of shape (2,), one for each output, got (3,)"),
        (full(0, 2).int(), "`labels` must be int64, got torch.int32"),
        (full(-1, 2), f"`labels` must be {ANY_LABEL.format(2)} -1"),
    ],
)
def test_labels_of_images(labels, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(LionForImageClassification)(pixel_values=PIXELS, labels=labels)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_dropout_prob": 1.5}, "`hidden_dropout_prob` must be from 0 to 1, got 1.5"),
        ({"attention_probs_dropout_prob": -0.1}, "`attention_probs_dropout_prob` must be from 0 to 1, got -0.1"),
        ({"classifier_dropout": torch.nan}, "`classifier_dropout` must be from 0 to 1, got nan"),
        ({"initializer_range": -0.1}, "`initializer_range` must be at least 0, got -0.1"),
        ({"max_position_embeddings": 0}, "`max_position_embeddings` must be at least 1, got 0"),
        ({"pad_token_id": 50}, "`pad_token_id` must be None or from 0 to `vocab_size` - 1 = 49, got 50"),
        ({"pad_token_id": -1}, "`pad_token_id` must be None or from 0 to `vocab_size` - 1 = 49, got -1"),
    ],
)
def test_fields_of_the_configuration(fields, message):
    with pytest.raises(StrictDataclassError, match=re.escape(message)):
        LionConfig(**{**TEXT, **fields})


def test_weights_may_begin_at_zero():
    model = LionModel(LionConfig(**IMAGE, position_embedding_type="absolute", initializer_range=0.0))
    assert model.embeddings.cls_token.count_nonzero() == model.embeddings.position_embeddings.count_nonzero() == 0


def test_an_unknown_activation():
    with pytest.raises(ValueError, match=r"`hidden_act` must be one of gelu, .*, got 'geluu'"):
        LionModel(LionConfig(**TEXT, hidden_act="geluu"))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments of scripts
# ---------------------------------------------------------------------------------------------------------------------

TINY_LION = ["--config", ",".join(f"{name}={value}" for name, value in SIZES.items())]
pretrain = functools.partial(training_checks.run_script, pretrain_mlm)
pretraining_fails = functools.partial(training_checks.fails_with, pretrain_mlm)


@pytest.fixture
def corpus(isolated_run):
    """./text.txt, ./tokenizer, and the arguments to pretrain on them."""
    build_character_tokenizer("bytes").save_pretrained("tokenizer")
    Path("text.txt").write_text("the cat sees a bird in the garden\n" * 40)
    files = ["--train_file", "text.txt", "--validation_file", "text.txt", "--output_dir", "out"]
    rest = ["--tokenizer_name", "tokenizer", "--max_seq_length", "16", "--report_to", "none", "--max_steps", "1"]
    return [*TINY_LION, *files, *rest]


@pytest.fixture
def any_run(corpus):
    """Arguments that would do, by script, a new model's first; beside the files of `corpus` ./SST-2 and ./train."""
    Path("SST-2").mkdir()
    for name in ("train", "dev"):
        Path(f"SST-2/{name}.tsv").write_text("sentence\tlabel\n" + "good\t1\nbad\t0\n" * 8)
    for label in ("a", "b"):
        Path("train", label).mkdir(parents=True)
        for number in range(4):
            PIL.Image.new("RGB", (8, 8)).save(Path("train", label, f"{number}.png"))
    few = ["--output_dir", "out", "--report_to", "none", "--max_steps", "1", "--per_device_train_batch_size", "4"]
    glue = ["--data_dir", ".", "--task_name", "sst2", "--tokenizer_name", "tokenizer", "--max_seq_length", "16"]
    config = f"{TINY_LION[1]},modality=image,image_size=8,patch_size=4"
    return {
        pretrain_mlm: [*TINY_LION, "--train_file", "text.txt", *corpus[6:]],
        run_glue: [*TINY_LION, *glue, *few],
        train_image_classification: ["--config", config, "--train_dir", "train", "--validation_dir", "train", *few],
    }


OF_ALL = {
    **{name: ["0", "-1"] for name in ["per_device_train_batch_size", "global_train_batch_size", "eval_steps"]},
    **{name: ["0", "-1"] for name in ["per_device_eval_batch_size", "logging_steps", "save_total_limit"]},
    "save_steps": ["0", "-1"],
    "max_steps": ["0", "-2"],
    **{name: ["-1", "nan", "inf"] for name in ["adam_epsilon", "weight_decay", "max_grad_norm"]},
    **{name: ["-0.1", "1", "nan"] for name in ["adam_beta1", "adam_beta2"]},
    **{name: ["-1"] for name in ["max_nonfinite_steps", "dataloader_num_workers"]},
    "seed": ["-1", "4294967296"],
    "num_train_epochs": ["0", "-1", "nan", "inf"],
}
OF_EACH = {
    pretrain_mlm: {
        **{name: ["0", "-1"] for name in ["max_seq_length", "max_eval_samples", "shuffle_buffer_size"]},
        **{name: ["0", "-1"] for name in ["preprocessing_num_workers", "pad_vocab_to_multiple_of"]},
        **{name: ["-0.1", "1", "nan"] for name in ["warmup_ratio", "final_lr_ratio"]},
        **{name: ["0", "1", "nan"] for name in ["mlm_probability", "eval_mlm_probability"]},
        "learning_rate": ["-1", "nan", "inf"],
        "validation_split_percentage": ["-1", "100", "nan"],
    },
    run_glue: {
        "learning_rate": ["-1", "nan", "inf"],
        "seeds": ["-1", "4294967296"],
        "early_stopping_patience": ["0"],
        "warmup_ratio": ["-0.1", "1", "nan"],
        "max_seq_length": ["0"],
    },
    train_image_classification: {
        **{name: ["0", "-1"] for name in ["max_train_samples", "max_eval_samples", "repeated_augmentation"]},
        **{name: ["-1", "nan", "inf"] for name in ["mixup", "cutmix", "color_jitter", "warmup_epochs"]},
        **{name: ["-0.1", "1", "nan"] for name in ["label_smoothing", "ema_decay"]},
        **{name: ["0", "1.1", "nan"] for name in ["min_crop_scale", "crop_pct"]},
        **{name: ["0", "-1", "nan", "inf"] for name in ["base_learning_rate", "distillation_tau"]},
        **{name: ["-0.1", "1.1", "nan"] for name in ["distillation_alpha", "horizontal_flip", "random_erasing"]},
    },
}


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (module, name, value)
        for module, own in OF_EACH.items()
        for name, values in {**OF_ALL, **own}.items()
        for value in values
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_read(module, name, value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["--output_dir", "out", "--dataset_name", "nobody/nothing", f"--{name}", value]
    error = training_checks.fails_with(module, monkeypatch, capsys, *argv)
    assert f"error: {name} must be " in error and "got " in error
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (pretrain_mlm, ["--adam_epsilon", "inf"], "adam_epsilon must be at least 0 and finite, got inf."),
        (pretrain_mlm, ["--save_steps", "0"], "save_steps must be at least 1, got 0."),
        (pretrain_mlm, ["--max_steps", "0"], "max_steps must be at least 1, or -1 for num_train_epochs, got 0."),
        (pretrain_mlm, ["--num_train_epochs", "inf"], "num_train_epochs must be above 0 and finite, got inf."),
        (pretrain_mlm, ["--mlm_probability", "0"], "mlm_probability must be above 0 and below 1, got 0.0."),
        (run_glue, ["--save_steps", "0"], "save_steps must be at least 1, got 0."),
        (
            train_image_classification,
            ["--horizontal_flip", "2"],
            "horizontal_flip must be at least 0 and at most 1, got 2.0.",
        ),
        (train_image_classification, ["--crop_pct", "0"], "crop_pct must be above 0 and at most 1, got 0.0."),
    ],
)
def test_what_is_accepted_is_said(module, arguments, message, monkeypatch, capsys):
    argv = ["--output_dir", "out", "--dataset_name", "nobody/nothing", *arguments]
    error = training_checks.fails_with(module, monkeypatch, capsys, *argv)
    assert error == f"{Path(module.__file__).name}: error: {message}"


def test_words_that_belong_to_no_argument_are_refused_with_what_they_follow(tmp_path, monkeypatch, capsys):
    fails = functools.partial(pretraining_fails, monkeypatch, capsys)
    assert fails("--output_dir", "out", "--max_steps", "1", "2").endswith("unknown argument 2 after --max_steps.")
    (tmp_path / "recipe.yaml").write_text("max_steps: [1, 2]\n")
    recipe = ["--recipe", str(tmp_path / "recipe.yaml"), "--output_dir", "out"]
    assert fails(*recipe).endswith("unknown argument 2 after --max_steps.")
    assert fails("out").endswith("required: --output_dir/--output-dir")
    assert fails("--output_dir=out", "text.txt").endswith("unknown argument text.txt after --output_dir=out.")


def test_names_in_a_mapping_are_text(monkeypatch, capsys):
    error = pretraining_fails(monkeypatch, capsys, "--output_dir", "out", "--config", "{1: 2}")
    assert error.endswith("argument --config/--config_overrides: names must be text, got 1")


def test_a_path_that_cannot_be_is_one_sentence(isolated_run, monkeypatch, capsys):
    error = pretraining_fails(monkeypatch, capsys, "--output_dir", "x" * 300)
    assert error.startswith("pretrain_mlm.py: error: [Errno 36] File name too long: 'xxx")


@pytest.mark.parametrize("module", OF_EACH)
def test_half_precision_with_a_scaler_is_refused_on_a_cpu(any_run, module, monkeypatch, capsys):
    """Accelerate would compute in float32 without a word."""
    error = training_checks.fails_with(module, monkeypatch, capsys, *any_run[module], "--mixed_precision", "fp16")
    assert error.endswith("error: mixed_precision fp16 needs a GPU: on a CPU give bf16 or no.")


@pytest.mark.parametrize("module", OF_EACH)
def test_a_tracker_that_is_not_installed_is_refused(any_run, module, monkeypatch, capsys):
    """Accelerate would do without it. Nor is it skipped where another one is there."""
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    arguments = [*any_run[module], "--report_to", "tensorboard", "wandb"]
    error = training_checks.fails_with(module, monkeypatch, capsys, *arguments)
    assert error.endswith("error: report_to wandb needs its package, which is not installed.")


@pytest.mark.parametrize("module", OF_EACH)
def test_a_family_that_does_not_exist_is_refused_with_one_that_does(any_run, module, monkeypatch, capsys):
    error = training_checks.fails_with(module, monkeypatch, capsys, *any_run[module], "--model_type", "lino")
    assert re.search(r"error: unknown model_type lino: did you mean .*\blion\b", error)


@pytest.mark.parametrize("module", OF_EACH)
@pytest.mark.parametrize("how", ["new", "config_name", "model_name_or_path"])
def test_a_misspelt_field_of_a_configuration_is_refused(any_run, module, how, monkeypatch, capsys):
    build(LionForImageClassification if module is train_image_classification else LionModel).save_pretrained("saved")
    arguments = any_run[module] if how == "new" else [*any_run[module][2:], f"--{how}", "saved"]
    error = training_checks.fails_with(module, monkeypatch, capsys, *arguments, "--config", "chunk_sise=8")
    assert error.endswith("LionConfig has no field `chunk_sise`: did you mean `chunk_size`?")


@pytest.mark.parametrize("how", ["new", "saved"])
def test_a_misspelt_field_of_another_family_is_refused(any_run, how, monkeypatch, capsys):
    BertConfig(num_hidden_layers=1).save_pretrained("saved")
    arguments = [
        *any_run[pretrain_mlm][2:],
        *(["--model_type", "bert"] if how == "new" else ["--config_name", "saved"]),
    ]
    error = pretraining_fails(monkeypatch, capsys, *arguments, "--config", "num_hiden_layers=2")
    assert error.endswith("error: the configuration of bert has no num_hiden_layers: did you mean num_hidden_layers?")


def test_a_saved_configuration_keeps_settings_that_it_does_not_know(tmp_path):
    BertConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    config = load_config(str(tmp_path), {"image_size": 224, "num_hidden_layers": 3})
    assert (config.image_size, config.num_hidden_layers) == (224, 3)


@pytest.mark.parametrize("module", OF_EACH)
def test_a_batch_larger_than_the_data_is_refused(any_run, module, monkeypatch, capsys):
    arguments = [*any_run[module], "--per_device_train_batch_size", "1000"]
    error = training_checks.fails_with(module, monkeypatch, capsys, *arguments)
    assert "batch of 1000" in error and error.endswith(" a smaller per_device_train_batch_size.")


@pytest.mark.parametrize("how", ["model_name_or_path", "config_name"])
@pytest.mark.parametrize("module", OF_EACH)
def test_a_model_of_the_other_modality_is_refused(any_run, module, how, monkeypatch, capsys):
    is_image = module is train_image_classification
    build(LionForMaskedLM if is_image else LionForImageClassification).save_pretrained("other")
    arguments = [*any_run[module][2:], f"--{how}", "other"]
    error = training_checks.fails_with(module, monkeypatch, capsys, *arguments)
    needed, got = ("image", "text") if is_image else ("text", "image")
    assert error.endswith(f'needs a configuration with modality="{needed}", got "{got}"')
    assert "cannot make the model other: LionFor" in error


# ---------------------------------------------------------------------------------------------------------------------
# Files of scripts
# ---------------------------------------------------------------------------------------------------------------------

IN_WORKERS = [["--streaming", "--dataloader_num_workers", "1"], ["--preprocessing_num_workers", "2"]]


def test_weights_that_are_cut_are_one_sentence(tmp_path):
    build(LionForImageClassification).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UsageError, match=r"cannot make the model .*: .*not fully covered"):
        build_model(ModelArguments(model_name_or_path=str(tmp_path)), AutoModelForImageClassification, {})
    with pytest.raises(UsageError, match=r"cannot load the teacher .*: .*not fully covered"):
        train_image_classification.load_teacher(str(tmp_path), None, None, None)


@pytest.mark.parametrize("name", ["header.csv", "header.tsv"])
@pytest.mark.parametrize("options", [[], ["--streaming"]], ids=str)
def test_a_table_that_has_only_a_header_is_refused(corpus, monkeypatch, capsys, name, options):
    Path(name).write_text("text\tlabel\n" if name.endswith("tsv") else "text,label\n")
    error = pretraining_fails(monkeypatch, capsys, *corpus, "--train_file", name, "--validation_file", name, *options)
    assert error.startswith(
        f"pretrain_mlm.py: error: {name} " + ("is empty" if options else "has no rows: it has a header")
    )


def test_a_file_of_null_bytes_is_named(corpus, monkeypatch, capsys):
    Path("null.txt").write_bytes(bytes(5000))
    error = pretraining_fails(monkeypatch, capsys, *corpus, "--train_file", "null.txt")
    assert error.startswith("pretrain_mlm.py: error: null.txt has no rows")


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("text\n", [], "valid.csv has no rows: it has a header"),
        ("text\n", ["--streaming"], "valid.csv is empty."),
        ("words\nwith\n", [], "cannot load train.csv valid.csv: Couldn't cast words"),
        ("words\nwith\n", ["--streaming"], "valid.csv has no column text; its columns are words."),
    ],
)
def test_the_validation_file_is_named_where_it_is_at_fault(corpus, monkeypatch, capsys, text, options, sentence):
    Path("train.csv").write_text("text\n" + "some words\n" * 40)
    Path("valid.csv").write_text(text)
    files = ["--train_file", "train.csv", "--validation_file", "valid.csv", *options]
    assert f"error: {sentence}" in pretraining_fails(monkeypatch, capsys, *corpus, *files)


def test_tables_of_glue_and_of_images_that_have_only_a_header_are_refused(any_run, monkeypatch, capsys):
    Path("tables/sst2").mkdir(parents=True)
    for split in ("train", "validation"):
        Path(f"tables/sst2/{split}.csv").write_text("sentence,label\n")
    arguments = [*any_run[run_glue], "--data_dir", "tables"]
    error = training_checks.fails_with(run_glue, monkeypatch, capsys, *arguments)
    assert "error: tables/sst2 has no rows: it has a header but nothing below it" in error
    Path("images.csv").write_text("image,label\n")
    arguments = [*TINY_LION, "--train_file", "images.csv", "--output_dir", "out"]
    error = training_checks.fails_with(train_image_classification, monkeypatch, capsys, *arguments)
    assert "error: images.csv has no rows: it has a header but nothing below it" in error


@pytest.mark.parametrize(("share", "what"), [("0", "evaluate"), ("99", "train")])
def test_a_share_that_leaves_nothing_is_refused(any_run, monkeypatch, capsys, share, what):
    runs = {
        pretrain_mlm: any_run[pretrain_mlm],
        train_image_classification: [*any_run[train_image_classification], "--validation_dir", ""],
    }
    for module, arguments in runs.items():
        arguments = [*arguments, "--validation_split_percentage", share]
        error = training_checks.fails_with(module, monkeypatch, capsys, *arguments)
        assert f"validation_split_percentage {float(share)} leaves none to {what} on" in error


def test_statistics_of_channels_are_finite(any_run, monkeypatch, capsys):
    arguments = [*any_run[train_image_classification], "--image_mean", "nan", "0", "0"]
    error = training_checks.fails_with(train_image_classification, monkeypatch, capsys, *arguments)
    assert error.endswith("image_mean and image_std need 3 finite numbers each, the latter above 0.")


@pytest.mark.parametrize("streaming", [[], ["--streaming"]], ids=["map", "stream"])
def test_binary_garbage_is_no_text(corpus, monkeypatch, capsys, streaming):
    Path("garbage.txt").write_bytes(bytes(range(256)) * 40)
    error = pretraining_fails(monkeypatch, capsys, *corpus, "--train_file", "garbage.txt", *streaming)
    assert "cannot load garbage.txt" in error and "utf-8" in error


@pytest.mark.parametrize("name", ["garbage.csv", "garbage.jsonl", "garbage.parquet"])
def test_binary_garbage_is_no_table(corpus, monkeypatch, capsys, name):
    Path(name).write_bytes(bytes(range(256)) * 40)
    files = ["--train_file", name, "--validation_file", name]
    assert f"cannot load {name}" in pretraining_fails(monkeypatch, capsys, *corpus, *files)
    files = ["--train_file", f"good{name[7:]}", name, "--validation_file", name]
    good = pandas.DataFrame({"text": ["the cat sees a bird in the garden"] * 40})
    good.to_csv("good.csv"), good.to_parquet("good.parquet"), good.to_json("good.jsonl", orient="records", lines=True)
    assert f"cannot load {name}: " in pretraining_fails(monkeypatch, capsys, *corpus, *files)


@pytest.mark.parametrize("options", [[], ["--streaming"], IN_WORKERS[0]], ids=str)
def test_what_is_not_text_among_texts_is_shown(corpus, monkeypatch, capsys, options):
    """JSON has a type for every value."""
    rows = [{"text": "the cat sees a bird in the garden"}] * 40
    Path("good.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("mixed.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"text": 5}])))
    files = ["--train_file", "mixed.jsonl", "--validation_file", "good.jsonl"]
    error = pretraining_fails(monkeypatch, capsys, *corpus, *files, *options)
    assert error == "pretrain_mlm.py: error: column text has 5, not text."


@pytest.mark.parametrize("options", [[], ["--streaming"]], ids=str)
def test_a_validation_text_without_a_sequence_is_refused(corpus, monkeypatch, capsys, options):
    Path("blank.txt").write_text("\n \n\n")
    error = pretraining_fails(monkeypatch, capsys, *corpus, "--validation_file", "blank.txt", *options)
    assert error.endswith("the validation text is too small for one sequence of 16 tokens.")


@pytest.mark.parametrize("path", [None, ""])
def test_a_row_without_an_image_is_none(isolated_run, monkeypatch, capsys, path):
    PIL.Image.new("RGB", (8, 8)).save("x.png")
    rows = [{"image": "x.png", "label": "a"}, {"image": "x.png", "label": "b"}, {"image": path, "label": "b"}]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = ["--train_file", "rows.jsonl", "--output_dir", "out", *TINY_LION]
    error = training_checks.fails_with(train_image_classification, monkeypatch, capsys, *argv)
    assert error.endswith("error: rows.jsonl has a row without image.")


def test_missing_cells_are_no_documents(corpus, monkeypatch):
    Path("cells.csv").write_text("label,text\n" + "1,the cat sees a bird in the garden\n2,\n3\n" * 30)
    pretrain(monkeypatch, *corpus, "--train_file", "cells.csv", "--validation_file", "cells.csv")
    assert json.loads(Path("out/results.json").read_text())["after"]["eval_targets"] > 0


@pytest.mark.parametrize("options", [[], ["--streaming"], ["--packing"], ["--line_by_line"], *IN_WORKERS], ids=str)
def test_a_line_of_50_megabytes_is_refused(corpus, monkeypatch, capsys, options):
    Path("long.txt").write_text("the dog\n" + "the cat sees a bird " * 2_500_000 + "\nthe dog\n")
    error = pretraining_fails(monkeypatch, capsys, *corpus, "--train_file", "long.txt", *options)
    assert error.startswith("pretrain_mlm.py: error: a document has 50,000,000 characters, more than the 10,000,000 t")


def test_a_text_of_50_megabytes_is_refused_in_glue(any_run, monkeypatch, capsys):
    Path("SST-2/dev.tsv").write_text("sentence\tlabel\ngood\t1\n" + "the cat sees a bird " * 2_500_000 + "\t1\n")
    error = training_checks.fails_with(run_glue, monkeypatch, capsys, *any_run[run_glue])
    assert error.endswith(
        "row 1 of the validation split of SST-2 has 50,000,000 characters in column sentence, more than the 10,000,000"
        " that are tokenised at once."
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tsv", bytes(range(256)) * 9, "cannot load data/sst2/train.tsv: 'utf-8' codec can't decode byte 0x80"),
        ("csv", bytes(range(256)) * 9, "cannot load data/sst2/train.csv: "),
        (
            "csv",
            b"sentence,label\ngood,1\nbad,\n",
            "row 1 of the train split of data/sst2 has the label '', not one of",
        ),
        ("csv", b"sentence,label\ngood,1\n,0\n", "row 1 of data/sst2/train.csv has no text in column sentence: fill"),
        ("csv", b"text,label\ngood,1\n", "data/sst2 has no column sentence; its columns are text, label."),
        ("csv", b"sentence,label\ngood,2\n", "has the label 2, not one of negative, positive."),
    ],
)
def test_tables_of_glue_that_are_none(any_run, monkeypatch, capsys, name, content, message):
    Path("data/sst2").mkdir(parents=True)
    for split in ("train", "dev" if name == "tsv" else "validation"):
        Path(f"data/sst2/{split}.{name}").write_bytes(content)
    arguments = [*any_run[run_glue], "--data_dir", "data"]
    assert message in training_checks.fails_with(run_glue, monkeypatch, capsys, *arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(range(256)) * 9, "cannot load images.csv: "),
        (b"image,label\ntrain/a/1.png,\ntrain/b/1.png,b\n", "row 0 has no label."),
        (b"image,label\ntrain/a/9.png,a\n", "there is no image train/a/9.png, which images.csv names."),
        (b"image,label\ntext.txt,a\ntrain/b/1.png,b\n", "cannot read the image text.txt: cannot identify image file"),
        (
            b"image,kind\ntrain/a/1.png,a\n",
            "cannot tell which of image, kind in images.csv ",
        ),
        (
            b"image,label\ntrain/a/1.png,0.5\n",
            " holds float64, neither class names nor numbers.",
        ),
    ],
)
def test_tables_of_images_that_are_none(any_run, monkeypatch, capsys, content, message):
    Path("images.csv").write_bytes(content)
    few = ["--per_device_train_batch_size", "2", "--report_to", "none", "--repeated_augmentation", "1"]
    files = ["--train_file", "images.csv", "--validation_file", "images.csv", "--output_dir", "out"]
    arguments = [*any_run[train_image_classification][:2], *files, *few]
    assert message in training_checks.fails_with(train_image_classification, monkeypatch, capsys, *arguments)


def test_labels_that_the_model_does_not_have(any_run, monkeypatch, capsys):
    Path("other/c").mkdir(parents=True)
    PIL.Image.new("RGB", (8, 8)).save("other/c/1.png")
    arguments = [*any_run[train_image_classification], "--validation_dir", "other"]
    error = training_checks.fails_with(train_image_classification, monkeypatch, capsys, *arguments)
    assert error.endswith(
        "the label c in train other is not among the 2 that the model has or the training data have."
    )
