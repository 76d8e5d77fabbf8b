"""Publishing through the real client of the Hub, against a small server on 127.0.0.1.

The server takes large files as a Hub without Xet does: what the client does with hf_xet is not tested.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from hub_server import HubServer, Repository
from huggingface_hub import ModelCard
from modeling_checks import build_from
from safetensors.torch import load_file, save_file
from training_checks import fails_with, run_script
from transformers import BertConfig, ViTImageProcessor

from lion_transformers import (
    LionConfig,
    LionForImageClassification,
    LionForMaskedLM,
    LionForMultipleChoice,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionModel,
)
from lion_transformers.scripts import publish
from lion_transformers.scripts.arguments import UsageError
from lion_transformers.tokenization import train_wordpiece_tokenizer


TOKEN = "hf_aVerySecretTokenThatNobodyMaySee"
TEXTS = ["the film was good", "the film was the worst", "the end"]
CODE = ["attention_lion.py", "configuration_lion.py", "modeling_lion.py", "scan_order_lion.py"]
INPUT_IDS = torch.arange(14).reshape(2, 7)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)

# In a process of its own: the address of the Hub is read when its client is imported.
PUBLISH = """
import runpy, sys, transformers, lion_transformers
from transformers import AutoModelForMaskedLM, AutoTokenizer, Trainer, TrainingArguments
script, text, image, output = sys.argv[1:]

model, tokenizer = AutoModelForMaskedLM.from_pretrained(text), AutoTokenizer.from_pretrained(text)
model.push_to_hub("alice/pushed")
arguments = TrainingArguments(
    output, hub_model_id="alice/trained", push_to_hub=True, max_steps=1, learning_rate=0.0, save_strategy="no",
    report_to="none", use_cpu=True,
)
rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [5, 6, 7]}] * 8
trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.push_to_hub()
for sys.argv in (
    [script, text, "--repo_id", "alice/text", "--license", "apache-2.0"],
    [script, image, "--repo_id", "alice/image", "--private"],
):
    runpy.run_path(script, run_name="__main__")
"""
LOAD = """
import sys
sys.modules["lion_transformers"] = None
import torch, transformers
from safetensors.torch import load_file, save_file
inputs, outputs = load_file(sys.argv[1]), {}
for name, auto_class in {
    "text": "AutoModelForMaskedLM",
    "pushed": "AutoModelForMaskedLM",
    "trained": "AutoModelForMaskedLM",
    "image": "AutoModelForImageClassification",
}.items():
    auto_class = getattr(transformers, auto_class)
    model = auto_class.from_pretrained(f"alice/{name}", trust_remote_code=True).eval()
    outputs[name] = model(inputs["pixels"] if name == "image" else inputs["input_ids"]).logits.detach()
