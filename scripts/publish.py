"""Publish a trained model on the Hugging Face Hub, in one commit, with its code and a model card.

    python scripts/publish.py outputs/demo/pretrained --repo_id user/lion-s-reviews --dry_run
    python scripts/publish.py outputs/demo/pretrained --repo_id user/lion-s-reviews --license apache-2.0

Of the folder only what belongs to the model is uploaded, no checkpoints, logs, pickles or pictures of your data;
results.json without the local paths in it. A README.md in the folder is uploaded as it is; where there is none, the
card of scripts/model_card.py is, but for `--update`, which then keeps the card on the Hub.

What would be uploaded is checked first: in a fresh process without this package, offline, the tokenizer or image
processor must load, and every head, by the code in the folder, must give what this package gives, bit by bit. Modules
of your own that an auto_map names are uploaded too, and run in that process. The token is that of `hf auth login` or
of HF_TOKEN.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, GitCommitInfo, HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file

import lion_transformers
from lion_transformers import LionConfig, modeling_lion
from lion_transformers.modeling_lion import AUTO_CLASSES
from lion_transformers.scripts import standalone
from lion_transformers.scripts.arguments import Parser, UsageError, one_line, run
from lion_transformers.scripts.model_card import check_repo_id, class_name, make_card, read_config, read_results


PACKAGE = Path(lion_transformers.__file__).parent
CODE = sorted(file.name for file in PACKAGE.glob("*_lion.py"))
WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
CONFIGS = ["config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"]
OF_THE_MODEL = [
    *("results.json", "loss_curve.png", "confusion_matrix.png"),
    *CONFIGS,
    *WEIGHTS,
    *CODE,
    *("tokenizer.json", "tokenizer.model", "spiece.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "chat_template.jinja"),
]
UPLOADED = ["README.md", "LICENSE", *OF_THE_MODEL]
# What would be loaded in place of the new model, or with it.
STALE = [
    *OF_THE_MODEL,
    *("*.bin", "model.*.safetensors", "model.safetensors.index.*.json", "adapter_config.json", "adapter_model.*"),
]
COMMIT_MESSAGE = "Upload LION model"
# All that a server leads to which cannot be reached, refuses or is confused.
HUB_ERRORS = (HTTPError, OSError, ValueError, RuntimeError, LookupError, TypeError)
NO_ANSWER = (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError)  # one that the client cannot read
NOTHING = "nothing was uploaded"


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
    if token is not None and not token.isascii():
        raise UsageError("the token for the Hub has characters that no token has: set HF_TOKEN anew.")
    config = read_config(folder)
    check_folder(folder, config)
    files = files_to_upload(folder, repo_id, arguments.license)
    print(f"Checking that {folder} loads on its own ...", flush=True)
    check_heads(folder, config, files)
    for name, content in files.items():
        print(f"{len(content) if isinstance(content, bytes) else content.stat().st_size:>14,}  {name}")
    if arguments.dry_run:
        print(f"{len(files)} files would be uploaded to {repo_id}.")
        return
    address = upload(files, repo_id, HfApi(token=token), private=arguments.private, update=arguments.update)
    print(f"Published: {address}")


# Checks of the folder


def check_folder(folder: Path, config: LionConfig) -> None:
    """Refuse a folder that is no complete LION model, as far as that can be told without running its code.

    Raises:
        UsageError: half written, foreign code, weights that are missing or broken.
    """
    check_complete(folder)
    check_code(folder, config)
    check_weights(folder, config)


def check_complete(folder: Path) -> None:
    if unfinished := sorted(path.name for path in folder.glob(".*.unfinished")):
        raise UsageError(f"{folder} is half written: it holds {', '.join(unfinished)}.")
    if (folder / "modules.json").is_file():
        raise UsageError(f"{folder} is a SentenceTransformer, more than the model: publish it by its own push_to_hub.")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with loading(folder):
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        shards = {"model.safetensors"}
    if missing := sorted(name for name in shards if not (folder / name).is_file()):
        if list(folder.glob("pytorch_model*.bin")):
            raise UsageError(f"{folder} holds its weights in a pickle: load them, and save the model as safetensors.")
        raise UsageError(f"{folder} is half written: it lacks {', '.join(missing)}.")


def check_code(folder: Path, config: LionConfig) -> None:
    """The code in the folder will be run: it must be this package's own, byte by byte."""
    files = [(name, folder / name) for name in CODE]
    foreign = [
        name for name, path in files if not path.is_file() or path.read_bytes() != (PACKAGE / name).read_bytes()
    ]
    auto_map, family = getattr(config, "auto_map", None) or {}, LionConfig.family_auto_map()
    if any(auto_map.get(name) != reference for name, reference in family.items()):
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


