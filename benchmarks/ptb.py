"""An LSTM on Penn Treebank with Adam and with Gadam: perplexity by epoch, and the time of a step.

The three-layer AWD-LSTM of Granziol et al. (2021), 5.4 and B.3, with the published settings: a
constant learning rate, an L2 term of 1.2e-6, segments of 70 words, and averaging over the second
half of the run. The learning rate is not published, so it is the default of Adam. Gradients are
clipped at a norm of 0.25, as in the code used there. The paper trains for 200 epochs with batch
size 20. Here ``--epochs`` is smaller and ``--batch-size`` larger, so compare the gain from
averaging, not the final perplexity. All segments have the same length, and activations are not
penalised.

Both optimisers start from the same weights and draw the same dropout. Perplexities are over whole
texts, read in ten streams with the hidden state carried over. The logs of the runs, with times, are
written to ``results/ptb*_<optimizer>.jsonl``.
"""

import argparse
import math
import warnings
from dataclasses import replace

import torch
from timing import RESULTS, write

from ritz import data, models
from ritz.training import evaluate, fit, read_log
from ritz.training._log import times_path

STREAMS = 10  # parallel streams of an evaluation
DECAY = 1.2e-6
OPTIMIZERS = {
    "adam": {"weight_decay": DECAY},
    "gadam": {"weight_decay": DECAY, "decoupled_weight_decay": False},
}


class Perplexities:
    """Validation and test perplexity after each epoch, of the weights and their average."""

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
    """Return the text; ``--steps-per-epoch`` shortens all three parts."""
    found = data.load("ptb", data_dir=args.data_dir, length=args.length, device=args.device)
    steps = args.steps_per_epoch
    count = None if steps is None else args.batch_size * (steps * args.length + 1)
    parts = {name: getattr(found, name) for name in ("train", "validation", "test")}
    cut = {name: replace(part, tokens=part.tokens[:count]) for name, part in parts.items()}
    return replace(found, **cut)


def train(args, name, text):
    """Train one network and return the path of its log."""
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
    """Return one row per epoch of the log."""
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
    parser.add_argument("--data-dir", default=None, help="folder with ptb; defaults to RITZ_DATA")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--width", type=int, default=400, help="width of the embedding")
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--length", type=int, default=70, help="words per segment")
    parser.add_argument(
        "--steps-per-epoch", type=int, default=None, help="shorten the text to this many steps"
    )
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument(
        "--average-from", type=int, default=None, help="first averaged epoch; defaults to half"
    )
    parser.add_argument("--average-every", choices=("step", "epoch"), default="epoch")
    parser.add_argument("--precision", choices=("float32", "tf32"), default=None)
    parser.add_argument("--capture", choices=("auto", "yes", "no"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.average_from = args.average_from or args.epochs // 2 + 1
    args.precision = args.precision or ("tf32" if args.device == "cuda" else "float32")
    args.name = "ptb" if args.device == "cpu" else f"ptb_{args.device}"
    warnings.simplefilter("default")  # warn about a step that cannot be captured, but continue
    RESULTS.mkdir(exist_ok=True)
    text = words(args)
    found = [row for name in OPTIMIZERS for row in rows(name, train(args, name, text))]
    write(args.name, found)


if __name__ == "__main__":
    main()
