"""An LSTM on Penn Treebank by Adam and by Gadam: perplexity by epoch, and the time of a step.

The three-layer AWD-LSTM of Granziol et al. (2021), 5.4 and B.3, on its settings where they are
printed: a constant rate, an L2 term of 1.2e-6, segments of 70 words, averaging from the middle of
the run on; its rate is not printed, so the default of Adam stands, and gradients are cut at a norm
of 0.25 as in the code that it used. It trains for 200 epochs of batches of 20; ``--epochs`` and
``--batch-size`` are smaller and larger here, so what to look at is the gain of the average, not
the last word on perplexity. Segments are of one length, and activations are not penalised.

Both optimisers begin with the same weights and draw the same dropout. Perplexities are those of
whole texts, read in ten streams with the state carried on. Beside the table,
``results/ptb*_<optimizer>.jsonl`` are the logs of the runs, with times beside them.
"""

import argparse
import math
import warnings
from dataclasses import replace

import torch
from timing import RESULTS, write

from ritz import data, models
from ritz.training import evaluate, fit, read_log
from ritz.training._folder import times_path

STREAMS = 10  # of an evaluation
DECAY = 1.2e-6
OPTIMIZERS = {
    "adam": {"weight_decay": DECAY},
    "gadam": {"weight_decay": DECAY, "decoupled_weight_decay": False},
}


class Perplexities:
    """Perplexity on validation and test words after every epoch, of the weights and their mean."""

    unit = "epoch"

    def __init__(self, name, text):
        self.name, self.parts = name, {"validation": text.validation, "test": text.test}

    def __call__(self, epoch, model, optimizer):
        found = self.scores(model, "")
        average = getattr(optimizer, "average", None)
        if average is not None and average.count:
            with average.applied(model):
                found |= self.scores(model, "average_")
        line = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in found.items())
        print(f"{self.name}, epoch {epoch}: {line}", flush=True)
        return {"kind": "perplexity"} | found

    def scores(self, model, prefix):
        return {
            f"{prefix}{name}": math.exp(evaluate(model, part.batches(STREAMS))["loss"])
            for name, part in self.parts.items()
        }


def words(args):
    """The text, all three parts of it cut where steps are counted."""
    found = data.load("ptb", data_dir=args.data_dir, length=args.length, device=args.device)
    steps = args.steps_per_epoch
    count = None if steps is None else args.batch_size * (steps * args.length + 1)
    parts = {name: getattr(found, name) for name in ("train", "validation", "test")}
    cut = {name: replace(part, tokens=part.tokens[:count]) for name, part in parts.items()}
    return replace(found, **cut)


def train(args, name, text):
    """Train one network; return the path of its log."""
    model = models.create(
        "lstm",
        num_classes=text.num_classes,
        width=args.width,
        hidden=round(args.width * 1150 / 400),
        generator=torch.Generator().manual_seed(args.seed),
        device=args.device,
    )
    path = RESULTS / f"{args.name}_{name}.jsonl"
    result = fit(
        model,
        text.train,
        num_epochs=args.epochs,
        batch_size=args.batch_size,
        optimizer=name,
        optimizer_settings={"lr": args.rate} | OPTIMIZERS[name],
        average_from=args.average_from if name == "gadam" else None,
        average_every=args.average_every,
        clip_norm=0.25,
        precision=args.precision,
        capture={"auto": None, "yes": True, "no": False}[args.capture],
        monitors=[Perplexities(name, text)],
        log=path,
        seed=args.seed,
    )
    print(result, flush=True)
    if not result.status.ok:
        raise SystemExit(str(result.status))
    return path


def rows(name, path):
    """One row an epoch, of what was logged."""
    log, times = read_log(path), read_log(times_path(path))
    epochs = [record for record in log if record["kind"] == "epoch"]
    scores = [record for record in log if record["kind"] == "perplexity"]
    for epoch, score, spent in zip(epochs, scores, times, strict=True):
        yield {
            "optimizer": name,
            "epoch": epoch["epoch"],
            "train": round(epoch["train_perplexity"], 2),
            "validation": round(score["validation"], 2),
            "test": round(score["test"], 2),
            "validation, average": round(score["average_validation"], 2)
            if "average_validation" in score
            else "-",
            "test, average": round(score["average_test"], 2) if "average_test" in score else "-",
            "ms a step": 1e3 * spent["seconds"] / spent["steps"],
            "s an epoch": spent["seconds"] + spent["evaluation_seconds"],
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data-dir", default=None, help="folder with ptb; or RITZ_DATA")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--width", type=int, default=400, help="of the embedding")
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--length", type=int, default=70, help="words a segment")
    parser.add_argument("--steps-per-epoch", type=int, default=None, help="of less text")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--average-from", type=int, default=None, help="epoch; half by default")
    parser.add_argument("--average-every", choices=("step", "epoch"), default="epoch")
    parser.add_argument("--precision", choices=("float32", "tf32"), default=None)
    parser.add_argument("--capture", choices=("auto", "yes", "no"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.average_from = args.average_from or args.epochs // 2 + 1
    args.precision = args.precision or ("tf32" if args.device == "cuda" else "float32")
    args.name = "ptb" if args.device == "cpu" else f"ptb_{args.device}"
    warnings.simplefilter("default")  # a step that cannot be captured is told of, and taken
    RESULTS.mkdir(exist_ok=True)
    text = words(args)
    found = [row for name in OPTIMIZERS for row in rows(name, train(args, name, text))]
    write(args.name, found)


if __name__ == "__main__":
    main()
