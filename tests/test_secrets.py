"""No token and no environment variable gets into what scripts write or print, and scripts run no foreign code."""

import ast
import functools
import json
import os
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
import json, sys
from lion_transformers.scripts import model_card, pretrain_mlm, publish

for name, *argv in json.loads(sys.argv[1]):
    sys.argv = [name, *argv]
    globals()[name].main()
"""


def run_with_secrets(folder, *commands, **env):
    """Everything that scripts print, run in `folder` with secrets in their environment."""
    env = {**os.environ, **SECRETS, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, "-c", RUN_ALL, json.dumps(commands)]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def test_no_secret_is_written_printed_or_published(tmp_path):
    build_character_tokenizer("bytes").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("the cat sees a bird in the garden\n" * 40)
    files = ["--train_file", "text.txt", "--tokenizer_name", "tokenizer", "--output_dir", "out"]
    training = ["--config", TINY, "--max_seq_length", "16", "--max_steps", "1", "--report_to", "tensorboard"]
    card = ["out", "--repo_id", "alice/cat", "--license", "mit"]
    with HubServer({TOKEN: "alice"}) as server:
        printed = run_with_secrets(
            tmp_path,
            ["pretrain_mlm", *files, *training],
            ["model_card", *card, "--output_file", "card.md"],
            ["publish", *card],
            **{"HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"},
            NO_PROXY="127.0.0.1",
        )
        assert f"Bearer {TOKEN}" in {authorization for _, authorization in server.requests}
        uploaded = server.repositories["alice/cat"].files
    assert list((tmp_path / "out").glob("runs/**/events*")) and (tmp_path / "out" / "checkpoint-1").is_dir()
    assert "model.safetensors" in uploaded

    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert tmp_path / "out" / "results.json" in written and tmp_path / "card.md" in written
    for name, content in {**written, **uploaded}.items():
        assert CANARY.encode() not in content, name
    assert CANARY not in printed


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
