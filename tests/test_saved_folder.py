"""Saved folders, as they travel to the Hub: they load alone, in every class, by every way of loading, bit for bit."""

import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from folder_tasks import answer, example, outputs_of
from modeling_checks import (
    DECAYS,
    assert_carries_code,
    assert_close,
    assert_same_state,
    build_from,
    decay_parameters,
)
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertTokenizer,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
)
from transformers.dynamic_module_utils import get_imports

import lion_transformers
from lion_transformers import LionConfig, LionForMaskedLM, LionModel
from lion_transformers.modeling_lion import AUTO_CLASSES, LionEmbeddings, LionImageEmbeddings, LionLayer


SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "num_labels": 3}
CONFIGS = {
    "text": {"vocab_size": 96, "max_position_embeddings": 40},
    "image": {"modality": "image", "image_size": (12, 10), "patch_size": (4, 2), "scan_order": "serpentine"},
}
CODE = {"attention_lion.py", "configuration_lion.py", "modeling_lion.py", "scan_order_lion.py"}
FITTING = {
    modality: {name: cls for name, cls in AUTO_CLASSES.items() if modality in cls.input_modalities}
    for modality in CONFIGS
}
each_class = pytest.mark.parametrize(
    ("modality", "auto_class"),
    [(modality, auto_class) for modality, classes in FITTING.items() for auto_class in classes],
)


def make_config(modality="text", decay_type="selective", **overrides):
    return LionConfig(decay_type=decay_type, **{**SIZES, **CONFIGS[modality], **overrides})


def build(auto_class, modality="text", **overrides):
    return build_from(AUTO_CLASSES[auto_class], make_config(modality, **overrides))


def from_pretrained(auto_class, folder, **kwargs):
    return getattr(transformers, auto_class).from_pretrained(folder, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Folders that stand alone
# ---------------------------------------------------------------------------------------------------------------------


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_distributions(*roots):
    """What pip would install for `roots`."""
    needed, pending = {}, list(roots)
    while pending:
        name = normalized(pending.pop())
        if name not in needed:
            try:
                needed[name] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # for other platforms
            requirements = [text for text in needed[name].requires or () if "extra ==" not in text]
            pending += [re.match(r"[\w.-]+", text)[0] for text in requirements]
    return needed.values()


@pytest.fixture(scope="module")
def make_site_packages(tmp_path_factory):
    """Makes folders with torch, transformers, safetensors, what else is named, and what all these need."""

    def make(*extra):
        folder = tmp_path_factory.mktemp("site-packages")
        for distribution in needed_distributions("torch", "transformers", "safetensors", *extra):
            installed = distribution.locate_file("")
            for name in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
                if not (folder / name).exists():
                    (folder / name).symlink_to(installed / name)
        return folder

    return make


@pytest.fixture
def run_task(tmp_path, make_site_packages):
    """Runs a task of folder_tasks.py with empty caches; returns the lines that it printed."""

    def run(task, *arguments, packages=()):
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
        variables |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        script = Path(__file__).with_name("folder_tasks.py")
        command = [sys.executable, "-I", "-S", script, make_site_packages(*packages), task, *arguments]
        result = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return run


def test_folders_load_alone_in_every_class_and_so_do_those_saved_from_there(tmp_path, run_task):
    """Cases F8 to F10."""
    generations = [tmp_path / f"generation-{number}" for number in range(3)]
    models = {
        f"{auto_class}-{modality}": build(auto_class, modality)
        for modality, classes in FITTING.items()
        for auto_class in classes
    }
    assert len(models) == 9
    for name, model in models.items():
        model.save_pretrained(generations[0] / name)
    for source, destination in itertools.pairwise(generations):
        run_task("reload", source, destination)
        for name, model in models.items():
            assert_carries_code(destination / name)
            first, again = (load_file(folder / name / "model.safetensors") for folder in (generations[0], destination))
            assert_same_state(again, first)
            assert torch.equal(load_file(f"{destination / name}.outputs")["outputs"], answer(model)), name
            Path(f"{destination / name}.outputs").unlink()


@pytest.mark.parametrize("modality", CONFIGS)
def test_f9_an_encoder_loads_alone_into_every_head_and_trains(tmp_path, run_task, modality):
    build("AutoModel", modality).save_pretrained(tmp_path / "encoder")
    heads = [auto_class for auto_class in FITTING[modality] if auto_class != "AutoModel"]
    lines = run_task("every_head", tmp_path / "encoder", *heads, packages=["accelerate"])
    assert [line for line in lines if line in heads] == heads


def test_a_configuration_without_a_model_leads_to_every_class(tmp_path, run_task):
    make_config().save_pretrained(tmp_path / "config")
    assert_carries_code(tmp_path / "config")
    assert run_task("configuration_alone", tmp_path / "config", tmp_path / "again") == ["LionModel"]
    assert_carries_code(tmp_path / "again")


def test_without_trust_transformers_refuses(tmp_path, run_task):
    build("AutoModelForMaskedLM").save_pretrained(tmp_path / "model")
    classes = ["AutoConfig", "AutoModel", "AutoModelForMaskedLM"]
    lines = run_task("without_trust", tmp_path / "model", *classes)
    refusals = [line for line in lines if "refused:" in line]
    assert len(refusals) == len(classes)
    assert all("custom code which must be executed" in line and "trust_remote_code=True" in line for line in refusals)


def test_tokenizers_and_image_processors_need_no_code(tmp_path, run_task):
    for modality in CONFIGS:
        build("AutoModel", modality).save_pretrained(tmp_path / modality)
    vocab = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])}
    BertTokenizer(vocab=vocab).save_pretrained(tmp_path / "text")
    ViTImageProcessor().save_pretrained(tmp_path / "image")
    assert run_task("without_code", "AutoTokenizer", tmp_path / "text") == ["BertTokenizer"]
    packages = ["torchvision", "pillow"]
    lines = run_task("without_code", "AutoImageProcessor", tmp_path / "image", packages=packages)
    assert lines == ["ViTImageProcessor"]


