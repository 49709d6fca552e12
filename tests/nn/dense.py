"""The modules' losses once more, by dense PyTorch and in any dtype: what the tests compare with."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer import nn
from gossamer.testing import assert_close

D_IN, D_OUT, D_SAE = 16, 10, 96
CLASSES = {
    "topk": nn.TopKSAE,
    "batchtopk": nn.BatchTopKSAE,
    "jumprelu": nn.JumpReLUSAE,
    "matryoshka": nn.MatryoshkaSAE,
    "matryoshka batch": nn.MatryoshkaBatchTopKSAE,
    "standard": nn.StandardSAE,
    "gated": nn.GatedSAE,
    "transcoder": nn.Transcoder,
    "batchtopk transcoder": nn.BatchTopKTranscoder,
    "jumprelu transcoder": nn.JumpReLUTranscoder,
}
AUX = {"aux_coefficient": 0.3, "aux_k": 8}
RECIPES: dict[str, dict[str, Any]] = {
    "step": {},
    "quadratic": {"penalty": "quadratic", "target_l0": 5.0},
    "tanh": {"penalty": "tanh", "tanh_scale": 3.0},
    "step, to input": {"ste_to_input": True},
    "quadratic, to input": {"penalty": "quadratic", "target_l0": 5.0, "ste_to_input": True},
    "anthropic": {"penalty": "tanh", "ste_to_input": True, "pre_act_coefficient": 0.01},
}
"""JumpReLU's."""


class Terms(NamedTuple):
    """As `SAELoss` has them."""

    loss: Tensor
    mse: Tensor
    l0_penalty: Tensor
    l0: Tensor
    reconstruction: Tensor
    dead_loss: Tensor
    further_mse: Tensor


class Jump(torch.autograd.Function):
    """(acts, active) with the published straight-through estimates."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, threshold: Tensor, bandwidth: float, to_input: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(z, threshold)
        ctx.bandwidth, ctx.to_input = bandwidth, to_input
        return z * (z > threshold), (z > threshold).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad_acts: Tensor, grad_active: Tensor) -> tuple[Tensor | None, ...]:
        z, threshold = ctx.saved_tensors
        near = ((z - threshold).abs() < ctx.bandwidth / 2).to(z.dtype) / ctx.bandwidth
        slope = near * (threshold * grad_acts + grad_active)
        grad_z = grad_acts * (z > threshold)
        return grad_z + slope if ctx.to_input else grad_z, -slope.sum(0), None, None


def selected(model: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(pre-activations, latents, numbers of latents) of x `[M, d_in]`, where no L1 penalty makes rows sparse."""
    jump = isinstance(model, nn.JumpReLUSAE)
    inner = x if jump or hasattr(model, "W_skip") else x - model.b_dec
    z = inner @ model.W_enc + model.b_enc
    if jump:
        acts, active = Jump.apply(z, model.threshold, model.bandwidth, model.ste_to_input)
        return z, acts, active.sum(-1)
    if isinstance(model, nn.BatchTopKSAE):
        kept = z.relu().flatten().topk(model.k * len(x)).indices
        mask = torch.zeros_like(z).flatten().index_fill(0, kept, 1).view_as(z)
    else:
        mask = torch.zeros_like(z).scatter(1, z.topk(model.k).indices, 1)
    acts = z.relu() * mask
    return z, acts, (acts != 0).sum(-1).to(z.dtype)


