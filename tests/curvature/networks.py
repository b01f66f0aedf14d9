"""Tiny networks with data, and their losses written without the library."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from ritz.curvature import Risk


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def labels(high, *shape, seed=1):
    return torch.randint(0, high, shape, generator=seeded(seed))


# Losses by their formulas: torch's own are what the library is given.


def cross_entropy(outputs, target):
    chosen = outputs.gather(1, target.unsqueeze(1)).squeeze(1)
    return (outputs.logsumexp(1) - chosen).mean()


def squared_error(outputs, target):
    return (outputs - target).square().mean()


def binary_cross_entropy(outputs, target):
    return (functional.softplus(outputs) - outputs * target).mean()


def quartic(outputs, target):
    """Convex, and unknown to the library."""
    return ((outputs - target).square() + (outputs - target) ** 4).mean()


# Networks


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2))
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.body(x))
        return self.head(x.mean((2, 3)))


class Tied(nn.Module):
    """An auto-encoder of one matrix, under two names."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(2, 2, batch_first=True)
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x).mean(1))


class Decoder(nn.Module):
    """Causal attention over tokens, with the embedding as head: classes second, (B, C, T)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        heads = [part.unflatten(2, (2, 2)).transpose(1, 2) for part in self.mix(x).chunk(3, 2)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = self.norm(x + mixed.transpose(1, 2).flatten(2))
        return self.head(x).transpose(1, 2)


class Padded(nn.Module):
    """Tokens of which the first is padding, whose row of the embedding is a constant."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 3)
        nn.init.normal_(self.embed.weight)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)).mean(1))


class Named(nn.Module):
    """Takes keywords and returns several things by name, with the loss if there are labels."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, inputs, scale, labels=None):
        logits = self.net(inputs) * scale[:, None]
        found = {"logits": logits, "hidden": inputs}
        if labels is not None:
            found["loss"] = functional.cross_entropy(logits, labels)
        return found


def small(*middle, inputs=3, hidden=4, classes=3, seed):
    """Two layers with ``middle`` between them, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(inputs, hidden), *middle, nn.Tanh(), nn.Linear(hidden, classes)
        )
    return model.double()


def mlp(width=3, out=3):
    return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, out))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(2, 2, 2),
        nn.Flatten(),
        nn.Linear(2, 3),
    )


# Cases


def plain(call, batch):
    return call(*batch[:-1]), batch[-1]


