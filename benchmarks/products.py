"""Products with Hessian and Gauss-Newton matrices, over one gradient of the same samples.

Each row is one way to compute a product (or one column of a block of eight), in one process with
the gradient, double backward and the other libraries. ``memory`` is the peak memory in MiB without
the model and the data, on a CUDA device only.
"""

import argparse
import warnings

import torch
from networks import BATCH, cnn, mlp, vgg16
from timing import interleaved, median, ratio, write
from torch.nn.functional import cross_entropy

import ritz

NETWORKS = {"mlp": mlp, "cnn": cnn, "vgg16": vgg16}
WIDTH = 8


class Setting:
    """A network with its batches, and vectors in the shapes that the libraries need."""

    def __init__(self, model, x, y, device, batch):
        self.model = model.to(device).eval()
        x, y = x.to(device), y.to(device)
        batch = batch or len(x)
        self.batches = list(zip(x.split(batch), y.split(batch), strict=True))
        self.total = len(x)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.risk = ritz.Risk(self.model, cross_entropy, self.batches)
        self.vector = torch.randn(self.risk.space.size, device=device)
        self.block = torch.randn(self.risk.space.size, WIDTH, device=device)
        self.pieces = list(self.risk.space.unflatten(self.vector).values())
        self.device = device

    @classmethod
    def of(cls, name, device, batch):
        """Return the setting of a network by its name."""
        torch.manual_seed(0)
        model, x, classes = NETWORKS[name]()
        if name == "vgg16" and device == "cpu":
            x = x[:16]
        return cls(model, x, torch.randint(0, classes, (len(x),)), device, batch)

    def summed(self, product):
        """Return a job: the sum of ``product`` over batches, weighted by their size."""

        def job():
            total = [torch.zeros_like(p) for p in self.params]
            for x, y in self.batches:
                torch._foreach_add_(total, list(product(x, y)), alpha=len(x) / self.total)
            return torch.cat([leaf.reshape(-1) for leaf in total])

        return job

    def gradient(self, x, y):
        return torch.autograd.grad(cross_entropy(self.model(x), y), self.params)

    def double_backward(self, x, y):
        loss = cross_entropy(self.model(x), y)
        gradient = torch.autograd.grad(loss, self.params, create_graph=True)
        return torch.autograd.grad(gradient, self.params, self.pieces)


def own_jobs(s, compiled):
    """Return jobs of ritz: compiled, default, without cache, in blocks.

    Compiled first: the fastest convolutions found there are used by all libraries afterwards.
    """
    width = None if s.device == "cpu" else WIDTH
    for kind, make in (("Hessian", ritz.hessian), ("GGN", ritz.ggn)):
        for suffix, compile in ((", compiled", True), ("", False)):
            if compile and not compiled:
                continue
            wide = make(s.risk, compile=compile, block_size=width)
            yield f"{kind} ritz{suffix}, block", lambda op=wide: op @ s.block
            op = make(s.risk, compile=compile)
            yield f"{kind} ritz{suffix}", lambda op=op: op @ s.vector
            bare = make(s.risk, compile=compile, memory=0)
            yield f"{kind} ritz{suffix}, nothing kept", lambda op=bare: op @ s.vector


def curvlinops_jobs(s):
    from curvlinops import GGNLinearOperator, HessianLinearOperator

    loss = torch.nn.CrossEntropyLoss()
    for kind, make in (("Hessian", HessianLinearOperator), ("GGN", GGNLinearOperator)):
        op = make(s.model, loss, s.params, s.batches, check_deterministic=False)
        yield f"{kind} curvlinops", lambda op=op: op @ s.vector
        yield f"{kind} curvlinops, block", lambda op=op: op @ s.block


def pyhessian_jobs(s):
    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    cuda = s.device != "cpu"
    loss = torch.nn.CrossEntropyLoss()
    whole = hessian(s.model, loss, dataloader=s.batches, cuda=cuda)
    yield "Hessian PyHessian", lambda: whole.dataloader_hv_product(s.pieces)[1]
    kept = []
    for batch in s.batches:
        s.model.zero_grad()
        kept.append(hessian(s.model, loss, data=batch, cuda=cuda))
    s.model.zero_grad()

    def product():
        total = [torch.zeros_like(p) for p in s.params]
        for one, (x, _) in zip(kept, s.batches, strict=True):
            part = hessian_vector_product(one.gradsH, one.params, s.pieces)
            torch._foreach_add_(total, list(part), alpha=len(x) / s.total)
        return total

    yield "Hessian PyHessian, graph kept", product


def backpack_jobs(s):
    from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist
    from backpack.hessianfree.hvp import hessian_vector_product

    def by_hessian(x, y):
        return hessian_vector_product(cross_entropy(s.model(x), y), s.params, s.pieces)

    def by_ggn(x, y):
        outputs = s.model(x)
        loss = cross_entropy(outputs, y)
        return ggn_vector_product_from_plist(loss, outputs, s.params, s.pieces)

    yield "Hessian BackPACK", s.summed(by_hessian)
    yield "GGN BackPACK", s.summed(by_ggn)


def eigenthings_jobs(s):
    import hessian_eigenthings as he

    hessian = he.HessianOperator(s.model, s.batches, he.supervised_loss(cross_entropy))
    yield "Hessian hessian-eigenthings", lambda: hessian.matvec(s.vector)
    parts = (he.supervised_forward, he.supervised_loss_of_output(cross_entropy))
    ggn = he.GGNOperator(s.model, s.batches, *parts)
    yield "GGN hessian-eigenthings", lambda: ggn.matvec(s.vector)


def timed(s, job):
    """Return a job that waits for the device."""

    def run():
        job()
        if s.device != "cpu":
            torch.cuda.synchronize()

    return run


def peak(s, job):
    if s.device == "cpu":
        return ""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    job()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def gathered(makers, s):
    """Return jobs of all installed libraries that support the matrix."""
    for name, maker in makers.items():
        try:
            for label, job in maker(s):
                job()
                yield label, job
        except Exception as error:
            print(f"  {name} could not: {type(error).__name__}: {str(error).splitlines()[:1]}")


def rows(name, device, args):
    s = Setting.of(name, device, args.batch)
    makers = {"ritz": lambda s: own_jobs(s, args.compile)}
    if args.peers:
        makers |= {
            "curvlinops": curvlinops_jobs,
            "BackPACK": backpack_jobs,
            "hessian-eigenthings": eigenthings_jobs,
            "PyHessian": pyhessian_jobs,
        }
    jobs = {"gradient": s.summed(s.gradient), "double backward": s.summed(s.double_backward)}
    jobs |= dict(gathered(makers, s))
    memory = {label: peak(s, job) for label, job in jobs.items()}
    seconds = interleaved({k: timed(s, job) for k, job in jobs.items()}, rounds=args.rounds)
    for label in jobs:
        columns = WIDTH if label.endswith("block") else 1
        each = [t / columns for t in seconds[label]]
        yield {
            "network": name,
            "what": label,
            "ms a column": 1e3 * median(each),
            "over gradient": ratio(each, seconds["gradient"]),
            "over double backward": ratio(each, seconds["double backward"]),
            "memory": memory[label],
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", nargs="+", default=["mlp", "cnn"], choices=NETWORKS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--name", default="products")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    found = [row for name in args.networks for row in rows(name, device, args)]
    write(f"{args.name}.py", found)


if __name__ == "__main__":
    main()
