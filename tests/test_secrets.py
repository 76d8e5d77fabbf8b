"""No token and no environment variable gets into what scripts write or print, and scripts run no foreign code."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest
import training_checks
from hub_server import HubServer

from lion_transformers.scripts import pretrain_mlm, run_glue, train_image_classification
from lion_transformers.tokenization import build_character_tokenizer


SCRIPTS = Path(pretrain_mlm.__file__).parent
CANARY = "canaryThatNobodyMaySee"
SECRETS = {name: f"{name}_{CANARY}" for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PRIVATE_SETTING")}
TOKEN = f"hf_{CANARY}"
TINY = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"


# One process for all scripts: starting is what takes the time.
RUN_ALL = """
import importlib, json, sys
from lion_transformers.scripts.arguments import run

for name, *argv in json.loads(sys.argv[1]):
    sys.argv = [name, *argv]
    try:
        run(importlib.import_module(f"lion_transformers.scripts.{name}").main)
    except SystemExit as exit:
        print(f"exit code of {name}: {exit.code}")
"""


def run_with_secrets(folder, server, *commands):
    """Everything that scripts print, run in `folder` with secrets in their environment."""
    env = {**os.environ, **SECRETS, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    env |= {"HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", RUN_ALL, json.dumps(commands)]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def check_no_secret(folder, printed, uploaded):
    written = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, content in {**written, **uploaded}.items():
        assert CANARY.encode() not in content, name
    assert CANARY not in printed


@pytest.fixture
def commands(tmp_path):
    """Command lines of the three training scripts, short ones with a tracker, and their data."""
    build_character_tokenizer("bytes").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("the cat sees a bird in the garden\n" * 40)
    (tmp_path / "SST-2").mkdir()
    for name in ("train", "dev", "test"):
        (tmp_path / "SST-2" / f"{name}.tsv").write_text("sentence\tlabel\n" + "good\t1\nbad\t0\n" * 4)
    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(4):
            PIL.Image.new("RGB", (8, 8)).save(tmp_path / "images" / label / f"{number}.png")
    text = ["--tokenizer_name", "tokenizer", "--config", TINY, "--max_seq_length", "16"]
    image = ["--config", f"{TINY},modality=image,image_size=8,patch_size=4", "--repeated_augmentation", "1"]
    short = ["--max_steps", "1", "--per_device_train_batch_size", "4", "--report_to", "tensorboard"]
    return {
        "pretrain_mlm": [*text, "--train_file", "text.txt", *short, "--output_dir", "text"],
        "run_glue": [*text, "--data_dir", ".", "--task_name", "sst2", *short, "--output_dir", "glue"],
        "train_image_classification": [
            *image,
            *["--train_dir", "images", "--validation_dir", "images", *short, "--output_dir", "image"],
        ],
    }


def test_no_secret_is_written_printed_or_published(tmp_path, commands):
    models = {"text": "text", "glue": "glue/sst2/seed-17", "image": "image"}
    cards = [
        ["model_card", folder, "--repo_id", f"alice/{name}", "--license", "mit", "--output_file", f"{name}.md"]
        for name, folder in models.items()
    ]
    publishing = ["publish", "text", "--repo_id", "alice/cat", "--license", "mit"]
    with HubServer({TOKEN: "alice"}) as server:
        printed = run_with_secrets(
            tmp_path, server, *([name, *argv] for name, argv in commands.items()), *cards, publishing
        )
        assert f"Bearer {TOKEN}" in {authorization for _, authorization in server.requests}
        uploaded = server.repositories["alice/cat"].files
    assert "exit code" not in printed
    for name, folder in models.items():
        assert list((tmp_path / folder).glob("runs/**/events*")) and (tmp_path / folder / "checkpoint-1").is_dir()
        assert (tmp_path / folder / "results.json").is_file() and (tmp_path / f"{name}.md").is_file()
    assert "model.safetensors" in uploaded
    check_no_secret(tmp_path, printed, uploaded)


def test_no_secret_is_written_or_printed_where_scripts_fail(tmp_path, commands):
    """Losses that are not finite, whose batches are kept; a broken image; a model that the Hub does not have."""
    (tmp_path / "broken" / "a").mkdir(parents=True)
    (tmp_path / "broken" / "a" / "1.png").write_bytes(b"no image")
    too_fast = ["--learning_rate", "1e30", "--max_steps", "30", "--max_nonfinite_steps", "0"]
    failing = [
        ["pretrain_mlm", *commands["pretrain_mlm"], *too_fast],
        ["pretrain_mlm", *commands["pretrain_mlm"][4:], "--model_name_or_path", "alice/nothing"],
        ["run_glue", *commands["run_glue"], *too_fast],
        ["train_image_classification", *commands["train_image_classification"], "--validation_dir", "broken"],
        ["model_card", "broken", "--repo_id", "alice/cat"],
        ["publish", "broken", "--repo_id", "alice/cat"],
    ]
    with HubServer({}) as server:
        printed = run_with_secrets(tmp_path, server, *failing)
        assert f"Bearer {TOKEN}" in {authorization for _, authorization in server.requests}
        assert not server.repositories
    assert re.findall(r"exit code of (\w+): 2", printed) == [name for name, *_ in failing]
    assert list(tmp_path.glob("text/nonfinite-batch-*")) and list(tmp_path.glob("glue/**/nonfinite-batch-*"))
    check_no_secret(tmp_path, printed, {})


# ---------------------------------------------------------------------------------------------------------------------
# Code of others
# ---------------------------------------------------------------------------------------------------------------------


def test_no_script_trusts_remote_code():
    """But for the fresh process in which publish.py runs the code of the folder that it has just compared."""
    for path in [*SCRIPTS.rglob("*.py"), *SCRIPTS.parent.glob("tokenization/*.py"), *SCRIPTS.parent.glob("*.py")]:
        source = path.read_text()
        if path.name == "standalone.py":
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, f"{path}:{node.lineno}"
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                        assert isinstance(value, ast.Constant) and value.value is False, f"{path}:{node.lineno}"
        assert "TRUST_REMOTE_CODE" not in source


@pytest.fixture
def foreign(isolated_run):
    """./foreign: a model and tokenizer whose code would make the file ./ran; beside it what scripts else need."""
    Path("foreign").mkdir()
    auto_map = {"AutoConfig": "foreign.Config"}
    for name in ("AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoModelForImageClassification"):
        auto_map[name] = "foreign.Model"
    config = {"model_type": "foreign", "auto_map": auto_map}
    Path("foreign/config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "ForeignTokenizer", "auto_map": {"AutoTokenizer": ["foreign.Tokenizer", None]}}
    Path("foreign/tokenizer_config.json").write_text(json.dumps(tokenizer))
    Path("foreign/foreign.py").write_text(f"open({str(Path('ran').absolute())!r}, 'w')\n")
    build_character_tokenizer("bytes").save_pretrained("tokenizer")
    Path("text.txt").write_text("the cat\n" * 40)
    Path("SST-2").mkdir()
    for name in ("train", "dev", "test"):
        Path(f"SST-2/{name}.tsv").write_text("sentence\tlabel\ngood\t1\nbad\t0\n")
    for split in ("train", "valid"):
        for label in ("a", "b"):
            Path(split, label).mkdir(parents=True)
            PIL.Image.new("RGB", (8, 8)).save(Path(split, label, "1.png"))


TEXT = ["--train_file", "text.txt", "--max_seq_length", "16", "--max_steps", "1"]
GLUE = ["--data_dir", ".", "--task_name", "sst2"]
IMAGES = ["--train_dir", "train", "--validation_dir", "valid", "--max_steps", "1"]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (pretrain_mlm, [*TEXT, "--model_name_or_path", "foreign", "--tokenizer_name", "tokenizer"]),
        (pretrain_mlm, [*TEXT, "--config_name", "foreign", "--tokenizer_name", "tokenizer"]),
        (pretrain_mlm, [*TEXT, "--tokenizer_name", "foreign"]),
        (run_glue, [*GLUE, "--model_name_or_path", "foreign", "--tokenizer_name", "tokenizer"]),
        (train_image_classification, [*IMAGES, "--model_name_or_path", "foreign"]),
        (
            train_image_classification,
            [
                *IMAGES,
                *[
                    "--config",
                    f"{TINY},modality=image,image_size=8,patch_size=4",
                    "--per_device_train_batch_size",
                    "1",
                ],
                *["--teacher_name_or_path", "foreign", "--distillation_type", "soft"],
            ],
        ),
    ],
    ids=["model", "config", "tokenizer", "glue", "images", "teacher"],
)
def test_foreign_code_is_refused_and_not_run(foreign, monkeypatch, capsys, module, arguments):
    fails = functools.partial(training_checks.fails_with, module, monkeypatch, capsys)
    error = fails(*arguments, "--output_dir", "out", "--report_to", "none")
    assert "foreign: it needs code of its own, which this script does not run: install the package" in error
    assert not Path("ran").exists()