save_file(outputs, sys.argv[2])
tokenizer = transformers.AutoTokenizer.from_pretrained("alice/text", trust_remote_code=False)
processor = transformers.AutoImageProcessor.from_pretrained("alice/image")
print(*tokenizer("the film was good")["input_ids"], processor.size["height"])
"""


def text_config(**overrides):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return LionConfig(vocab_size=48, **sizes, **overrides)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A text model as a training script leaves it, much beside it; and an image model."""
    folder = tmp_path_factory.mktemp("saved")
    text, image = folder / "text", folder / "image"
    build_from(LionForMaskedLM, text_config()).save_pretrained(text)
    train_wordpiece_tokenizer(TEXTS, vocab_size=48, min_frequency=1, show_progress=False).save_pretrained(text)
    results = {
        "after": {"step": 4, "eval_loss": 2.5},
        "steps": 4,
        "arguments": {"train_file": ["/home/alice/secret-project/train.csv"], "seed": 17},
    }
    (text / "results.json").write_text(json.dumps(results))
    for name in ("checkpoint-4/model.safetensors", "runs/events", "data/train.csv"):
        (text / name).parent.mkdir()
        (text / name).write_text("not of the model")
    for name in (
        "predictions.png",
        "training_args.bin",
        "optimizer.pt",
        "state.pkl",
        ".hidden",
        "notes.txt",
        "private.json",
    ):
        (text / name).write_text("not of the model")
    (text / "loss_curve.png").write_bytes(b"\x89PNG")
    config = text_config(modality="image", image_size=8, patch_size=4, scan_order="serpentine", num_labels=3)
    build_from(LionForImageClassification, config).save_pretrained(image)
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(image)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the text model to do things to."""
    return shutil.copytree(saved / "text", tmp_path / "text")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub for this process, whose token is alice's."""
    constants = huggingface_hub.constants
    with HubServer({TOKEN: "alice"}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def checked_heads(monkeypatch):
    """Folders whose heads were to be checked, which takes seconds and has tests of its own."""
    folders = []
    monkeypatch.setattr(publish, "check_heads", lambda folder, config, files: folders.append(folder))
    return folders


def run_client(code, server, home, *arguments):
    """Code in a fresh process that knows the server for the Hub, and alice's token."""
    env = {
        **os.environ,
        "HF_ENDPOINT": server.address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(home),
        "OMP_NUM_THREADS": "1",
    }
    env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_DEBUG": "1", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def published(saved, tmp_path_factory):
    """What four ways of publishing have left on a Hub, and what they printed."""
    home = tmp_path_factory.mktemp("publisher")
    with HubServer({TOKEN: "alice"}) as server:
        result = run_client(PUBLISH, server, home, publish.__file__, saved / "text", saved / "image", home / "trainer")
        yield server, result


# ---------------------------------------------------------------------------------------------------------------------
# The round trip
# ---------------------------------------------------------------------------------------------------------------------


def test_what_was_published_loads_without_the_package_and_gives_the_same(published, saved, tmp_path):
    server, _ = published
    save_file({"input_ids": INPUT_IDS, "pixels": PIXELS}, tmp_path / "inputs.safetensors")
    result = run_client(LOAD, server, tmp_path, tmp_path / "inputs.safetensors", tmp_path / "outputs.safetensors")
    outputs = load_file(tmp_path / "outputs.safetensors")
    with torch.no_grad():
        text = LionForMaskedLM.from_pretrained(saved / "text").eval()(INPUT_IDS).logits
        image = LionForImageClassification.from_pretrained(saved / "image").eval()(PIXELS).logits
    for name in ("text", "pushed", "trained"):
        assert torch.equal(outputs[name], text), name
    assert torch.equal(outputs["image"], image)
    vocabulary = json.loads((saved / "text" / "tokenizer.json").read_text())["model"]["vocab"]
    words = ["[CLS]", "the", "film", "was", "good", "[SEP]"]
    assert result.stdout.splitlines()[-1] == f"{' '.join(str(vocabulary[word]) for word in words)} 8"


def test_only_what_belongs_to_the_model_is_uploaded_in_one_commit(published):
    server, result = published
    text, image = server.repositories["alice/text"], server.repositories["alice/image"]
    common = {".gitattributes", "README.md", "config.json", "model.safetensors", *CODE}
    beside_text = {"tokenizer.json", "tokenizer_config.json", "results.json", "loss_curve.png"}
    assert set(text.files) == common | beside_text
    assert set(image.files) == common | {"preprocessor_config.json"}
    assert len(text.commits) == len(image.commits) == 2  # the Hub makes the first
    assert image.private and not text.private
    assert f"Published: {server.address}/alice/text" in result.stdout


def test_results_and_card_on_the_hub_hold_no_local_path(published):
    server, _ = published
    files = server.repositories["alice/text"].files
    assert json.loads(files["results.json"])["arguments"] == {"train_file": ["train.csv"], "seed": 17}
    card = ModelCard(files["README.md"].decode())
    assert card.data.license == "apache-2.0"
    assert card.data.eval_results[0].metric_value == 2.5
    assert not [name for name, content in files.items() if b"secret-project" in content]


def test_the_token_is_never_printed(published):
    server, result = published
    assert f"Bearer {TOKEN}" in {authorization for _, authorization in server.requests}
    assert "Send: curl" in result.stderr  # the client tells all that it does
    assert TOKEN not in result.stdout + result.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Before anything is uploaded
# ---------------------------------------------------------------------------------------------------------------------


def test_dry_run_checks_and_lists_without_network_or_token(folder, hub, checked_heads, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text", "--dry_run")
    assert checked_heads == [folder] and hub.requests == []
    lines = capsys.readouterr().out.splitlines()
    size = (folder / "model.safetensors").stat().st_size
    assert f"{size:,}  model.safetensors" in [line.strip() for line in lines]
    assert {line.split()[-1] for line in lines[1:-1]} == {
        *("README.md", "config.json", "loss_curve.png", "model.safetensors", "results.json"),
        *("tokenizer.json", "tokenizer_config.json", *CODE),
    }
    assert lines[-1] == "11 files would be uploaded to alice/text."


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(file):
    file.write_bytes(file.read_bytes()[:-100])


def move_into(folder, name):
    files = list(folder.iterdir())
    (folder / name).mkdir()
    for file in files:
        file.rename(folder / name / file.name)


def rename(folder, name):
    (folder / "model.safetensors").rename(folder / name)


BROKEN = {
    "no folder": (shutil.rmtree, "is not there: give the folder of a saved model"),
    "checkpoints alone": (
        lambda folder: move_into(folder, "checkpoint-9"),
        "holds no config.json: .* checkpoint-9 in it",
    ),
    "a pickle": (lambda folder: rename(folder, "pytorch_model.bin"), "weights in a pickle"),
    "sentence embeddings": (lambda folder: (folder / "modules.json").write_text("[]"), "is a SentenceTransformer"),
    "a broken card": (
        lambda folder: (folder / "README.md").write_text("---\na: [1\n---\n"),
        "metadata of .*README.md",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "not the configuration of a LION model"),
    "another family": (lambda folder: BertConfig().save_pretrained(folder), "a model of type bert, not a LION model"),
    "bad setting": (lambda folder: edit_config(folder, hidden_size=15), "`hidden_size` .15. must be a multiple"),
    "another class": (lambda folder: edit_config(folder, architectures=["Bert"]), "Bert, which is none of LION's"),
    "unfinished": (lambda folder: (folder / ".model.unfinished").mkdir(), r"half written: it holds .model.unfinished"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "half written: it lacks model.safetensors"),
    "truncated": (lambda folder: truncate(folder / "model.safetensors"), "cannot be loaded"),
    "a tensor missing": (lambda folder: edit_weights(folder, lambda w: w.pop("head.dense.bias")), "head.dense.bias"),
    "no code": (lambda folder: (folder / "scan_order_lion.py").unlink(), r"\(scan_order_lion.py\)"),
    "an older auto_map": (lambda folder: edit_config(folder, auto_map={}), r"\(auto_map in config.json\)"),
    "code elsewhere": (
        lambda folder: edit_config(folder, auto_map={"AutoConfig": "mallory/x--configuration_lion.LionConfig"}),
        r"\(auto_map in config.json\)",
    ),
}


@pytest.mark.parametrize(("spoil", "sentence"), BROKEN.values(), ids=BROKEN)
def test_broken_folder_is_refused(folder, hub, checked_heads, monkeypatch, capsys, spoil, sentence):
    spoil(folder)
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text")
    assert re.search(sentence, message), message
    assert checked_heads == [] and hub.requests == []


@pytest.mark.parametrize("head", [LionForSequenceClassification, LionForTokenClassification, LionForMultipleChoice])
def test_a_classifier_is_published_though_other_heads_have_other_sizes(folder, head, monkeypatch, capsys):
    build_from(head, text_config(num_labels=3)).save_pretrained(folder)
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text", "--dry_run")
    assert "would be uploaded to alice/text" in capsys.readouterr().out


def test_a_token_of_other_characters_is_not_sent(folder, hub, checked_heads, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_schlüssel")
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text")
    assert "characters that no token has" in message and "schl" not in message
    assert hub.requests == []


def test_a_missing_shard_is_named(folder, checked_heads, monkeypatch, capsys):
    LionForMaskedLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="4KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text", "--dry_run")
    shards[0].unlink()
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text", "--dry_run")
    assert f"half written: it lacks {shards[0].name}" in message


def test_foreign_code_is_refused_and_not_run(folder, tmp_path, monkeypatch, capsys):
    with (folder / "modeling_lion.py").open("a") as file:
        file.write(f"\nopen({str(tmp_path / 'was-run')!r}, 'w')\n")
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text", "--dry_run")
    assert "does not hold the code of lion_transformers" in message and "(modeling_lion.py)" in message
    assert "save it again" in message
    assert not (tmp_path / "was-run").exists()


OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def add_own_tokenizer(folder, code=OWN_TOKENIZER):
    (folder / "tokenization_own.py").write_text(code)
    auto_map = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config |= {"auto_map": auto_map, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, auto_map={**config["auto_map"], **auto_map})


def one_head(monkeypatch):
    """The check of one head, which all of them have elsewhere."""
    monkeypatch.setattr(publish, "AUTO_CLASSES", {"AutoModelForMaskedLM": LionForMaskedLM})


def test_code_of_ones_own_is_checked_and_uploaded(folder, monkeypatch, capsys):
    one_head(monkeypatch)
    add_own_tokenizer(folder)
    (folder / "unnamed.py").write_text("not of the model")
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text", "--dry_run")
    listed = {line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert "tokenization_own.py" in listed and "unnamed.py" not in listed


def test_code_of_ones_own_that_is_not_whole_is_refused(folder, monkeypatch, capsys):
    one_head(monkeypatch)
    add_own_tokenizer(folder, f"import lion_transformers\n{OWN_TOKENIZER}")
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text", "--dry_run")
    assert "does not load without this package" in message and "lion_transformers" in message
    (folder / "tokenization_own.py").unlink()
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text", "--dry_run")
    assert "lacks tokenization_own.py, named by auto_map" in message


def test_a_processor_that_does_not_load_is_refused(folder, monkeypatch, capsys):
    one_head(monkeypatch)
    (folder / "tokenizer.json").write_text("{")
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text", "--dry_run")
    assert "does not load without this package" in message


def test_the_check_sees_only_what_is_uploaded(folder, monkeypatch, capsys):
    one_head(monkeypatch)
    monkeypatch.setattr(publish, "UPLOADED", [name for name in publish.UPLOADED if name != "scan_order_lion.py"])
    monkeypatch.setattr(publish, "own_modules", lambda folder: set())
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text", "--dry_run")
    assert "does not load without this package" in message and "scan_order_lion.py" in message


def test_files_of_all_tokenizers_are_uploaded(folder):
    names = {"tokenizer.model", "spiece.model", "chat_template.jinja", "confusion_matrix.png"}
    for name in names:
        (folder / name).write_text("")
    assert names <= set(publish.files_to_upload(folder, "alice/text", None))


@pytest.mark.parametrize("results", ["[1]", '{"after": {"eval_loss": NaN}}'])
def test_the_card_is_made_before_the_slow_check(folder, hub, checked_heads, monkeypatch, capsys, results):
    (folder / "results.json").write_text(results)
    assert "results.json" in fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text")
    assert checked_heads == [] and hub.requests == []


def test_a_licence_that_the_hub_does_not_take_is_refused(folder, checked_heads, monkeypatch, capsys):
    arguments = [folder, "--repo_id", "alice/text", "--dry_run", "--license", "nonsense licence: x"]
    assert "the Hub names licences by" in fails_with(publish, monkeypatch, capsys, *arguments)
    assert checked_heads == []


def test_weights_that_are_not_finite_are_refused(folder, monkeypatch, capsys):
    edit_weights(folder, lambda weights: weights["head.dense.bias"].fill_(float("nan")))
    monkeypatch.setattr(publish, "outputs_in_fresh_process", lambda *_: {})
    one_head(monkeypatch)
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text", "--dry_run")
    assert "AutoModelForMaskedLM.logits is not finite" in message


def test_the_fresh_process_runs_the_code_of_the_folder(folder, monkeypatch, capsys):
    """Code that differs would give other logits: it is checked by its bytes first, which is put aside here."""
    one_head(monkeypatch)
    monkeypatch.setattr(publish, "check_code", lambda *_: None)
    modeling = folder / "modeling_lion.py"
    code = modeling.read_text()
    modeling.write_text(
        code.replace("return self.norm(self.activation_fn(", "return 2 * self.norm(self.activation_fn(")
    )
    assert modeling.read_text() != code
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text", "--dry_run")
    assert "AutoModelForMaskedLM.logits differs" in message


def test_the_fresh_process_has_no_package(folder, monkeypatch, capsys):
    one_head(monkeypatch)
    monkeypatch.setattr(publish, "check_code", lambda *_: None)
    modeling = folder / "modeling_lion.py"
    modeling.write_text(modeling.read_text().replace("import torch\n", "import torch\nimport lion_transformers\n", 1))
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", "alice/text", "--dry_run")
    assert "does not load without this package" in message and "lion_transformers" in message


@pytest.mark.parametrize("repo_id", ["text", "alice/", "alice/a/b", "alice/a--b", "al ice/text"])
def test_malformed_repo_id_is_refused(folder, hub, checked_heads, monkeypatch, capsys, repo_id):
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", repo_id)
    assert "repo_id must be user/name" in message
    assert checked_heads == [] and hub.requests == []


def test_missing_arguments_are_one_sentence(monkeypatch, capsys):
    assert "required: folder, --repo_id" in fails_with(publish, monkeypatch, capsys)


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong with the Hub
# ---------------------------------------------------------------------------------------------------------------------


def publish_fails(folder, monkeypatch, capsys, *arguments, repo_id="alice/text"):
    message = fails_with(publish, monkeypatch, capsys, folder, "--repo_id", repo_id, *arguments)
    assert TOKEN not in message
    return message


def test_missing_token(folder, hub, checked_heads, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    assert "no token for the Hub: run `hf auth login`" in publish_fails(folder, monkeypatch, capsys)
    assert checked_heads == [] and hub.requests == []


def test_unknown_token(folder, hub, checked_heads, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    message = publish_fails(folder, monkeypatch, capsys)
    assert "nothing was uploaded: the Hub does not know the token" in message and "hf_another" not in message
    assert hub.repositories == {}


def test_name_of_somebody_else(folder, hub, checked_heads, monkeypatch, capsys):
    message = publish_fails(folder, monkeypatch, capsys, repo_id="bob/text")
    assert "nothing was uploaded: the token may not write to bob/text" in message
    assert hub.repositories == {}


@pytest.mark.parametrize(("owner", "arguments"), [("alice", []), ("bob", []), ("bob", ["--update"])])
def test_taken_name(folder, hub, checked_heads, monkeypatch, capsys, owner, arguments):
    files = {"README.md": b"mine", "other.safetensors": b""}
    taken = hub.repositories[f"{owner}/text"] = Repository(False, [files])
    message = publish_fails(folder, monkeypatch, capsys, *arguments, repo_id=f"{owner}/text")
    taken_sentence = f"{owner}/text is taken: it holds 2 files; choose another name, or add --update"
    assert ("may not write to bob/text" if arguments else taken_sentence) in message
    assert taken.commits == [files] and hub.blobs == {}


def test_an_empty_repository_is_filled(folder, hub, checked_heads, monkeypatch):
    repository = hub.repositories["alice/text"] = Repository(private=False)
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text")
    assert len(repository.commits) == 2 and "model.safetensors" in repository.files


def test_no_network(folder, hub, checked_heads, monkeypatch, capsys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert "no connection to the Hub" in publish_fails(folder, monkeypatch, capsys)


def test_offline_mode(folder, hub, checked_heads, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = publish_fails(folder, monkeypatch, capsys)
    assert "no connection to the Hub" in message and "offline mode is enabled" in message
    assert hub.requests == []


@pytest.mark.parametrize("route", ["create", "info", "validate_yaml", "preupload", "lfs_batch", "commit"])
def test_a_hub_that_fails_midway_is_left_without_files(folder, hub, checked_heads, monkeypatch, capsys, route):
    hub.failures[route] = 418
    message = publish_fails(folder, monkeypatch, capsys)
    empty = "" if route in ("create", "info") else ", alice/text was made and is empty"
    assert f"nothing was uploaded{empty}: the Hub answered with status 418, {route} fails (Bearer ***)" in message
    assert all(set(repository.files) == {".gitattributes"} for repository in hub.repositories.values())
    hub.failures.clear()
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text")  # and can be tried again
    assert len(hub.repositories["alice/text"].commits) == 2


def test_an_upload_that_fails_is_one_sentence(folder, hub, checked_heads, monkeypatch, capsys):
    hub.failures["lfs_upload"] = 418  # in a thread of the client, and without a token
    message = publish_fails(folder, monkeypatch, capsys)
    assert "nothing was uploaded, alice/text was made and is empty: the Hub answered with status 418" in message
    assert set(hub.repositories["alice/text"].files) == {".gitattributes"} and hub.count("commit") == 0


@pytest.mark.parametrize(
    ("status", "content"),
    [(500, {}), (200, b"<html>"), (200, {}), (200, []), (200, b"\xff"), (0, None)],
    ids=["500", "HTML", "no commit", "a list", "no text", "broken off"],
)
def test_a_commit_whose_answer_is_lost_is_found(folder, hub, checked_heads, monkeypatch, capsys, status, content):
    hub.lost["commit"] = (status, content)
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text")
    assert f"Published: {hub.address}/alice/text" in capsys.readouterr().out
    assert len(hub.repositories["alice/text"].commits) == 2


@pytest.mark.parametrize("is_new", [True, False])
def test_a_commit_that_fails_in_the_hub_is_looked_for(folder, hub, checked_heads, monkeypatch, capsys, is_new):
    hub.failures["commit"] = 500
    if not is_new:
        hub.repositories["alice/text"] = Repository(private=False)
    message = publish_fails(folder, monkeypatch, capsys)
    empty = ", alice/text was made and is empty" if is_new else ""
    assert f"nothing was uploaded{empty}: the Hub answered with status 500" in message
    assert hub.count("commits") == 1


def test_a_commit_that_is_refused_is_not_looked_for(folder, hub, checked_heads, monkeypatch, capsys):
    hub.failures["commit"] = 412
    assert "nothing was uploaded" in publish_fails(folder, monkeypatch, capsys)
    assert hub.count("commits") == 0


@pytest.mark.parametrize("made", [True, False])
def test_an_outcome_that_nobody_tells_is_unknown(folder, hub, checked_heads, monkeypatch, capsys, made):
    if made:
        hub.lost["commit"] = (500, {"error": f"lost {TOKEN}"})
    else:
        hub.failures["commit"] = 500
    hub.failures["commits"] = 418
    message = publish_fails(folder, monkeypatch, capsys)
    assert "it is unknown whether alice/text was changed, look at it on the Hub: " in message
    assert "nothing was uploaded" not in message and "status 500" in message


def test_the_commit_of_somebody_else_is_not_taken_for_ones_own(folder, hub, checked_heads, monkeypatch, capsys):
    repository = hub.repositories["alice/text"] = Repository(private=False)
    hub.failures["commit"] = 500
    newest_commit = publish.newest_commit

    def after_another(*arguments):
        repository.commits.append({"README.md": b"theirs"})
        return newest_commit(*arguments)

    monkeypatch.setattr(publish, "newest_commit", after_another)
    assert "it is unknown whether alice/text was changed" in publish_fails(folder, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("no room"), "no room."),
        (FileNotFoundError("model.safetensors is gone"), "model.safetensors is gone."),
        (ConnectionError("reset"), "no connection to the Hub, reset."),
    ],
)
def test_reasons_are_not_mistaken_for_a_lost_connection(error, sentence):
    with pytest.raises(UsageError) as raised, publish.hub_errors("nothing was uploaded", "alice/text", TOKEN):
        raise error
    assert str(raised.value) == f"nothing was uploaded: {sentence}"


# ---------------------------------------------------------------------------------------------------------------------
# Updates, cards, privacy
# ---------------------------------------------------------------------------------------------------------------------


def test_update_replaces_the_weights_in_one_commit(folder, hub, checked_heads, monkeypatch):
    LionForMaskedLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="4KB")
    (folder / "model.safetensors").unlink()
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text")
    repository = hub.repositories["alice/text"]
    assert "model.safetensors" not in repository.files and "model.safetensors.index.json" in repository.files
    repository.files["notes-on-the-hub.md"] = b"kept"

    for file in folder.glob("model*"):
        file.unlink()
    build_from(LionForMaskedLM, text_config(), seed=1).save_pretrained(folder)
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text", "--update")
    assert len(repository.commits) == 3
    assert [name for name in repository.files if name.startswith("model.") or name.startswith("model-")] == [
        "model.safetensors"
    ]
    assert repository.files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert repository.files["notes-on-the-hub.md"] == b"kept"


def test_update_leaves_nothing_that_would_be_loaded_with_the_new_model(folder, hub, checked_heads, monkeypatch):
    stale = [
        *("tokenizer.model", "vocab.txt", "preprocessor_config.json", "confusion_matrix.png", "pytorch_model.bin"),
        *(
            "adapter_config.json",
            "adapter_model.safetensors",
            "model.fp16.safetensors",
            "model-00001-of-2.safetensors",
        ),
        *("model.safetensors.index.json", "model.safetensors.index.fp16.json"),
    ]
    kept = [
        ".gitattributes",
        "README.md",
        "LICENSE",
        "notes.md",
        "onnx/model.bin",
        "onnx/config.json",
        "predictions.png",
    ]
    files = dict.fromkeys([*stale, *kept, "config.json"], b"theirs")
    repository = hub.repositories["alice/text"] = Repository(False, [files])
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text", "--update")
    assert not set(stale) & set(repository.files)
    assert [name for name in kept if repository.files.get(name) != b"theirs"] == []
    assert repository.files["config.json"] == (folder / "config.json").read_bytes()


def test_update_keeps_the_card_on_the_hub_unless_the_folder_has_one(folder, hub, checked_heads, monkeypatch, capsys):
    repository = hub.repositories["alice/text"] = Repository(False, [{"README.md": b"on the Hub"}])
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text", "--update")
    assert repository.files["README.md"] == b"on the Hub" and "model.safetensors" in repository.files
    assert "The card on the Hub is kept" in capsys.readouterr().out
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# By hand\n")
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text", "--update")
    assert repository.files["README.md"] == (folder / "README.md").read_bytes()


def test_a_card_written_by_hand_is_kept(folder, hub, checked_heads, monkeypatch, capsys):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# By hand\n")
    run_script(publish, monkeypatch, folder, "--repo_id", "alice/text")
    assert hub.repositories["alice/text"].files["README.md"] == (folder / "README.md").read_bytes()
    message = publish_fails(folder, monkeypatch, capsys, "--license", "mit")
    assert "has a README.md of its own: state the licence there" in message


def test_a_card_that_the_hub_refuses_stops_the_upload(folder, hub, checked_heads, monkeypatch, capsys):
    (folder / "README.md").write_text("---\nlicense: my own, of course\n---\n")
    message = publish_fails(folder, monkeypatch, capsys)
    assert (
        "nothing was uploaded, alice/text was made and is empty: " in message
        and "license is no name of one" in message
    )
    assert set(hub.repositories["alice/text"].files) == {".gitattributes"}


def test_private_is_not_published_into_a_public_repository(folder, hub, checked_heads, monkeypatch, capsys):
    repository = hub.repositories["alice/text"] = Repository(private=False)
    message = publish_fails(folder, monkeypatch, capsys, "--private")
    assert "alice/text is there and public" in message
    assert len(repository.commits) == 1


def test_a_headless_model_can_be_published(tmp_path, hub, checked_heads, monkeypatch):
    build_from(LionModel, text_config()).save_pretrained(tmp_path / "encoder")
    run_script(publish, monkeypatch, tmp_path / "encoder", "--repo_id", "alice/encoder")
    card = ModelCard(hub.repositories["alice/encoder"].files["README.md"].decode())
    assert card.data.pipeline_tag == "feature-extraction"
    assert not (tmp_path / "encoder" / "README.md").exists()
