"""Captured steps: on a CUDA device, and their bookkeeping with a graph that is played here."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import cross_entropy
from training.examples import Stop, StoppedError, assert_same_bits, network, samples, state

from ritz.curvature._noise_kinds import NOISE_KINDS
from ritz.curvature._shared import Adapter
from ritz.optim import CovarianceNoise, IterateAverage, Lookahead
from ritz.optim._shared import NoiseReplay
from ritz.training import TrainingConfig, _cuda_graph, fit
from ritz.training._checkpoint import load_optimizer_state, optimizer_state
from ritz.training._fit import channels_last
from ritz.training._optimizers import create_optimizer
from ritz.training._step import Piece, Step

CAPTURED = [kind for kind in NOISE_KINDS if kind != "kfac"]


class Stream:
    def wait_stream(self, other):
        pass


class Played:
    """A graph whose replay computes what was recorded."""

    def replay(self):
        noise = None if self.step.noise is None else NoiseReplay(self.step.noise)
        with _cuda_graph.recording_hooks(self.step.optimizer, noise):
            Step.__call__(self.step, self.pieces)


class Recording(Step):
    """A step that remembers what it was to compute while a graph was recorded."""

    graph = None

    def __call__(self, pieces):
        if self.graph is None:
            super().__call__(pieces)
        else:
            self.graph.step, self.graph.pieces = self, pieces


@pytest.fixture
def played(monkeypatch):
    """CUDA graphs without CUDA."""

    @contextmanager
    def recording(graph, stream, *, pool, generators):
        Recording.graph = graph
        yield
        Recording.graph = None

    monkeypatch.setattr(_cuda_graph, "recorded", recording)
    monkeypatch.setattr(_cuda_graph, "_generators", lambda noise: [])
    for name, value in {
        "Stream": Stream,
        "current_stream": Stream,
        "graph_pool_handle": lambda: None,
        "CUDAGraph": Played,
        "synchronize": lambda: None,
        "stream": lambda stream: contextmanager(lambda: iter([None]))(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def walk(kind, take_of):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "lookahead":
        optimizer = Lookahead(optimizer, k=2)
    average = IterateAverage(optimizer, start=3, interval=2)
    adapter = Adapter(model, cross_entropy, None)
    step = Recording(adapter, optimizer, TrainingConfig(), torch.device("cpu"))
    take = take_of(step)
    averaged = stepped(take, 12, model, average)
    return state(model), averaged, step.totals, take


def stepped(take, count, model, average):
    """Take steps on batches of two sizes, and return the averaged weights."""
    x, y = samples(48)
    for i in range(count):
        rows = slice(0, 20) if i % 4 == 3 else slice(4 * (i % 4), 4 * (i % 4) + 10)
        take([Piece((x[rows], y[rows]))])
    with average.applied(model):
        return state(model)


@pytest.mark.parametrize("kind", ["plain", "lookahead"])
def test_replays_run_hooks_and_count_as_steps_do(played, kind):
    weights, averaged, totals, _ = walk(kind, lambda step: step)
    found, found_average, found_totals, take = walk(
        kind, lambda step: _cuda_graph.CapturedStep(step, required=True)
    )
    assert len(take._graphs) == 1  # nine steps of ten rows; three of twenty only warm up
    assert_same_bits(found, weights)
    assert_same_bits(found_average, averaged)
    assert torch.equal(found_totals.sums, totals.sums)


@contextmanager
def refusing(graph, stream, *, pool, generators):
    raise RuntimeError("operation not permitted when stream is capturing\nmore")
    yield


def test_a_step_that_cannot_be_recorded_runs_as_an_ordinary_step(played, monkeypatch):
    monkeypatch.setattr(_cuda_graph, "recorded", refusing)
    weights = walk("plain", lambda step: step)[0]
    with pytest.warns(UserWarning, match="not captured in a CUDA graph: operation not permitted"):
        found = walk("plain", lambda step: _cuda_graph.CapturedStep(step, required=False))[0]
    assert_same_bits(found, weights)
    with pytest.raises(ValueError, match="capture=True: the step cannot be captured"):
        walk("plain", lambda step: _cuda_graph.CapturedStep(step, required=True))


def noisy_walk(options, take_of, rate):
    model = network(norm=options.pop("norm", False))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    average = IterateAverage(optimizer, start=3, interval=2)
    noise = CovarianceNoise(optimizer, model, small=4, **options)
    device = torch.device("cpu")
    step = Recording(Adapter(model, cross_entropy, None), optimizer, TrainingConfig(), device,
                     noise=noise)  # fmt: skip
    take = take_of(step)
    averaged = stepped(take, 48, model, average)
    return state(model), averaged, noise, take


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        *(({"kind": kind}, ["new moments"]) for kind in CAPTURED),
        ({"refresh": 3, "until": 30}, ["new moments", "old moments", "without noise"]),
        ({"kind": "full", "until": 20, "momentum": "before"}, ["new moments", "without noise"]),
        ({"norm": True, "refresh": 3}, ["new moments", "old moments"]),
    ],
    ids=str,
)
def test_replays_draw_the_noise_of_ordinary_steps(played, options, phases):
    if options.get("kind") == "sgld":
        options = options | {"temperature": 1e-3}
    for rate in (0.1, torch.tensor(0.1)):
        weights, averaged, noise, _ = noisy_walk(dict(options), lambda step: step, rate)
        found, found_average, other, take = noisy_walk(
            dict(options), lambda step: _cuda_graph.CapturedStep(step, required=True), rate
        )

        assert {key[-1] for key in take._graphs} == set(phases)
        assert other.num_steps == noise.num_steps == 48
        assert_same_bits(found, weights)
        assert_same_bits(found_average, averaged)


def test_noise_goes_on_after_a_recording_that_failed(played, monkeypatch):
    @contextmanager
    def failing(graph, stream, *, pool, generators):
        Recording.graph = graph
        yield
        Recording.graph = None
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(_cuda_graph, "recorded", failing)
    weights, averaged, noise, _ = noisy_walk({"refresh": 3}, lambda step: step, 0.1)
    with pytest.warns(UserWarning, match="not captured in a CUDA graph: operation failed"):
        found, found_average, other, take = noisy_walk(
            {"refresh": 3}, lambda step: _cuda_graph.CapturedStep(step, required=False), 0.1
        )

    assert not take._graphs
    assert other.num_steps == noise.num_steps == 48
    assert_same_bits(found, weights)
    assert_same_bits(found_average, averaged)


def test_graphs_are_dropped_after_a_recording_that_failed(played, monkeypatch):
    """They would draw dropout from the former state of the generator."""
    take = walk("plain", lambda step: _cuda_graph.CapturedStep(step, required=False))[-1]
    assert len(take._graphs) == 1
    monkeypatch.setattr(_cuda_graph, "recorded", refusing)

    pieces = [Piece(tuple(tensor[:5] for tensor in samples(48)))]
    for _ in range(3):
        take(pieces)
    with pytest.warns(UserWarning, match="not captured"):
        take(pieces)

    assert not take._graphs


@pytest.mark.gpu
def test_dropout_works_after_a_recording_that_failed():
    class Reads(torch.nn.Module):
        """Can be captured until it reads a value on the host."""

        reads = False

        def forward(self, x):
            return x + float(x.sum() > 1e9) if self.reads else x

    torch.manual_seed(0)
    model = torch.nn.Sequential(network(dropout=0.3), Reads())

    def watch(count, model, optimizer):
        Reads.reads = count >= 6  # the graph of 12 rows exists, that of 6 cannot be recorded

    watch.unit = "step"
    with pytest.warns(UserWarning, match="not captured"):
        result = fit(model, samples(30), num_epochs=8, batch_size=12, device="cuda",
                     optimizer_settings={"lr": 0.1}, monitors=[watch])  # fmt: skip

    assert result.status.outcome == "completed"
    first, second = (torch.randn(3, device="cuda") for _ in range(2))
    assert not torch.equal(first, second)
    assert all(p.isfinite().all() for p in model.parameters())
    # The allocator works as before: it frees its cache, and another run records its graphs.
    torch.cuda.empty_cache()
    fit(network(dropout=0.3), samples(24), num_epochs=4, batch_size=12, device="cuda", capture=True)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "gadam", "gadamx", "adamw", "lookahead_sgd"])
def test_captured_runs_equal_runs_of_ordinary_steps(optimizer):
    rate = 0.1 if "sgd" in optimizer else 0.01
    found = []
    for capture in (False, True):
        # The bias before a batch norm has no gradient but roundoff, whose sign Adam would follow.
        model = network(norm="sgd" in optimizer)
        fit(model, samples(100), num_epochs=6, batch_size=12, optimizer=optimizer, device="cuda",
            optimizer_settings={"lr": rate}, schedule="linear", average_from=3, capture=capture,
            final="average")  # fmt: skip
        found.append(state(model))
    # A rate in a tensor and a fused kernel round otherwise than the ordinary ones.
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


NOISY = {"num_epochs": 12, "batch_size": 24, "device": "cuda", "noise_batch": 4,
         "optimizer_settings": {"lr": 0.05}}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        *({"noise": kind} for kind in CAPTURED if kind != "trace_unscaled"),
        {"noise": "diagonal", "noise_refresh": 10, "num_epochs": 40},
        {"noise": "trace", "noise_refresh": 2, "noise_until": 0.5},
        {"noise": "full", "noise_until": 0.5, "noise_momentum": "before"},
        {"noise": "diagonal", "norm": True},
        {"noise": "diagonal", "accumulate": 2, "batch_size": 12},
        {"noise": "diagonal", "precision": "bfloat16"},
        {"noise": "diagonal", "optimizer": "adamw", "optimizer_settings": {"lr": 1e-3}},
        {"noise": "none", "noise_batch": None, "optimizer": "noisy_sgd"},
        {"noise": "diagonal", "optimizer": "lookahead_sgd", "average_from": 3},
    ],
    ids=str,
)
def test_captured_runs_draw_the_noise_of_ordinary_steps(options):
    options, found = NOISY | options, []
    norm = options.pop("norm", False)
    for capture in (False, True):
        model = network(norm=norm, dropout=0.2)
        fit(model, samples(60), capture=capture, **options)
        found.append(state(model))
    # A learning rate in a tensor rounds otherwise than a number.
    half = options.get("precision") == "bfloat16"
    rtol, atol = (1e-2, 1e-2) if half else (1e-4, 1e-5)
    torch.testing.assert_close(found[1], found[0], rtol=rtol, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("refresh", [1, 4])
@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_a_captured_run_with_noise_is_resumed_bit_for_bit(kind, refresh, tmp_path):
    common = NOISY | {"capture": True, "noise": kind, "noise_refresh": refresh,
                      "deterministic": True}  # fmt: skip
    whole, parts = network(dropout=0.3), network(dropout=0.3)
    fit(whole, samples(60), **common)
    # Saved after every step, and stopped between two refreshes.
    with pytest.raises(StoppedError):
        fit(parts, samples(60), checkpoint=tmp_path, save_interval=0, monitors=[Stop(22)], **common)
    fit(parts, samples(60), checkpoint=tmp_path, **common)
    assert_same_bits(state(parts), state(whole))


@pytest.mark.gpu
def test_steps_with_kronecker_factored_noise_are_not_captured():
    result = fit(network(), samples(60), noise="kfac", **NOISY)
    assert result.status.outcome == "completed"


@pytest.mark.gpu
def test_a_captured_run_is_resumed_bit_for_bit(tmp_path):
    common = {"batch_size": 12, "device": "cuda", "deterministic": True, "capture": True,
              "optimizer_settings": {"lr": 0.1}}  # fmt: skip
    whole, parts = network(dropout=0.3), network(dropout=0.3)
    fit(whole, samples(), num_epochs=6, **common)
    fit(parts, samples(), num_epochs=3, checkpoint=tmp_path, **common)
    fit(parts, samples(), num_epochs=6, checkpoint=tmp_path, **common)
    assert_same_bits(state(parts), state(whole))


def convolutions():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 2, 2)), torch.nn.Conv2d(2, 4, 2), torch.nn.Flatten(),
        torch.nn.Linear(4, 3),
    )  # fmt: skip


def test_kernels_are_channels_last_during_a_run_on_cuda():
    model = convolutions()
    kernel, before = model[1].weight, model[1].weight.detach().clone()
    with channels_last(model, "tf32", torch.device("cuda")):
        assert kernel.stride() == (8, 1, 4, 2)
        assert torch.equal(kernel, before)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        saved = optimizer_state(optimizer)
        saved["state"]["0"]["momentum_buffer"] = kernel.grad.contiguous()
        load_optimizer_state(optimizer, saved, torch.device("cpu"))
        assert optimizer.state[kernel]["momentum_buffer"].stride() == kernel.stride()
        assert torch.equal(optimizer.state[kernel]["momentum_buffer"], kernel.grad)
    assert kernel.is_contiguous()
    with channels_last(model, "float32", torch.device("cuda")):
        assert kernel.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "gadamx"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_run_of_convolutions_is_resumed_bit_for_bit(tmp_path, optimizer, compiled):
    chosen = {"lr": 0.01} | ({"compile": True} if compiled and optimizer == "gadamx" else {})
    common = {"batch_size": 12, "device": "cuda", "deterministic": True, "capture": True,
              "precision": "tf32", "optimizer": optimizer, "optimizer_settings": chosen,
              "average_from": 2, "final": "average"}  # fmt: skip
    data = samples(100, features=8)
    whole, parts = convolutions(), convolutions()
    fit(whole, data, num_epochs=6, **common)
    fit(parts, data, num_epochs=3, checkpoint=tmp_path, **common)
    fit(parts, data, num_epochs=6, checkpoint=tmp_path, **common)
    assert_same_bits(state(parts), state(whole))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_learns_on_cuda(precision):
    result = fit(network(), samples(), num_epochs=10, batch_size=12, precision=precision,
                 device="cuda", optimizer_settings={"lr": 0.1})  # fmt: skip
    assert result.history["train_loss"][-1] < 0.7 * result.history["train_loss"][0]


@pytest.mark.gpu
def test_sgd_is_not_fused_where_a_scaler_may_skip_its_first_step():
    params = network().cuda().parameters()
    (group,) = create_optimizer(
        "sgd", params, may_skip_steps=True, lr=0.1, momentum=0.9
    ).param_groups
    assert not group["fused"]


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True], ids=["ordinary", "captured"])
@pytest.mark.parametrize("as_batches", [False, True], ids=["tensors", "batches of the host"])
@pytest.mark.parametrize("noise", ["none", "diagonal", "full", "trace"])
def test_no_step_waits_for_the_device(capture, as_batches, noise):
    """torch warns of every wait; their number must not depend on that of the steps."""

    def waits(count):
        x, y = samples(8 * count)
        data = (
            list(zip(x.split(8), y.split(8), strict=True)) if as_batches else (x.cuda(), y.cuda())
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                small = None if noise == "none" else 4
                fit(network().cuda(), data, num_epochs=2, batch_size=8, capture=capture,
                    noise=noise, noise_batch=small)  # fmt: skip
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(one.message) for one in told)

    waits(8)  # the first run of a process begins things that are then there
    assert waits(40) == waits(8)
