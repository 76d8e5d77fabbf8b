"""The command that converts original checkpoints: what it reads, assumes and refuses, and what its folders compute."""

import argparse
import fractions
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from modeling_checks import (
    GOLDEN,
    GOLDEN_CASES,
    GOLDEN_IMAGES,
    GOLDEN_TEXTS,
    MODES,
    assert_close,
    assert_gives_golden_outputs,
    golden_settings,
    golden_state,
    golden_task,
    load_golden,
)
from PIL import Image
from safetensors.torch import save_file
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from lion_transformers import LionConfig, LionForImageClassification
from lion_transformers.scripts import convert_original_checkpoint as script
from lion_transformers.scripts.arguments import UsageError, run
from lion_transformers.scripts.convert_original_checkpoint import convert_original_checkpoint, main


AUTO_CLASSES = {
    "mlm": AutoModelForMaskedLM,
    "sequence-classification": AutoModelForSequenceClassification,
    "image-classification": AutoModelForImageClassification,
}
LAYER = "model.bert.encoder.layer.1"


def write(state, path, is_image=True):
    torch.save({"model": state, "epoch": 3} if is_image else {"state": {"model": state, "timestamp": {}}}, path)
    return path


def write_changed(name, path, remove=(), **tensors):
    """A golden checkpoint without some of its tensors and with others."""
    state = {key: x for key, x in golden_state(name).items() if key not in remove}
    return write({**state, **tensors}, path, name in GOLDEN_IMAGES)


def flags(name):
    return [part for key, value in golden_settings(name).items() for part in (f"--{key}", str(value))]


def convert(output_dir, name, *arguments, checkpoint=None):
    """Run the command on a golden checkpoint, or on `checkpoint` with its settings; the model in the folder."""
    checkpoint = checkpoint or GOLDEN / GOLDEN_CASES[name]["checkpoint"]
    argv = ["--checkpoint", checkpoint, "--task", golden_task(name), "--output_dir", output_dir, *arguments]
    main([str(part) for part in argv])
    return AUTO_CLASSES[golden_task(name)].from_pretrained(output_dir).eval()


