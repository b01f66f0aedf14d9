"""Networks whose gradient noise has a covariance that is written out without the library."""

import torch
from curvature.networks import labels, noise
from torch import nn
from torch.func import functional_call, jacrev

from ritz.curvature import Risk
from ritz.models import GhostBatchNorm2d

N, GHOST = 128, 32


def randomised(model, seed=2):
    model = model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.6)
    return model


def mlp():
    return randomised(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)))


def convolutional():
    body = nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten()
    return randomised(nn.Sequential(*body, nn.Linear(16, 3)))


def normalised():
    body = nn.Conv2d(1, 4, 3, bias=False), GhostBatchNorm2d(4, GHOST)
    return randomised(nn.Sequential(*body, nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)))


NETWORKS = {"mlp": mlp, "convolutional": convolutional, "normalised": normalised}


def data(name):
    return noise(N, *((4,) if name == "mlp" else (1, 4, 4))), labels(3, N)


def make_risk(name, **options):
    mode = "train" if name == "normalised" else "eval"
    return Risk(NETWORKS[name](), nn.CrossEntropyLoss(), data(name), batch_size=N,
                batch_norm=mode, **options)  # fmt: skip


class Reference:
    """Gradients of single samples, and the matrices they make, by torch alone.

    Args:
        name: One of the networks.
        constant: Statistics of ghost batches do not depend on the weights.
    """

    def __init__(self, name, *, constant=False):
        self.name, self.constant, self.model = name, constant, NETWORKS[name]().eval()
        self.x, self.y = data(name)
        self.params = {k: v.detach() for k, v in self.model.named_parameters()}
        self.size = sum(v.numel() for v in self.params.values())

    def outputs(self, params):
        if self.name != "normalised":
            return functional_call(self.model, params, (self.x,))
        parts = []
        for group in self.x.split(GHOST):
            z = nn.functional.conv2d(group, params["0.weight"])
            still = z.detach() if self.constant else z
            mean, variance = still.mean((0, 2, 3)), still.var((0, 2, 3), correction=0)
            z = (z - mean[:, None, None]) / (variance + 1e-5).sqrt()[:, None, None]
            z = z * params["1.weight"][:, None, None] + params["1.bias"][:, None, None]
            parts.append(z.tanh().flatten(1) @ params["4.weight"].T + params["4.bias"])
        return torch.cat(parts)

    def flat(self, tree, lead):
        return torch.cat([part.reshape(*lead, -1) for part in tree.values()], -1)

    def gradients(self):
        def losses(params):
            outputs = self.outputs(params)
            return outputs.logsumexp(1) - outputs.gather(1, self.y[:, None])[:, 0]

        return self.flat(jacrev(losses)(self.params), (N,))

    def gauss_newton(self):
        jacobian = self.flat(jacrev(self.outputs)(self.params), (N, 3))
        p = self.outputs(self.params).softmax(1)
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        return torch.einsum("nap,nab,nbq->pq", jacobian, middle, jacobian) / N

    def kronecker(self):
        """Blocks G (x) A of linear layers and convolutions; the exact block of batch norm."""
        state, inputs, deltas = self.params, {}, {}
        layers = dict(self.model.named_modules())
        for name in {key.rpartition(".")[0] for key in state}:
            width = layers[name].weight.shape[0]
            deltas[name] = self._deltas(name, width)
            inputs[name] = self._inputs(name)
        blocks, g, start = [], self.gradients(), 0
        for name in dict.fromkeys(key.rpartition(".")[0] for key in state):
            keys = [key for key in state if key.startswith(name + ".")]
            size = sum(state[key].numel() for key in keys)
            if isinstance(layers[name], nn.BatchNorm2d):
                part = g[:, start : start + size]
                blocks.append(part.T @ part / N)
            else:
                a, d = inputs[name], deltas[name]  # (N, T, i) and (N, T, o)
                A = torch.einsum("nti,ntj->ij", a, a) / (a.shape[0] * a.shape[1])
                G = torch.einsum("nto,ntp->op", d, d) / N
                blocks.append(self._ordered(torch.kron(G, A), len(G), len(A), len(keys) > 1))
            start += size
        return torch.block_diag(*blocks)

    def _ordered(self, matrix, outputs, inputs, bias):
        places = torch.arange(outputs * inputs).view(outputs, inputs)
        if bias:  # all weights first, then all biases
            places = torch.cat([places[:, :-1].flatten(), places[:, -1]])
        return matrix[places.flatten()][:, places.flatten()]

    def _hidden(self, params):
        """Outputs of each layer with parameters, and what follows it, by name."""
        if self.name == "mlp":
            first = self.x @ params["0.weight"].T + params["0.bias"]
            return {"0": (self.x[:, None], first), "2": (first.tanh()[:, None], None)}
        z = nn.functional.conv2d(self.x, params["0.weight"], params.get("0.bias"))
        patches = nn.functional.unfold(self.x, 3).transpose(1, 2)
        if self.name == "convolutional":
            return {"0": (patches, z), "3": (z.tanh().flatten(1)[:, None], None)}
        normal = self._normal(z, params)
        return {"0": (patches, z), "4": (normal.tanh().flatten(1)[:, None], None)}

    def _normal(self, z, params):
        parts = []
        for group in z.split(GHOST):
            still = group.detach()
            mean, variance = still.mean((0, 2, 3)), still.var((0, 2, 3), correction=0)
            part = (group - mean[:, None, None]) / (variance + 1e-5).sqrt()[:, None, None]
            parts.append(part)
        z = torch.cat(parts)
        return z * params["1.weight"][:, None, None] + params["1.bias"][:, None, None]

    def _inputs(self, name):
        found = self._hidden(self.params).get(name)
        if found is None:
            return None
        a = found[0]
        if f"{name}.bias" in self.params:
            a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
        return a

    def _deltas(self, name, width):
        """Derivatives of each sample's loss in the output of a layer, ``(N, T, width)``."""
        found = self._hidden(self.params).get(name)
        if found is None:
            return None
        last = found[1] is None
        point = self.outputs(self.params) if last else found[1]
        point = point.detach().requires_grad_()
        if last:
            outputs = point
        elif self.name == "mlp":
            outputs = point.tanh() @ self.params["2.weight"].T + self.params["2.bias"]
        elif self.name == "convolutional":
            outputs = point.tanh().flatten(1) @ self.params["3.weight"].T + self.params["3.bias"]
        else:
            hidden = self._normal_at(point).tanh().flatten(1)
            outputs = hidden @ self.params["4.weight"].T + self.params["4.bias"]
        loss = nn.functional.cross_entropy(outputs, self.y, reduction="sum")
        delta = torch.autograd.grad(loss, point)[0]
        return delta.reshape(N, width, -1).transpose(1, 2)

    def _normal_at(self, z):
        return self._normal(z, self.params)


