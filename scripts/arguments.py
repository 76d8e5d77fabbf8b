"""Command lines with recipes, for every script in this folder.

A script describes its arguments as dataclasses, as the examples of Transformers do. `--recipe FILE.yaml` gives values
for any of them. The command line wins, whatever the type, because a recipe is turned into arguments that are parsed
before those of the command line: one parser, one set of checks.
"""

import argparse
import dataclasses
import difflib
import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser


RECIPES = Path(__file__).parent / "recipes"
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
PATH_ERRORS = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}


class UsageError(Exception):
    """A failure that the user can mend: shown as one sentence, without a traceback."""

    def __init__(self, message: str):
        # From a loader's worker comes the whole traceback, which ends with the sentence.
        name = type(self).__name__
        if message.startswith(f"Caught {name} in "):
            message = message.rpartition(f".{name}: ")[2].strip()
        super().__init__(message)


def run(main: Callable[[], None]) -> None:
    """Run a script's `main`. A failure that the user can mend becomes one line on stderr and exit code 2.

    Such are a `UsageError`, a path that cannot be or may not be used, and a disk that does not take what a library
    writes, its cache for example. What several processes have to say is said once, by the first of them, whichever
    that is. Ctrl-C is exit code 130.
    """
    try:
        main()
    except KeyboardInterrupt:
        _fail("interrupted.", exit_code=130)
    except UsageError as error:
        _fail(one_line(error))
    except OSError as error:
        if error.errno in PATH_ERRORS:
            _fail(f"{one_line(error)}.")
        if error.errno not in DISK_ERRORS:
            raise
        _fail(f"{one_line(error)}: make room there, or make it writable, then start again.")


def _fail(message: str, exit_code: int = 2) -> None:
    sentence = f"{Path(sys.argv[0]).name}: error: {message}"
    if is_first_to_say(sentence):
        print(sentence, file=sys.stderr, flush=True)
    sys.exit(exit_code)


def is_first_to_say(sentence: str) -> bool:
    """Whether no other process has said it, as far as the store by which processes meet can be asked."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    try:
        from torch.distributed import TCPStore  # not in every build of torch

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection((address, port), timeout=1).close()  # TCPStore takes longer, and prints its stack
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
        return store.add(f"said: {sentence}", 1) == 1
    # It has gone with its process, or has not been there yet, or nothing says where it is.
    except (ImportError, KeyError, ValueError, OSError, RuntimeError):
        return True


def call(*command: object) -> None:
    """Run a script of this project in a process of its own, its output shown as it comes.

    Raises:
        UsageError: if it fails; what was wrong it has said itself.
    """
    process = subprocess.run([sys.executable, *map(str, command)], check=False)
    if process.returncode != 0:
        raise UsageError(f"{command[0]} ended with exit code {process.returncode}.")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def why_not_loaded(error: Exception) -> str:
    """What kept a model, tokenizer or processor from being loaded. Scripts never trust foreign code for their user."""
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which this script does not run: install the package which that code is from"
    return one_line(error)


class YamlLoader(yaml.SafeLoader):
    """YAML 1.1 reads 8e-4 as text; people who write recipes mean the number."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class KeyValues(dict):
    """A mapping argument: `key=value,key=value` on the command line (values are YAML), a mapping in a recipe."""

    def __init__(self, items: str | dict | Iterable = ()):
        super().__init__(self._parse(items) if isinstance(items, str) else items)
        if wrong := [key for key in self if not isinstance(key, str)]:
            raise argparse.ArgumentTypeError(f"names must be text, got {wrong[0]!r}")

    @staticmethod
    def _parse(text: str) -> dict[str, Any]:
        pairs = [] if text.startswith("{") else [pair.partition("=") for pair in text.split(",")]
        if not all(key and separator for key, separator, _ in pairs):
            raise argparse.ArgumentTypeError(
                f"expected key=value,key=value, got {text!r}; lists go into {{key: [1, 2]}}"
            )
        try:
            if not pairs:
                return yaml.load(text, Loader=YamlLoader)
            return {key.strip(): yaml.load(value, Loader=YamlLoader) for key, _, value in pairs}
        except yaml.YAMLError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not YAML: {one_line(error)}") from error


