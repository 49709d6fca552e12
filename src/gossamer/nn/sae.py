"""Sparse autoencoders as modules."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer import gemm, sae
from gossamer._core import checks
from gossamer._core.compiling import ahead
from gossamer._core.recompute import recomputed, remembered
from gossamer.nn._placement import HERE, Here
from gossamer.nn._silence import Silence
from gossamer.nn._wide_tensors import WideTensors
from gossamer.nn.median import geometric_median
from gossamer.rowsparse import DensityTracker, Rows
from gossamer.sae.decode import decode_dense
from gossamer.sae.encode_dense import choose_path, encode_dense, most_slots, slots
from gossamer.sae.sharded import sum_over
from gossamer.sae.smallest import smallest
from gossamer.sae.squared_error import squared_error


class SAELoss(NamedTuple):
    """The terms of `loss`, all of them tensors on the device. The host has not waited for any. The backward pass reads
    the reconstruction and its target again: no one may change them in place before.

    Args:
        loss: `[]`, mse + l0_penalty + further_mse + dead_loss: call `backward()` on it.
        mse: `[]`, the squared error of a row, summed over its columns, mean over rows.
        l0_penalty: `[]`, the penalty that makes rows sparse, coefficient included; 0 for TopK.
        l0: `[]`, float32, values of a row that differ from 0, mean over rows, without a gradient.
        reconstruction: `[..., d_in]`, of a `Transcoder` `[..., d_out]`.
        dead_loss: `[]`, the loss of dead latents, coefficient included; 0 where none is dead.
        further_mse: `[]`, in training the squared errors of other reconstructions: of the inner widths of a
            `MatryoshkaSAE`, weights included, and of the gate of a `GatedSAE`; 0 of all others.
    """

    loss: Tensor
    mse: Tensor
    l0_penalty: Tensor
    l0: Tensor
    reconstruction: Tensor
    dead_loss: Tensor
    further_mse: Tensor

    def __repr__(self) -> str:
        """Numbers, and of the reconstruction its shape; it waits for the device."""
        shown = (f"{name}={_shown(part)}" for name, part in zip(self._fields, self))
        return f"{type(self).__name__}({', '.join(shown)})"


def _shown(part: Tensor) -> str:
    # A tensor that a compiler or a transform passes around has no number to show.
    wrapped = type(part) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(part)
    if part.dim() == 0 and not wrapped and not part.is_meta:
        return f"{part.item():.6g}"
    return f"{part.dtype} {list(part.shape)}".removeprefix("torch.")


class SparseAutoencoder(WideTensors):
    """The base of all autoencoders: parameters with SAELens's names and layouts, statistics, and the loss."""

    firing_counts: Tensor
    steps_since_fired: Tensor
    dead_after: int
    capacity: int | None = None
    _placement: Here = HERE
    _rows_on: tuple[Any] | None = None
    """The group of ranks of which each has rows of its own, in a call of `data_parallel_sae`."""
    _compiled: frozenset[tuple[bool, bool]] = frozenset()

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        operator = f"nn.{type(self).__name__}"
        checks.positive(operator, "d_in", d_in, "It is the size of the vectors to encode.")
        checks.positive(operator, "d_sae", d_sae, "It is the number of latents.")
        checks.float_dtype(operator, "dtype", dtype, "Biases and thresholds are float32 at least in any case.")
        self.d_in, self.d_sae = d_in, d_sae
        directions = torch.randn(d_sae, d_in, device=device)
        directions = (directions / directions.norm(dim=1, keepdim=True)).to(dtype or torch.get_default_dtype())
        self.W_dec = torch.nn.Parameter(directions)
        self.W_enc = torch.nn.Parameter(directions.t().clone(memory_format=torch.contiguous_format))
        self.b_enc = torch.nn.Parameter(torch.zeros(d_sae, dtype=self._wide, device=device))
        self.b_dec = torch.nn.Parameter(torch.zeros(d_in, dtype=self._wide, device=device))
        self.register_buffer("firing_counts", torch.zeros(d_sae, dtype=torch.int64, device=device))
        self.register_buffer("steps_since_fired", torch.zeros(d_sae, dtype=torch.int64, device=device))
        self._silence_known = Silence()
        self._density = DensityTracker()

    @property
    def density(self) -> DensityTracker:
        """The numbers of latents of earlier rows, and the path of calls: `"sparse"`, or `"dense"` by plain products.

        A call takes the path that is faster at the density of a few calls ago. `density.pinned` names a path that is
        always taken, `last_path` is the last one.
        """
        return self._density

    @property
    def last_path(self) -> str | None:
        """The path last taken, or None."""
        return self._density.last_path

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of biases, thresholds and statistics."""
        return torch.promote_types(self.W_dec.dtype, torch.float32)

    def encode(self, x: Tensor) -> Rows:
        """x `[..., d_in]` -> latents `(..., d_sae)`; see `sae.encode`. In training mode it counts firings."""
        self._check(x)
        return self._encode(x, self.capacity)[0]

    def decode(self, rows: Rows) -> Tensor:
        """Latents `(..., d_sae)` -> reconstruction `[..., d_in]`; see `sae.decode`."""
        return self._placement.decode(rows, self.W_dec, self.b_dec)

    def gathered(self, rank: int | None = None) -> Any:
        """The whole autoencoder, on the CPU: for `nn.save_sae`, or to use it on one device. Every rank has to call it.

        Args:
            rank: the rank of the group that gets it, while the others get None; by default all get it.
        """
        return self._placement.gathered(self, rank)

    @property
    def latents(self) -> range:
        """Which of the `d_sae` latents are here: all of them, or the slice of this rank (`nn.shard_sae`)."""
        return self._placement.latents or range(self.d_sae)

    @property
    def sharded(self) -> bool:
        """Whether `nn.shard_sae` made this module."""
        return self._placement.latents is not None

    @property
    def _encoder(self) -> tuple[Tensor, Tensor]:
        """(weight, bias) of the latents in the units in which `forward` and `loss` compute."""
        return self.W_enc, self.b_enc

    @property
    def _output_bias(self) -> Tensor:
        """b_dec in the same units."""
        return self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., d_in]` -> reconstruction `[..., d_in]`."""
        rows, _, nnz = self._chosen(x)
        out = self._output(x, rows)
        self._record(nnz)
        return out

    def _check(self, x: Tensor) -> None:
        checks.module_input(f"nn.{type(self).__name__}", "x", x, self.W_enc, "d_in", self.d_in)

    def dead(self) -> Tensor:
        """Bool `[d_sae]`, on the device: which latents have been silent for `dead_after` calls of `encode` or more."""
        return self.steps_since_fired >= self.dead_after

    @torch.no_grad()
    def initialize_(self, x: Tensor) -> None:
        """Sets b_dec to the geometric median of x `[..., d_in]`, a sample of the rows to reconstruct.

        Raises:
            ValueError: x has another last dimension than b_dec, no row, or NaN or Inf.

        Source: Bricken et al. 2023, "Towards Monosemanticity", on initialisation.
        """
        median = geometric_median(self._sample(x))
        checks.finite_start(f"nn.{type(self).__name__}", median)
        self.b_dec.copy_(median)

    def _sample(self, x: Tensor) -> Tensor:
        """The rows of a sample `[M, d_in]`."""
        if x.shape[-1:] != self.b_dec.shape:
            raise ValueError(
                f"nn.{type(self).__name__}: x must be a sample of the rows to reconstruct, with shape "
                f"[..., {len(self.b_dec)}] like b_dec, got {list(x.shape)}."
            )
        return x.flatten(0, -2) if x.dim() > 1 else x[None]

    @torch.no_grad()
    def normalize_decoder_(self) -> None:
        """Scales the rows of W_dec to norm 1, where training constrains them; call it after `optimizer.step()`."""
        self.W_dec.div_(self._decoder_norms(self.W_dec).clamp(min=1e-8)[:, None])

    @torch.no_grad()
    def project_decoder_gradient_(self) -> None:
        """Takes the part that would only change the norms of rows from the gradient of W_dec; call it before
        `optimizer.step()`, and `normalize_decoder_` after it.

        Source: Bricken et al. 2023, "Towards Monosemanticity", on training.
        """
        if self.W_dec.grad is not None:
            grad, rows = self.W_dec.grad.to(self._wide), self.W_dec.to(self._wide)
            # A row of zeros has no direction, and loses nothing.
            along = (grad * rows).sum(1) / rows.square().sum(1).clamp(min=torch.finfo(rows.dtype).tiny)
            self.W_dec.grad.copy_(torch.addcmul(grad, along[:, None], rows, value=-1))

    def _encode(self, x: Tensor, capacity: int | None) -> tuple[Any, Tensor]:
        """(latents, l0 of each row), counted in training."""
        return self._counted(self._latents(x, capacity))

    def _latents(self, x: Tensor, capacity: int | None) -> tuple[Any, Tensor]:
        """(latents, l0 of each row). A selection of known size has a slot per entry, whatever `capacity` says."""
        options = self._options() if self._expected is not None else {"capacity": capacity, **self._options()}
        return self._placement.encode(x, *self._encoder, **options)

    def _whole_pass(self, x: Tensor) -> None:
        """Kernels that `forward` and `loss` launch on packed latents in this mode, and no change."""
        rows = self._latents(x, self._slots)[0]
        if self.training:
            with torch.no_grad():
                sae.count_fired(rows)
        self._output(x, rows)

    def _options(self) -> dict[str, Any]:
        """The arguments of `sae.encode` and `encode_dense` in this mode."""
        raise NotImplementedError

    @property
    def _expected(self) -> int | None:
        """The number of entries of a row, where the host knows it without looking."""
        return None

    def _chosen(self, x: Tensor) -> tuple[Rows | Tensor, Tensor, Tensor | None]:
        """(latents as a container or dense, l0, counts of entries where the density tracker follows them)"""
        self._check(x)
        # The sum over ranks takes packed latents.
        followed = self._expected is None and not self.sharded
        path = "sparse"
        if not self.sharded:
            rows, training = x.shape[:-1].numel(), self.training
            self._density.check_pinned("sparse", "dense")
            path = self._density.path(
                lambda known: choose_path(known, rows, self.W_dec, self._expected, training=training), training=training
            )
        if path == "sparse":
            mode = self.training, torch.is_grad_enabled()
            skip = torch.compiler.is_compiling() or self.sharded or mode in self._compiled
            if not skip and ahead(self._whole_pass, x):
                self._compiled |= {mode}
            latents, l0 = self._encode(x, self._slots)
            return latents, l0, latents.counts if followed else None
        acts, l0, fired, nnz = encode_dense(x, *self._encoder, **self._options())
        if self.training:
            with torch.no_grad():
                self._count(acts, fired)
        return acts, l0, nnz if followed else None

    @property
    def _slots(self) -> int | None:
        """Slots of a row: where earlier rows would have filled the usual number, up to twice as many."""
        if self.capacity is not None or self._expected is not None:
            return self.capacity
        return slots(self._density.basis(training=self.training), self.d_sae)

    def _record(self, nnz: Tensor | None) -> None:
        if nnz is not None:
            limit = self.capacity or most_slots(self.d_sae)
            self._density.record(nnz, training=self.training, limit=limit)

    def _counted(self, found: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
        """Latents and their l0, which a call in training has counted."""
        if self.training:
            with torch.no_grad():
                self._count(found[0], sae.count_fired(found[0]))
        return found

    def _count(self, rows: Rows | Tensor, fired: Tensor) -> None:
        """Adds a call in training to the statistics, without gradients. A call that a checkpoint computes again was
        counted in its first run."""
        if recomputed():
            return
        fired = self._of_all_rows(fired)
        self.firing_counts += fired
        self._silence_known.update_(self.steps_since_fired, fired)

    def _of_all_rows(self, value: Tensor, mean: bool = False) -> Tensor:
        """The sum, or the mean, of the values that ranks with rows of their own have."""
        if self._rows_on is None:
            return value
        total = sum_over(value, *self._rows_on)
        return total / dist.get_world_size(*self._rows_on) if mean else total

    def _loss(self, x: Tensor, target: Tensor) -> SAELoss:
        if target is x and x.dim() > 2:
            # The encoder and the squared error would each copy an x whose rows do not follow each other in memory.
            x = target = x.contiguous()
        rows, l0, nnz = self._chosen(x)
        reconstruction, terms = self._terms(x, target, rows, l0)
        mse = terms.pop("mse") if "mse" in terms else mean(squared_error(target, reconstruction))
        dead = self._dead_loss(x, target, reconstruction) if self.training else None
        self._record(nnz)
        return total(mse, terms if dead is None else terms | {"dead_loss": dead}, l0, reconstruction)

    def _terms(self, x: Tensor, target: Tensor, rows: Any, l0: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(the reconstruction, the terms of the loss beside its squared error, by their names in `SAELoss`; "mse" among
        them where that error is known already)"""
        return self._output(x, rows), {}

    def _output(self, x: Tensor, rows: Rows | Tensor) -> Tensor:
        """The reconstruction in the units in which `forward` and `loss` compute."""
        return self._decoded(rows, self.W_dec, self._output_bias)

    def _decoded(self, rows: Rows | Tensor, W_dec: Tensor, b_dec: Tensor) -> Tensor:
        if isinstance(rows, Tensor):
            return decode_dense(rows, W_dec, b_dec)
        return self._placement.decode(rows, W_dec, b_dec)

    def _dead_loss(self, x: Tensor, target: Tensor, reconstruction: Tensor) -> Tensor | None:
        """None while it is 0."""
        return None

    def _lost(self) -> Any:
        raise RuntimeError(
            f"nn.{type(self).__name__}: a checkpoint computes a call again whose first run was not seen, so the state "
            "of that run (dead latents, steering) is not known. Use torch.utils.checkpoint with "
            "use_reentrant=False, around the whole call, and with no other saved_tensors_hooks inside."
        )

    def _longest_silent(self, count: int) -> tuple[Tensor, Tensor]:
        """(the latents that were silent longest, whether each is dead); of equally silent ones the first. Their number
        is fixed, because the device alone knows how many are dead."""
        steps, latents = self.steps_since_fired, self.latents
        # Keys in the order of silence, of which no two are equal.
        ties = torch.arange(latents.start, latents.stop, device=steps.device)
        keys = steps * self.d_sae + (self.d_sae - 1 - ties)
        which, chosen = self._placement.highest(keys, min(count, self.d_sae))
        dead = self.dead()[which]
        return which, dead if chosen is None else dead & chosen

    def _decoder_norms(self, W_dec: Tensor) -> Tensor:
        """`[latents]`, in the wide dtype; 0 has the gradient 0."""
        return torch.linalg.vector_norm(W_dec, dim=1, dtype=self._wide)


class Reviving(SparseAutoencoder):
    """The base of autoencoders that keep k latents: their settings, and the auxiliary loss for dead latents."""

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        k: int,
        *,
        aux_coefficient: float = 1 / 32,
        aux_k: int | None = None,
        dead_after: int = 2500,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_in, d_sae, dtype, device)
        operator = f"nn.{type(self).__name__}"
        checks.positive(operator, "k", k, "It is the number of latents to keep per row.")
        if k > d_sae:
            raise ValueError(f"{operator}: k must be at most d_sae = {d_sae}, got {k}.")
        checks.number(operator, "aux_coefficient", aux_coefficient, "0 leaves dead latents dead.", zero=True)
        checks.positive(operator, "dead_after", dead_after, "It is a number of calls of encode.")
        if aux_k is not None:
            checks.positive(operator, "aux_k", aux_k, "aux_coefficient=0 leaves the auxiliary loss out.")
        self.k, self.aux_coefficient, self.dead_after = k, aux_coefficient, dead_after
        self.aux_k = min(aux_k or max(d_in // 2, 1), d_sae)

    def _options(self) -> dict[str, Any]:
        return {"activation": gemm.TopK(self.k), "b_dec": self._centre}

    @property
    def _expected(self) -> int | None:
        return self.k

    def _dead_loss(self, x: Tensor, target: Tensor, reconstruction: Tensor) -> Tensor | None:
        if not self.aux_coefficient:
            return None
        count = max(2 * self.aux_k, self.d_in)
        silent = remembered(
            self, lambda: None if self._none_is_dead() else self._longest_silent(count), lost=self._lost
        )
        if silent is None:
            return None
        which, dead = silent
        # No index is there twice, so that the gradient of index_select has nothing to add up, or to sort for that.
        biases = torch.where(dead, self.b_enc.index_select(0, which), -torch.inf)
        W_enc = self.W_enc.index_select(1, which)
        rows, _ = self._placement.encode(x, W_enc, biases, activation=gemm.TopK(self.aux_k), b_dec=self._centre)
        estimate = self._placement.estimate(rows, self.W_dec.index_select(0, which))
        residual = target.detach().to(self._wide) - reconstruction.detach().to(self._wide)
        loss = mean(squared_error(residual, estimate))
        return self.aux_coefficient * torch.where(self._placement.any(dead), loss, 0)

    def _none_is_dead(self) -> bool:
        """Whether the host knows that no latent is dead, so that the loss is 0 to the bit. Of other ranks' latents it
        knows nothing, and all ranks have to take part."""
        return not self.sharded and self._silence_known.below(self.steps_since_fired, self.dead_after)

    @property
    def _centre(self) -> Tensor | None:
        """The bias that the encoder subtracts from x."""
        return self.b_dec

    def loss(self, x: Tensor) -> SAELoss:
        """The loss of x `[..., d_in]`; the L0 penalty is 0."""
        return self._loss(x, x)

    def extra_repr(self) -> str:
        return f"d_in={self.d_in}, d_sae={self.d_sae}, k={self.k}{self._placement}"


def mean(terms: Tensor) -> Tensor:
    """Over all rows; 0 where there are none."""
    return terms.mean() if terms.numel() else terms.sum()


def total(mse: Tensor, terms: dict[str, Tensor], l0: Tensor, reconstruction: Tensor) -> SAELoss:
    """mse and further terms by their names; a term that an autoencoder lacks is a zero, in a tensor of its own."""
    none, *zeros = mse.new_zeros(4).unbind()
    loss = mse
    for term in [*terms.values()] or [none]:
        loss = loss + term
    penalty, dead, further = map(terms.get, ("l0_penalty", "dead_loss", "further_mse"), zeros)
    return SAELoss(loss, mse, penalty, mean(l0.detach()), reconstruction, dead, further)


class TopKSAE(Reviving):
    """A sparse autoencoder that keeps the k largest latents of each row.

    Decoder rows start with unit norm and the encoder as their transpose. Biases are made in float32 whatever `dtype`
    is, and stay so under autocast; `module.to(dtype)` converts them with all the rest, so give `dtype` here instead.

    Args:
        d_in: size of the vectors to encode.
        d_sae: number of latents.
        k: latents to keep per row.
        aux_coefficient: weight of the loss that lets dead latents explain the error of the others; 0: none.
        aux_k: how many dead latents a row takes for that; None is half of d_in. They are chosen among the d_in, or
            2 * aux_k, that have been silent longest, so that no size depends on how many are dead.
        dead_after: for how many calls of `encode` in training a latent is silent before it counts as dead.
        dtype: of the weights; None takes PyTorch's default.
        device: of the parameters.

    Raises:
        ValueError: a size below 1, k above d_sae, or an aux_coefficient below 0.
        TypeError: a size that is no int, or a dtype that is not floating.

    Attributes:
        W_enc, W_dec, b_enc, b_dec: `[d_in, d_sae]`, `[d_sae, d_in]`, `[d_sae]`, `[d_in]`. b_dec is subtracted from x
            before it is encoded.
        firing_counts: int64 `[d_sae]`, how many rows each latent fired in while training.
        steps_since_fired: int64 `[d_sae]`, for how many calls of `encode` while training each latent has been silent.

    Source: Gao et al. 2024, "Scaling and evaluating sparse autoencoders"; appendix A.2 for the auxiliary loss.

    >>> TopKSAE(4, 16, k=2)(torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """


class BatchTopKSAE(Reviving):
    """A sparse autoencoder that keeps the k * M largest latents of a batch of M rows: k on average, as rows need them.

    In training mode a batch competes for its k * M entries, and a running mean follows the smallest value that gets
    one. In evaluation mode that mean is a threshold, and a row's entries do not depend on other rows.

    Initialisation and dtypes are those of `TopKSAE`, but the encoder begins at 0.4 times the decoder. At 1 the rows
    with the largest norms take all entries of an untrained batch, which then explain these rows several times over, and
    training unlearns that slowly. Fast learning leaves more latents dead, so the auxiliary loss has other defaults.

    Args:
        d_in, d_sae, dead_after, dtype, device: as in `TopKSAE`.
        k: latents to keep per row, on average.
        threshold_rate: how much of a batch goes into the running mean. The first batch sets it.
        capacity: slots per row in evaluation mode, as in `sae.encode`. Rows beyond it stay exact but cost as much as
            dense. With None `forward` takes up to twice the usual number, where earlier rows would have filled that.
        aux_coefficient: as in `TopKSAE`. Beside the gradients that Adam remembers of a latent, 1/32 has no effect.
        aux_k: as in `TopKSAE`, but None is k: among half of d_in none has a part of its own.

    Raises:
        ValueError: a size below 1, k above d_sae, a threshold_rate outside (0, 1], or an aux_coefficient below 0.
        TypeError: a size that is no int, or a dtype that is not floating.

    Attributes:
        W_enc, W_dec, b_enc, b_dec: as in `TopKSAE`.
        threshold: float32 `[]`, the running mean of the smallest value kept; 0 before the first batch.
        firing_counts, steps_since_fired: as in `TopKSAE`.

    Source: Bussmann et al. 2024, "BatchTopK Sparse Autoencoders".

    >>> BatchTopKSAE(4, 16, k=2).eval()(torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """

    threshold: Tensor
    _wide_tensors = ("threshold",)

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        k: int,
        *,
        threshold_rate: float = 0.01,
        capacity: int | None = None,
        aux_coefficient: float = 1.0,
        aux_k: int | None = None,
        dead_after: int = 10,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        aux_k = k if aux_k is None else aux_k
        super().__init__(
            d_in, d_sae, k, aux_coefficient=aux_coefficient, aux_k=aux_k, dead_after=dead_after, dtype=dtype,
            device=device,
        )  # fmt: skip
        with torch.no_grad():
            self.W_enc.mul_(0.4)
        operator = f"nn.{type(self).__name__}"
        checks.number(operator, "threshold_rate", threshold_rate, "It is the share of one batch.")
        if threshold_rate > 1:
            raise ValueError(f"{operator}: threshold_rate must be at most 1, got {threshold_rate}.")
        if capacity is not None:
            checks.positive(operator, "capacity", capacity, "It is the number of slots per row.")
        self.threshold_rate, self.capacity = threshold_rate, capacity
        self.register_buffer("threshold", torch.zeros((), dtype=self._wide, device=device))

    def _options(self) -> dict[str, Any]:
        if self.training:
            return {"activation": gemm.BatchTopK(self.k), "b_dec": self._centre}
        return {"activation": gemm.JumpReLU(self.threshold), "b_dec": self._centre}

    @property
    def _expected(self) -> int | None:
        return self.k if self.training else None

    def _count(self, rows: Rows | Tensor, fired: Tensor) -> None:
        """Moves the threshold towards the smallest value kept, too, without waiting for the device."""
        super()._count(rows, fired)
        if recomputed():
            return
        least = self._smallest(rows).to(self.threshold.dtype)
        moved = torch.where(self.threshold > 0, torch.lerp(self.threshold, least, self.threshold_rate), least)
        self.threshold.copy_(self._of_all_rows(torch.where(least.isfinite(), moved, self.threshold), mean=True))

    def _smallest(self, rows: Rows | Tensor) -> Tensor:
        """[], inf where nothing is held."""
        if isinstance(rows, Tensor):
            return torch.where(rows > 0, rows, torch.inf).amin() if rows.numel() else rows.new_full((), torch.inf)
        return self._placement.least(smallest(rows))
