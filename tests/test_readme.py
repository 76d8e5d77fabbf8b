"""Runs every code block of the README, on a small stand-in for what `make demo` leaves behind."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from transformers import ViTImageProcessor

from lion_transformers import LionConfig, LionForImageClassification, LionForMaskedLM
from lion_transformers.tokenization import train_wordpiece_tokenizer


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
# Added to what the README says so that it ends within a minute, on what is at hand.
SHORTER = {
    "pretrain_text_base_lion_s": (
        "--config hidden_size=48,num_hidden_layers=1,num_attention_heads=3,intermediate_size=96 --max_steps 2 "
        "--global_train_batch_size 8 --per_device_train_batch_size 4 --max_eval_samples 4 --eval_steps 2 "
        "--dataset_name outputs/c4 --tokenizer_name outputs/tokenizer --dataloader_num_workers 0 --mixed_precision no "
        "--dataset_config_name default"
    ),
    "lion-d-small": "--max_steps 2 --max_eval_samples 4 --eval_steps 2",
    "accelerate launch scripts/train_image_classification.py": (
        "--config image_size=28,patch_size=7,hidden_size=48,num_hidden_layers=1,intermediate_size=48 --max_steps 2 "
        "--global_train_batch_size 8 --per_device_train_batch_size 4 --max_eval_samples 4 --eval_steps 2 "
        "--dataset_name outputs/digits-on-the-hub --dataloader_num_workers 0 --mixed_precision no"
    ),
    "scripts/run_glue.py": (
        "--model_name_or_path outputs/demo/pretrained --dataset_name= --data_dir outputs/glue_data --task_name sst2 "
        "--seeds 19 --max_steps 2 --global_train_batch_size 8 --per_device_train_batch_size 4 --mixed_precision no"
    ),
    "--recipe demo_image": (
        "--config num_hidden_layers=1 --max_steps 2 --global_train_batch_size 8 --per_device_train_batch_size 4 "
        "--eval_steps 2 --save_steps 2"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with a tiny model, its tokenizer and reviews where `make demo` puts them."""
    folder = tmp_path_factory.mktemp("readme")
    good, bad = "a great film with the best story i have ever seen .", "a boring film and the worst acting , sadly ."
    reviews = pd.DataFrame({"text": [good, bad] * 500, "label": [1, 0] * 500})
    demo = folder / "outputs" / "demo"
    (demo / "data").mkdir(parents=True)
    reviews.to_csv(demo / "data" / "train.csv", index=False)
    tokenizer = train_wordpiece_tokenizer(reviews["text"], vocab_size=200, show_progress=False)
    tokenizer.save_pretrained(demo / "pretrained")
    config = LionConfig(
        vocab_size=200, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96
    )
    LionForMaskedLM(config).save_pretrained(demo / "pretrained")
    make_image_demo(folder / "outputs" / "demo-image")
    shutil.copytree(folder / "outputs" / "demo-image" / "data", folder / "outputs" / "digits-on-the-hub")
    (folder / "outputs" / "glue_data" / "SST-2").mkdir(parents=True)
    for split in ("train", "dev"):
        rows = reviews[:32].rename(columns={"text": "sentence"})
        rows.to_csv(folder / "outputs" / "glue_data" / "SST-2" / f"{split}.tsv", sep="\t", index=False)
    (folder / "outputs" / "c4").mkdir()
    for split in ("train", "validation"):
        reviews.to_json(folder / "outputs" / "c4" / f"{split}.jsonl", orient="records", lines=True)
    return folder


def make_image_demo(folder):
    """A tiny image classifier and folders of digits where `make demo-image` puts them."""
    generator = np.random.default_rng(0)
    for split in ("train", "validation"):
        for digit in range(10):
            digits = folder / "data" / split / str(digit)
            digits.mkdir(parents=True)
            for number in range(2):
                pixels = generator.integers(0, 256, (28, 28), dtype=np.uint8)
                Image.fromarray(pixels).save(digits / f"{number:03}.png")
    names = [str(digit) for digit in range(10)]
    config = LionConfig(
        modality="image",
        scan_order="serpentine",
        image_size=28,
        patch_size=7,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        id2label=dict(enumerate(names)),
        label2id={name: label for label, name in enumerate(names)},
    )
    LionForImageClassification(config).save_pretrained(folder / "lion-s-natural")
    ViTImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder / "lion-s-natural")


def test_python_blocks_run_one_after_the_other(folder):
    script = folder / "readme.py"
    script.write_text("\n".join(PYTHON), encoding="utf-8")
    result = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    guesses = [line for line in lines if re.match(r"0\.\d{3}  ", line)]
    assert len(guesses) == 5
    accuracies = [float(line) for line in lines if re.fullmatch(r"[01]\.\d+", line)]
    assert accuracies == [1.0]  # the two reviews are easy to tell apart
    difference = next(float(line) for line in lines if "e-" in line or line == "0.0")
    assert difference < 1e-4
    assert any(re.fullmatch(r"\[\{'label': '\d', 'score': 0\.\d+\}\]", line) for line in lines)
    assert "torch.Size([1, 10])" in lines


def test_every_block_is_python_shell_or_a_drawing():
    assert {language for language, _ in BLOCKS} == {"python", "bash", ""}
    assert len(PYTHON) >= 6 and len(COMMANDS) >= 6


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, folder):
    program, *arguments = shlex.split(command)
    if program == "make":
        run(["make", "--dry-run", *arguments], ROOT)
    elif program == "pip":
        run([sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", *arguments[1:]], ROOT)
    else:
        if not (folder / "outputs" / "tokenizer").exists() and "build_tokenizer" not in command:
            run_script(next(line for line in COMMANDS if "outputs/tokenizer" in line), folder)
        run_script(command, folder)


def run_script(command, folder):
    extra = next((extra for name, extra in SHORTER.items() if name in command), "")
    command = command.replace("scripts/", f"{ROOT}/scripts/").replace("tests/golden/", f"{ROOT}/tests/golden/")
    on_cpu = "--main_process_port 0" if "--multi_gpu" in command else "--cpu"
    command = command.replace("accelerate launch", f"{sys.executable} -m accelerate.commands.launch {on_cpu}")
    command = re.sub(r"^python ", f"{sys.executable} ", re.sub(r"^([A-Z_]+=)", r"env \1", command))
    run(shlex.split(f"{command} {extra}"), folder)
    if "--dry_run" in command:  # which writes nothing
        return
    output_dir = folder / re.search(r"--output_dir (\S+)", command)[1]
    written = {"build_tokenizer": "tokenizer.json", "convert_original": "model.safetensors", "run_glue": "glue.json"}
    last_file = next((file for name, file in written.items() if name in command), "results.json")
    assert (output_dir / last_file).exists()


def run(command, cwd):
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
