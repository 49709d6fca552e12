"""The sections of docs/benchmarks.md: files of results, the title of each, and what a reader has to know."""


def blocks(*stems: str) -> tuple[str, ...]:
    """The files of room `blocksparse`, which share a section."""
    return tuple(f"blocksparse-{stem}-nvidia-h100-80gb-hbm3.json" for stem in stems)


PAGES: dict[str | tuple[str, ...], tuple[str, str]] = {
    "sae-nvidia-h200.json": (
        "Autoencoders: decode",
        "From dense activations (`decode`, and its sweeps), from ready containers (`decode_ready`), and backward. With "
        "a batch of 32 eager times are those of the host, which launches; a CUDA graph shows the device. `gossamer` is "
        "the default, exact for every input. *jumprelu-sae-kernels* are the published kernels, written anew; *unsafe* "
        "drops what does not fit. Where most latents fire and TF32 is allowed, gossamer is **slower than dense**.",
    ),
    "sae-encode-nvidia-h200.json": (
        "Autoencoders: encode",
        "*GEMM alone* is the product without an activation, the least that any encoder needs.",
    ),
    "nn-nvidia-h200.json": (
        "Autoencoders: training steps",
        "The loss and all gradients, without an optimizer. JumpReLU keeps pre-activations for rows with more latents "
        "than slots: it takes **more memory** than a compiled dense step.",
    ),
    "nn-train-jumprelu-steered-nvidia-h200.json": (
        "Autoencoders: what steering JumpReLU costs",
        "`held` is how many entries a row stores, with those in the window below a threshold; `spread` is that of the "
        "pre-activations. Both steps of gossamer hold the same.",
    ),
    "nn-train-jumprelu-nvidia-h200.json": (
        "Autoencoders: JumpReLU where many latents fire",
        "Where more than some hundred latents fire, the module goes the dense way.",
    ),
    "integrations-saelens-nvidia-h200.json": (
        "SAELens, as it is and patched",
        "Eager, a patched decode is bound by the host, whatever the shape: two launches and SAELens's own hooks. A "
        "training step is SAELens's own trainer's, optimizer included.",
    ),
    "gemm-nvidia-h200.json": (
        "Gated layers, and layers that pack what they activate",
        "*GEMM alone* is one product to both halves, without gating. `mlp` is a block, forward and backward.",
    ),
    "ffn-blocks-nvidia-h200.json": (
        "Sparse feed-forward blocks",
        "A gated block of which `nnz` of N neurons fire for a token; of groups of 64 neighbouring tokens `shared` fire "
        'for all. `gossamer` is the module in steady state with `method="auto"`; the others pin a way. Eager, a block '
        "of up to 16 tokens is bound by the host. `down by columns` stores W_down column by column, which spares a "
        "CUDA graph the copy that each of its calls makes else, and few tokens reading more than they need. Since this "
        "run 16 tokens with W_down by rows go the way of `gather`.",
    ),
    "ffn-plain-nvidia-h200.json": (
        "Sparse feed-forward blocks without a gate",
        "From 300 of 8,192 neurons on `auto` is the dense block; ratios there are what its time varies by.",
    ),
    "ffn-models-nvidia-h200.json": (
        "Whole models with sparse feed-forward blocks",
        "Llama-like models of 0.5B, 1B, 1.5B and 2B parameters (8, 18, 28 and 38 layers), with a gate (N 5,632) and "
        "without (N 8,192). Attention, norms and head are the same for all providers. With SiLU nothing is sparse: "
        "gossamer's is `gemm.gated_mlp` there.",
    ),
    "ffn-models-compiled-nvidia-h200.json": (
        "A whole model with sparse feed-forward blocks, beside torch.compile",
        "The same model with every way, eager, and compiled layer by layer.",
    ),
    "ffn-gated-nvidia-h100-80gb-hbm3.json": (
        "Sparse feed-forward blocks beside torch.compile",
        "A later commit than [above](#sparse-feed-forward-blocks), on an H100. In the case of unequal rows, 15% of the "
        "tokens have 440 active neurons and the others 40; with W_down by columns its dense part makes a copy of that.",
    ),
    "ffn-gated-cpu.json": (
        "Sparse feed-forward blocks on a CPU",
        "Up to 8 tokens in float32, on two cores.",
    ),
    blocks("attention"): (
        "Block-sparse attention",
        "Random layouts, another for each head; `density` is the percentage of blocks present. blksprs is missing at "
        "25% and 50%, where its error, 0.011 to 0.017, exceeded the bound, 0.01, and in blocks of 128: it raises.",
    ),
    blocks("attention-training"): (
        "Block-sparse attention, forward and backward",
        "Eager, sparse layouts are bound by the host. PyTorch's own tiles of FlexAttention's backward pass do not fit "
        "blocks of 64 here: it is given tiles that do. blksprs's error exceeded the bound, 0.02, at D 64 and 25%: "
        "0.021.",
    ),
    blocks("transformer"): (
        "Training a transformer with a Longformer-like layout",
        "4 layers of 512 with 8 heads, bfloat16 by autocast. Eager, the host bounds it: **slower than dense** SDPA, at "
        "0.76 to 0.90 of its speed; as a graph at 1,024 tokens, too.",
    ),
    blocks("softmax", "softmax-training", "transpose"): (
        "Block-sparse softmax and transpose",
        "Batch 4. blksprs cannot be captured, and its softmax takes float32 alone, twice the bytes of bfloat16. Eager, "
        "the host bounds softmax up to n 2,048, with gradients up to 4,096: often **slower than dense**.",
    ),
    blocks("gather", "gather-training", "repeat-interleave"): (
        "Block-sparse gather and repetition",
        "Batch 4. At n 1,024 all of it is bound by the host, eager, and **slower than dense**, and float32's gather at "
        "2,048. Where nothing is absent a gather is slower up to n 4,096, as a graph too.",
    ),
    blocks("matmul", "matmul-with-dense"): (
        "Block-sparse products",
        "Batch 4, both operands and the result block-sparse, or one operand alone; `dense` is cuBLAS with the zeros. "
        "The host bounds eager calls up to n 2,048. **Slower than dense** are graphs at n 1,024 and 2,048 in bfloat16 "
        "(0.87 to 0.92 of its speed, but 1.39 at n 2,048, 75%), where a quarter is absent at larger n (0.74 to 0.94), "
        "with blocks of 16 and 32 (0.75), and half a matrix in blocks of 64 times a dense one (0.91). Eager, at n "
        "1,024, a product takes up to nine times as long as dense.",
    ),
    blocks("scatter-reduce"): (
        "Block-sparse scatter",
        "Batch 4. gossamer's result is the same in every run. blksprs computes in float32: in bfloat16 it ends in an "
        "illegal memory access.",
    ),
    blocks("layout"): (
        "Block-sparse layouts",
        "From a mask `[16, blocks, blocks]` on the device to a layout with all of its lists.",
    ),
    "attention-nvidia-h200.json": (
        "Gated sparse attention: the layer, selection, and attention with its selection",
        "`gated_sparse_attention` is the whole layer. `select_topk` goes from the indexer's inputs to a selection of k "
        "keys for each of T queries, and `select_topk_units` takes them in units of four neighbours. "
        "`selected_attention` is selection and attention together, and `shared` has one selection for four layers. Up "
        "to 8,192 tokens dense attention is **faster**. Eager, the layer is bound by the host. An older commit: with "
        "131,072 keys selection takes less time [below](#gated-sparse-attention-selection-and-attention-together).",
    ),
    "attention-selected-nvidia-h100-80gb-hbm3.json": (
        "Gated sparse attention: selection and attention together",
        "A later commit, on an H100: of rows of more than 32,768 keys only those that may be among the highest are "
        "kept. `units of four` takes four neighbouring keys at a time.",
    ),
    "attention-layer-nvidia-h100-80gb-hbm3.json": (
        "Gated sparse attention: the layer, forward and backward",
        "`gossamer, dense` is the layer with dense attention, by cuDNN; `plain PyTorch` is it as it was published, "
        "whose gradients exceeded the bound, 0.01, up to 2,048 tokens. The indexer is frozen in training.",
    ),
    "attention-sparse-attention-32768-nvidia-h200.json": (
        "Attention over a given selection, at 32,768 keys",
        "`random` draws the keys of each query by themselves, which no real selection does.",
    ),
    "attention-32768-8192-nvidia-h200.json": (
        "Selected attention: scores, selection, decoding",
        "`select_topk` goes from the indexer's inputs to a selection of k keys for each of T queries. `sparse_decode` "
        "is one query over T keys, of which it takes k.",
    ),
}
"""Files of results, the title of each, and what a reader has to know."""
