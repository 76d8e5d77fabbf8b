"""Files that are either whole or absent: written beside their place, flushed to the disk, then renamed into it.

Names that begin with a dot are unfinished; whoever reads an output folder can ignore them.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lion_transformers.scripts.arguments import UsageError, one_line


MANIFEST = "manifest.json"
RESULTS = ["results.json", "predictions"]
# What a run that came to nothing leaves; names that begin with a dot are unfinished.
REMAINS = ["runs", "nonfinite-batch-*", ".*.unfinished", ".*.discarded"]


def unfinished(path: Path) -> Path:
    """Where `path` is written before it gets its name."""
    return path.with_name(f".{path.name}.unfinished")


def publish(path: Path) -> None:
    """Give the complete file or folder at `unfinished(path)` its name, replacing what had it."""
    source = unfinished(path)
    for part in [source, *source.rglob("*")]:
        _flush(part)
    if path.is_dir():
        remove_directory(path)
    os.replace(source, path)
    _flush(path.parent)


def publish_files(folder: Path, destination: Path) -> None:
    """Move the complete files at `unfinished(folder)` into `destination`, each replacing what had its name."""
    source = unfinished(folder)
    for file in source.iterdir():
        _flush(file)
        os.replace(file, destination / file.name)
    _flush(destination)
    source.rmdir()


def atomic_write(path: Path, write: Callable[[Path], Any]) -> None:
    """Have `write` make a file, which appears as `path` only once it is complete."""
    write(unfinished(path))
    publish(path)


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2) + "\n"
    atomic_write(path, lambda file: file.write_text(text, encoding="utf-8"))


def remove_directory(path: Path) -> None:
    """Delete a folder. It loses its name first: an interrupted deletion leaves no half folder behind it."""
    discarded = path.with_name(f".{path.name}.discarded")
    shutil.rmtree(discarded, ignore_errors=True)
    os.replace(path, discarded)
    shutil.rmtree(discarded)


def claim_output_dir(output_dir: Path, overwrite: bool) -> None:
    """Refuse a folder with files in it, unless `overwrite`; what a run that came to nothing left does not count."""
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError(f"output_dir {output_dir} is a file.")
    # One look: other processes are trying the folder at the same time.
    names = os.listdir(output_dir) if output_dir.is_dir() else []
    if not overwrite and not all(any(fnmatch(name, pattern) for pattern in REMAINS) for name in names):
        raise UsageError(f"output_dir {output_dir} is not empty; --overwrite_output_dir writes into it all the same.")


def make_output_dir(output_dir: Path) -> None:
    """Make the folder, and see that it can be written."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output_dir, prefix=".", suffix=".unfinished").close()
    except OSError as error:
        raise UsageError(f"cannot write into output_dir {output_dir}: {error.strerror}.") from error


@contextmanager
def removing_if_empty(output_dir: Path) -> Iterator[None]:
    """Take away again, of a run that fails before it writes, the folders that were made for it."""
    missing = [folder for folder in [output_dir, *output_dir.parents] if not folder.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # there is something in it, or another process has been faster
            for folder in missing:
                folder.rmdir()
        raise


def clear_output_dir(output_dir: Path) -> None:
    """Remove what an earlier run left of itself; files that are not a run's are never touched."""
    for step in list_checkpoints(output_dir):
        remove_directory(checkpoint_folder(output_dir, step))
    _remove(output_dir, [*RESULTS, *REMAINS])


def clear_unfinished(output_dir: Path, after_step: int) -> None:
    """Remove what goes beyond the checkpoint of a step: half files, results, and later checkpoints."""
    _remove(output_dir, [*RESULTS, *(pattern for pattern in REMAINS if pattern.startswith("."))])
    for step in list_checkpoints(output_dir):
        if step > after_step:
            remove_directory(checkpoint_folder(output_dir, step))


def _remove(folder: Path, patterns: list[str]) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            _discard(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong with writing `path` (a full disk, lost rights) into one sentence, and free its space.

    Raises:
        UsageError: names the path, what to do, and the checkpoint that is there all the same.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = why_not_written(error)
        if reason is None:
            raise
        with suppress(OSError):
            _discard(unfinished(path))
        steps = list_checkpoints(path.parent)
        left = f"{checkpoint_folder(path.parent, steps[-1])} is complete: " if steps else ""
        raise UsageError(
            f"cannot write {path}: {reason}; {left}make room there, or make it writable, then start again with the"
            " same command."
        ) from error


def why_not_written(error: Exception) -> str | None:
    """What kept a file from being written, or None where that is not what the error is about."""
    message = one_line(error)
    if isinstance(error, SafetensorError) and "I/O error" in message:
        return message
    # Those of a tracker's connection are OSErrors, too: of a socket, or of requests, which give no number.
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return message
    if isinstance(error, RuntimeError) and ("inline_container" in message or "PytorchStreamWriter" in message):
        return "the disk did not take all of a file"  # torch's archive writer tells only how far it has come
    return None


def _discard(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# Manifests: what a folder consists of


def write_manifest(folder: Path, **about: Any) -> None:
    """Name, size and SHA-256 of every file in `folder`, what else is to be known `about` it, a SHA-256 of all that."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    described = {file.relative_to(folder).as_posix(): describe_file(file) for file in files}
    manifest = {**about, "files": described}
    write_json(folder / MANIFEST, {**manifest, "sha256": _hash(manifest)})


def _hash(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def describe_file(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder whose files are all as they were written.

    Raises:
        UsageError: one is not; it is named.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        is_whole = manifest.pop("sha256") == _hash(manifest)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"{folder / MANIFEST} is missing or damaged") from error
    if not is_whole:
        raise UsageError(f"{folder / MANIFEST} is damaged: its content has changed")
    for name, expected in manifest["files"].items():
        if not (folder / name).is_file():
            raise UsageError(f"{folder / name} is missing")
        size = (folder / name).stat().st_size
        if size != expected["size"]:
            raise UsageError(f"{folder / name} is damaged: it has {size} bytes, not {expected['size']}")
        if describe_file(folder / name) != expected:
            raise UsageError(f"{folder / name} is damaged: its content has changed")
    return manifest


# Checkpoints


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def list_checkpoints(output_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, in order."""
    names = os.listdir(output_dir) if output_dir.is_dir() else []
    matches = (re.fullmatch(r"checkpoint-(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def prune_checkpoints(output_dir: Path, best_step: int | None, limit: int) -> None:
    """Delete the oldest checkpoints until `limit` are left; the best and the last always stay."""
    steps = list_checkpoints(output_dir)
    removable = [step for step in steps[:-1] if step != best_step]
    for step in removable[: max(0, len(steps) - limit)]:
        remove_directory(checkpoint_folder(output_dir, step))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
