"""An LSTM on Penn Treebank: Gadam paper, Tables 6, 12 and 13, Figures 12 and 13.

After Granziol et al., *Beyond SGD: iterate averaged adaptive gradient methods*, 5.4, B.3 and C.2.
The recipe is that of AWD-LSTM: segments of random lengths, dropout of words, features and recurrent
weights, penalties on the last activations, clipping. It is an option of ``ritz.training.fit``, and
the published settings are presets of ``ritz.optim``; the settings here are those presets.

By default, a small network learns part of the text with a small vocabulary. Its perplexities
compare methods with each other, but not with the published perplexities. For each seed, all methods
have the same initial weights and segments, so their differences are paired. Averaging does not
change the iterates: the last iterate of Gadam is that of Adam with a constant learning rate.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ritz import data, models, plots, training
from ritz._core.checks import check_range
from ritz._core.progress import Progress
from ritz.data import TextData, TextSplit
from ritz.plots._shared import style
from ritz.studies._evidence import Evidence, signed, spread
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    check_entries,
    check_minimums,
    compute_by_seed,
    record,
    seeded,
)
from ritz.studies._training import fit_whole

# Presets by method; the averages of ASGD, Gadam and GadamX begin at the half.
PRESETS = {
    "ASGD": "asgd/lstm/ptb",
    "NT-ASGD": "nt_asgd/lstm/ptb",
    "Adam, steps": "scheduled_adam/lstm/ptb",
    "Padam, steps": "padam/lstm/ptb",
    "Gadam": "gadam/lstm/ptb",
    "GadamX": "gadamx/lstm/ptb",
}
# Validation and test perplexity, Tables 12 and 13.
PAPER = {
    "Adam": (65.96, 63.16), "ASGD": (64.88, 61.98), "NT-ASGD": (66.01, 64.73),
    "Adam, steps": (63.99, 61.51), "Padam, steps": (65.69, 62.15), "Gadam": (61.35, 58.77),
    "GadamX": (63.49, 60.45),
}  # fmt: skip
# Dropout of Merity et al. for Penn Treebank.
DROPOUT = {
    "dropout": 0.4, "input_dropout": 0.4, "hidden_dropout": 0.25, "embedding_dropout": 0.1,
    "weight_drop": 0.5,
}  # fmt: skip
STREAMS = 10  # parallel streams of an evaluation
# Pairs of methods whose perplexities are compared, and where the paper has them.
CLAIMS = (
    ("Table 12", "Gadam", "Adam"),
    ("Table 12", "GadamX", "Padam, steps"),
    ("Table 12", "Gadam", "ASGD"),
    ("Table 12", "GadamX", "ASGD"),
    ("Table 12", "Gadam", "GadamX"),
    ("Table 13", "NT-ASGD", "ASGD"),
    ("Table 13", "Adam, steps", "Adam"),
)


@record
class Config:
    """Text, network and number of the runs.

    Attributes:
        methods: Methods, of ``PRESETS``. Adam is added if Gadam is one of them.
        dataset: ``ptb``, or ``chain``, a random chain of words for a test without files.
        num_words: Words of the training text, from its beginning; a quarter as many for validation
            and for testing. ``None`` is all of the text.
        vocabulary: Size of the vocabulary: the most frequent words, and ``<unk>`` for the others.
            ``None`` is that of the data set.
        length: Usual number of words of a segment.
        batch_size: Streams that are read in parallel.
        width: Size of the embedding and of the last layer.
        hidden: Size of the other layers.
        depth: Number of layers.
        regularization: Factor on the published probabilities of dropout.
        rate: Learning rate of Adam and Gadam, whose published one is not known.
        num_epochs: Epochs of every run.
        patience: Evaluations by which NT-ASGD looks back.
        num_seeds: Runs of every method.
        device: Device of the networks.
        seed: Run ``i`` has the seed ``seed + i``.
        data: Folder of the text. Defaults to the environment variable ``RITZ_DATA``.
    """

    methods: tuple[str, ...] = tuple(PRESETS)
    dataset: Literal["ptb", "chain"] = "ptb"
    num_words: int | None = 20_000
    vocabulary: int | None = 1000
    # Few words and short segments, so that the weights reach a plateau within 3,000 steps, as they
    # do in 200 epochs of the whole text: before that an average is behind.
    length: int = 20
    batch_size: int = 10
    width: int = 48
    hidden: int = 64
    depth: int = 2
    # So small a network learns too little with all of it.
    regularization: float = 0.5
    # The best of 0.003 and 0.01, by the validation perplexity of another seed.
    rate: float = 0.01
    num_epochs: int = 30
    patience: int = 2
    num_seeds: int = 3
    device: str = "cpu"
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        check_minimums(
            self, length=2, batch_size=1, width=1, hidden=1, depth=1, num_epochs=4, patience=1,
            num_seeds=1, seed=0, rate=0.0, num_words=200, vocabulary=10,
        )  # fmt: skip
        check_entries(self, methods=PRESETS)
        check_range("regularization", self.regularization, low=0.0, high=1.0)


SIZES = {
    "smoke": Config(
        dataset="chain", num_words=2000, vocabulary=30, length=10, width=8, hidden=8, num_epochs=4,
        num_seeds=2, patience=1,
    ),
    "paper": Config(
        num_words=None, vocabulary=None, length=70, batch_size=20, width=400, hidden=1150, depth=3,
        regularization=1.0, rate=1e-3, num_epochs=200, patience=10, device="cuda",
    ),
}  # fmt: skip


@record
class Result(StudyResult[Config]):
    """Perplexities of every method; that of the average where a method has one.

    Attributes:
        test: Test perplexity at the end, ``(methods, num_seeds)``, in the order of ``names``.
        curves: Validation perplexity after every epoch, ``(methods, num_seeds, num_epochs)``; that
            of the average once it has begun.
        starts: First epoch at whose end there is an average, ``(methods, num_seeds)``; NaN without.
        words: Words of the training text.
        num_classes: Size of the vocabulary.
    """

    test: Tensor
    curves: Tensor
    starts: Tensor
    words: int
    num_classes: int

    @property
    def names(self) -> tuple[str, ...]:
        """The methods in their order; Adam is the last iterate of Gadam."""
        chosen = self.config.methods
        return ("Adam", *chosen) if "Gadam" in chosen else chosen

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"Perplexity on {c.dataset}, {self.words:,} words, vocabulary of {self.num_classes:,}, "
            f"{c.num_epochs} epochs; mean over {c.num_seeds} seeds ± standard error",
            f"{'':14}{'validation':>20}{'test':>20}{'average from':>14}{'published test':>16}",
        ]
        for i, name in enumerate(self.names):
            start = self.starts[i].mean()
            begun = "-" if bool(start.isnan()) else f"{float(start):.1f}"
            lines.append(
                f"{name:14}{spread(self.curves[i, :, -1]):>20}{spread(self.test[i]):>20}"
                f"{begun:>14}{PAPER[name][1]:>16.2f}"
            )
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False, state: StatePath = None) -> Result:
    """Return the perplexities of all methods for all seeds."""
    text = _text(config)
    # (last iterate or average, test and epochs) by seed and method.
    table = compute_by_seed(
        partial(_train, config, text), config.methods, config=config, state=state,
        progress=progress,
    )  # fmt: skip
    last, average = table.permute(2, 1, 0, 3)
    best = torch.where(average.isnan(), last, average)
    # The first column is the test, the others are epochs.
    begun = average[..., 1:].isfinite()
    starts = torch.where(begun.any(-1), begun.double().argmax(-1) + 1.0, math.nan)
    if "Gadam" in config.methods:
        # Averaging does not change the iterates: those of Gadam are those of Adam.
        adam = last[config.methods.index("Gadam")][None]
        best, starts = torch.cat([adam, best]), torch.cat([starts[:1] * math.nan, starts])
    return Result(
        config=config,
        test=best[..., 0].contiguous(),
        curves=best[..., 1:].contiguous(),
        starts=starts,
        words=len(text.train.tokens),
        num_classes=text.num_classes,
    )


def figure(result: Result) -> style.Figure:
    """Draw the validation perplexity of every method over the epochs, Figures 12 and 13.

    The second panel has the second half of the epochs and the adaptive methods alone.
    """
    drawing, axes = plots.panels(1, 2, width=4.8, height=3.4)
    count = result.config.num_epochs
    for axis, start in zip(axes, (1, count // 2 + 1), strict=True):
        for name, colour, curves in zip(
            result.names, style.STYLE.palette, result.curves, strict=False
        ):
            if start == 1 or "ASGD" not in name:
                # Dashed, so that the two that share their first epochs are both visible.
                line = "--" if name.startswith("Gadam") else "-"
                axis.plot(range(start, count + 1), curves.mean(0)[start - 1 :], line, color=colour,
                          linewidth=1.4, label=name)  # fmt: skip
    style.log_scale(axes[0], result.curves.mean(1))
    title = f"{result.words:,} words of {result.config.dataset}, {result.config.num_seeds} seeds"
    style.finish(axes[0], "epoch", "validation perplexity", title)
    style.finish(axes[1], "epoch", "validation perplexity", "adaptive methods, second half")
    style.share_legend(drawing)
    return drawing


def setting(result: Result) -> str:
    """Return the text and the network."""
    c = result.config
    return (
        f"{result.words:,} words of {c.dataset}, vocabulary of {result.num_classes:,}, {c.depth} "
        f"layers of {c.hidden}, {c.num_epochs} epochs, {c.num_seeds} seed{'s'[: c.num_seeds > 1]}."
    )


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield each comparison of the tables as a paired change of the test perplexity in %."""
    for where, name, other in CLAIMS:
        if not {name, other} <= set(result.names):
            continue
        first, second = (result.test[result.names.index(each)] for each in (name, other))
        # Relative changes, since perplexities depend on text and vocabulary.
        published = 100 * (PAPER[name][1] / PAPER[other][1] - 1)
        change = 100 * (first / second - 1)
        yield Evidence(
            paper="GADAM",
            where=where,
            what=f"change of the test perplexity in %, {name} against {other}",
            published=f"{published:+.1f}",
            measured=spread(change),
            **signed(change, int(math.copysign(1, published)), size=published),
        )


