"""Fetch Transformers' own tests: the `tests/` folder of the source distribution of the version that is installed.

They go into `.transformers/`, which git ignores; what is there already is used again.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

from lion_transformers.scripts.arguments import UsageError, run


NAME = f"transformers-{transformers.__version__}"
FOLDER = Path(__file__).parents[2] / ".transformers"
TESTS = FOLDER / NAME / "tests"


def main():
    if not TESTS.is_dir():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
            extract_tests(download(Path(temporary)))


def download(folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"transformers=={transformers.__version__}"]
    if subprocess.run(command, check=False).returncode != 0:
        raise UsageError(f"pip could not download the source distribution of {NAME}; what it says is above.")
    return folder / f"{NAME}.tar.gz"


def extract_tests(archive: Path):
    """Beside the archive first, then moved: a folder that is there is complete."""
    with tarfile.open(archive) as source:
        tests = [member for member in source if member.name.startswith(f"{NAME}/tests/")]
        source.extractall(archive.parent, tests, filter="data")
    (archive.parent / NAME / "tests" / "__init__.py").touch()  # one of the tests loads the folder as a package
    (archive.parent / NAME).rename(TESTS.parent)


if __name__ == "__main__":
    run(main)
