"""Files that are either whole or absent: written beside their place, flushed to the disk, then renamed into it.

Names that begin with a dot are unfinished; whoever reads an output folder can ignore them.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lion_transformers.scripts.arguments import UsageError


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
    """Refuse a folder with files in it, unless `overwrite`; logs alone are of a run that came to nothing."""
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError(f"output_dir {output_dir} is a file.")
    if output_dir.is_dir() and {path.name for path in output_dir.iterdir()} - {"runs"} and not overwrite:
        raise UsageError(f"output_dir {output_dir} is not empty; --overwrite_output_dir writes into it all the same.")


def clear_output_dir(output_dir: Path) -> None:
    """Make the folder and remove what an earlier run left of itself; files that are not a run's are never touched."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for pattern in ["checkpoint-[0-9]*", "results.json", "runs", "predictions", ".*.unfinished", ".*.discarded"]:
        for path in output_dir.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def list_checkpoints(output_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, in order."""
    matches = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in output_dir.iterdir())
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
