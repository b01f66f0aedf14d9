"""``ritz advise``: batch size, learning rate and damping, from the curvature and its noise."""

from dataclasses import dataclass
from typing import Literal

import typer

from ritz.cli import _options as shared
from ritz.cli._options import option

EPILOG = shared.examples(
    "ritz advise runs/digits --verify",
    "ritz advise runs/vgg --sizes 32,128,512 --matrix ggn --samples 5000",
    file="advise-ggn-32,128-samples5000.safetensors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(shared.MeasureOptions):
    """Options of the command."""

    matrix: Literal["hessian", "ggn"] = option("hessian", shared.MATRIX, free=True)
    sizes: str | None = option(None, "Batch sizes to advise on, such as 8,64 (default: 8,32,128,512"
                               ").", metavar="SIZES")  # fmt: skip
    # fmt: off
    optimizer: Literal["sgd", "momentum", "nesterov", "adam", "kfac"] | None = option(
        None, "Optimiser to advise on, such as momentum or adam (default: that of the run).")
    # fmt: on
    momentum: float | None = option(None, "Momentum (default: that of the run).", low=0.0, high=1.0)
    verify: bool = option(False, "Find the largest learning rate that short trainings of a copy "
                          "stand.")  # fmt: skip
    split: shared.Split = option("train", shared.SPLIT)
    picture: shared.Picture = option("png", shared.PICTURE, shared.OUTPUT, free=True)


def command(options: Options) -> None:
    """Advise on batch size, learning rate and damping for a trained network."""
    from ritz import measures
    from ritz.cli._session import measurement
    from ritz.training._shared import advised_settings

    sizes = shared.split_sizes("--sizes", options.sizes)
    with measurement(options) as session:
        risk = session.risk(options.split)
        settings = advised_settings(session.run.config, options.optimizer, options.momentum)
        typer.echo(measures.advice_cost(risk, batch_sizes=sizes), err=True)
        advice = measures.advise(
            risk,
            batch_sizes=sizes,
            matrix=options.matrix,
            verify=options.verify,
            generator=session.generator(),
            progress=not options.json,
            **settings,
        )
        session.save("advice", advice, session.name("advise", "matrix"), picture=options.picture)
