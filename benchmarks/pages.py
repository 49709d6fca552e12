"""The sections of docs/benchmarks.md, and the files of results that it links alone."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Section(NamedTuple):
    """A table of the page.

    title: its heading. text: the caveats that a reader needs. file: of benchmarks/results, without its suffix.
    names: of the cases that are shown, in order. shown: which of them.
    """

    title: str
    text: str
    file: str
    names: tuple[str, ...]
    shown: Callable[[dict[str, Any]], bool] = lambda parameters: True


SECTIONS = (
    Section(
        "Autoencoders: decode",
        "A batch of 32 rows, in each of which L0 of 65,536 latents fire, from dense activations. Eager, the host "
        "bounds the call; a CUDA graph shows the device. *jumprelu-sae-kernels* are the published kernels; *unsafe* "
        "drops entries that do not fit.",
        "sae-nvidia-h200",
        ("sweep_l0",),
    ),
    Section(
        "Autoencoders: training steps",
        "The loss and all gradients, without an optimizer; Matryoshka has five widths. Eager, the host bounds a step. "
        "JumpReLU, which takes **more memory** than a compiled dense step, is in `nn-train-jumprelu-nvidia-h200.json`.",
        "nn-nvidia-h200",
        ("train_topk", "train_batchtopk", "train_matryoshka"),
    ),
    Section(
        "SAELens, as it is and patched",
        "Forward passes, and steps of SAELens's own trainer with its optimizer. Eager, the host bounds a forward pass.",
        "integrations-saelens-nvidia-h200",
        ("sae_lens_forward", "sae_lens_training_step"),
    ),
    Section(
        "Gated layers, and layers that pack what they activate",
        "`linear_glu` is SiLU(x W_gate) * (x W_up) in one product. `linear_pack` multiplies by a weight, applies ReLU"
        " or JumpReLU, and writes only what is left; with `decode` a second product follows. `mlp` is a whole block, "
        "forward and backward.",
        "gemm-nvidia-h200",
        ("linear_glu", "linear_pack_relu", "linear_pack_decode", "mlp"),
    ),
    Section(
        "Sparse feed-forward blocks",
        "A gated block in which `nnz` of N neurons fire for a token; `shared` is the share of these that fire for all"
        " of 64 neighbouring tokens. Eager, the host bounds a block of up to 16 tokens: it is **slower than dense**.",
        "ffn-blocks-nvidia-h200",
        ("gated",),
    ),
    Section(
        "Whole models with sparse feed-forward blocks",
        "Llama-like models of 8 to 38 layers; `entries` is how many of the 5,632 neurons of a block fire for a token.",
        "ffn-models-nvidia-h200",
        ("model",),
    ),
    Section(
        "Block-sparse attention",
        "Random layouts, another for each head; `density` is the percentage of blocks that are present.",
        "blocksparse-attention-nvidia-h100-80gb-hbm3",
        ("attention",),
    ),
    Section(
        "Block-sparse products",
        "Both operands and the result are block-sparse, in a batch of 4. `sparsity` is the percentage of blocks that "
        "are absent, and dense is cuBLAS with the zeros. **Slower than dense** are most products in bfloat16 up to n "
        "2,048, products in blocks of 16 and 32, and large products in which a quarter is absent.",
        "blocksparse-matmul-nvidia-h100-80gb-hbm3",
        ("matmul",),
        lambda given: given["sparsity"] in (25, 50, 75),
    ),
    Section(
        "Gated sparse attention: selection and attention together",
        "From the indexer's inputs to the output: each query attends to the k keys that score highest. Dense "
        "attention is **faster** up to 16,384 tokens.",
        "attention-selected-nvidia-h100-80gb-hbm3",
        ("selected_attention",),
    ),
    Section(
        "Selected attention: decoding",
        "One query over T keys, of which it takes k; G is the number of heads of keys and values.",
        "attention-32768-8192-nvidia-h200",
        ("sparse_decode",),
    ),
)