def test_code_imports_torch_and_transformers_and_what_these_always_bring():
    files = sorted(Path(lion_transformers.__file__).parent.glob("*_lion.py"))
    assert {file.name for file in files} == CODE
    imported = {name for file in files for name in get_imports(file)} - sys.stdlib_module_names
    assert imported == {"torch", "transformers", "huggingface_hub"}


def test_where_the_library_is_installed_its_classes_are_used(tmp_path):
    build("AutoModelForMaskedLM").save_pretrained(tmp_path)
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path)) is LionForMaskedLM


OWN_CODE = """
from lion_transformers import LionConfig, LionModel


class MyConfig(LionConfig):
    model_type = "my-lion"


class MyModel(LionModel):
    config_class = MyConfig
"""


def test_classes_that_users_derive_are_saved_beside_the_family(tmp_path, monkeypatch):
    (tmp_path / "my_lion.py").write_text(OWN_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    import my_lion

    config = my_lion.MyConfig(**SIZES, **CONFIGS["text"])
    my_lion.MyModel(config).save_pretrained(tmp_path / "plain")
    assert_carries_code(tmp_path / "plain")  # loads as the family's classes, which have its weights

    my_lion.MyConfig.register_for_auto_class()
    my_lion.MyModel.register_for_auto_class("AutoModel")
    my_lion.MyModel(config).save_pretrained(tmp_path / "registered")
    auto_map = json.loads((tmp_path / "registered" / "config.json").read_text())["auto_map"]
    assert (auto_map["AutoConfig"], auto_map["AutoModel"]) == ("my_lion.MyConfig", "my_lion.MyModel")
    assert auto_map["AutoModelForMaskedLM"] == "modeling_lion.LionForMaskedLM"
    assert (tmp_path / "registered" / "my_lion.py").read_text() == OWN_CODE
    assert {path.name for path in (tmp_path / "plain").glob("*.py")} == CODE
    assert {path.name for path in (tmp_path / "registered").glob("*.py")} == CODE | {"my_lion.py"}


def test_references_to_the_family_elsewhere_are_replaced_and_others_stay(tmp_path):
    config = make_config()
    config.auto_map = {
        "AutoTokenizer": ["my_tokenizer.MyTokenizer", None],
        "AutoModel": "someone/else--modeling_lion.LionModel",
        "AutoModelForMaskedLM": "someone/else--my_lion.MyMaskedLM",
    }
    config.save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoTokenizer"] == ["my_tokenizer.MyTokenizer", None]
    assert auto_map["AutoModel"] == "modeling_lion.LionModel"
    assert auto_map["AutoModelForMaskedLM"] == "someone/else--my_lion.MyMaskedLM"


def test_a_folder_that_links_to_the_package_can_be_saved_into(tmp_path):
    for name in CODE:
        (tmp_path / name).symlink_to(Path(lion_transformers.__file__).with_name(name))
    build("AutoModel").save_pretrained(tmp_path)
    assert_carries_code(tmp_path)


def test_other_processes_than_the_main_one_write_nothing(tmp_path):
    build("AutoModel").save_pretrained(tmp_path / "model", is_main_process=False)
    assert not any((tmp_path / "model").iterdir())


def test_checkpoints_of_trainer_carry_the_code(tmp_path):
    model = build("AutoModelForSequenceClassification")
    rows = [{"input_ids": [5, 6, 7], "labels": label} for label in (0, 1, 2, 1)]
    arguments = TrainingArguments(
        tmp_path, max_steps=1, save_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to="none"
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    for folder in (tmp_path / "checkpoint-1", tmp_path / "final"):
        assert_carries_code(folder)
        assert_same_state(AutoModelForSequenceClassification.from_pretrained(folder).state_dict(), model.state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


def name_in_index(folder):
    weights = dict.fromkeys(torch.load(folder / "weights.bin", weights_only=True), "weights.bin")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


@pytest.mark.parametrize(
    ("file", "prepare"), [("pytorch_model.bin", lambda folder: None), ("weights.bin", name_in_index)]
)
@pytest.mark.parametrize("use_safetensors", [None, True, False])
def test_a_pickle_is_never_read(tmp_path, monkeypatch, use_safetensors, file, prepare):
    model = build("AutoModelForMaskedLM")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / file)
    prepare(tmp_path)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("a pickle was read"))
    for loader in (LionForMaskedLM, AutoModelForMaskedLM):
        with pytest.raises((OSError, ValueError), match=r"from safetensors files alone|no file named \S+"):
            loader.from_pretrained(tmp_path, use_safetensors=use_safetensors)


def test_what_is_saved_holds_no_pickle(tmp_path):
    build("AutoModelForMaskedLM").save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"} | CODE


def test_tied_weights_are_stored_once(tmp_path):
    model = build("AutoModelForMaskedLM")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert model.state_dict().keys() - stored.keys() == {"decoder.weight"}
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert loaded.decoder.weight.data_ptr() == loaded.lion.embeddings.word_embeddings.weight.data_ptr()


@each_class
def test_shards_together_are_the_model(tmp_path, modality, auto_class):
    model = build(auto_class, modality)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert_carries_code(tmp_path)
    loaded = from_pretrained(auto_class, tmp_path)
    assert_same_state(loaded.state_dict(), model.state_dict())
    assert torch.equal(answer(loaded), answer(model))


@each_class
@pytest.mark.parametrize("decay_type", DECAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"device_map": "auto"},
        {"device_map": "cpu"},
        {"dtype": "auto"},
        {"low_cpu_mem_usage": True},
        {"ignore_mismatched_sizes": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_way_of_loading_gives_the_same_model(tmp_path, modality, auto_class, decay_type, options):
    model = build(auto_class, modality, decay_type=decay_type)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(auto_class, tmp_path, **options)
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
    assert_same_state(loaded.state_dict(), model.state_dict())
    assert torch.equal(answer(loaded), answer(model))


@each_class
@pytest.mark.parametrize("decay_type", DECAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_loaded_as_it_was_saved_decays_in_float32(tmp_path, modality, auto_class, decay_type, dtype):
    build(auto_class, modality, decay_type=decay_type).save_pretrained(tmp_path / "float32")
    model = from_pretrained(auto_class, tmp_path / "float32", dtype=dtype)
    model.save_pretrained(tmp_path / "half")
    loaded = from_pretrained(auto_class, tmp_path / "half", dtype="auto", device_map="auto")
    assert_same_state(loaded.state_dict(), model.state_dict())
    assert {p.dtype for p in decay_parameters(loaded).values()} <= {torch.float32}
    assert {p.dtype for name, p in loaded.named_parameters() if name not in decay_parameters(loaded)} == {dtype}
    assert torch.equal(answer(loaded), answer(model))


@each_class
def test_a_model_can_be_wrapped_layer_by_layer(modality, auto_class):
    """As FSDP does it."""
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(build(auto_class, modality))
    embeddings = {"text": LionEmbeddings, "image": LionImageEmbeddings}[modality]
    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {embeddings, LionLayer}


@each_class
def test_layers_that_stay_on_disk_give_the_same_outputs(tmp_path, modality, auto_class):
    model = build(auto_class, modality)
    model.save_pretrained(tmp_path / "model")
    prefix = "" if auto_class == "AutoModel" else "lion."
    device_map = {name: "cpu" for name, _ in model.named_children() if name not in ("lion", "layers")}
    device_map |= {f"{prefix}{name}": "cpu" for name, _ in getattr(model, "lion", model).named_children()}
    del device_map[f"{prefix}layers"]
    device_map |= {f"{prefix}layers.0": "cpu", f"{prefix}layers.1": "disk"}
    loaded = from_pretrained(auto_class, tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "disk")
    assert loaded.get_parameter(f"{prefix}layers.1.mlp.fc1.weight").is_meta
    with torch.no_grad():
        # Not bit for bit: tensors of a file lie unaligned in memory, where a product can round differently.
        assert_close(outputs_of(loaded(**example(model))), answer(model), 1e-6)


@pytest.mark.parametrize("modality", CONFIGS)
def test_a_model_of_the_meta_device_takes_weights_from_a_file(tmp_path, modality):
    model = build("AutoModel", modality)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = LionModel(make_config(modality))
    assert all(x.is_meta for x in empty.state_dict().values())
    empty.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert_same_state(empty.state_dict(), model.state_dict())
    assert torch.equal(answer(empty), answer(model))


def test_a_head_of_another_size_is_new_and_the_rest_as_saved(tmp_path):
    model = build("AutoModelForSequenceClassification")
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert loaded.classifier.weight.shape == (5, 24)
    assert loaded.classifier.weight.abs().max() < 0.2 and loaded.classifier.bias.eq(0).all()
    assert_same_state(loaded.lion.state_dict(), model.lion.state_dict())