@dataclass(kw_only=True, eq=False)
class Case:
    """A model with all that the library is given, and what it should do with it.

    ``prepared`` is a copy of the model in the mode in which ``evaluate`` calls it, ``formula`` the
    loss written down, ``names`` the parameters that vary.
    """

    model: nn.Module
    data: list[Any]
    loss_fn: Any = functional.cross_entropy
    options: dict[str, Any] = field(default_factory=dict)
    formula: Callable[..., Tensor] = cross_entropy
    evaluate: Callable[..., Any] = plain
    mode: str = "eval"
    chosen: Callable[[str], bool] = lambda name: True
    sizes: list[int] = field(default_factory=list)
    outputs: bool = True  # whether the library sees them: Gauss-Newton needs them

    def __post_init__(self):
        moved(self.model)
        if not self.sizes:
            self.sizes = [len(batch[0]) for batch in self.data]
        self.prepared = prepared(self.model, self.mode, self.data)
        free = [name for name, p in self.prepared.named_parameters() if p.requires_grad]
        self.names = [name for name in free if self.chosen(name)]
        every = dict(self.prepared.named_parameters())
        self.shapes = {name: every[name].shape for name in self.names}
        self.theta = torch.cat([every[name].detach().reshape(-1) for name in self.names])
        self.prepared.requires_grad_(False)

    def risk(self, **options):
        return Risk(self.model, self.loss_fn, self.data, **(self.options | options))

    def weighted(self):
        """Batches with their shares of the samples."""
        total = sum(self.sizes)
        return [(batch, size / total) for batch, size in zip(self.data, self.sizes, strict=True)]

    def call(self, theta):
        pieces = theta.split([shape.numel() for shape in self.shapes.values()])
        values = {
            name: piece.view(shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }
        return lambda *args, **kwargs: functional_call(self.prepared, values, args, kwargs)

    def loss(self, theta):
        total = 0.5 * self.options.get("l2", 0.0) * theta.square().sum()
        for batch, weight in self.weighted():
            total = total + weight * self.formula(*self.evaluate(self.call(theta), batch))
        return total


def prepared(model, mode, data):
    model = copy.deepcopy(model).eval()
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    if mode == "recomputed":
        update_bn(data, model)
    if mode == "train":
        for layer in norms:  # with no statistics to follow, batch norm uses those of its input
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    return model


def images(*sizes):
    return [(noise(n, 1, 6, 6, seed=n), labels(3, n, seed=n + 1)) for n in sizes]


def vectors(*sizes, width=3):
    return [(noise(n, width, seed=n), labels(3, n, seed=n + 1)) for n in sizes]


def sequences(*sizes, width=2):
    return [(noise(n, 3, width, seed=n), labels(3, n, seed=n + 1)) for n in sizes]


def dictionaries(*sizes):
    return [
        {"inputs": noise(n, 3, seed=n), "scale": noise(n, seed=n + 2), "labels": labels(3, n)}
        for n in sizes
    ]


def by_keyword(call, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return call(**inputs)["logits"], batch["labels"]


def moved(model):
    """In double precision, with statistics and scales of batch norm that are not those of birth."""
    model = model.double()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.running_mean.copy_(noise(layer.num_features, seed=5) / 2)
            layer.running_var.copy_(1 + noise(layer.num_features, seed=6).abs())
            nn.init.normal_(layer.weight, 1.0, 0.3)
            nn.init.normal_(layer.bias, 0.0, 0.3)
    return model


def frozen():
    model = mlp()
    model[0].bias.requires_grad_(False)
    return model


def normed(layer):
    return nn.Sequential(nn.Linear(3, 6), layer, nn.Tanh(), nn.Linear(6, 3))


def stacked(model, batch):
    """For batches of one tensor, with the label in the last column."""
    return model(batch["rows"][:, :3]), batch["rows"][:, 3].long()


def stacked_batches(*sizes):
    rows = [torch.cat([x, y[:, None].double()], 1) for x, y in vectors(*sizes)]
    return [{"rows": row} for row in rows]


MODES = ("eval", "train", "recomputed")
regressed = [(noise(n, 3, seed=n), noise(n, 2, seed=n + 1)) for n in (5, 3)]
chances = [(x, (y > 0).double()) for x, y in regressed]
tokens = [(labels(6, 3, 4, seed=s), labels(6, 3, 4, seed=s + 2)) for s in (0, 1)]

CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(model=mlp(), data=vectors(5, 5, 2)),
    "l2": lambda: Case(model=mlp(), data=vectors(5, 2), options={"l2": 0.3}),
    "squared error": lambda: Case(
        model=mlp(out=2), data=regressed, loss_fn=functional.mse_loss, formula=squared_error
    ),
    "binary": lambda: Case(
        model=mlp(out=2), data=chances, loss_fn=nn.BCEWithLogitsLoss(), formula=binary_cross_entropy
    ),
    "quartic": lambda: Case(model=mlp(out=2), data=regressed, loss_fn=quartic, formula=quartic),
    **{
        f"cnn {mode}": lambda mode=mode: Case(
            model=cnn(), data=images(4, 4), mode=mode, options={"batch_norm": mode}
        )
        for mode in MODES
    },
    **{
        f"residual {mode}": lambda mode=mode: Case(
            model=Residual(), data=images(4, 4), mode=mode, options={"batch_norm": mode}
        )
        for mode in MODES
    },
    "layer norm": lambda: Case(model=normed(nn.LayerNorm(6)), data=vectors(5)),
    "group norm": lambda: Case(model=normed(nn.GroupNorm(2, 6)), data=vectors(5)),
    "tied": lambda: Case(
        model=Tied(),
        data=[(x, x) for x, _ in vectors(5, 2, width=4)],
        loss_fn=nn.MSELoss(),
        formula=squared_error,
    ),
    "lstm": lambda: Case(model=Recurrent(nn.LSTM), data=sequences(4)),
    "gru": lambda: Case(model=Recurrent(nn.GRU), data=sequences(4)),
    "encoder": lambda: Case(model=Encoder(), data=sequences(3, width=4)),
    "decoder": lambda: Case(model=Decoder(), data=tokens),
    "dictionaries": lambda: Case(
        model=Named(), data=dictionaries(4, 3), evaluate=by_keyword, sizes=[4, 3]
    ),
    "loss inside": lambda: Case(
        model=Named(),
        data=dictionaries(4, 3),
        loss_fn=None,
        evaluate=by_keyword,
        sizes=[4, 3],
        outputs=False,
    ),
    "adapter": lambda: Case(
        model=mlp(),
        data=stacked_batches(4, 3),
        options={"forward": stacked},
        evaluate=lambda call, batch: stacked(call, batch),
        sizes=[4, 3],
    ),
    "frozen": lambda: Case(model=frozen(), data=vectors(5, 2)),
    "regex": lambda: Case(
        model=mlp(), data=vectors(5, 2), options={"params": "2"}, chosen=lambda n: n[0] == "2"
    ),
    "list": lambda: Case(
        model=mlp(),
        data=vectors(5, 2),
        options={"params": ["2.weight", "0.bias"]},
        chosen=lambda n: n in ("0.bias", "2.weight"),
    ),
    "function": lambda: Case(
        model=mlp(),
        data=vectors(5, 2),
        options={"params": lambda n: n.endswith("bias")},
        chosen=lambda n: n.endswith("bias"),
    ),
}


@cache
def case(name):
    """The case of that name, the same object in every test, which none may change."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return CASES[name]()
