"""Curvature of a Hugging Face language model, with dictionaries as batches.

Usage: python examples/huggingface.py [--quick] [--out FOLDER]

The model is a small GPT-2 with random weights, trained for a few steps on a synthetic language;
nothing is downloaded. If ``transformers`` is not installed, the script says so and uses a stand-in
with the same interface: it is called with ``input_ids`` and ``labels``, and returns ``loss`` and
``logits``. Takes about a minute on one core.
"""

import argparse
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ritz

VOCABULARY, LENGTH, WIDTH = 50, 16, 32


class StandIn(nn.Module):
    """A bigram model with the interface of ``GPT2LMHeadModel``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.head(self.embed(input_ids))
        loss = None if labels is None else next_token_loss(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    # Each position predicts the token after it.
    return cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])


def make_model() -> nn.Module:
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed (pip install transformers): using a stand-in")
        return StandIn()
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, **sizes))


def make_batches(count: int, generator: torch.Generator) -> list[dict[str, Tensor]]:
    """Sequences in which the next token is three times the last one, plus 0, 1 or 2."""
    tokens = torch.randint(VOCABULARY, (32 * count, 1), generator=generator)
    for _ in range(LENGTH - 1):
        noise = torch.randint(3, (32 * count, 1), generator=generator)
        tokens = torch.cat([tokens, (3 * tokens[:, -1:] + noise) % VOCABULARY], dim=1)
    return [{"input_ids": part, "labels": part} for part in tokens.split(32)]


def main(quick: bool, out: Path) -> None:
    torch.manual_seed(0)
    model = make_model()
    batches = make_batches(4 if quick else 16, torch.Generator().manual_seed(0))

    # loss_fn=None: the model returns its own loss.
    training = {"num_epochs": 5 if quick else 20, "optimizer": "adamw"}
    print(ritz.training.fit(model, batches, loss_fn=None, **training))
    risk = ritz.Risk(model, None, batches)
    spectrum = ritz.lanczos(ritz.hessian(risk), num_steps=10 if quick else 60, progress=True)
    print(spectrum)

    # The Gauss-Newton matrix needs outputs and loss apart: ``forward`` returns logits and targets.
    def forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=batch["input_ids"]).logits
        return logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:]

    split = ritz.Risk(model, cross_entropy, batches, forward=forward)
    print("largest eigenvalue of the Gauss-Newton matrix:")
    print(ritz.eigenpairs(ritz.ggn(split), largest=1, rtol=1e-2))

    out.mkdir(parents=True, exist_ok=True)
    ritz.save(spectrum, out / "spectrum.safetensors")
    ritz.plots.spectrum(spectrum).figure.savefig(out / "spectrum.png", dpi=150)
    print("written:", *sorted(map(str, out.iterdir())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, rough numbers")
    parser.add_argument("--out", type=Path, default=Path("out/huggingface"))
    arguments = parser.parse_args()
    main(arguments.quick, arguments.out)