def expected(name, kind):
    """The covariance of a kind of noise."""
    constant = kind in ("diagonal", "kfac", "trace", "trace_unscaled")
    reference = Reference(name, constant=constant)
    if kind == "true":
        return reference.gauss_newton()
    if kind == "kfac":
        return reference.kronecker()
    g = reference.gradients()
    fisher, mean, eye = g.T @ g / N, g.mean(0), torch.eye(g.shape[1], dtype=g.dtype)
    return {
        "full": fisher,
        "centred": fisher - torch.outer(mean, mean),
        "diagonal": torch.diag(fisher.diagonal()),
        "trace": fisher.trace() / len(eye) * eye,
        "trace_unscaled": fisher.trace() * eye,
        "isotropic": 0.25 * eye,
        "multiplicative": 0.25 * torch.diag(mean.square()),
        "sgld": 2 / N / 0.1 * eye,
    }[kind]


def assert_covariance(samples, matrix, *, ends=(0.9, 1.1), largest=5.5):
    """Compare samples ``(P, k)`` with the covariance that they should have, element by element.

    Elements of a covariance are correlated, and one outlying eigenvalue would decide their mean
    z^2. So that is taken in the coordinates in which the covariance is the identity.
    """
    z = _scores(samples, matrix)
    assert z < largest, f"largest |z| {z:.2f}"
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > 1e-9 * values.max()
    # Nothing outside of the range of the matrix.
    assert float((vectors[:, ~kept].T @ samples).norm()) < 1e-5 * float(samples.norm())
    white = (vectors[:, kept] / values[kept].sqrt()).T @ samples
    scores = _scores(white, torch.eye(len(white), dtype=white.dtype), every=True)
    square = float(scores.square().mean())
    assert ends[0] < square < ends[1], f"mean z^2 {square:.3f}"
    assert float(scores.max()) < largest
    # The mean is zero: z of each component.
    assert float(white.mean(1).abs().max()) * samples.shape[1] ** 0.5 < largest
    return z, square


def _scores(samples, matrix, *, every=False):
    """|z| of the elements of the covariance, with errors from the samples; or the largest."""
    count = samples.shape[1]
    products, squares = torch.zeros_like(matrix), torch.zeros_like(matrix)
    for part in samples.T.split(500):
        products += part.T @ part
        squares += part.square().T @ part.square()
    mean = products / count
    error = ((squares / count - mean.square()).clamp_min(0) / count).sqrt()
    gap = (mean - matrix).abs()
    upper = torch.triu(torch.ones_like(gap, dtype=torch.bool))
    # An element that is the same in every sample has no error but roundoff.
    exact = gap < 1e-12 * matrix.abs().max()
    z = torch.where(exact, 0.0, gap / error.clamp_min(1e-300))
    return z[upper] if every else float(z.max())


def sample_options(kind):
    return {"sigma": 0.5} if kind in ("isotropic", "multiplicative") else (
        {"lr": 0.1} if kind == "sgld" else {})  # fmt: skip
