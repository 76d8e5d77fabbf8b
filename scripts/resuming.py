"""Finding the checkpoint that a run goes on from, and refusing those that it cannot go on from.

A checkpoint is a folder that the Auto classes load, with the states of optimizer, schedule and generators beside the
weights, and a manifest.json of its files and of the run that it belongs to.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lion_transformers.scripts.arguments import UsageError
from lion_transformers.scripts.checkpointing import checkpoint_folder, list_checkpoints, read_manifest


# Arguments that may change between stop and resume: they do not change what is computed.
FREE_ARGUMENTS = {
    *["output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to", "logging_steps", "save_steps"],
    *["save_total_limit", "max_nonfinite_steps", "preprocessing_num_workers", "dataloader_num_workers"],
    *["per_device_eval_batch_size", "per_device_train_batch_size", "global_train_batch_size"],  # see `layout`
}


@dataclass
class Checkpoint:
    """A complete one.

    Args:
        folder: where it is.
        script: that made it.
        state: of the run, as it was saved.
        arguments: of the run.
        layout: what of data and processes has to stay as it was.
    """

    folder: Path
    script: str
    state: dict[str, Any]
    arguments: dict[str, Any]
    layout: dict[str, Any]

    def check_script(self, script: str) -> None:
        """Refuse to go on with a run of another script.

        Raises:
            UsageError: names both.
        """
        if self.script != script:
            raise UsageError(
                f"{self.folder} is a checkpoint of {self.script}.py, from which {script}.py cannot go on: give another"
                " one, another output_dir, or begin anew with --overwrite_output_dir."
            )

    def check_arguments(self, arguments: dict[str, Any], free: set[str]) -> None:
        """Refuse to go on with other arguments than the checkpoint was made with.

        Raises:
            UsageError: names the first one.
        """
        self._check(self.arguments, json.loads(json.dumps(arguments)), free)

    def check_layout(self, layout: dict[str, Any]) -> None:
        """The same for data and processes."""
        self._check(self.layout, layout, set())

    def _check(self, saved: dict[str, Any], given: dict[str, Any], free: set[str]) -> None:
        for name in sorted({*saved, *given} - free):
            if saved.get(name) != given.get(name):
                raise UsageError(
                    f"{self.folder} was made with {name} {saved.get(name)}, not {given.get(name)}: go on with that,"
                    " give another output_dir, or begin anew with --overwrite_output_dir."
                )


def folder_to_resume(output_dir: Path, given: str | None, overwrite: bool) -> Path | None:
    """The checkpoint that is asked for, or the last in `output_dir`; None for a run that begins.

    Args:
        output_dir: of the run.
        given: a folder, "latest", or None for the last one if there is any.
        overwrite: whether the run is to begin anew.

    Raises:
        UsageError: there is none, or it is not to be used.
    """
    if given is not None and overwrite:
        raise UsageError("overwrite_output_dir begins anew, resume_from_checkpoint goes on: give one of them.")
    steps = list_checkpoints(output_dir)
    if given in (None, "latest"):
        if given is None and (overwrite or not steps):
            return None
        if not steps:
            raise UsageError(f"output_dir {output_dir} has no checkpoint to resume from.")
        return checkpoint_folder(output_dir, steps[-1])
    if not Path(given).is_dir():
        raise UsageError(f"there is no folder {given} to resume from.")
    return Path(given)


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint whose every file is as it was written.

    Raises:
        UsageError: it is not; an older one that is whole is offered.
    """
    try:
        manifest = read_manifest(folder)
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        return Checkpoint(folder, manifest["script"], state, manifest["arguments"], manifest["layout"])
    except (OSError, KeyError) as error:
        raise UsageError(f"{folder} is not a checkpoint of a training run{_offer(folder)}") from error
    except UsageError as error:
        raise UsageError(f"{error}{_offer(folder)}") from error


def _offer(folder: Path) -> str:
    for step in reversed(list_checkpoints(folder.parent)):
        older = checkpoint_folder(folder.parent, step)
        if folder.name == older.name or _is_later(step, folder):
            continue
        try:
            read_manifest(older)
        except UsageError:
            continue
        return f": give --resume_from_checkpoint {older}, which is whole."
    return ", and there is no older checkpoint that is whole: begin anew with --overwrite_output_dir."


def _is_later(step: int, folder: Path) -> bool:
    number = folder.name.rpartition("-")[2]
    return number.isdecimal() and step > int(number)
