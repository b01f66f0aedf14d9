"""Monitors in trainings by Lightning and by Hugging Face, and in the files of TensorBoard."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from training.examples import assert_same_bits, network, samples, state

import ritz
from ritz import training
from ritz.training import CurvatureMonitor, fit

QUANTITIES = ["lambda_max", "trace", "gradient_norm", "update_size"]


def read_tags(folder):
    """Steps and values by tag, read by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            for each in events.Scalars(tag):
                found.setdefault(tag, {})[each.step] = each.value
    return found


def sharpness(model, data):
    """The largest eigenvalue, from the dense Hessian."""
    risk = ritz.Risk(model, cross_entropy, data)
    return float(torch.linalg.eigvalsh(ritz.hessian(risk).dense())[-1])


def blocks(*words):
    """The Python blocks of the page on integrations that begin with one of these imports."""
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(found) == 6
    return [block for word in words for block in found if block.startswith(f"{word}\n")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_on_integrations_runs(tmp_path, monkeypatch):
    for name in ("tensorboard", "lightning", "accelerate", "transformers"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    words = ("import torch", "import lightning", "from ritz.training import TrainerCallback",
             "from ritz.training import sweep")  # fmt: skip
    program = blocks(*words)
    assert len(program) == 4
    exec("\n".join(program), {"__name__": "page"})
    tags = read_tags(tmp_path)
    assert {"curvature/lambda_max", "train/curvature/lambda_max"} <= set(tags)
    assert len(list(tmp_path.glob("sweeps/widths/*"))) == 18


def test_callbacks_are_names_of_training_and_a_wrong_name_is_none():
    assert {"LightningCallback", "TrainerCallback"} <= set(dir(training))
    with pytest.raises(AttributeError, match=r"'ritz.training' has no attribute 'KerasCallback'"):
        _ = training.KerasCallback


def test_fit_writes_into_the_files_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    data, model = samples(), network()
    monitors = [
        CurvatureMonitor(data, quantities=QUANTITIES, unit="step", every=8),
        CurvatureMonitor(data, quantities=["weight_norms"]),
    ]
    with SummaryWriter(tmp_path) as writer:
        result = fit(
            model, data, num_epochs=2, batch_size=12, validation=data, test=data, writer=writer,
            monitors=monitors, schedule=lambda epoch: 0.5**epoch, log=tmp_path / "log.jsonl",
        )  # fmt: skip

    found = read_tags(tmp_path)
    records = training.read_log(tmp_path / "log.jsonl")
    # By epoch, over steps: four of them in each.
    tags = {"train/loss": "train_loss", "train/accuracy": "train_accuracy",
            "validation/loss": "validation_loss", "learning_rate": "learning_rate"}  # fmt: skip
    for tag, name in tags.items():
        logged = {x["step"]: x[name] for x in records if x["kind"] == "epoch"}
        assert found[tag] == pytest.approx(logged, rel=1e-6)
        assert sorted(logged) == [4, 8]
    assert found["test/accuracy"] == pytest.approx({8: result.metrics["test_accuracy"]})
    assert list(found["curvature/weight_norm"]) == [4, 8]
    assert list(found["curvature/lambda_max"]) == [8]
    assert found["curvature/lambda_max"][8] == pytest.approx(sharpness(model, data), rel=1e-3)
    assert list(found["curvature/update_size"]) == [8]


class Told:
    """A writer that remembers what it was given."""

    def __init__(self):
        self.numbers = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.numbers.append((tag, global_step))


def test_a_monitor_with_a_writer_is_not_written_twice(tmp_path):
    one, other, data = Told(), Told(), samples()
    monitor = CurvatureMonitor(data, quantities=["weight_norms"], writer=other)
    fit(network(), data, num_epochs=1, batch_size=12, monitors=[monitor], writer=one)
    assert ("train/loss", 4) in one.numbers
    assert not [tag for tag, _ in one.numbers if tag.startswith("curvature/")]
    assert other.numbers == [("curvature/weight_norm", 1), ("curvature/weight_max", 1)]


def test_a_resumed_run_writes_from_its_checkpoint_on(tmp_path):
    writers, data = [Told(), Told()], samples()
    for epochs, writer in zip((1, 3), writers, strict=True):
        fit(network(), data, num_epochs=epochs, batch_size=12, writer=writer, checkpoint=tmp_path)
    steps = [[step for tag, step in each.numbers if tag == "train/loss"] for each in writers]
    assert steps == [[4], [8, 12]]


def test_what_a_user_defined_monitor_returns_is_written():
    told = Told()
    fit(network(), samples(), num_epochs=1, batch_size=12, writer=told,
        monitors=[lambda count, model, optimizer: {"count": float(count)}])  # fmt: skip
    assert ("curvature/count", 4) in told.numbers


# ------------------------------------------------------------------------------------------
# Lightning.


@pytest.fixture
def quiet():
    """Lightning warns of things that are as they should be in a small test."""
    pytest.importorskip("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def lightning_run(folder, callbacks, epochs=2, resume=None, accumulate=1):
    """Train with dropout, batch norm and momentum; return the module."""
    import lightning
    from lightning.pytorch.loggers import TensorBoardLogger

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network(norm=True, dropout=0.3)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            loss = cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(3)
    module = Module()
    loader = DataLoader(TensorDataset(*samples()), batch_size=12, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=epochs, logger=TensorBoardLogger(folder), callbacks=callbacks, accelerator="cpu",
        default_root_dir=folder, log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module


def test_a_lightning_run_is_the_same_with_curvature_in_its_tensorboard_files(tmp_path, quiet):
    pytest.importorskip("tensorboard")
    data = samples()
    monitors = [
        CurvatureMonitor(data, quantities=QUANTITIES, unit="step", every=4),
        CurvatureMonitor(data, quantities=["lambda_max", "distance"], unit="epoch"),
    ]

    plain = lightning_run(tmp_path / "plain", [])
    watched = lightning_run(tmp_path / "watched", [training.LightningCallback(monitors[0])])
    epochs = lightning_run(tmp_path / "epochs", [training.LightningCallback(monitors[1])])

    assert_same_bits(state(watched), state(plain))
    assert_same_bits(state(epochs), state(plain))
    before, found = read_tags(tmp_path / "plain"), read_tags(tmp_path / "watched")
    assert found["loss"] == before["loss"]
    assert set(found["curvature/lambda_max"]) == {4, 8}
    # The second search has six products from the first eigenvector.
    assert found["curvature/lambda_max"][8] == pytest.approx(
        sharpness(plain.eval(), data), rel=1e-3
    )
    assert "curvature/update_size" in found
    found = read_tags(tmp_path / "epochs")
    assert set(found["curvature/lambda_max"]) == {4, 8}  # two epochs, at the steps of the logger
    moved = sum((p - q).square().sum() for p, q in zip(plain.net.parameters(),
                network(norm=True).parameters(), strict=True)).sqrt()  # fmt: skip
    assert found["curvature/distance"][8] == pytest.approx(float(moved), rel=1e-5)


def test_a_resumed_lightning_run_measures_from_the_same_initial_weights(tmp_path, quiet):
    pytest.importorskip("tensorboard")
    made = [CurvatureMonitor(samples(), quantities=["distance"]) for _ in range(3)]
    callbacks = [training.LightningCallback(monitor) for monitor in made]

    lightning_run(tmp_path / "whole", [callbacks[0]])
    lightning_run(tmp_path / "half", [callbacks[1]], epochs=1)
    lightning_run(tmp_path / "rest", [callbacks[2]], resume=tmp_path / "half" / "last.ckpt")

    whole, rest = (read_tags(tmp_path / name) for name in ("whole", "rest"))
    # The order of the second epoch differs: Lightning does not store the global generator.
    ratio = rest["curvature/distance"][8] / whole["curvature/distance"][8]
    assert ratio == pytest.approx(1, abs=0.2)
    first = read_tags(tmp_path / "half")["curvature/distance"][4]
    assert rest["curvature/distance"][8] > first


def test_accumulated_batches_of_lightning_are_one_step(tmp_path, quiet):
    pytest.importorskip("tensorboard")
    monitor = CurvatureMonitor(samples(), quantities=["gradient_norm"], unit="step")
    lightning_run(tmp_path, [training.LightningCallback(monitor)], accumulate=2)
    assert sorted(read_tags(tmp_path)["curvature/gradient_norm"]) == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------
# Hugging Face.


class Classifier(nn.Module):
    """A network that returns its loss."""

    def __init__(self):
        super().__init__()
        self.net = network(norm=True, dropout=0.3)

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def huggingface_run(folder, monitor=None, **more):
    """Train with dropout, batch norm and AdamW; return the model and the trainer."""
    from transformers import Trainer, TrainingArguments

    x, y = samples()
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    torch.manual_seed(3)
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=12, seed=3,
        learning_rate=0.05, logging_steps=2, save_strategy="no", use_cpu=True, disable_tqdm=True,
        **{"report_to": "none"} | more,
    )  # fmt: skip
    model = Classifier()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    if monitor is not None:
        trainer.add_callback(training.TrainerCallback(monitor, log=trainer.log))
    trainer.train()
    return model, trainer


@pytest.fixture
def huggingface():
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def losses(trainer):
    return [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row]


def test_a_hugging_face_run_is_the_same_with_curvature_in_its_tensorboard_files(
    tmp_path, huggingface, monkeypatch
):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    x, y = samples()
    batches = [{"x": x, "labels": y}]
    monitor = CurvatureMonitor(
        batches, loss_fn=None, quantities=["lambda_max", "trace", "update_size"], unit="step",
        every=4,
    )  # fmt: skip

    plain, before = huggingface_run(tmp_path / "plain")
    watched, after = huggingface_run(tmp_path / "watched", monitor, report_to="tensorboard")

    assert_same_bits(state(watched), state(plain))
    # The losses are logged at the same steps, also where curvature is.
    assert losses(after) == losses(before)
    assert [step for step, _ in losses(after)] == [2, 4, 6, 8]
    found = read_tags(tmp_path)
    assert set(found["train/curvature/lambda_max"]) == {4, 8}
    exact = sharpness(plain.net.eval(), (x, y))
    assert found["train/curvature/lambda_max"][8] == pytest.approx(exact, rel=0.05)
    assert set(found["train/curvature/update_size"]) == {4, 8}
    assert set(found["train/loss"]) == {2, 4, 6, 8}


def test_a_hugging_face_run_is_measured_by_epochs_into_a_log(tmp_path, huggingface):
    x, y = samples()
    log = tmp_path / "curvature.jsonl"
    monitor = CurvatureMonitor(
        [{"x": x, "labels": y}], loss_fn=None, quantities=["lambda_max"], log=log
    )

    huggingface_run(tmp_path, monitor)

    assert [record["epoch"] for record in training.read_log(log)] == [1, 2]
