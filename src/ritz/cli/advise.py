"""``ritz advise``: batch size, learning rate and damping, from the curvature and its noise."""

from dataclasses import dataclass
from typing import Any, Literal

import typer

from ritz.cli import _options as shared
from ritz.cli._options import option

EPILOG = shared.examples(
    "ritz advise runs/digits --verify",
    "ritz advise runs/vgg --batch-sizes 32,128,512 --matrix ggn --samples 5000",
    file="advise-ggn-32,128-samples5000.safetensors",
)
Update = Literal["sgd", "momentum", "nesterov", "adam", "kfac"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(shared.MeasureOptions):
    """Options of the command."""

    # fmt: off
    matrix: Literal["hessian", "ggn"] = option("hessian", shared.MATRIX, free=True)
    batch_sizes: str | None = option(None, "Batch sizes, such as 8,64 (default: 8,32,128,512).")
    optimizer: Update | None = option(None, "Optimiser to advise on (default: that of the run).")
    momentum: float | None = option(None, "Momentum (default: as in the run).", low=0.0, high=1.0)
    verify: bool = option(False, "Check the learning rates by short trainings of a copy of the "
                          "network.")
    max_products: int | None = option(None, "Limit on the number of matrix-vector products "
                                      "(default: no limit).", low=1)
    split: shared.Split = option("train", shared.SPLIT)
    picture: shared.Picture = option("png", shared.PICTURE, shared.OUTPUT, free=True)
    # fmt: on


def command(options: Options) -> None:
    """Advise on batch size, learning rate and damping for a trained network."""
    from ritz import measures
    from ritz.cli._measurement import measurement
    from ritz.training._shared import advised_settings

    sizes = shared.split_sizes("--batch-sizes", options.batch_sizes)
    with measurement(options) as session:
        risk = session.risk(options.split)
        settings = advised_settings(session.run.config, options.optimizer, options.momentum)
        limits: Any = {"batch_sizes": sizes, "max_products": options.max_products}
        # Said before the work starts, and on stderr, so that --json prints nothing but JSON.
        cost = measures.advice_cost(risk, timed=not options.json, **limits)
        typer.echo(cost, err=True)
        settings |= {"matrix": options.matrix, "verify": options.verify} | limits
        shown: Any = {"generator": session.generator(), "progress": not options.json}
        advice = measures.advise(risk, **settings, **shown)
        session.save("advice", advice, session.name("advise", "matrix"), picture=options.picture)
