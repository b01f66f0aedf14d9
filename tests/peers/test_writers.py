"""Monitors that write to Weights & Biases, offline, and to MLflow, read back by these libraries."""

import re
import struct
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from ritz.training import CurvatureMonitor, MlflowWriter, WandbWriter, fit, read_log


def run(writer, folder):
    """Train with a monitor; return its numbers and those of the epoch by step, from the log."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    monitor = CurvatureMonitor((x, y), quantities=["lambda_max", "trace"],
                               unit="step", every=2)  # fmt: skip
    fit(model, (x, y), num_epochs=1, batch_size=10, monitors=[monitor], log=folder / "log.jsonl",
        writer=writer)  # fmt: skip
    found = {}
    for each in read_log(folder / "log.jsonl"):
        found.setdefault(each["step"], {}).update(each)
    return found


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """The library, which keeps the folder and the settings of its first use until it ends."""
    library = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield library
    library.teardown()


def history(file):
    """Rows of an offline run by step. The format is the log of LevelDB after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts, rows = file.read_bytes(), 7, b"", {}
    assert content.startswith(b":W&B")
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # no header spans two blocks
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        parts, place = parts + content[place + 7 : place + 7 + size], place + 7 + size
        if kind not in (1, 4):  # the whole record, or its last part
            continue
        record, parts = Record.FromString(parts), b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {each.key or "/".join(each.nested_key): each.value_json for each in items}
            rows[int(float(row["_step"]))] = row
    return rows


@pytest.mark.filterwarnings("ignore")
def test_an_offline_run_of_wandb_has_the_numbers(tmp_path, wandb):
    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True)

    with wandb.init(project="ritz", mode="offline", dir=tmp_path, settings=settings) as made:
        expected = run(WandbWriter(made), tmp_path)

    (file,) = tmp_path.glob("wandb/offline-run*/*.wandb")
    rows, patience = history(file), time.monotonic() + 60
    while len(rows) < 2 and time.monotonic() < patience:  # another process writes the file
        time.sleep(0.1)
        rows = history(file)
    for step in (2, 4):
        for name in ("lambda_max", "trace"):
            assert float(rows[step][f"curvature/{name}"]) == expected[step][name]
    assert sorted(rows) == [2, 4]
    assert float(rows[4]["train/loss"]) == expected[4]["train_loss"]
    assert float(rows[4]["learning_rate"]) == expected[4]["learning_rate"]


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_mlflow_has_the_numbers(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    number = mlflow.create_experiment("ritz", artifact_location=str(tmp_path / "artifacts"))

    with mlflow.start_run(experiment_id=number) as made:
        expected = run(MlflowWriter(made), tmp_path)

    client = mlflow.MlflowClient()
    for name in ("lambda_max", "trace"):
        history = client.get_metric_history(made.info.run_id, f"curvature/{name}")
        assert {each.step: each.value for each in history} == {
            step: record[name] for step, record in expected.items()
        }
        assert sorted(expected) == [2, 4]
    (loss,) = client.get_metric_history(made.info.run_id, "train/loss")
    assert (loss.step, loss.value) == (4, expected[4]["train_loss"])


@pytest.mark.filterwarnings("ignore")
def test_the_page_on_integrations_runs(tmp_path, wandb):
    for name in ("mlflow", "tensorboard"):
        pytest.importorskip(name)
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[:3]
    assert [block.partition("\n")[0] for block in blocks] == [
        "import torch", "import wandb", "import mlflow"
    ]  # fmt: skip

    exec("\n".join(blocks), {"__name__": "page"})

    assert list(tmp_path.glob("logs/events.out.tfevents.*"))
    assert list(tmp_path.glob("wandb/offline-run*/*.wandb"))
    assert (tmp_path / "mlflow.db").is_file()
