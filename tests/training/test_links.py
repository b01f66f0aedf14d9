"""Nothing is written through a link, and those who take turns in a folder do not fail."""

import threading

import pytest
from training.examples import network, samples

from ritz.training import CheckpointError, fit
from ritz.training._checkpoint import sole_writer
from ritz.training._log import Log

RUN = {"num_epochs": 1, "batch_size": 12}


@pytest.fixture
def precious(tmp_path):
    found = tmp_path / "precious"
    found.write_text("not of a run")
    return found


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", [".lock", "log.jsonl", "log.times.jsonl"])
@pytest.mark.parametrize("leads", [True, False])
def test_a_link_is_refused_before_anything_is_changed(tmp_path, precious, name, leads):
    folder = tmp_path / "run"
    given = {"checkpoint": folder, "log": folder / "log.jsonl"}
    fit(network(), samples(), **given, **RUN)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(precious)
    before = contents(folder)
    if not leads:
        precious.unlink()
    with pytest.raises(OSError, match=rf"{name} is a symbolic link: remove it, or"):
        fit(network(), samples(), resume=False, **given, **RUN)
    assert precious.exists() == leads
    assert (folder / name).is_symlink()
    if not leads:
        precious.write_text("not of a run")
    assert contents(folder) == before


def test_links_are_refused_by_folders_and_by_logs(tmp_path, precious):
    (tmp_path / ".lock").symlink_to(precious)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        fit(network(), samples(), checkpoint=tmp_path, **RUN)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        Log(tmp_path / ".lock")
    assert precious.read_text() == "not of a run"


def test_threads_that_compete_for_a_folder_see_no_other_error(tmp_path):
    """A lock has gone between any two looks at it; each open file is locked on its own."""
    errors, turns = [], []

    def take():
        for _ in range(500):
            try:
                with sole_writer(tmp_path):
                    turns.append(1)
            except CheckpointError:
                pass
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert turns
    assert list(tmp_path.iterdir()) == []
