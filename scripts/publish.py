"""Publish a trained model on the Hugging Face Hub, in one commit, with its code and a model card.

    python scripts/publish.py outputs/demo/pretrained --repo_id user/lion-s-reviews --dry_run
    python scripts/publish.py outputs/demo/pretrained --repo_id user/lion-s-reviews --license apache-2.0

The folder is checked first: in a fresh process without this package, offline, every head must load by the code in the
folder and give what this package gives, bit by bit. The token is that of `hf auth login` or of HF_TOKEN.

Of the folder only what belongs to the model is uploaded, no checkpoints, logs or pickles; results.json without the
local paths in it. A README.md in the folder is uploaded as it is; where there is none, the card of
scripts/model_card.py is.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from httpx2 import HTTPError
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from safetensors.torch import load_file

import lion_transformers
from lion_transformers import LionConfig, modeling_lion
from lion_transformers.modeling_lion import AUTO_CLASSES
from lion_transformers.scripts import standalone
from lion_transformers.scripts.arguments import Parser, UsageError, one_line, run
from lion_transformers.scripts.model_card import class_name, make_card, read_config, read_results


PACKAGE = Path(lion_transformers.__file__).parent
CODE = sorted(file.name for file in PACKAGE.glob("*_lion.py"))
WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
UPLOADED = [
    *("README.md", "LICENSE", "config.json", "results.json", "*.png"),
    *WEIGHTS,
    *CODE,
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "preprocessor_config.json", "processor_config.json"),
]


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a trained model")
    parser.add_argument("--repo_id", required=True, help="name on the Hub: user/name")
    parser.add_argument("--license", help="licence of the weights, by the Hub's name: apache-2.0, cc-by-4.0 ...")
    parser.add_argument("--private", action="store_true", help="make a repository that only you see")
    parser.add_argument("--update", action="store_true", help="replace the model in a repository that holds one")
    parser.add_argument("--dry_run", action="store_true", help="check and list what would be uploaded; no network")
    arguments = parser.parse_args()
    folder, repo_id = arguments.folder, arguments.repo_id
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    check_repo_id(repo_id)
    token = get_token()
    if token is None and not arguments.dry_run:
        raise UsageError("there is no token for the Hub: run `hf auth login`, or set HF_TOKEN.")
    print(f"Checking that {folder} loads on its own ...", flush=True)
    check_folder(folder)
    files = files_to_upload(folder, repo_id, arguments.license)
    for name, content in files.items():
        print(f"{len(content) if isinstance(content, bytes) else content.stat().st_size:>14,}  {name}")
    if arguments.dry_run:
        print(f"{len(files)} files would be uploaded to {repo_id}.")
        return
    with hub_errors(repo_id, token):
        address = upload(files, repo_id, HfApi(token=token), private=arguments.private, update=arguments.update)
    print(f"Published: {address}")


def check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(f"repo_id must be user/name: {one_line(error)}") from error
    if "/" not in repo_id:
        raise UsageError(f"repo_id must be user/name, got {repo_id}.")


# Checks of the folder


def check_folder(folder: Path) -> None:
    """Refuse a folder that would not load from the Hub, or not as it does here.

    Raises:
        UsageError: not a complete LION model, foreign code, weights that are missing or broken, heads that differ.
    """
    config = read_config(folder)
    check_complete(folder)
    check_code(folder, config)
    check_weights(folder, config)
    check_heads(folder, config)


def check_complete(folder: Path) -> None:
    if unfinished := sorted(path.name for path in folder.glob(".*.unfinished")):
        raise UsageError(f"{folder} is half written: it holds {', '.join(unfinished)}.")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with loading(folder):
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        shards = {"model.safetensors"}
    if missing := sorted(name for name in shards if not (folder / name).is_file()):
        raise UsageError(f"{folder} is half written: it lacks {', '.join(missing)}.")


def check_code(folder: Path, config: LionConfig) -> None:
    """The code in the folder will be run: it must be this package's own, byte by byte."""
    files = [(name, folder / name) for name in CODE]
    foreign = [
        name for name, path in files if not path.is_file() or path.read_bytes() != (PACKAGE / name).read_bytes()
    ]
    auto_map = {name: f"modeling_lion.{cls.__name__}" for name, cls in AUTO_CLASSES.items()}
    if getattr(config, "auto_map", None) != {"AutoConfig": "configuration_lion.LionConfig", **auto_map}:
        foreign.append("auto_map in config.json")
    if foreign:
        raise UsageError(
            f"{folder} does not hold the code of lion_transformers {lion_transformers.__version__}"
            f" ({', '.join(foreign)}): load the model with this package, save it again and publish that."
        )