def refusal(tmp_path, *arguments, checkpoint=None, task="mlm"):
    """What the command says. It has written nothing."""
    before = sorted(tmp_path.rglob("*"))
    argv = [
        "--checkpoint",
        checkpoint or GOLDEN / "mlm_s.pt",
        "--task",
        task,
        "--output_dir",
        tmp_path / "new" / "out",
    ]
    with pytest.raises(UsageError) as caught:
        main([str(part) for part in [*argv, *arguments]])
    assert sorted(tmp_path.rglob("*")) == before
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Golden checkpoints as folders, by name."""
    folder = tmp_path_factory.mktemp("converted")
    for name in GOLDEN_CASES:
        convert(folder / name, name, *flags(name))
    return folder


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_the_folder_gives_the_outputs_of_the_public_reference(name, mode, converted):
    model = AUTO_CLASSES[golden_task(name)].from_pretrained(converted / name, attn_mode=mode).eval()
    assert_gives_golden_outputs(model, name, None)


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_nothing_but_weights_settings_and_processor_is_in_the_folder(name, converted):
    files = {file.name for file in (converted / name).iterdir() if file.suffix != ".py"}
    processor = {"preprocessor_config.json"} if name in GOLDEN_IMAGES else set()
    assert files == {"config.json", "model.safetensors", *processor}
    assert {path.name for path in converted.iterdir()} == set(GOLDEN_CASES)


@pytest.mark.parametrize("name", GOLDEN_IMAGES)
def test_image_settings_are_those_of_the_public_reference(name, converted):
    official = GOLDEN_CASES[name]["official"]
    model = AutoModelForImageClassification.from_pretrained(converted / name)
    config = model.config
    assert config.modality == "image"
    assert config.decay_type == {"Lit": "none", "Decay": "fixed", "Selective": "selective"}[official["mask_type"]]
    assert config.scan_order == {"Normal": "raster", "S": "serpentine"}[official["order"]]
    assert config.position_embedding_type == ("absolute" if official["pos_emb"] else "none")
    assert config.classifier_pooling == ("cls" if official["cls_tok"] else "mean")
    ours = [config.image_size, config.patch_size, config.hidden_size, config.num_hidden_layers]
    assert ours == [official[key] for key in ("img_size", "patch_size", "embed_dim", "depth")]
    assert config.num_attention_heads == official["num_heads"]
    assert config.intermediate_size == official["embed_dim"] * official["mlp_ratio"]
    assert (config.qkv_bias, config.num_labels) == (official["qkv_bias"], official["num_classes"])
    assert config.layer_norm_eps == official["layer_norm_eps"]
    assert model.num_parameters() == sum(x.numel() for x in golden_state(name).values())


@pytest.mark.parametrize("name", GOLDEN_TEXTS)
def test_text_settings_are_those_of_the_public_reference(name, converted):
    official = GOLDEN_CASES[name]["official"]
    config = AUTO_CLASSES[golden_task(name)].from_pretrained(converted / name).config
    assert config.modality == "text"
    assert config.decay_type == {"lion-lit": "none", "lion-d": "fixed", "lion-s": "selective"}[official["arch_type"]]
    assert config.attention_output_norm == official["layer_norm_after"]
    absolute = official["position_embedding_type"] == "absolute"
    assert config.position_embedding_type == ("absolute" if absolute else "none")
    same = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size type_vocab_size hidden_act"
    for key in [*same.split(), "max_position_embeddings", "layer_norm_eps"]:
        assert getattr(config, key) == official[key], key
    if name == "cls_s":
        assert (config.num_labels, config.classifier_pooling) == (3, "cls")


@pytest.mark.parametrize("name", GOLDEN_TEXTS[1:])
def test_text_models_with_decays_need_no_settings(name, tmp_path):
    assert_gives_golden_outputs(convert(tmp_path / "out", name), name, "chunk")


def test_orders_are_joined_rows_before_columns():
    state = golden_state("vision_decay_s")
    rows, columns = (state[f"blocks.1.attn.{name}"] for name in ("a_i", "a2_i"))
    model = load_golden("vision_decay_s")
    assert model.lion.layers[1].attention.decay_bias.tolist() == [*rows.tolist(), *columns.tolist()]
    assert not model.training


def test_a_process_of_its_own(tmp_path):
    command = [sys.executable, script.__file__, "--checkpoint", GOLDEN / "mlm_s.pt", "--task", "mlm"]
    done = subprocess.run([*command, "--output_dir", tmp_path / "out"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Where DeepSpeed is installed, Accelerate imports it and it says on stdout which accelerator it chose.
    first, *rest = [line for line in done.stdout.splitlines() if "[real_accelerator.py" not in line]
    assert first == "LION-S as LionForMaskedLM: 2 layers of 48, 3 heads, 45,558 parameters"
    assert rest[0] == "assumed: layer_norm_eps=1e-12, position_embedding_type=none, hidden_act=gelu"
    assert rest[1].startswith("left out") and "bert.embeddings.position_embeddings.weight" in rest[1]
    assert rest[2].startswith(f"saved in {tmp_path / 'out'}; the file holds no tokenizer")
    assert_gives_golden_outputs(AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval(), "mlm_s", "rnn")


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    argv = ["--checkpoint", str(tmp_path / "gone.pt"), "--task", "mlm", "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["convert_original_checkpoint.py", *argv])
    with pytest.raises(SystemExit) as caught:
        run(main)
    printed = capsys.readouterr()
    assert caught.value.code == 2 and printed.out == ""
    assert printed.err == f"convert_original_checkpoint.py: error: checkpoint {tmp_path / 'gone.pt'} is not there.\n"


# ---------------------------------------------------------------------------------------------------------------------
# What is read, told and assumed
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("mlm_s", ["--decay_type", "fixed"], "decay_type=fixed (the tensors say selective)"),
        ("mlm_lit", ["--decay_type", "selective"], "decay_type=selective (the tensors say none)"),
        ("mlm_s", ["--num_attention_heads", "4"], "num_attention_heads=4 (the tensors say 3)"),
        ("mlm_d", ["--attention_output_norm", "true"], "attention_output_norm=True (the tensors say False)"),
        ("mlm_lit", ["--attention_output_norm", "false"], "attention_output_norm=False (the tensors say True)"),
        ("mlm_s", ["--scan_order", "serpentine"], "scan_order=serpentine (the tensors say raster)"),
        ("cls_s", ["--num_labels", "2"], "num_labels=2 (the tensors say 3)"),
        ("vision_decay", ["--scan_order", "serpentine"], "scan_order=serpentine (the tensors say raster)"),
        ("vision_decay_s", ["--scan_order", "raster"], "scan_order=raster (the tensors say serpentine)"),
        (
            "vision_lit",
            ["--position_embedding_type", "none"],
            "position_embedding_type=none (the tensors say absolute)",
        ),
        (
            "vision_decay",
            ["--num_labels", "7", "--decay_type", "none"],
            "num_labels=7 (the tensors say 5), decay_type",
        ),
        (
            "vision_decay",
            ["--config", "hidden_size=64,modality=text"],
            "hidden_size=64 (the tensors say 48), modality",
        ),
        ("vision_lit", ["--image_size", "40", "--pooling", "cls"], "pos_embed is (1, 17, 48), not (1, 26, 48)"),
        ("mlm_s", ["--image_size", "32"], "image_size says nothing about a model for mlm"),
        ("mlm_s", ["--num_labels", "2"], "num_labels says nothing about a model for mlm"),
        (
            "vision_lit",
            ["--num_attention_heads", "5", "--pooling", "cls"],
            "must be a multiple of `num_attention_heads`",
        ),
        ("mlm_s", ["--config", "hidden_act=sine"], "cannot make the model"),
        ("mlm_s", ["--config", "pooling=max"], "cannot make the model"),
        ("mlm_s", ["--use_ema"], "use_ema is for image models"),
    ],
)
def test_a_setting_that_contradicts_the_file_is_refused(name, arguments, said, tmp_path):
    if name.endswith("lit") and "--num_attention_heads" not in arguments:
        arguments = [*arguments, "--num_attention_heads", "3"]
    checkpoint = GOLDEN / GOLDEN_CASES[name]["checkpoint"]
    assert said in refusal(tmp_path, *arguments, checkpoint=checkpoint, task=golden_task(name))


def test_settings_that_agree_with_the_file_pass(tmp_path):
    told = ["--decay_type", "selective", "--scan_order", "serpentine", "--position_embedding_type", "absolute"]
    told += ["--num_labels", "5", "--num_attention_heads", "3", "--attention_output_norm", "false"]
    model = convert(tmp_path / "out", "vision_selective_s", *told, "--pooling", "cls", "--layer_norm_eps", "1e-6")
    assert_gives_golden_outputs(model, "vision_selective_s", "chunk")


def test_other_settings_are_taken_over(tmp_path):
    arguments = ["--layer_norm_eps", "1e-5", "--config", "hidden_act=relu,layer_norm_eps=1e-3", "--pooling", "cls"]
    config = convert(tmp_path / "out", "mlm_s", *arguments).config
    assert (config.layer_norm_eps, config.hidden_act, config.classifier_pooling) == (1e-5, "relu", "cls")


def test_without_decays_heads_of_64_are_assumed_or_the_number_is_asked_for(tmp_path):
    refused = refusal(tmp_path, checkpoint=GOLDEN / "mlm_lit.pt")
    assert "48 is no multiple of the paper's 64: say --num_attention_heads" in refused
    state = {name: torch.cat([x] * 4) if x.shape[0] == 48 else x for name, x in golden_state("mlm_lit").items()}
    state = {name: torch.cat([x] * 4, 1) if x.shape[1:] == (48,) else x for name, x in state.items()}
    state["model.bert.encoder.layer.0.output.dense.weight"] = torch.zeros(192, 96)
    state["model.bert.encoder.layer.1.output.dense.weight"] = torch.zeros(192, 96)
    conversion = convert_original_checkpoint(state, "mlm")
    assert conversion.model.config.hidden_size == 192
    assert conversion.model.config.num_attention_heads == conversion.assumed["num_attention_heads"] == 3


def test_pooling_of_images_is_the_mean_under_decays_and_asked_for_without(tmp_path):
    refused = refusal(
        tmp_path, "--num_attention_heads", 3, checkpoint=GOLDEN / "vision_lit.pth", task="image-classification"
    )
    assert "say --pooling" in refused
    assert convert(tmp_path / "out", "vision_selective").config.classifier_pooling == "mean"


def test_image_size_is_that_of_the_positions_or_224():
    for name, size in [("vision_selective_s", 32), ("vision_decay", 224)]:
        conversion = convert_original_checkpoint(golden_state(name), "image-classification")
        assert conversion.model.config.image_size == conversion.assumed["image_size"] == size


def test_positions_that_are_not_square_need_a_size(tmp_path):
    checkpoint = write_changed("vision_selective_s", tmp_path / "wide.pth", pos_embed=torch.ones(1, 7, 48))
    refused = refusal(tmp_path, checkpoint=checkpoint, task="image-classification")
    assert "6 position embeddings are of no square image: say --config '{image_size: [HEIGHT, WIDTH]}'" in refused
    model = convert(
        tmp_path / "out", "vision_selective_s", "--config", "{image_size: [16, 24]}", checkpoint=checkpoint
    )
    assert list(model.config.image_size) == [16, 24]
    assert model(torch.zeros(1, 3, 16, 24)).logits.shape == (1, 5)


def test_positions_of_text_are_as_told(tmp_path):
    table = golden_state("mlm_s")["model.bert.embeddings.position_embeddings.weight"]
    model = convert(tmp_path / "with", "mlm_s", "--position_embedding_type", "absolute")
    assert torch.equal(model.lion.embeddings.position_embeddings.weight, table)
    model = convert(tmp_path / "without", "mlm_lit", *flags("mlm_lit"), "--position_embedding_type", "none")
    assert model.lion.embeddings.position_embeddings is None


def test_biases_and_cls_token_are_there_if_the_file_has_them():
    state = golden_state("vision_decay")
    without = {name: x for name, x in state.items() if name != "cls_token" and not name.endswith("qkv.bias")}
    config = convert_original_checkpoint(without, "image-classification").model.config
    assert (config.qkv_bias, config.use_cls_token) == (False, False)


def test_an_output_layer_of_its_own_stays_its_own(tmp_path):
    name = "model.cls.predictions.decoder.weight"
    weight = golden_state("mlm_s")[name] + 1
    checkpoint = write_changed("mlm_s", tmp_path / "untied.pt", **{name: weight})
    model = convert(tmp_path / "out", "mlm_s", checkpoint=checkpoint)
    assert torch.equal(model.decoder.weight, weight)
    words = golden_state("mlm_s")["model.bert.embeddings.word_embeddings.weight"]
    assert torch.equal(model.lion.embeddings.word_embeddings.weight, words)


# ---------------------------------------------------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------------------------------------------------


def write_recipe(path, **content):
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_a_recipe_tells_the_architecture_and_arguments_win(tmp_path):
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        model_type="lion",
        config={"num_attention_heads": 3, "pooling": "cls", "image_size": 32, "drop_path_rate": 0.1},
        mixup=0.8,
        learning_rate=1e-3,
    )
    model = convert(tmp_path / "out", "vision_lit", "--recipe", recipe, "--pooling", "mean")
    assert model.config.drop_path_rate == 0.1
    assert_gives_golden_outputs(model, "vision_lit", "parallel")


def test_a_recipe_may_name_the_arguments_themselves(tmp_path):
    recipe = write_recipe(tmp_path / "recipe.yaml", num_attention_heads=3, pooling="mean", task="image-classification")
    main(
        ["--checkpoint", str(GOLDEN / "vision_lit.pth"), "--recipe", str(recipe), "--output_dir", str(tmp_path / "a")]
    )
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "a").eval()
    assert_gives_golden_outputs(model, "vision_lit", "rnn")


@pytest.mark.parametrize(
    ("recipe", "task", "name", "wrong"),
    [
        ("train_image_tiny_lion_s_natural", "image-classification", "vision_selective_s.pth", "hidden_size=192"),
        ("train_image_tiny_lion_s", "image-classification", "vision_selective_s.pth", "scan_order=raster"),
        ("pretrain_text_base_lion_s", "mlm", "mlm_s.pt", "hidden_size=768"),
        ("pretrain_text_base_lion_d", "mlm", "mlm_s.pt", "decay_type=fixed"),
    ],
)
def test_recipes_of_the_package_are_checked_against_the_file(recipe, task, name, wrong, tmp_path):
    refused = refusal(tmp_path, "--recipe", recipe, checkpoint=GOLDEN / name, task=task)
    assert refused.startswith("the checkpoint contradicts ") and wrong in refused


def test_a_misspelt_recipe_key_is_refused(tmp_path):
    recipe = write_recipe(tmp_path / "recipe.yaml", num_attention_head=3)
    assert "did you mean num_attention_heads?" in refusal(tmp_path, "--recipe", recipe)


# ---------------------------------------------------------------------------------------------------------------------
# Every tensor is accounted for
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("vision_lit", "norm.bias"),
        ("vision_selective", "blocks.1.attn.a_i.weight"),
        ("vision_selective_s", "blocks.0.attn.a2_i.bias"),
        ("mlm_s", f"{LAYER}.intermediate.dense.weight"),
        ("mlm_s", "model.bert.encoder.layer.0.attention.self.key.weight"),
        ("mlm_d", "model.cls.predictions.decoder.weight"),
        ("mlm_lit", "model.bert.embeddings.position_embeddings.weight"),
        ("mlm_lit", f"{LAYER}.attention.self.layer_norm.bias"),
        ("cls_s", "model.bert.pooler.dense.bias"),
        ("cls_s", "model.classifier.weight"),
    ],
)
def test_a_missing_tensor_is_named(name, lost, tmp_path):
    checkpoint = write_changed(name, tmp_path / "file", remove=[lost])
    refused = refusal(tmp_path, *flags(name), checkpoint=checkpoint, task=golden_task(name))
    assert refused.endswith(f"it lacks {lost.removeprefix('model.')}.")


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("vision_lit", "blocks.0.attn.gate"),
        ("vision_decay", "blocks.1.attn.a_i.weight"),
        ("mlm_d", "model.bert.encoder.layer.0.attention.self.Wa_i.weight"),
        ("mlm_d", "model.bert.pooler.dense.weight"),
        ("cls_s", "model.cls.predictions.decoder.weight"),
    ],
)
def test_an_unexpected_tensor_is_named(name, extra, tmp_path):
    checkpoint = write_changed(name, tmp_path / "file", **{extra: torch.zeros(3, 48)})
    refused = refusal(tmp_path, *flags(name), checkpoint=checkpoint, task=golden_task(name))
    assert refused.endswith(f"it has {extra.removeprefix('model.')}.")


def test_all_missing_and_unexpected_tensors_are_listed(tmp_path):
    lost = [f"blocks.{i}.norm{n}.weight" for i in range(2) for n in (1, 2)]
    extra = {"blocks.0.attn.gate": torch.zeros(3), "dist_token": torch.zeros(1, 1, 48)}
    checkpoint = write_changed("vision_decay", tmp_path / "file", remove=lost, **extra)
    refused = refusal(tmp_path, checkpoint=checkpoint, task="image-classification")
    assert refused.endswith(f"it lacks {', '.join(lost)} and has {', '.join(extra)}.")


def test_a_layer_that_is_missing_is_noticed(tmp_path):
    state = golden_state("vision_decay")
    state = {name.replace("blocks.1", "blocks.2"): x for name, x in state.items()}
    refused = refusal(tmp_path, checkpoint=write(state, tmp_path / "file"), task="image-classification")
    assert "it lacks blocks.1.attn.a_i, " in refused and "has blocks.2." in refused


def test_all_tensors_of_wrong_shape_are_listed(tmp_path):
    wrong = {"head.bias": torch.zeros(4), "blocks.1.attn.qkv.weight": torch.zeros(48, 144)}
    checkpoint = write_changed("vision_decay", tmp_path / "file", **wrong)
    refused = refusal(tmp_path, checkpoint=checkpoint, task="image-classification")
    assert "blocks.1.attn.qkv.weight is (48, 144), not (144, 48)" in refused
    assert "head.bias is (4,), not (5,)" in refused
    flat = write_changed("vision_decay", tmp_path / "file", **{"patch_embed.proj.weight": torch.zeros(48, 192)})
    refused = refusal(tmp_path, checkpoint=flat, task="image-classification")
    assert "patch_embed.proj.weight in the checkpoint has 2 axes, not 4" in refused


def test_output_biases_that_differ_are_refused(tmp_path):
    bias = {"model.cls.predictions.bias": torch.ones(96)}
    refused = refusal(tmp_path, checkpoint=write_changed("mlm_s", tmp_path / "file", **bias))
    assert "two output biases, cls.predictions.bias and cls.predictions.decoder.bias, that differ" in refused


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("name", ["mlm_s", "vision_selective"])
def test_names_of_wrapped_models_are_unwrapped(name, prefix):
    state = {prefix + key: x for key, x in golden_state(name).items()}
    model = convert_original_checkpoint(state, golden_task(name), golden_settings(name)).model
    assert_gives_golden_outputs(model, name, "chunk")


def test_a_tensor_under_a_wrapped_and_a_plain_name_is_refused():
    state = {**golden_state("vision_decay"), "module.norm.bias": torch.zeros(48)}
    with pytest.raises(UsageError, match=r"holds norm\.bias twice, once as module\.norm\.bias"):
        convert_original_checkpoint(state, "image-classification")


# ---------------------------------------------------------------------------------------------------------------------
# Averaged weights
# ---------------------------------------------------------------------------------------------------------------------


def test_averaged_weights_are_taken_when_asked_for(tmp_path):
    state = golden_state("vision_decay")
    averaged = {name: 2 * x for name, x in state.items()}
    torch.save({"model": state, "model_ema": averaged}, tmp_path / "both.pth")
    for arguments, right in [([], state), (["--use_ema"], averaged)]:
        folder = tmp_path / f"out{len(arguments)}"
        model = convert(folder, "vision_decay", *arguments, checkpoint=tmp_path / "both.pth")
        assert torch.equal(model.classifier.weight, right["head.weight"])
    torch.save({"model_ema": averaged}, tmp_path / "one.pth")
    task = "image-classification"
    assert "averaged weights are there: --use_ema" in refusal(tmp_path, checkpoint=tmp_path / "one.pth", task=task)
    refused = refusal(tmp_path, "--use_ema", checkpoint=GOLDEN / "vision_decay.pth", task=task)
    assert "holds no tensors at model_ema" in refused


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def damaged_files(folder):
    whole = (GOLDEN / "mlm_s.pt").read_bytes()
    legacy = folder / "legacy"
    torch.save({"state": {"model": golden_state("mlm_s")}}, legacy, _use_new_zipfile_serialization=False)
    contents = {
        "empty": b"",
        "start": whole[:100],
        "truncated": whole[: len(whole) // 2],
        "legacy-start": legacy.read_bytes()[:60],
        "legacy-truncated": legacy.read_bytes()[:-100],
        "text": b"Lorem ipsum dolor sit amet\n" * 9,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    save_file({"model.bert.pooler.dense.bias": torch.zeros(3)}, folder / "safetensors")
    return [*contents, "safetensors"]


@pytest.mark.parametrize("arguments", [[], ["--allow_pickle"]])
def test_damaged_and_foreign_files_are_refused(arguments, tmp_path):
    for name in damaged_files(tmp_path):
        refused = refusal(tmp_path, *arguments, checkpoint=tmp_path / name)
        said = "it is not what torch.save writes, or not whole."
        assert refused == f"cannot read checkpoint {tmp_path / name}: {said}", name


def test_files_of_the_first_format_of_torch_are_read(tmp_path):
    state = golden_state("mlm_s")
    torch.save({"state": {"model": state}}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    model = convert(tmp_path / "out", "mlm_s", checkpoint=tmp_path / "legacy.pt")
    assert_gives_golden_outputs(model, "mlm_s", "chunk")


def test_what_is_no_file_is_refused(tmp_path):
    assert "gone.pt is not there" in refusal(tmp_path, checkpoint=tmp_path / "gone.pt")
    assert f"{tmp_path} is a folder" in refusal(tmp_path, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("content", "task", "place"),
    [
        (golden_state("mlm_s"), "mlm", "state → model"),
        (golden_state("vision_decay"), "image-classification", "at model,"),
        ({"state": {"model": {}}}, "mlm", "state → model"),
        ({"state": {"model": {"bias": 3}}}, "mlm", "state → model"),
        ({"state": [1]}, "sequence-classification", "state → model"),
        ([torch.zeros(2)], "image-classification", "at model,"),
        (torch.zeros(2), "mlm", "state → model"),
    ],
)
def test_files_without_the_originals_layout_are_refused(content, task, place, tmp_path):
    torch.save(content, tmp_path / "file")
    refused = refusal(tmp_path, checkpoint=tmp_path / "file", task=task)
    assert "the checkpoint holds no tensors at" in refused and place in refused


SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}


def test_other_models_in_the_originals_layout_are_refused(tmp_path):
    bert = write(BertForMaskedLM(BertConfig(**SMALL, vocab_size=99)).state_dict(), tmp_path / "bert", is_image=False)
    refused = refusal(tmp_path, checkpoint=bert)
    assert "which is BERT and not LION" in refused and "--attention_output_norm false" in refused
    vit = write(ViTForImageClassification(ViTConfig(**SMALL, image_size=32)).state_dict(), tmp_path / "vit")
    refused = refusal(tmp_path, checkpoint=vit, task="image-classification")
    assert "it lacks patch_embed.proj.weight" in refused
    refused = refusal(tmp_path, checkpoint=GOLDEN / "mlm_s.pt", task="sequence-classification")
    assert "it lacks classifier.weight" in refused
    both = {"model": golden_state("vision_decay"), "state": {"model": golden_state("vision_decay")}}
    torch.save(both, tmp_path / "both")
    assert "it lacks bert.embeddings.word_embeddings.weight" in refusal(tmp_path, checkpoint=tmp_path / "both")


def test_a_lit_without_norms_is_converted_when_it_is_said_to_be_one(tmp_path):
    norms = [name for name in golden_state("mlm_lit") if "self.layer_norm" in name]
    checkpoint = write_changed("mlm_lit", tmp_path / "file", remove=norms)
    assert "which is BERT" in refusal(tmp_path, "--num_attention_heads", 3, checkpoint=checkpoint)
    arguments = ["--num_attention_heads", 3, "--attention_output_norm", "false"]
    config = convert(tmp_path / "out", "mlm_lit", *arguments, checkpoint=checkpoint).config
    assert (config.decay_type, config.attention_output_norm) == ("none", False)


def test_more_than_tensors_is_read_only_when_allowed(tmp_path):
    content = {"model": golden_state("vision_decay"), "rate": fractions.Fraction(1, 1000)}
    for name, is_zip in [("file.pth", True), ("legacy.pth", False)]:
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=is_zip)
        refused = refusal(tmp_path, checkpoint=tmp_path / name, task="image-classification")
        assert "holds more than tensors (fractions.Fraction)" in refused and "--allow_pickle" in refused
        folder = tmp_path / f"out-{name}"
        model = convert(folder, "vision_decay", "--allow_pickle", "--image_size", 32, checkpoint=tmp_path / name)
        assert_gives_golden_outputs(model, "vision_decay", "chunk")


def test_the_arguments_of_a_run_beside_its_tensors_need_no_permission(tmp_path):
    content = {"model": golden_state("vision_decay"), "args": argparse.Namespace(lr=1e-3), "epoch": 300}
    torch.save(content, tmp_path / "file.pth")
    model = convert(tmp_path / "out", "vision_decay", "--image_size", 32, checkpoint=tmp_path / "file.pth")
    assert_gives_golden_outputs(model, "vision_decay", "chunk")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.to_sparse(), "is no plain tensor of numbers (torch.float32, torch.sparse_coo)"),
        (lambda x: x.to("meta"), "is no plain tensor of numbers"),
        (lambda x: x.to(torch.complex64), "is no plain tensor of numbers (torch.complex64"),
        (lambda x: x.to(torch.int8), "holds torch.int8, not floating-point numbers"),
        (lambda x: x / 0, "holds numbers that are not finite"),
    ],
)
def test_tensors_that_cannot_be_weights_are_refused(change, said, tmp_path):
    state = golden_state("vision_decay")
    state["blocks.0.mlp.fc1.weight"] = change(state["blocks.0.mlp.fc1.weight"])
    torch.save({"model": state}, tmp_path / "file.pth")
    refused = refusal(tmp_path, "--image_size", "32", checkpoint=tmp_path / "file.pth", task="image-classification")
    assert f"blocks.0.mlp.fc1.weight in the checkpoint {said}" in refused


def test_a_flipped_bit_is_found(tmp_path):
    content = bytearray((GOLDEN / "mlm_s.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "file.pt").write_bytes(content)
    refused = refusal(tmp_path, checkpoint=tmp_path / "file.pt")
    assert f"checkpoint {tmp_path / 'file.pt'} is damaged" in refused and "--allow_pickle" not in refused


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "is not YAML"),
        ("chunk_sise=3", "LionConfig has no field chunk_sise: did you mean chunk_size"),
        ("dtype=foo", "cannot make the model"),
        ("pad_token_id=99999", "cannot make the model"),
        ("hidden_act=blah", "cannot make the model"),
        ("layer_norm_eps=-1.0", "`layer_norm_eps` must be above 0, got -1.0"),
        ("layer_norm_eps=.nan", "`layer_norm_eps` must be above 0, got nan"),
    ],
)
def test_settings_that_make_no_model_are_refused(config, said, tmp_path):
    assert said in refusal(tmp_path, "--config", config)


def test_a_square_may_be_told_by_both_sides(tmp_path):
    model = convert(tmp_path / "out", "vision_decay", "--config", "{patch_size: [8, 8], image_size: [32, 32]}")
    assert (model.config.patch_size, model.config.image_size) == (8, 32)


def test_pickled_code_does_not_run_unasked(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"state": {"model": golden_state("mlm_s")}, "trap": Trap()}, tmp_path / "file")
    assert "--allow_pickle" in refusal(tmp_path, checkpoint=tmp_path / "file")
    assert not (tmp_path / "sprung").exists()


def test_a_class_that_is_not_installed_is_named(tmp_path, monkeypatch):
    (tmp_path / "trainer_of_old.py").write_text("class State: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import trainer_of_old

    torch.save({"model": golden_state("vision_decay"), "x": trainer_of_old.State()}, tmp_path / "file")
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "trainer_of_old")
    refused = refusal(tmp_path, "--allow_pickle", checkpoint=tmp_path / "file", task="image-classification")
    assert "No module named 'trainer_of_old'" in refused


# ---------------------------------------------------------------------------------------------------------------------
# The folder
# ---------------------------------------------------------------------------------------------------------------------


def test_a_folder_with_files_is_refused_or_written_into_when_asked_for(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]")
    argv = ["--checkpoint", str(GOLDEN / "mlm_s.pt"), "--task", "mlm", "--output_dir", str(tmp_path)]
    with pytest.raises(UsageError, match="is not empty; --overwrite_output_dir"):
        main(argv)
    assert [file.name for file in tmp_path.iterdir()] == ["vocab.txt"]
    assert_gives_golden_outputs(convert(tmp_path, "mlm_s", "--overwrite_output_dir"), "mlm_s", "chunk")
    convert(tmp_path, "mlm_d", "--overwrite_output_dir")
    assert_gives_golden_outputs(AutoModelForMaskedLM.from_pretrained(tmp_path).eval(), "mlm_d", "chunk")
    assert (tmp_path / "vocab.txt").read_text() == "[PAD]"


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(tmp_path, "--output_dir", tmp_path / "file")
    assert "cannot write" in refusal(tmp_path, "--output_dir", tmp_path / "file" / "out")


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, folder):
        assert (Path(folder) / "model.safetensors").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ViTImageProcessor, "save_pretrained", fail)
    checkpoint, task = GOLDEN / "vision_decay.pth", "image-classification"
    refused = refusal(tmp_path, "--output_dir", tmp_path / "out", checkpoint=checkpoint, task=task)
    assert "cannot write" in refused and "No space left on device" in refused


def test_what_a_killed_conversion_left_is_in_nobodys_way(tmp_path):
    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "half").write_text("")
    convert(tmp_path / "out", "mlm_s")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "half").exists()


def test_the_image_processor_evaluates_as_the_original(converted):
    """Resized to 8/7 of the model's size, cropped from the centre, normalised as for ImageNet."""
    processor = AutoImageProcessor.from_pretrained(converted / "vision_selective")
    assert (processor.size.shortest_edge, processor.crop_size.height, processor.crop_size.width) == (36, 32, 32)
    grey = processor(Image.new("RGB", (80, 50), (128, 128, 128)), return_tensors="pt")["pixel_values"]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert_close(grey, ((128 / 255 - mean) / std)[None, :, None, None].expand(1, 3, 32, 32), 1e-4)


