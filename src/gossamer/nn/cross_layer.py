"""Autoencoders and transcoders across the layers of a model."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.ops import returned
from gossamer.nn.sae import SAELoss, SparseAutoencoder, mean, total
from gossamer.nn.transcoder import Transcoding
from gossamer.rowsparse import Rows
from gossamer.sae.squared_error import squared_error


class Crosscoder(torch.nn.Module):
    """One dictionary for several layers, or for one layer of several models: an autoencoder of all of them in a row.

    A latent reads each layer through a piece of its encoder column, and writes each through a piece of its decoder row,
    `d` numbers long. So a crosscoder is an autoencoder of vectors of layers * d numbers, of any class, and computes as
    fast. The loss is the sum over layers: bring them to one scale first. `decoder_norms` says where a latent is at
    home.

    Args:
        sae: the autoencoder, of d_in = layers * d; or a slice of one (`shard_sae`). `save_sae` and `data_parallel_sae`
            take `crosscoder.sae`, too.
        layers: number of layers or models.

    Raises:
        ValueError: layers below 1, or a d_in that layers do not divide.
        TypeError: another module than an autoencoder, or layers that are no int.

    Source: Lindsey et al. 2024, "Sparse Crosscoders for Cross-Layer Features and Model Diffing"; with BatchTopK, Minder
    et al. 2025, "Overcoming Sparsity Artifacts in Crosscoders to Interpret Chat-Tuning". With `StandardSAE` the penalty
    weighs the norm over all layers, where Lindsey et al. take the sum of their norms.

    >>> model = Crosscoder(gossamer.nn.BatchTopKSAE(2 * 4, 16, k=2), layers=2)
    >>> model(torch.randn(3, 2, 4)).shape, model.decoder_norms.shape
    (torch.Size([3, 2, 4]), torch.Size([16, 2]))
    """

    sae: Any

    def __init__(self, sae: Any, layers: int) -> None:
        super().__init__()
        if not isinstance(sae, SparseAutoencoder) or isinstance(sae, Transcoding):
            raise TypeError(f"nn.Crosscoder: sae must be an autoencoder of gossamer.nn, got {type(sae).__name__}.")
        checks.positive("nn.Crosscoder", "layers", layers, "It is the number of layers that share latents.")
        if sae.d_in % layers:
            raise ValueError(f"nn.Crosscoder: sae must have d_in of {layers} layers of one size, got {sae.d_in}.")
        self.sae, self.layers = sae, layers

    @property
    def decoder_norms(self) -> Tensor:
        """`[latents, layers]`: how much a latent writes to each layer."""
        return torch.linalg.vector_norm(self._by_layer(self.sae.W_dec), dim=2)

    def encode(self, x: Tensor) -> Rows:
        """x `[..., layers, d]` -> latents `(..., d_sae)`."""
        found: Rows = self.sae.encode(self._flat(x))
        return found

    def decode(self, rows: Rows) -> Tensor:
        """Latents `(..., d_sae)` -> reconstruction `[..., layers, d]`."""
        return self._by_layer(self.sae.decode(rows))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., layers, d]` -> reconstruction `[..., layers, d]`."""
        return self._by_layer(self.sae(self._flat(x)))

    def loss(self, x: Tensor) -> SAELoss:
        """The loss of x `[..., layers, d]`, the sum over layers."""
        found: SAELoss = self.sae.loss(self._flat(x))
        # Not by `_replace`, whose result PyTorch 2.11 cannot return from a compiled region.
        fields = [*found[:4], self._by_layer(found.reconstruction), *found[5:]]
        return SAELoss(*fields)

    def initialize_(self, x: Tensor) -> None:
        """As `TopKSAE.initialize_`, of a sample `[..., layers, d]`."""
        self.sae.initialize_(self._flat(x))

    def _by_layer(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.layers, -1))

    def _flat(self, x: Tensor) -> Tensor:
        return _layers("nn.Crosscoder", "x", x, self.layers, self.sae.d_in // self.layers).flatten(-2)


class CrossLayerTranscoder(torch.nn.Module):
    """Transcoders of all layers of a model, each of which writes to its own layer and all later ones.

    Layer i of L has the transcoder `layers[i]` from x_i `[..., d_in]` to the outputs of layers i to L - 1 in a row,
    (L - i) * d numbers. So an entry is read once, and its decoder row once, for all layers that it writes. The output
    of a layer is the sum of the parts that this layer and those before it write. Each layer selects its own latents, by
    the class of its transcoder.

    Args:
        layers: `Transcoder`, `BatchTopKTranscoder` or `JumpReLUTranscoder` modules with d_out = (L - i) * d; or slices
            of them (`shard_sae`). The first holds b_dec of all layers: those of the others are added to it, and become
            0 for good.

    Raises:
        ValueError: no layer, or a d_in or d_out that does not fit.
        TypeError: another module than a transcoder.

    Attributes:
        layers: a `ModuleList`.

    Source: Ameisen et al. 2025, "Circuit Tracing: Revealing Computational Graphs in Language Models". Their penalty and
    thresholds are `penalty="tanh", ste_to_input=True, pre_act_coefficient=3e-6` of `JumpReLUTranscoder`.

    >>> model = CrossLayerTranscoder(gossamer.nn.Transcoder(4, (3 - i) * 4, 16, k=2) for i in range(3))
    >>> model(torch.randn(5, 3, 4)).shape
    torch.Size([5, 3, 4])
    """

    layers: Any

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        count = len(self.layers)
        if not count:
            raise ValueError("nn.CrossLayerTranscoder: layers must have a transcoder for each layer, got none.")
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, Transcoding):
                raise TypeError(
                    f"nn.CrossLayerTranscoder: layers must be transcoders of gossamer.nn, got {type(layer).__name__}."
                )
            if layer.d_out * count != self.layers[0].d_out * (count - i):
                raise ValueError(
                    f"nn.CrossLayerTranscoder: layers[{i}] must have d_out of {count - i} layers, where layers[0] has "
                    f"{self.layers[0].d_out} of {count}, got {layer.d_out}."
                )
            if layer.d_in != self.layers[0].d_in:
                raise ValueError(
                    f"nn.CrossLayerTranscoder: layers[{i}] must have d_in = {self.layers[0].d_in} like layers[0], got "
                    f"{layer.d_in}."
                )
            if i:
                layer.b_dec.requires_grad_(False)
                with torch.no_grad():
                    self.layers[0].b_dec[-layer.d_out :] += layer.b_dec
                    layer.b_dec.zero_()

    @property
    def d_out(self) -> int:
        """The size of the output of one layer."""
        return int(self.layers[-1].d_out)

    def encode(self, x: Tensor) -> list[Rows]:
        """x `[..., L, d_in]` -> of each layer its latents `(..., d_sae)`."""
        return [layer.encode(part) for layer, part in self._parts(x)]

    def decode(self, rows: Sequence[Rows]) -> Tensor:
        """Latents of each layer -> their outputs `[..., L, d]`, without skips."""
        if len(rows) != len(self.layers):
            raise ValueError(
                f"nn.CrossLayerTranscoder: rows must have latents of {len(self.layers)} layers, got {len(rows)}."
            )
        return self._whole([layer.decode(part) for layer, part in zip(self.layers, rows)])

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., L, d_in]` -> reconstruction of y `[..., L, d]`."""
        return self._whole([layer(part) for layer, part in self._parts(x)])

    def loss(self, x: Tensor, y: Tensor) -> SAELoss:
        """The loss of y `[..., L, d]` reconstructed from x `[..., L, d_in]`: the sum over layers, as is `l0`.

        Raises:
            TypeError: x or y is no floating tensor.
            ValueError: x or y has another shape.
        """
        parts = self._parts(x)
        operator = "nn.CrossLayerTranscoder"
        checks.floating(operator, y=y)
        checks.same_device(operator, "x", x.device, y=y)
        checks.shape(operator, "y", y, (*x.shape[:-1], self.d_out), "[..., L, d]", "with the rows of x")
        found, outputs, l0 = [], [], x.new_zeros((), dtype=torch.float32)
        for layer, part in parts:
            rows, fired, nnz = layer._chosen(part)
            output, terms = layer._terms(part, part, rows, fired)
            layer._record(nnz)
            found.append(terms)
            outputs.append(output)
            l0 = l0 + fired.detach()
        whole = self._whole(outputs)
        for i, (layer, part) in enumerate(parts):
            target, written = y[..., i:, :].flatten(-2), whole[..., i:, :].flatten(-2)
            dead = layer._dead_loss(part, target, written) if self.training else None
            found.append({} if dead is None else {"dead_loss": dead})
        terms = {}
        for each in found:
            for name, term in each.items():
                terms[name] = terms[name] + term if name in terms else term
        return total(mean(squared_error(y.flatten(-2), whole.flatten(-2))), terms, l0, whole)

    def initialize_(self, y: Tensor) -> None:
        """Sets b_dec to the geometric median of y `[..., L, d]`, a sample of the outputs to reconstruct."""
        self.layers[0].initialize_(_layers("nn.CrossLayerTranscoder", "y", y, len(self.layers), self.d_out).flatten(-2))

    def _parts(self, x: Tensor) -> list[tuple[Any, Tensor]]:
        """Of each layer its transcoder and its x."""
        x = _layers("nn.CrossLayerTranscoder", "x", x, len(self.layers), self.layers[0].d_in)
        return [*zip(self.layers, x.unbind(-2))]

    def _whole(self, outputs: list[Tensor]) -> Tensor:
        """`[..., L, d]`, from the outputs `[..., (L - i) * d]`."""
        whole: Tensor = _Later.apply(*outputs)
        return whole.unflatten(-1, (len(self.layers), -1))


class _Later(torch.autograd.Function):
    """The sum of outputs that end together, of which the first is longest; autograd would pad each to the longest."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        whole = outputs[0].to(torch.promote_types(outputs[0].dtype, torch.float32), copy=True)
        for output in outputs[1:]:
            whole[..., whole.shape[-1] - output.shape[-1] :] += output
        ctx.sizes = [output.shape[-1] for output in outputs]
        return returned(whole.to(outputs[0].dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad[..., grad.shape[-1] - size :] for size in ctx.sizes)


def _layers(operator: str, name: str, x: Tensor, layers: int, d: int) -> Tensor:
    checks.floating(operator, **{name: x})
    if x.dim() < 2 or x.shape[-2:] != (layers, d):
        raise ValueError(f"{operator}: {name} must have shape [..., {layers}, {d}], got {list(x.shape)}.")
    return x