def check_weights(folder: Path, config: LionConfig) -> None:
    """The class that was saved must find all its weights, and no others."""
    model_class = getattr(modeling_lion, class_name(config))
    with loading(folder):
        _, found = model_class.from_pretrained(folder, output_loading_info=True)
    for kind in ["missing_keys", "unexpected_keys", "mismatched_keys"]:
        if names := sorted(map(str, found[kind])):
            raise UsageError(f"{folder}: the weights do not fit {model_class.__name__}, {kind}: {', '.join(names)}.")


def check_heads(folder: Path, config: LionConfig) -> None:
    """Every head gives the same by the code in the folder, in a process of its own, and by this package."""
    auto_classes = [name for name, cls in AUTO_CLASSES.items() if config.modality in cls.input_modalities]
    with loading(folder):
        expected = standalone.head_outputs(str(folder), auto_classes, trust_remote_code=False)
    alone = outputs_in_fresh_process(folder, auto_classes)
    for name, value in expected.items():
        if not value.isfinite().all():
            raise UsageError(f"{folder}: {name} is not finite.")
        if not torch.equal(value, alone[name]):
            raise UsageError(f"{folder}: {name} differs by the code in the folder from what this package gives.")


def outputs_in_fresh_process(folder: Path, auto_classes: list[str]) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as cache:
        env = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
        env |= {"HF_HOME": cache, "HF_MODULES_CACHE": f"{cache}/modules", "HF_HUB_OFFLINE": "1"}
        env["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # sums of other parts round in another way
        output = Path(cache) / "outputs.safetensors"
        # -P: the folder of the script, which is this one, is nothing to import from.
        command = [sys.executable, "-P", standalone.__file__, folder.resolve(), output, *auto_classes]
        result = subprocess.run(command, env=env, cwd=cache, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            reason = one_line(result.stderr.strip().rpartition("\n")[2])
            raise UsageError(f"{folder} does not load without this package: {reason}")
        return load_file(output)


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise UsageError(f"the model in {folder} cannot be loaded: {one_line(error)}") from error


# What is uploaded


def files_to_upload(folder: Path, repo_id: str, license: str | None) -> dict[str, Path | bytes]:
    """What goes to the Hub, by its name there: files of the folder, or contents that are made for it."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and is_any_of(path.name, UPLOADED))
    files: dict[str, Path | bytes] = {path.name: path for path in paths}
    results = read_results(folder)
    if results:
        files["results.json"] = f"{json.dumps(results, indent=2)}\n".encode()
    if "README.md" in files and license:
        raise UsageError(f"{folder} has a README.md of its own: state the licence there, not by --license.")
    if "README.md" not in files:
        files["README.md"] = str(make_card(folder, repo_id, license)).encode()
    return files


def is_any_of(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def upload(files: dict[str, Path | bytes], repo_id: str, api: HfApi, private: bool, update: bool) -> str:
    """Make the repository if need be and fill it in one commit. Returns its address."""
    api.whoami()
    api.create_repo(repo_id, private=private or None, exist_ok=True)
    repository = api.model_info(repo_id)
    present = {file.rfilename for file in repository.siblings} - {".gitattributes"}
    if present and not update:
        raise UsageError(f"{repo_id} is taken: it holds {len(present)} files; choose another name, or add --update.")
    if private and not repository.private:
        raise UsageError(f"{repo_id} is there and public: make it private in its settings on the Hub first.")
    additions = [CommitOperationAdd(name, content) for name, content in files.items()]
    # Weights of an earlier version under other names would be loaded in place of the new ones.
    stale = [CommitOperationDelete(name) for name in present - files.keys() if is_any_of(name, WEIGHTS)]
    commit = api.create_commit(
        repo_id, [*additions, *stale], commit_message="Upload LION model", parent_commit=repository.sha
    )
    return commit.repo_url


@contextmanager
def hub_errors(repo_id: str, token: str) -> Iterator[None]:
    """One sentence for whatever goes wrong between here and the Hub."""
    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        # What fails in a thread that uploads is wrapped.
        reason = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        # A server may repeat what it was sent.
        raise UsageError(explain(reason, repo_id).replace(token, "***")) from error


def explain(error: BaseException, repo_id: str) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        reason = "the Hub does not know the token, run `hf auth login` or set HF_TOKEN to a valid one"
    elif status == 403:
        reason = f"the token may not write to {repo_id}: the name is somebody else's, or the token only reads"
    elif status is not None:
        reason = f"the Hub answered with status {status}, {one_line(error.server_message or error)}"
    elif isinstance(error, ValueError):  # a card that the Hub does not take
        reason = one_line(error)
    else:
        return f"no connection to the Hub, so that all was uploaded or nothing: {one_line(error)}"
    return f"nothing was uploaded: {reason}."


if __name__ == "__main__":
    run(main)
