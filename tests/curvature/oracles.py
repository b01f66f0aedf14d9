"""Matrices of small networks, written out without the library."""

from contextlib import contextmanager
from functools import cache

import torch
from torch.func import grad, jacfwd
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def second_derivatives():
    """Attention that can be differentiated twice."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@cache
def dense_hessian(case):
    """By ``jacfwd(grad)``: ``torch.func.hessian`` is wrong through LayerNorm and BatchNorm."""
    with second_derivatives():
        return jacfwd(grad(case.loss))(case.theta)


@cache
def dense_ggn(case):
    """The Jacobian of the outputs and the Hessian of the formula in them, both written out."""
    size = len(case.theta)
    total = case.options.get("l2", 0.0) * torch.eye(size, dtype=case.theta.dtype)
    with second_derivatives():
        for batch, weight in case.weighted():
            outputs, target = case.evaluate(case.call(case.theta), batch)
            outputs = outputs.detach()

            def flat(theta, batch=batch):
                return case.evaluate(case.call(theta), batch)[0].reshape(-1)

            def loss(values, shape=outputs.shape, target=target):
                return case.formula(values.view(shape), target)

            jacobian = jacfwd(flat)(case.theta)
            middle = jacfwd(grad(loss))(outputs.reshape(-1))
            total = total + weight * jacobian.T @ middle @ jacobian
    return total


def dense_fisher(case, *, centred=False):
    """Outer products of the gradients of the samples."""

    def losses(theta):
        found = []
        for batch, _ in case.weighted():
            outputs, target = case.evaluate(case.call(theta), batch)
            pairs = zip(outputs.split(1), target.split(1), strict=True)
            found += [case.formula(*pair) for pair in pairs]
        return torch.stack(found)

    with second_derivatives():
        gradients = jacfwd(losses)(case.theta)
    mean = gradients.mean(0)
    total = gradients.T @ gradients / len(gradients)
    return total - torch.outer(mean, mean) if centred else total


def difference_hessian(case, step=1e-5):
    """By central differences of the gradient, of fourth order."""
    with second_derivatives():
        gradient = grad(case.loss)
        columns = []
        for unit in torch.eye(len(case.theta), dtype=case.theta.dtype) * step:
            near = gradient(case.theta + unit) - gradient(case.theta - unit)
            far = gradient(case.theta + 2 * unit) - gradient(case.theta - 2 * unit)
            columns.append((8 * near - far) / (12 * step))
    return torch.stack(columns, 1)