class MergeKeyValues(argparse.Action):
    """Later mappings add to earlier ones and win key by key."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, KeyValues({**getattr(namespace, self.dest), **values}))


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action):
        # HfArgumentParser accepts every option with dashes as well; listing both spellings doubles the help.
        shown = [option for option in action.option_strings if not re.match(r"--\w+-", option)]
        if not shown or action.nargs == 0:
            return ", ".join(shown)
        return f"{', '.join(shown)} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _get_help_string(self, action):
        return action.help if action.default in (None, [], {}) else super()._get_help_string(action)


class Parser(HfArgumentParser):
    def error(self, message):
        raise UsageError(message)


def parse_arguments(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    *,
    other_recipe_types: Sequence[type] = (),
) -> tuple:
    """One instance of each dataclass, from defaults, then the recipe, then the command line.

    Args:
        dataclass_types: the arguments; field names are unique over all of them.
        argv: the command line without the program's name; `sys.argv[1:]` when None.
        description: stands at the top of `--help` as it is.
        other_recipe_types: arguments of other scripts, which a recipe may hold as well; they are not looked at.

    Raises:
        UsageError: an unknown key or argument (close matches are named), a value of the wrong type, a missing recipe.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(
        dataclass_types,
        description=description,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [--recipe FILE] [arguments]",
    )
    recipe_help = "YAML file with values for these arguments, or the name of one in scripts/recipes."
    parser.add_argument("--recipe", metavar="FILE", help=recipe_help)
    recipe = _load_recipe(argv)
    names, others = _field_names(dataclass_types), _field_names(other_recipe_types)
    recipe = {name: value for name, value in recipe.items() if name in names or name not in others}
    given, known = [*as_arguments(recipe, names), *argv], [*names, "recipe"]
    *parsed, _, unknown = parser.parse_args_into_dataclasses(
        given, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
        raise UsageError(f"unknown argument {unknown[0]}{_after(unknown[0], given)}{did_you_mean(name, known)}")
    return tuple(parsed)


def _after(value: str, argv: Sequence[str]) -> str:
    """Which argument does not take a value."""
    before = [argument for argument in argv[: argv.index(value)] if argument.startswith("--")]
    return f" after {before[-1]}" if before and not value.startswith("-") else ""


def _field_names(dataclass_types: Sequence[type]) -> list[str]:
    return [field.name for dataclass_type in dataclass_types for field in dataclasses.fields(dataclass_type)]


def _load_recipe(argv: Sequence[str]) -> dict[str, Any]:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    given = parser.parse_known_args(argv)[0].recipe
    if given is None:
        return {}
    path = Path(given) if Path(given).is_file() else RECIPES / f"{given}.yaml"
    if not path.is_file():
        shipped = sorted(recipe.stem for recipe in RECIPES.glob("*.yaml"))
        raise UsageError(f"there is no recipe {given}; the ones that come with the package: {', '.join(shipped)}.")
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=YamlLoader)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"recipe {given} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise UsageError(f"recipe {given} must hold `argument: value` lines.")
    return recipe


def as_arguments(recipe: dict[str, Any], names: Sequence[str]) -> list[str]:
    """A recipe as a command line.

    Args:
        recipe: argument → value.
        names: all arguments there are.

    Raises:
        UsageError: an unknown key (close matches are named).
    """
    arguments = []
    for name, value in recipe.items():
        if name not in names:
            raise UsageError(f"unknown recipe key {name}{did_you_mean(str(name), names)}")
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            arguments.append(f"--{name}={json.dumps(value)}")
        elif value is not None:
            arguments.append(f"--{name}={value}")
    return arguments


def did_you_mean(name: str, names: Iterable[str], otherwise: str = ".") -> str:
    """The end of a sentence on a name that there is not."""
    close = difflib.get_close_matches(name, names)
    return f": did you mean {' or '.join(close)}?" if close else otherwise
