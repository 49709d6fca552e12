"""What modules say of an x that does not fit them: module, argument, rule, what arrived and the way out."""

from collections.abc import Callable

import pytest
import torch

from gossamer import blocksparse, nn

LAYOUT = blocksparse.Layout.from_mask(torch.eye(2, dtype=torch.bool), 16)
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "TopKSAE": lambda: nn.TopKSAE(32, 64, k=4),
    "BatchTopKSAE": lambda: nn.BatchTopKSAE(32, 64, k=4),
    "JumpReLUSAE": lambda: nn.JumpReLUSAE(32, 64, target_l0=4),
    "MatryoshkaSAE": lambda: nn.MatryoshkaSAE(32, 64, k=4),
    "StandardSAE": lambda: nn.StandardSAE(32, 64),
    "GatedSAE": lambda: nn.GatedSAE(32, 64),
    "Transcoder": lambda: nn.Transcoder(32, 32, 64, k=4),
    "MLP": lambda: nn.MLP(32, 64),
    "GatedMLP": lambda: nn.GatedMLP(32, 64, activation="relu"),
    "BlockSparseAttention": lambda: nn.BlockSparseAttention(32, 4, layout=LAYOUT),
    "GatedSparseAttention": lambda: nn.GatedSparseAttention(32, 4),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_dtype_names_module_and_argument(name: str, device: torch.device) -> None:
    model = MODULES[name]().to(device)
    x = torch.randn(2, 32, 32, device=device)
    says = rf"nn.{name}: x must be float32 like the module's weights, got bfloat16. Convert x with .to\(torch.float32\)"
    with pytest.raises(TypeError, match=says + r" or the module with .to\(torch.bfloat16\), or use torch.autocast"):
        model(x.bfloat16())
    with pytest.raises(TypeError, match=rf"nn.{name}: x must be float32, float16 or bfloat16 .*, got int64"):
        model(x.long())
    with torch.autocast(device.type, torch.bfloat16):
        assert model(x.bfloat16()).isfinite().all()


@pytest.mark.parametrize("name", [name for name in MODULES if name != "BlockSparseAttention"])
def test_a_shape_names_module_and_argument(name: str, device: torch.device) -> None:
    size = "hidden_size" if "MLP" in name or "Attention" in name else "d_in"
    with pytest.raises(
        ValueError, match=rf"nn.{name}: x must have shape \[..., {size}\] with {size} = 32, got \[2, 31"
    ):
        MODULES[name]().to(device)(torch.randn(2, 31, 31, device=device))


def test_a_first_loss_of_another_dtype_changes_nothing(device: torch.device) -> None:
    model = nn.JumpReLUSAE(32, 64, target_l0=4).to(device)
    with pytest.raises(TypeError, match="x must be float32 like"):
        model.loss(torch.randn(8, 32, device=device).bfloat16())
    assert model.is_fresh and model.input_scale == 1


def test_layers_that_are_no_plain_linear_take_what_they_take(device: torch.device) -> None:
    """An adapter may cast by itself."""

    class Casting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    for model in (nn.MLP(32, 64), nn.GatedMLP(32, 64)):
        for name, layer in list(model.named_children()):
            if isinstance(layer, torch.nn.Linear):
                setattr(model, name, Casting(layer.in_features, layer.out_features, False))
        assert model.to(device)(torch.randn(3, 32, device=device).bfloat16()).dtype is torch.float32
