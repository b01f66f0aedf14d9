"""`Risk`: a model, a loss and data at one point in weight space; checks of model and loss."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ritz._core import modes
from ritz._core.attempts import UNSUITABLE, attempt
from ritz._core.batch_norm import (
    BATCH_NORM_MODES,
    BatchNormMode,
    batch_norms,
    evaluating,
    recomputed_statistics,
)
from ritz._core.batches import Batch, join_rows, num_rows, take_rows
from ritz._core.checks import (
    check_choice,
    check_count,
    check_finite,
    check_range,
    check_tensor,
    check_type,
    is_below,
)
from ritz._core.distributed import Group, all_sum, rank, unwrapped, world_size
from ritz._core.modes import Precision
from ritz._core.params import ParamSpace
from ritz._core.progress import Progress
from ritz.curvature import _losses as losses
from ritz.curvature import _parameters as parameters
from ritz.curvature._adapter import Adapter, Forward, inputs_error, recognized_loss
from ritz.curvature._batches import Batches, move_batch
from ritz.curvature._losses import LossFunction, check_labels, known_loss, term_mass
from ritz.curvature._modes import product_modes
from ritz.curvature._parameters import Context, ModelSelection, Params, Selection
from ritz.curvature._replaced_functions import FunctionDetector
from ritz.curvature._sample_means import (
    CAUSES,
    NOT_A_MEAN,
    check_not_sum,
    check_outputs_suffice,
    sample_gap,
    warn_if_batches_matter,
)

Sharing = Literal["split", "own", "none"]


@final
class Risk:
    r"""The mean loss of a model on fixed data, at the current parameters of the model.

    .. math:: L(\theta) = \frac{1}{N} \sum_i \ell_i(\theta) + \frac{\mu}{2} \|\theta\|^2

    Parameters and buffers are copied. The model is never changed: its weights, its running
    statistics and its mode stay as they are. Memory: one vector of parameters, the buffers, and up
    to 4 GiB of data. Data beyond that are loaded again in every pass, and a checksum detects
    changes.

    Args:
        model: Any module. Wrappers of ``torch.compile`` and DDP are removed, also from the names of
            parameters.
        loss_fn: Takes outputs and target of a batch, returns the *mean* loss over its samples. Any
            callable, such as ``torch.nn.functional.cross_entropy``. It must depend on the
            parameters through the outputs alone. ``None`` if the model returns its own loss, as
            Hugging Face models do. If this loss equals the cross-entropy of ``logits`` and
            ``labels`` on the first batch, with or without a shift by one token, the Gauss-Newton
            and Fisher matrices are available too.
        data: A ``DataLoader`` or list of batches, each ``(*inputs, target)`` or a dictionary of
            keyword arguments with ``labels`` as target; or all samples as a tuple or dictionary, or
            as a dataset of torch. NumPy arrays become tensors of the same dtype. The
            order must be the same in every pass: pass ``freeze=True`` with a loader that shuffles,
            or that augments and does not fit into memory.
        batch_norm: ``eval`` (running statistics), ``train`` (statistics of each batch) or
            ``recomputed`` (running statistics recomputed over these data at this point).
        params: Parameters with respect to which derivatives are taken: a regular expression that
            matches the beginning of a name (``layer3``, ``.*bias``), a list of names, a function of
            the name, a module of the model, or its ``parameters()``. Defaults to all that require a
            gradient. Frozen parameters cannot be selected.
        forward: Takes the model and a batch, returns ``(outputs, target)``. Pass it if batches have
            another form.
        l2: The coefficient :math:`\mu`, like ``weight_decay`` of SGD. It enters loss, gradient,
            Hessian and Gauss-Newton matrix. Defaults to 0.
        dropout: ``off`` (the default), or ``fixed``: dropout layers use one mask per batch, the
            same in every pass. Dropout inside attention and recurrent layers stays off.
        batch_size: Samples per batch if ``data`` holds all samples at once. Defaults to 512.
            Required for ``batch_norm="train"``, as the loss then depends on it.
        freeze: Keep the batches of the first pass in memory. Loaders may then shuffle or augment.
        max_samples: Use a random subset of at most this many samples (rows of tensors), drawn once
            with ``seed`` and kept in memory. A loader with a map-style dataset loads only these
            samples; other data are read once. With ``sharing="own"``, each process draws its part.
        count: Function that takes a batch and returns its number of samples, which is its weight
            in the mean. For a loss that averages over tokens, return the number of tokens that are
            not ignored. Defaults to the length of the first tensor. If the loss is a cross-entropy
            of torch, or recognized as one, the default weight is the number of labels that are not
            ignored, or the sum of their class weights, so that the risk does not depend on how the
            samples are batched.
        precision: Precision of the arithmetic: ``float32``, ``tf32`` or ``float64``. Defaults to
            the dtype of the parameters, or to ``float32`` if they are float16 or bfloat16.
        sharing: For several processes. ``split`` (the default): each process has all data and uses
            every k-th batch. ``own``: each process has different data, as with
            ``DistributedSampler``. ``none``: no communication.
        group: The processes. Defaults to all.
        seed: Seed of the dropout masks and of the subset.
        progress: Show a bar while a loader is read, or a :class:`Progress` to report to.

    Attributes:
        theta: The chosen parameters as one vector ``(P,)``, in the order of
            ``named_parameters()``.
        space: Their names and shapes.
        num_samples: :math:`N`, over all processes.
        shared: Traces, shared by all operators of this risk and of the risks that its ``at()``,
            ``batch()`` and ``samples()`` return.
        linear_loss: Whether the loss is linear in the outputs of the first batch, so that its
            Gauss-Newton matrix is zero.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        data: Any,
        *,
        batch_norm: BatchNormMode = "eval",
        params: ModelSelection | None = None,
        forward: Forward | None = None,
        l2: float = 0.0,
        dropout: Literal["off", "fixed"] = "off",
        batch_size: int | None = None,
        freeze: bool = False,
        max_samples: int | None = None,
        count: Callable[[Batch], int] | None = None,
        precision: Precision | None = None,
        sharing: Sharing = "split",
        group: Group | None = None,
        seed: int = 0,
        progress: bool | Progress = False,
    ) -> None:
        check_type("model", model, nn.Module, "a torch.nn.Module")
        check_choice("batch_norm", batch_norm, BATCH_NORM_MODES)
        check_choice("dropout", dropout, ("off", "fixed"))
        check_choice("sharing", sharing, ("split", "own", "none"))
        check_range("l2", l2, low=0.0)
        check_count("seed", seed, low=0)
        losses.check_reduction(loss_fn)
        # Compiled code has no second derivatives; the products are those of the plain model.
        self.model, self.loss_fn = (model := unwrapped(model)), loss_fn
        self.batch_norm, self.dropout, self.l2, self.seed = batch_norm, dropout, float(l2), seed
        self.sharing, self.group, self.precision = sharing, group, precision
        self.warned: list[str] = []  # shared with all risks derived from this one
        self._written: list[str] = []  # buffers that the model writes to, such as counters
        self._replaces = False  # whether functions of torch are replaced by formulas
        self._constant = False  # whether derivatives treat batch statistics as constants
        self.adapter = Adapter(model, loss_fn, forward, accurate=True)
        self.space, self.theta, self._constants, cast = parameters.copy_state(
            model, params, precision
        )
        # How batches are read, here and in moved().
        self._reading: dict[str, Any] = {
            "freeze": freeze,
            "count": count if count or loss_fn or forward else self._count_terms,
            "mass": None if count else self._mass,
            "device": self.space.device,
            "dtype": cast,
            "share": (rank(group), world_size(group)) if sharing == "split" else (0, 1),
        }
        self._recognized = False  # whether recognized_loss() was called
        if max_samples is not None and sharing == "own":
            max_samples = check_count("max_samples", max_samples, low=world_size(group))
            max_samples = len(range(rank(group), max_samples, world_size(group)))
        self._read(data, batch_size, max_samples=max_samples, seed=seed, progress=progress)
        self._check_batch_norm(batch_norm)
        self._statistics: Params | None = None
        self._sample_gaps: dict[bool, str] = {}
        # How the products of each matrix are computed. It stays valid at other weights and batches.
        self.shared: dict[Any, Any] = {}
        self.linear_loss = False
        self._outputs: Any = None  # outputs of one sample, to check labels against
        self._outputs = _inspect_first_batch(self)
        self._check_labels(self._batches if self._batches.held else ())

    def _count_terms(self, batch: Batch) -> int:
        """Return the weight of a batch for a model that returns its loss.

        This is the number of labels that are not ignored if :func:`recognized_loss` recognizes a
        loss over tokens, and the number of rows otherwise.
        """
        if not self._recognized:
            self._recognized = True
            here = move_batch(batch, self.space.device, self._reading["dtype"])
            with torch.no_grad(), self.settings():
                call = partial(functional_call, self.model, self.params | self._constants, ())
                # If the model cannot be called in this way, a later check has a better message.
                model_loss = recognized_loss(
                    lambda keywords: attempt(partial(call, keywords), *UNSUITABLE)[0], here
                )
            if model_loss is not None:
                self.loss_fn = functional.cross_entropy
                self.adapter = Adapter(self.model, self.loss_fn, None, model_loss, accurate=True)
        model_loss = self.adapter.model_loss
        if model_loss is None or not model_loss.tokens:
            return num_rows(batch)
        return model_loss.num_terms(batch["labels"])

    def _mass(self, batch: Batch) -> float | None:
        """Return what cross-entropy divides by: the labels that count, by the weights of classes.

        ``None`` for other losses, which are means over samples.
        """
        target = self.adapter.target(batch)
        # On the CPU, where a label out of range raises. A later check has a better message.
        target = target.cpu() if isinstance(target, Tensor) else target
        mass, _ = attempt(lambda: term_mass(self.loss_fn, target), *UNSUITABLE)
        return None if mass is None else float(mass)

    def _read(self, data: Any, batch_size: int | None, **first: Any) -> None:
        """Read the batches, and count their samples over all processes."""
        self._batches = Batches(data, batch_size=batch_size, **self._reading, **first)
        totals = [float(sum(self._batches.sizes)), sum(self._batches.masses)]
        total = torch.tensor(totals, dtype=torch.float64, device=self.space.device)
        samples, self._total = (
            all_sum(total, self.group) if self.sharing == "own" else total
        ).tolist()
        self.num_samples = int(samples)
        self._mask_shapes: dict[Any, list[tuple[tuple[int, ...], float]]] = {}
        self._first = 0  # index of the first batch, from which dropout masks are seeded

    # Loss and gradient

    def loss(self) -> float:
        """Return the risk with its L2 term. One forward pass."""
        # L = sum_b w_b L_b + (mu / 2) |theta|^2, where batch b has the share w_b of the samples.
        total = torch.zeros((), dtype=torch.float64, device=self.theta.device)
        with torch.no_grad(), self.settings():
            for _, context, weight in self.contexts():
                total += weight * self.batch_loss(self.params, context).double()
        self._require_finite(self.sum_over_processes(total))
        return float(total) + 0.5 * self.l2 * float(self.theta.double().square().sum())

    def gradient(self) -> Tensor:
        """Return the gradient ``(P,)`` with its L2 term. One forward and backward pass."""
        # grad L = sum_b w_b grad L_b + mu theta
        total = torch.zeros_like(self.theta)
        with self.settings():
            for _, context, weight in self.contexts():
                total.add_(self.batch_gradient(context)[0], alpha=weight)
        self._require_finite(self.sum_over_processes(total))
        return total.add_(self.theta, alpha=self.l2)

    def batch_gradient(self, context: Context) -> tuple[Tensor, Tensor]:
        """Return gradient ``(P,)`` and loss of one batch, without L2. Needs :meth:`settings`."""
        # Plain autograd: torch.func lacks packed sequences, checkpoints and old autograd functions.
        with modes.recording():
            leaves = parameters.as_leaves(self.params)
            value = self.batch_loss(leaves, context)
            gradient = parameters.derivatives(value, leaves)
        return self.space.flatten(gradient).detach(), value.detach()

    def evaluate(self, params: Params, context: Context) -> tuple[Any, Any]:
        """Return outputs and target of a batch at other values of the chosen parameters."""
        state = {f"model.{name}": value for name, value in (params | context.constants).items()}
        # Every call finds the buffers as they were.
        state |= {f"model.{name}": context.constants[name].clone() for name in self._written}
        masked = modes.masked_dropout(self.model, context.masks)
        with parameters.attributes_restored(self.model), masked:
            pair: tuple[Any, Any] = functional_call(self.adapter, state, (context.batch,))
        return pair

    def batch_loss(self, params: Params, context: Context) -> Tensor:
        """Return the mean loss of a batch, without L2. Needs :meth:`settings`."""
        loss: Tensor = self.adapter.loss(*self.evaluate(params, context))
        return loss

    # Other risks

    def at(self, theta: Tensor) -> "Risk":
        """Return the risk at another point ``(P,)``.

        With ``batch_norm="recomputed"``, the statistics are recomputed at the new point.
        """
        size, dtype, device = self.space.size, self.theta.dtype, self.theta.device
        if isinstance(theta, Tensor) and theta.shape != (size,):
            raise ValueError(f"theta must be ({size},), got {tuple(theta.shape)}")
        check_tensor("theta", theta, dtype=dtype, device=device, rows=size, like="the risk")
        with modes.outside_inference():
            return self._copy_with(theta=theta.detach().clone(), shared=self.shared)

    def moved(self, data: Any = None, *, batch_size: int | None = None) -> "Risk":
        """Return the risk at the current weights of the model, on the same or on other data.

        It costs a copy of the weights and buffers. In contrast to ``Risk(...)``, the model is not
        evaluated, and with ``op.at(risk.moved(batch))`` it is not traced again either. The selected
        parameters are those of this risk.

        Args:
            data: Data in any form that the class takes. Defaults to the data of this risk.
            batch_size: Samples per batch if ``data`` holds all samples at once.
        """
        names = list(self.space.shapes)
        with modes.outside_inference():
            space, theta, constants, _ = parameters.copy_state(self.model, names, self.precision)
            other = self._copy_with(space=space, theta=theta, _constants=constants)
        # All at once, and by name only if that fails: every check waits for the device.
        if not bool(theta.isfinite().all()):
            for name, value in other.params.items():
                check_finite(f"parameter {name!r}", value)
        if data is not None:
            other._read(data, batch_size)
            other._check_batch_norm(self.batch_norm)
            other._check_labels(other._batches if other._batches.held else ())
        return other

    def in_float64(self) -> "Risk":
        """Return the risk at the same point in float64, for contexts in float64."""
        double = parameters.as_double
        return self._copy_with(
            precision="float64", space=ParamSpace(double(self.params)), theta=double(self.theta)
        )

    def mismatch(self, other: "Risk") -> str:
        """Return why a trace of another risk is not valid for this one, or ``""`` if it is."""
        same = {
            "model": self.model is other.model,
            "loss_fn": self.loss_fn is other.loss_fn,
            "forward": self.adapter.custom is other.adapter.custom,
            "parameters": self.space.shapes == other.space.shapes,
            "dtype or device": (self.space.dtype, self.space.device)
            == (other.space.dtype, other.space.device),
        }
        for name in ("batch_norm", "dropout", "precision", "l2"):
            same[name] = getattr(self, name) == getattr(other, name)
        different = [name for name, equal in same.items() if not equal]
        return f"it has another {different[0]}" if different else ""

    def with_batch_norm(self, mode: BatchNormMode) -> "Risk":
        """Return the risk with batch norm in another mode."""
        check_choice("batch_norm", mode, BATCH_NORM_MODES)
        self._check_batch_norm(mode)
        return self._copy_with(batch_norm=mode)

    def with_constant_statistics(self) -> "Risk":
        """Return a risk whose derivatives treat the batch statistics of batch norm as constants.

        Loss and outputs stay the same. The gradient of a sample then depends on its own loss alone,
        so that per-sample gradients exist in train mode too.
        """
        return self if self.separable else self._copy_with(_constant=True)

    def without_l2(self) -> "Risk":
        """Return the risk without its L2 term."""
        return self._copy_with(l2=0.0, shared=self.shared)

    def on(self, params: Selection) -> "Risk":
        """Return the risk as a function of some of its parameters. The others are constant."""
        names = parameters.select_names(list(self.space.shapes), params)
        constants = self.params
        values = {name: constants.pop(name) for name in names}
        space = ParamSpace(values)
        with modes.outside_inference():
            theta = space.flatten(values)
        return self._copy_with(space=space, theta=theta, _constants=self._constants | constants)

    def batch(self, index: int) -> "Risk":
        """Return the risk of one batch. The batch must belong to this process."""
        for number, batch in self._batches:
            if number == index:
                other = self._on_batches([batch])
                other._first = self._first + number
                return other
        raise IndexError(f"index must be between 0 and {self.num_batches - 1}, got {index}")

    def samples(self, indices: Tensor, *, batch_size: int = 512) -> "Risk":
        """Return the risk of the samples with these indices, in the order of the data.

        The data must be in memory. Not available with ``batch_norm="train"`` or
        ``dropout="fixed"``.
        """
        self.require_separable("samples()")
        if self.dropout == "fixed":
            raise ValueError("samples() needs dropout='off', got 'fixed'")
        batch_size = check_count("batch_size", batch_size)
        if not isinstance(indices, Tensor) or indices.ndim != 1 or indices.dtype != torch.int64:
            got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
            raise TypeError(f"indices must be one vector of int64, got {got}")
        check_count("number of indices", len(indices))
        batch, size = self.join_batches()
        for end in indices.aminmax():
            check_range("indices", int(end), low=0, high=size - 1)
        return self._on_batches([take_rows(batch, p, size) for p in indices.split(batch_size)])

    # For operators

    @property
    def params(self) -> Params:
        """The selected parameters by name, as views of ``theta``."""
        return self.space.unflatten(self.theta)

    @property
    def num_batches(self) -> int:
        """Number of batches in the data of this process."""
        return len(self.batch_sizes)

    @property
    def batch_sizes(self) -> list[int]:
        """Number of samples in each batch, according to ``count``."""
        return self._batches.sizes

    @property
    def batch_rows(self) -> list[int]:
        """Number of rows in each batch. A row is a sample that can be separated from the others."""
        return self._batches.rows

    @property
    def num_outputs(self) -> int:
        """Number of outputs for the largest batch; 0 if the outputs are not a tensor."""
        return 0 if self._outputs is None else self._outputs.numel() * max(self.batch_rows)

    @property
    def separable(self) -> bool:
        """Whether the outputs of a sample do not depend on the other samples of its batch."""
        if self._constant:
            return True
        layers = batch_norms(self.model).values()
        # A layer without running statistics uses those of the batch in eval mode too.
        return all(self.batch_norm != "train" and n.running_mean is not None for n in layers)

    def require_separable(self, caller: str) -> None:
        """Raise if the samples of a batch depend on each other."""
        if not self.separable:
            wanted = "batch_norm='eval' or 'recomputed' and running statistics"
            raise ValueError(
                f"{caller} needs {wanted}, got a risk with batch norm that couples samples"
            )

    def sample_gap(self, *, alone: bool) -> str:
        """Return why the loss of a batch is not the mean over its samples, or ``""`` if it is.

        The result is cached. The check goes through all batches of this process once. It costs one
        forward pass, or one gradient per sample if the outputs do not have one row per sample.

        Args:
            alone: If true, the loss of a sample is the loss of a batch of this sample alone. If
                false, the losses of cross-entropy are weighted by the number of labels of a sample
                that are not ignored, so that their mean is the loss of the batch.
        """
        if alone not in self._sample_gaps:
            # Class weights, and numbers of labels if samples stand alone, must not weight samples.
            uneven = not self._batches.even and (alone or known_loss(self.loss_fn) is None)
            labels = f"{NOT_A_MEAN}: batches are weighted by their labels ({CAUSES})"
            self._sample_gaps[alone] = labels if uneven else sample_gap(self, alone)
        return self._sample_gaps[alone]

    def require_sample_mean(self, *, alone: bool) -> None:
        """Raise, in all processes, unless the loss of each batch is the mean over its samples."""
        gap = self.sample_gap(alone=alone)
        # If one process raised alone, the others would wait for it forever: all raise together.
        flag = torch.tensor(float(bool(gap)), device=self.theta.device)
        if float(self.sum_over_processes(flag)):
            raise ValueError(gap or f"{NOT_A_MEAN}, in another process")

    def join_batches(self) -> tuple[Batch, int]:
        """Return all samples of this process as one batch, with their number."""
        if not self._batches.held:
            raise ValueError("data must be in memory to select samples: pass freeze=True")
        numbers, batches = zip(*self._batches, strict=True)
        sizes = [self.batch_rows[number] for number in numbers]
        return join_rows(batches, sizes), sum(sizes)

    def contexts(self, constants: Params | None = None) -> Iterator[tuple[int, Context, float]]:
        """Yield index, context and weight of each batch of this process, in a fixed order.

        The weights sum to one over all processes. ``constants`` defaults to :meth:`constants`.
        """
        constants = self.constants() if constants is None else constants
        for index, batch in self._batches:
            if not self._batches.held:
                self._check_labels([(index, batch)])
            context = self.context(constants, index, batch)
            yield index, context, self._batches.masses[index] / self._total

    def context(self, constants: Params, index: int, batch: Batch) -> Context:
        """Return a batch together with the constants and dropout masks that its loss depends on."""
        return Context(constants, batch, self._masks(index, batch), self.batch_rows[index])

    def sum_over_processes(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes that share the data, in place, and return it."""
        return tensor if self.sharing == "none" else all_sum(tensor, self.group)

    def constants(self) -> Params:
        """Return frozen parameters, parameters that are not selected, and buffers, by name."""
        if self.batch_norm != "recomputed":
            return self._constants
        if self._statistics is None:
            # Statistics are those of samples: labels that the loss ignores count as well.
            weighted = (
                (context, float(self.batch_sizes[index]))
                for index, context, _ in self.contexts(self._constants)
            )
            # The modes are those of products, except that batch norm uses batch statistics.
            statistics = evaluating(self.adapter, batch_statistics=True)
            with modes.outside_inference(), self.settings(), statistics:
                self._statistics = recomputed_statistics(
                    self.model,
                    lambda context: self.evaluate(self.params, context),  # type: ignore[arg-type]
                    weighted,
                    reduce=self.sum_over_processes,
                )
        return self._constants | self._statistics

    def settings(self) -> AbstractContextManager[None]:
        """Return a context manager that sets the modes in which the model is evaluated."""
        return product_modes(
            self.adapter,
            batch_statistics=self.batch_norm == "train",
            precision=self.precision,
            device=self.theta.device,
            constant=self._constant,
            replace=self._replaces,
        )

    def diagnose(self) -> None:
        """Raise an error that names the first batch with invalid labels, loss or gradient."""
        with self.settings():
            for index, context, _ in self.contexts():
                with torch.no_grad():
                    outputs, target = self.evaluate(self.params, context)
                check_labels(self.loss_fn, outputs, target, f"batch {index}")
                gradient, loss = self.batch_gradient(context)
                losses.check_loss(loss, index)
                check_finite(f"the gradient of batch {index}, at a loss of {loss:.6g},", gradient)

    def __repr__(self) -> str:
        parts = [
            f"{type(self.model).__name__}, {self.space.size:,} parameters",
            f"{self.num_samples:,} " + ("labels" if self.adapter.by_label else "samples"),
            f"batch norm {self.batch_norm}" if batch_norms(self.model) else "",
            f"l2 {self.l2:g}" if self.l2 else "",
            "dropout fixed" if self.dropout == "fixed" else "",
            self.precision or "",
        ]
        return f"Risk({', '.join(filter(None, parts))})"

    def _masks(self, index: int, batch: Batch) -> list[Tensor] | None:
        if self.dropout == "off":
            return None
        index += self._first
        if index not in self._mask_shapes:
            context = Context(self._constants, batch, None, 0)
            with torch.no_grad(), self.settings():
                self._mask_shapes[index] = modes.dropout_shapes(
                    self.model, lambda: self.evaluate(self.params, context)
                )
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return modes.draw_masks(self._mask_shapes[index], generator, like=self.theta)

    def _check_labels(self, batches: Iterable[tuple[int, Batch]]) -> None:
        for index, batch in batches if self._outputs is not None else ():
            target = self.adapter.target(batch)
            check_labels(self.loss_fn, self._outputs, target, f"batch {index}")

    def _check_batch_norm(self, mode: BatchNormMode) -> None:
        if mode == "train" and self._batches.defaulted and batch_norms(self.model):
            raise ValueError(
                "batch_size is required with batch_norm='train': the loss depends on it"
            )

    def _require_finite(self, total: Tensor) -> None:
        if not bool(torch.isfinite(total.sum())):
            self.diagnose()
            raise ValueError("loss and gradient must be finite, got NaN or Inf in another process")

    def _on_batches(self, batches: list[Batch]) -> "Risk":
        other = self._copy_with(sharing="none", shared=self.shared)
        counts: Any = {name: self._reading[name] for name in ("count", "mass")}
        other._batches = Batches(batches, device=self.theta.device, **counts)
        other.num_samples, other._total = sum(other.batch_sizes), sum(other._batches.masses)
        if self.batch_norm == "recomputed":
            # The statistics are recomputed from all data, not from this part of them.
            other.batch_norm, other._constants = "eval", self.constants()
        return other

    def _copy_with(self, **changes: Any) -> "Risk":
        other = copy.copy(self)
        other._statistics, other._sample_gaps, other.shared = None, {}, {}
        for name, value in changes.items():
            setattr(other, name, value)
        return other


def check_risk(risk: Any) -> None:
    """Raise unless the argument of a function is a risk."""
    check_type("risk", risk, Risk, "ritz.Risk(model, loss_fn, data)")


def require_outputs(risk: Risk, caller: str) -> None:
    """Raise unless the risk has outputs that are separate from its loss."""
    check_risk(risk)
    if risk.loss_fn is None:
        raise ValueError(
            f"{caller} needs outputs that are separate from the loss, got a risk with "
            "loss_fn=None: pass loss_fn to Risk, and forward if necessary"
        )


# ------------------------------------------------------------------------------------------
# Checks of the model and the loss.


def _inspect_first_batch(risk: Risk) -> Any:
    """Evaluate one batch twice, and raise unless both losses are the same finite number.

    Also restores buffers that the model wrote to, and sets what the first call shows: whether
    functions of torch must be replaced, and whether the loss is linear in the outputs.

    Returns:
        The outputs of one sample, or ``None`` if the outputs are not a tensor.
    """
    for name, value in risk.params.items():
        check_finite(f"parameter {name!r}", value)
    before = risk.theta.clone()
    if risk._batches.first is not None:  # cached, because iterating would load the data again
        index, batch = risk._batches.first
        context = risk.context(risk.constants(), index, batch)
        with torch.no_grad(), risk.settings():
            try:
                with FunctionDetector() as noted:
                    outputs, target = risk.evaluate(risk.params, context)
            except (RuntimeError, IndexError) as error:  # the shape or dtype of the inputs
                error.args = (inputs_error(index, batch, risk.theta.dtype, error),)
                raise
            known = known_loss(risk.loss_fn)
            if known is None and risk.loss_fn is not None:
                with noted:  # a user-defined loss may call cross-entropy
                    attempt(lambda: risk.adapter.loss(outputs, target), *UNSUITABLE)
            risk._replaces = noted.used
            if not torch.equal(risk.theta, before):
                raise ValueError("model must not change its parameters: does it use max_norm?")
            risk._written = parameters.restore_buffers(risk.model, risk._constants)
            losses.check_outputs(risk.loss_fn, outputs, target, f"batch {index}")
            if known is None and isinstance(outputs, Tensor) and risk.loss_fn is not None:
                # The Hessian in the outputs times a vector in a generic direction.
                vector = torch.linspace(1, 2, outputs.numel()).to(outputs).view_as(outputs)
                call = partial(losses.output_hessian, risk.loss_fn, outputs, target, vector)
                curvature, problem = attempt(partial(call, reverse=True), *UNSUITABLE)
                risk.linear_loss = not problem and not bool(curvature.any())
            if context.masks == []:
                raise ValueError(
                    "dropout='fixed' needs dropout layers, but the model calls none; functional "
                    "dropout and dropout inside attention and recurrent layers stay off"
                )
            first = risk.adapter.loss(outputs, target)
            again = risk.batch_loss(risk.params, context)
        losses.check_loss(first, index)
        if known is None:
            check_not_sum(risk, context, index)
        if risk.loss_fn is not None:
            with risk.settings():
                if known is None:
                    check_outputs_suffice(risk, outputs, target)
                # A user-defined forward alone knows the labels of a batch.
                counted = risk._reading["count"] or risk._mass(batch) is not None
                if risk.num_batches > 1 and not counted:
                    warn_if_batches_matter(risk, outputs, target, context.size)
        gap = abs(float(first) - float(again))
        if not is_below(gap, 100 * torch.finfo(risk.theta.dtype).eps * abs(float(first))):
            raise ValueError(
                f"model must give the same loss in two calls, got {float(first):.9g} and "
                f"{float(again):.9g}: does it use dropout or noise in eval mode?"
            )
        return outputs[:1] if isinstance(outputs, Tensor) and outputs.ndim > 1 else None
    return None