# ------------------------------------------------------------------------------------------
# One run, and its text.


def _train(config: Config, text: TextData, name: str, seed: int) -> Tensor:
    """Return test and validation perplexities of last iterate and average, ``(2, 1 + epochs)``."""
    sizes: Any = {"width": config.width, "hidden": config.hidden, "depth": config.depth}
    # A smaller network needs less of the published dropout.
    sizes |= {key: config.regularization * value for key, value in DROPOUT.items()}
    model = models.create(
        "lstm", num_classes=text.num_classes, generator=seeded(seed), device=config.device, **sizes
    )
    result = fit_whole(
        model, text.train, validation=text.validation, test=text.test,
        config=training.preset_config(PRESETS[name], **_changes(config, name)),
        evaluation_batch_size=STREAMS, seed=seed,
    )  # fmt: skip
    scores = torch.full((2, 1 + config.num_epochs), math.nan, dtype=torch.float64)
    for row, prefix in zip(scores, ("", "average_"), strict=True):
        row[0] = result.metrics.get(f"{prefix}test_perplexity", math.nan)
        # A run that diverged has fewer epochs.
        curve = result.history.get(f"{prefix}validation_perplexity", row[:0])
        row[1 : 1 + len(curve)] = curve
    return scores


def _changes(config: Config, name: str) -> dict[str, Any]:
    """Return the options that differ from the preset, which is for 200 epochs."""
    changes: dict[str, Any] = {"num_epochs": config.num_epochs, "batch_size": config.batch_size}
    if name == "NT-ASGD":
        return changes | {"patience": config.patience}
    if name.endswith("steps"):
        marks = (config.num_epochs // 2, config.num_epochs * 3 // 4)
        changes |= {"milestones": marks}
    else:  # the published start, epoch 100 of 200
        changes |= {"average_from": config.num_epochs // 2}
    if name in ("Gadam", "Adam, steps"):
        changes |= {"optimizer_settings": {"lr": config.rate}}
    return changes


def _text(config: Config) -> TextData:
    """Return the beginning of the text, with a smaller vocabulary."""
    if config.dataset == "chain":
        text = _chain(config)
    else:
        loaded: Any = data.load("ptb", data_dir=config.data, length=config.length)
        text = loaded
    if config.num_words is not None:
        train, held = config.num_words, config.num_words // 4
        text = replace(
            text,
            train=_first(text.train, train),
            validation=_first(text.validation, held),
            test=_first(text.test, held),
        )
    return _with_frequent_words(text, config.vocabulary).to(config.device)


def _first(split: TextSplit, count: int) -> TextSplit:
    return replace(split, tokens=split.tokens[:count])


def _with_frequent_words(text: TextData, count: int | None) -> TextData:
    """Return the text with its ``count - 1`` most frequent words, the others as ``<unk>``."""
    if count is None or count >= text.num_classes:
        return text
    unknown = text.vocabulary.index("<unk>") if "<unk>" in text.vocabulary else 0
    counts = torch.bincount(text.train.tokens, minlength=text.num_classes)
    counts[unknown] = len(text.train.tokens) + 1  # the first of the new vocabulary
    frequent = counts.argsort(descending=True, stable=True)[:count]
    numbers = torch.zeros(text.num_classes, dtype=torch.int64)
    numbers[frequent] = torch.arange(count)
    parts = {
        name: replace(part, tokens=numbers[part.tokens])
        for name in ("train", "validation", "test")
        for part in [getattr(text, name)]
    }
    return replace(text, vocabulary=tuple(text.vocabulary[i] for i in frequent.tolist()), **parts)


def _chain(config: Config) -> TextData:
    """Return a text in which each word has three possible successors."""
    generator, words = seeded(config.seed), config.vocabulary or 30
    successors = torch.randint(words, (words, 3), generator=generator).tolist()
    choices = torch.randint(3, (2 * (config.num_words or 2000),), generator=generator).tolist()
    # A text of which a model can learn something: one of three successors per word.
    tokens = [0]
    for choice in choices:
        tokens.append(successors[tokens[-1]][choice])
    third = len(tokens) // 4
    splits = torch.tensor(tokens).split([len(tokens) - 2 * third, third, third])
    train, validation, test = (TextSplit(tokens=x, length=config.length) for x in splits)
    return TextData(
        name="chain", train=train, validation=validation, test=test,
        vocabulary=tuple(map(str, range(words))),
    )  # fmt: skip