def check_heads(folder: Path, config: LionConfig, files: dict[str, Path | bytes]) -> None:
    """Every head gives the same by the code to be uploaded, in a process of its own, and by this package.

    Args:
        folder: of the model.
        config: its configuration.
        files: those of the folder that are uploaded, by name. No others are there in that process.

    Raises:
        UsageError: what is uploaded does not load, or gives something else.
    """
    auto_classes = [name for name, cls in AUTO_CLASSES.items() if config.modality in cls.input_modalities]
    with loading(folder):
        expected = standalone.head_outputs(str(folder), auto_classes, trust_remote_code=False)
    alone = outputs_in_fresh_process(folder, auto_classes, files)
    for name, value in expected.items():
        if not value.isfinite().all():
            raise UsageError(f"{folder}: {name} is not finite.")
        if not torch.equal(value, alone[name]):
            raise UsageError(f"{folder}: {name} differs by the code in the folder from what this package gives.")


def outputs_in_fresh_process(
    folder: Path, auto_classes: list[str], files: dict[str, Path | bytes]
) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as cache:
        uploaded = Path(cache) / "uploaded"
        uploaded.mkdir()
        for name, content in files.items():
            if isinstance(content, Path):
                (uploaded / name).symlink_to(content.resolve())
        env = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
        env |= {"HF_HOME": cache, "HF_MODULES_CACHE": f"{cache}/modules", "HF_HUB_OFFLINE": "1"}
        env["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # sums of other parts round in another way
        output = Path(cache) / "outputs.safetensors"
        # -P: the folder of the script, which is this one, is nothing to import from.
        command = [sys.executable, "-P", standalone.__file__, uploaded, output, *auto_classes]
        result = subprocess.run(command, env=env, cwd=cache, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            reason = one_line(result.stderr.strip().rpartition("\n")[2])
            raise UsageError(f"{folder} does not load without this package: {reason}")
        return load_file(output)


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, SafetensorError) as error:
        raise UsageError(f"the model in {folder} cannot be loaded: {one_line(error)}") from error


# What is uploaded


def files_to_upload(folder: Path, repo_id: str, license: str | None) -> dict[str, Path | bytes]:
    """What goes to the Hub, by its name there: files of the folder, or contents that are made for it."""
    names = [*UPLOADED, *own_modules(folder)]
    paths = sorted(path for path in folder.iterdir() if path.is_file() and is_any_of(path.name, names))
    files: dict[str, Path | bytes] = {path.name: path for path in paths}
    results = read_results(folder)
    if results:
        files["results.json"] = f"{json.dumps(results, indent=2)}\n".encode()
    if "README.md" in files and license:
        raise UsageError(f"{folder} has a README.md of its own: state the licence there, not by --license.")
    if "README.md" in files:
        try:
            ModelCard.load(folder / "README.md")
        except (ValueError, yaml.YAMLError) as error:
            raise UsageError(f"the metadata of {folder / 'README.md'} cannot be read: {one_line(error)}") from error
    else:
        files["README.md"] = str(make_card(folder, repo_id, license)).encode()
    return files


def own_modules(folder: Path) -> set[str]:
    """Files of the classes that the user has added to an auto_map, and the family's own."""
    modules = set()
    for path in [folder / name for name in CONFIGS if (folder / name).is_file()]:
        with loading(folder):
            auto_map = json.loads(path.read_text(encoding="utf-8")).get("auto_map") or {}
            for entry in auto_map.values():
                references = entry if isinstance(entry, list) else [entry]  # tokenizers have two, either may be None
                modules |= {f"{reference.partition('.')[0]}.py" for reference in references if reference}
    if missing := sorted(modules - {path.name for path in folder.iterdir()}):
        names = ", ".join(missing)
        raise UsageError(
            f"{folder} lacks {names}, named by auto_map: put it there, or take its entry out of auto_map."
        )
    return modules


def is_any_of(name: str, patterns: Iterable[str]) -> bool:
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# The upload


def upload(files: dict[str, Path | bytes], repo_id: str, api: HfApi, private: bool, update: bool) -> str:
    """Make the repository if need be and fill it in one commit. Returns its address.

    Raises:
        UsageError: what went wrong, and what is in the repository now.
    """
    with hub_errors(NOTHING, repo_id, api.token):
        api.whoami()
        is_new = not api.repo_exists(repo_id)
        address = api.create_repo(repo_id, private=private or None, exist_ok=True)
    with hub_errors(f"{NOTHING}, {repo_id} was made and is empty" if is_new else NOTHING, repo_id, api.token):
        repository = api.model_info(repo_id)
        present = {file.rfilename for file in repository.siblings} - {".gitattributes"}
        if present and not update:
            raise UsageError(
                f"{repo_id} is taken: it holds {len(present)} files; choose another name, or add --update."
            )
        if private and not repository.private:
            raise UsageError(f"{repo_id} is there and public: make it private in its settings on the Hub first.")
        if "README.md" in present and isinstance(files["README.md"], bytes):
            print("The card on the Hub is kept: to replace it, put a README.md into the folder.")
            files = {name: content for name, content in files.items() if name != "README.md"}
        stale = [name for name in present - files.keys() if is_any_of(name, STALE)]
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        commit(api, repo_id, [*operations, *map(CommitOperationDelete, stale)], parent=repository.sha)
    return address


def commit(
    api: HfApi, repo_id: str, operations: list[CommitOperationAdd | CommitOperationDelete], parent: str
) -> None:
    """One commit after `parent`. Where its answer is lost, the repository tells whether it was made."""
    try:
        api.create_commit(repo_id, operations, commit_message=COMMIT_MESSAGE, parent_commit=parent)
    except HUB_ERRORS as error:
        if not may_be_committed(error):
            raise
        newest = newest_commit(api, repo_id)
        if newest is None or (newest.commit_id != parent and newest.title != COMMIT_MESSAGE):
            outcome = f"it is unknown whether {repo_id} was changed, look at it on the Hub"
            raise UsageError(f"{outcome}: {explain(error, repo_id, api.token)}.") from error
        if newest.commit_id == parent:
            raise


def may_be_committed(error: Exception) -> bool:
    """Whether the request for the commit was sent, and not refused."""
    if isinstance(error, HTTPError):
        answer = error.response if isinstance(error, HfHubHTTPError) else None  # none: the connection broke off
        request = error.request if answer is None else answer.request
        return request.url.path.endswith("/commit/main") and (answer is None or answer.status_code >= 500)
    return isinstance(error, NO_ANSWER)


def newest_commit(api: HfApi, repo_id: str) -> GitCommitInfo | None:
    try:
        return api.list_repo_commits(repo_id)[0]
    except HUB_ERRORS:
        return None


@contextmanager
def hub_errors(outcome: str, repo_id: str, token: str) -> Iterator[None]:
    """One sentence for whatever goes wrong between here and the Hub: what came of it, and why."""
    try:
        yield
    except HUB_ERRORS as error:
        raise UsageError(f"{outcome}: {explain(error, repo_id, token)}.") from error


def explain(error: Exception, repo_id: str, token: str) -> str:
    # What fails in a thread that uploads is wrapped.
    reason = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    return reason_of(reason, repo_id).replace(token, "***").rstrip(".")  # a server may repeat what it was sent


def reason_of(error: BaseException, repo_id: str) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return "the Hub does not know the token, run `hf auth login` or set HF_TOKEN to a valid one"
    if status == 403:
        return f"the token may not write to {repo_id}: the name is somebody else's, or the token only reads"
    if status is not None:
        return f"the Hub answered with status {status}, {one_line(error.server_message or error)}"
    if isinstance(error, (HTTPError, ConnectionError, TimeoutError)):
        return f"no connection to the Hub, {one_line(error)}"
    if isinstance(error, NO_ANSWER):
        return f"the answer is not that of a Hub, {one_line(error)}"
    return one_line(error)  # a card that the Hub does not take, a file that cannot be read


if __name__ == "__main__":
    run(main)