def penalties(model: Any, z: Tensor, acts: Tensor, l0: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(the penalty on L0, the loss of dead latents); it counts steps since a latent fired."""
    jump, norms = isinstance(model, nn.JumpReLUSAE), model.W_dec.norm(dim=1)
    with torch.no_grad():
        silent = torch.where((acts > 0).any(0), 0, model.steps_since_fired + 1)
        model.steps_since_fired.copy_(silent)
    penalty = dead_loss = z.new_zeros(())
    if jump:
        sparsity = {
            "step": lambda: l0,
            "quadratic": lambda: 2 / model.target_l0 * (l0 - model.target_l0) ** 2,
            "tanh": lambda: torch.tanh(model.tanh_scale * acts * norms).sum(-1),
        }[model.penalty]()
        penalty = model.l0_coefficient * sparsity.mean()
    count = 2 * model.d_in if jump else max(2 * model.aux_k, model.d_in)
    # A stable sort leaves those that are equally silent in their order.
    chosen = torch.zeros_like(silent, dtype=torch.bool)
    chosen[silent.sort(descending=True, stable=True).indices[:count]] = True
    chosen &= silent >= model.dead_after
    if jump and model.pre_act_coefficient:
        below = (model.threshold - z).relu() * norms
        dead_loss = model.pre_act_coefficient * below[:, chosen].sum(-1).mean()
    elif not jump and model.aux_coefficient and chosen.any():
        pre = torch.where(chosen, z, -torch.inf)
        top = pre.topk(model.aux_k).indices
        explained = torch.zeros_like(z).scatter(1, top, pre.gather(1, top).relu()) @ model.W_dec
        dead_loss = model.aux_coefficient * (explained - residual.detach()).square().sum(-1).mean()
    return penalty, dead_loss


def loss(model: Any, x: Tensor, y: Tensor | None = None) -> Terms:
    """What `model.loss` returns for x `[M, d_in]`; like it, it counts steps since a latent fired."""
    if isinstance(model, nn.CrossLayerTranscoder):
        return _across(model, x, y)  # type: ignore[arg-type]
    if isinstance(model, nn.StandardSAE | nn.GatedSAE):
        return _penalised(model, x)
    z, acts, l0 = selected(model, x)
    output = acts @ model.W_dec + model.b_dec
    if getattr(model, "W_skip", None) is not None:
        output = output + x @ model.W_skip.t()
    residual = (x if y is None else y) - output
    mse, (penalty, dead_loss) = residual.square().sum(-1).mean(), penalties(model, z, acts, l0, residual)
    further = z.new_zeros(())
    if isinstance(model, nn.MatryoshkaSAE | nn.MatryoshkaBatchTopKSAE):
        for width, weight in zip(model.widths, model.inner_weights):
            inner_error = acts[:, :width] @ model.W_dec[:width] + model.b_dec - x
            further = further + weight * inner_error.square().sum(-1).mean()
    total = mse + penalty + dead_loss + further
    return Terms(total, mse, penalty, l0.detach().mean(), output, dead_loss, further)


def _across(model: nn.CrossLayerTranscoder, x: Tensor, y: Tensor) -> Terms:
    """Of x `[M, L, d_in]` and y `[M, L, d]`: layer j is the sum over i <= j of piece j - i of the rows of layer i."""
    layers: Any = model.layers
    found = [selected(layer, x[:, i]) for i, layer in enumerate(layers)]
    output = layers[0].b_dec.view(y.shape[1:]).expand_as(y)
    for i, ((_, acts, _), layer) in enumerate(zip(found, layers)):
        pieces = [acts @ piece for piece in layer.W_dec.split(y.shape[-1], dim=1)]
        output = output + torch.stack([torch.zeros_like(pieces[0])] * i + pieces, dim=1)
    residual = y - output
    added = [penalties(layer, *found[i], residual[:, i:].flatten(1)) for i, layer in enumerate(layers)]
    penalty, dead = (torch.stack(terms).sum() for terms in zip(*added))
    mse, l0 = residual.square().sum((1, 2)).mean(), torch.stack([l0.detach().mean() for *_, l0 in found]).sum()
    return Terms(mse + penalty + dead, mse, penalty, l0, output, dead, x.new_zeros(()))


def _penalised(model: Any, x: Tensor) -> Terms:
    """The recipes with an L1 penalty: Conerly et al. 2024; Rajamanoharan et al. 2024 with decoder norms of 1, which the
    penalty does not train."""
    z, norms, further = (x - model.b_dec) @ model.W_enc, model.W_dec.norm(dim=1), x.new_zeros(())
    if isinstance(model, nn.GatedSAE):
        penalised, norms = (z + model.b_gate).relu(), norms.detach()
        acts = (z + model.b_gate > 0) * (z * model.r_mag.exp() + model.b_mag).relu()
        by_gate = penalised @ model.W_dec.detach() + model.b_dec.detach()
        further = (by_gate - x).square().sum(-1).mean()
    else:
        acts = penalised = (z + model.b_enc).relu()
    output = acts @ model.W_dec + model.b_dec
    mse, penalty = (x - output).square().sum(-1).mean(), model.l1_coefficient * (penalised * norms).sum(-1).mean()
    with torch.no_grad():
        model.steps_since_fired.copy_(torch.where((acts > 0).any(0), 0, model.steps_since_fired + 1))
    l0 = (acts != 0).sum(-1).to(z.dtype).mean()
    return Terms(mse + penalty + further, mse, penalty, l0, output, x.new_zeros(()), further)


def gradients(terms: Any, model: torch.nn.Module) -> dict[str, Tensor]:
    """What is not reached has a gradient of zeros."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(terms.loss, parameters.values(), materialize_grads=True)
    return dict(zip(parameters, found))


def compare(model: Any, x: Tensor, y: Tensor | None = None) -> tuple[nn.SAELoss, dict[str, Tensor]]:
    """Asserts that terms, gradients and statistics are those of dense PyTorch, as near to float64 as float32 is."""
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    given = (x,) if y is None else (x, y)
    got, usual, wanted = model.loss(*given), loss(plain, *given), loss(exact, *(t.double() for t in given))
    # A number of the result adds up the latents of a row, each of which adds up D_IN products. The directions have all
    # signs, so that the products of a number are about as large as the numbers of its row.
    output = wanted.reconstruction
    budget: dict[str, Any] = {
        "length": D_IN + int(wanted.l0),
        "magnitude": output.square().mean(-1, keepdim=True).sqrt(),
    }
    assert_close(got.reconstruction, reference64=output, plain=usual.reconstruction, **budget)
    for name in ("loss", "mse", "l0_penalty", "l0", "dead_loss", "further_mse"):
        # A single number of plain PyTorch may be right by luck.
        torch.testing.assert_close(getattr(got, name).double(), getattr(wanted, name).double(), rtol=2e-6, atol=0)
    grads, plain_grads, exact_grads = gradients(got, model), gradients(usual, plain), gradients(wanted, exact)
    # b_dec has 16 numbers, of which plain PyTorch may have all right by luck: each sums the errors of all rows, of each
    # width, and the gradients of encoders.
    error = ((x if y is None else y) - wanted.reconstruction).norm(dim=0).flatten() * 2 / len(x)
    sums: dict[str, Any] = {"length": 4 * len(x), "magnitude": error}
    for name, grad in grads.items():
        assert grad.dtype is model.get_parameter(name).dtype
        budget = sums if name.endswith("b_dec") else {}
        assert_close(grad, reference64=exact_grads[name], plain=plain_grads[name], name=name, **budget)
    for name, silent in model.named_buffers():
        assert torch.equal(silent, exact.get_buffer(name)) or not name.endswith("steps_since_fired")
    return got, grads


def sample(m: int, generator: torch.Generator) -> Tensor:
    """Rows that are sums of few out of 40 fixed directions."""
    device = generator.device
    fixed = torch.Generator(device).manual_seed(1)
    directions = torch.nn.functional.normalize(torch.randn(40, D_IN, generator=fixed, device=device))
    fired = torch.rand(m, 40, generator=generator, device=device)
    return ((fired < 0.08) * (0.5 + fired * 12)) @ directions


def targets(x: Tensor) -> Tensor:
    """`[M, D_OUT]`: something that is not linear in x, with a mean that is not 0."""
    fixed = torch.Generator(x.device).manual_seed(4)
    hidden = (x @ torch.randn(D_IN, 24, generator=fixed, device=x.device).to(x.dtype)).relu()
    return hidden @ torch.randn(24, D_OUT, generator=fixed, device=x.device).to(x.dtype) / 5 + 0.5


def make(kind: str, device: torch.device, **options: Any) -> Any:
    """A model whose parameters are nowhere 0, so that each gradient has something to say; rows have about 6 latents."""
    torch.manual_seed(0)
    sizes = (D_IN, D_OUT, D_SAE) if kind.endswith("transcoder") else (D_IN, D_SAE)
    model: Any = CLASSES[kind](*sizes, device=device, **{**usual(kind), **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        if kind in ("standard", "gated"):
            # ReLU would keep half of all latents.
            model.W_enc.mul_(4)
            (model.b_enc if kind == "standard" else model.b_gate).sub_(0.8)
    return model


def usual(kind: str) -> dict[str, Any]:
    """The arguments without which a class has no rows of a few latents."""
    if kind in ("standard", "gated"):
        return {}
    if kind.startswith("jumprelu"):
        return {"bandwidth": 0.2, "initial_threshold": 0.4, "l0_coefficient": 0.01}
    return {"k": 6, **({"widths": (8, 30, D_SAE)} if kind.startswith("matryoshka") else {})}


def given(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """What `model.loss` takes."""
    return (x, targets(x)) if hasattr(model, "W_skip") else (x,)


def compare_compiled(model: Any, x: Tensor, compiled: Any) -> nn.SAELoss:
    """The loss in compiled code, which is that of a copy outside of it, as are gradients and counts."""
    eager = copy.deepcopy(model)
    want = eager.loss(*given(model, x))
    got: nn.SAELoss = compiled(lambda *operands: model.loss(*operands))(*given(model, x))
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(gradients(got, model), gradients(want, eager))
    assert torch.equal(model.steps_since_fired, eager.steps_since_fired)
    assert torch.equal(model.firing_counts, eager.firing_counts)
    return got


@torch.no_grad()
def kill(model: Any, x: Tensor, count: int) -> None:
    """Lets `count` latents be dead, for different times: their biases are lowered until x does not make them fire."""
    hushed = torch.arange(D_SAE, device=x.device) % 7 % 2 == 1
    for _ in range(12):
        fired = (copy.deepcopy(model).encode(x).to_dense() != 0).any(0)
        model.b_enc -= 0.15 * (fired & hushed)
    silent = (hushed & ~fired).nonzero()[:, 0]
    assert len(silent) >= count
    model.dead_after = 50
    model.steps_since_fired[silent[:count]] = 50 + torch.arange(count, device=x.device) // 2 % 5
