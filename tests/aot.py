"""Ahead-of-time compilation of kernels without a GPU, by the `EXAMPLES` of their files."""

import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

import gossamer

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}

_OPTIONS = {"num_warps": 4, "num_stages": 2, "maxnreg": None}
_WORDS = {
    "*i32": "above again any arrived before bits blocks bound cols columns counts elements entries fired flags found"
    " from heavy indices kth last lengths list lists long need nnz offsets order others pairs places plan"
    " positions ranks reach rows sizes some sorted starts table taken tiles ties union wanted",
    "*i64": "index keys map spans words",
    "*u8": "mask",
    "*fp32": "bias bounds cos dki dots dqi l0 l1 lse mean partial parts penalty predictor radius sin slope stats sums"
    " threshold wide",
    "fp32": "fill neutral price radius scale temperature",
}
"""The type of an argument by the last word of its name. Other pointers are to bf16, and other numbers are i32."""
_TYPES = {(kind[0] == "*", word): kind for kind, words in _WORDS.items() for word in words.split()}


def kernel_modules() -> list[str]:
    """Every kernel module of the package, by dotted name."""
    root = Path(gossamer.__file__).parent
    found = [*root.glob("*/_triton/*.py"), *root.glob("*/_gluon/*.py")]
    files = sorted(f for f in found if not f.stem.startswith("_"))
    return [".".join(("gossamer", *f.relative_to(root).with_suffix("").parts)) for f in files]


def examples() -> dict[str, tuple[Any, dict[str, Any]]]:
    """`_triton._name_kernel` or `_gluon._name_kernel` -> (kernel, its example), from every kernel module."""
    found = {}
    for module in kernel_modules():
        # A file without kernels of its own has none.
        for kernel, example in getattr(importlib.import_module(module), "EXAMPLES", {}).items():
            name = f"{module.split('.')[-2]}.{kernel.fn.__name__}"
            if name in found:
                raise RuntimeError(f"Two kernels of the name {name}, the second in {module}: give it another.")
            found[name] = (kernel, complete(kernel, example))
    return found


def type_of(name: str) -> str:
    """The type that an argument's name says."""
    stem = name.removesuffix("_ptr")
    pointer = stem != name
    return _TYPES.get((pointer, stem.rpartition("_")[2]), "*bf16" if pointer else "i32")


def complete(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The argument of `compile_kernel`, from an example as the kernel's file gives it.

    An example gives each constexpr, the options of a launch that are not `_OPTIONS`, and each argument that is not as
    its name says: a type, the block of a tensor descriptor, None for a pointer that is absent, a number that the kernel
    is compiled for, or the types of a tuple.
    """
    kernel = kernel.fn
    given = _OPTIONS | given
    unknown = given.keys() - {*kernel.arg_names, *_OPTIONS}
    if unknown:
        raise ValueError(f"{kernel.__name__} has no {', '.join(sorted(unknown))}, which its example gives.")
    signature: dict[str, str | None] = {}
    constexprs = {}
    for param in kernel.params:
        name, value = param.name, given.get(param.name, ...)
        if param.is_constexpr or isinstance(value, int):
            constexprs[name] = given[name]
        elif isinstance(value, list):
            signature[name] = f"tensordesc<bf16{value},{gl.NVMMASharedLayout(128, 16, len(value))!r}>"
        elif value is ...:
            signature[name] = type_of(name)
        else:
            signature[name] = value
    return {"signature": signature, "constexprs": constexprs} | {option: given[option] for option in _OPTIONS}


def targets_of(kernel: Any) -> list[str]:
    """The targets that a kernel is for: all of them, or Hopper alone where it is written in Gluon."""
    return ["sm_90"] if isinstance(kernel.fn, GluonJITFunction) else list(TARGETS)


def compile_kernel(kernel: Any, example: dict[str, Any], target: str) -> Any:
    """Compiles what `complete` gives: a signature, in which None is an absent pointer, constexprs, and the options of a
    launch.

    Integers and pointers count as divisible by 16, as they are on the shapes that matter.
    """
    kernel = kernel.fn
    names = kernel.arg_names
    absent = {name: None for name, kind in example["signature"].items() if kind is None}
    constexprs: dict[Any, Any] = {**absent, **example["constexprs"]}
    signature = example["signature"] | dict.fromkeys(constexprs, "constexpr")
    skip = {names[i] if isinstance(i, int) else i for i in kernel.do_not_specialize or ()}
    attrs = {}
    for name, kind in signature.items():
        at = names.index(name)
        if isinstance(kind, tuple):
            constexprs |= {(at, i): None for i, part in enumerate(kind) if part is None}
            attrs |= {(at, i): [["tt.divisibility", 16]] for i, part in enumerate(kind) if part is not None}
            signature[name] = tuple(part or "constexpr" for part in kind)
        elif name not in skip and (kind.startswith("*") or kind in ("i32", "i64")):
            attrs[at,] = [["tt.divisibility", 16]]
    ordered = {name: signature[name] for name in names}
    make = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = make(fn=kernel, signature=ordered, constexprs=constexprs, attrs=attrs)
    options = {name: example[name] for name in _OPTIONS if example[name] is not None}
    if target.startswith("gfx"):
        options.pop("maxnreg", None)
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(compiled: Any) -> dict[str, int]:
    """Registers and spill bytes (REG, STACK, LOCAL) of a compiled CUDA kernel, read by the bundled cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}