def test_what_was_assumed_and_what_cannot_be_told_apart_is_printed(tmp_path, capsys):
    convert(tmp_path / "a", "vision_selective_s")
    natural = capsys.readouterr().out.splitlines()
    assert natural[0].startswith("LION-S♮ as LionForImageClassification: 2 layers of 48, 3 heads, ")
    assert natural[1] == "assumed: image_size=32, classifier_pooling=mean, layer_norm_eps=1e-06, hidden_act=gelu"
    assert "a ViT" not in "".join(natural)
    convert(tmp_path / "b", "vision_lit", "--num_attention_heads", 3, "--pooling", "cls", "--image_size", 32)
    lit = capsys.readouterr().out
    assert "LION-LIT" in lit and "a ViT has tensors of the same names" in lit
    told = ["--layer_norm_eps", "1e-12", "--position_embedding_type", "none", "--config", "hidden_act=gelu"]
    convert(tmp_path / "c", "mlm_s", *told)
    assert "assumed: " not in capsys.readouterr().out


def test_models_of_the_paper_sizes_are_recognised_by_their_recipe(tmp_path):
    config = LionConfig.from_size("tiny", modality="image", scan_order="serpentine", num_hidden_layers=12)
    model = LionForImageClassification(config)
    names = {name: script.original_names(name, config) for name in model.state_dict()}
    state = {
        part: chunk.clone()
        for name, x in model.state_dict().items()
        for part, chunk in zip(names[name], x.chunk(len(names[name])), strict=True)
    }
    recipe = ["--recipe", "train_image_tiny_lion_s_natural"]
    again = convert(tmp_path / "out", "vision_selective_s", *recipe, checkpoint=write(state, tmp_path / "tiny.pth"))
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    assert (again.config.drop_path_rate, again.config.num_attention_heads) == (0.1, 3)
