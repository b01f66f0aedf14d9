"""A run with all that has a state, in a process that is there to be killed.

Dropout, batch norm, Gadam with its average, a schedule by step, accumulation and a monitor; a
checkpoint after every step, and a pause that leaves time for the kill.
"""

import time

from training.examples import network, samples

from ritz.training import CurvatureMonitor, fit


class Slow:
    unit = "step"

    def __init__(self, pause):
        self.pause = pause

    def __call__(self, count, model, optimizer):
        time.sleep(self.pause)


def run(folder, pause=0.0):
    data = samples(60)
    fit(
        network(norm=True, dropout=0.3),
        data,
        validation=data,
        test=data,
        num_epochs=6,
        batch_size=12,
        optimizer="gadamx",
        optimizer_settings={"lr": 0.05},
        schedule="linear",
        schedule_unit="step",
        average_from=3,
        accumulate=2,
        save_interval=0.0,
        seed=4,
        log=f"{folder}/log.jsonl",
        checkpoint=folder,
        keep=[2],
        monitors=[
            Slow(pause),
            CurvatureMonitor(data, quantities=["spectrum"], num_steps=3, every=2),
        ],
    )
