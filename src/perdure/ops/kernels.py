"""The functions a model's layers are built from, chosen together when the model is built; models never branch on it.

- `torch_kernels` joins torch's with one of the forms of products in `linear`; `native_kernels` is all in C
  (`ops.native`), the default on a CPU that has a compiler. Of the default, products whose weight comes as a tensor are
  oneDNN's: that is how a shape it serves better (`choice`) gets it.
- On CUDA all but the products is Triton's (`ops.triton`). So are products that give a row the same bits in any company;
  else they are cuBLAS's, but for few rows, which Triton's multiply with what stands about the product, and for gates of
  many on Hopper.

Shapes: as in `linear`, `norm`, `activation` and `rope`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from perdure.ops import activation, float8, gluon, norm, rope
from perdure.ops.float8 import Float8Weight
from perdure.ops.linear import LINEAR_FORMS, LinearForm, Product, can_pack, row_tile
from perdure.ops.native import Library, library, why_not
from perdure.ops.native.rows import RowKernels
from perdure.ops.native.weights import JoinedWeight, packed_floats
from perdure.ops.residual import FewRows, ReadProduct, Stream, WriteProduct

Weight = Tensor | JoinedWeight | Float8Weight
"""[M, K]. Torch's forms take tensors, the native ones packed weights, too, and all those of 8 bits."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One form of each function.

    name: of the products' form. version: what the bits depend on beside it, in words.
    row_tile: rows a step is best padded to a multiple of.
    linear: y = x @ w.T + b; it may lay the weight out anew and forget the original.
    embedding: rows of a weight by their numbers, int64 [N] in, [N, K] out.
    add_norm: (x + y, rms_norm of it).
    few_rows: products with what stands about them in one kernel; None: there are none.
    gated: (a product, `silu_mul` of it) -> a form of the latter in one kernel, where that serves; None: there is none.
    """

    name: str
    version: str
    row_tile: int
    linear: Callable[[Weight, Tensor | None], Product]
    embedding: Callable[[Weight], Callable[[Tensor], Tensor]]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_once: Callable[[Tensor, Tensor, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_tanh_mul: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    rotations: Callable[[rope.RotaryTable, Tensor, torch.dtype], tuple[Tensor, Tensor]] = rope.rotations
    few_rows: FewRows | None = None
    gated: Callable[[Product, Product], Product] | None = None

    def normed(self, stream: Stream, weight: Tensor, eps: float) -> tuple[Stream, Tensor]:
        """The stream with its sum made, and the `rms_norm` of that."""
        if stream.more is None:
            return stream, self.rms_norm(stream.x, weight, eps)
        total, normed = self.add_norm(stream.x, stream.more, weight, eps)
        return Stream(total), normed

    def with_gate(self, product: Product) -> Product:
        """`silu_mul` of the product."""

        def multiply(x: Tensor) -> Tensor:
            return self.silu_mul(product(x))

        return multiply if self.gated is None else self.gated(product, multiply)

    def reading(self, product: Product, norm_weight: Tensor, eps: float, *, gated: bool = False) -> ReadProduct:
        """The product of a stream's `rms_norm`; gated: `silu_mul` of it."""
        multiply = self.with_gate(product) if gated else product

        def read(stream: Stream) -> tuple[Stream, Tensor]:
            stream, normed = self.normed(stream, norm_weight, eps)
            return stream, multiply(normed)

        return read if self.few_rows is None else self.few_rows.reading(product, norm_weight, eps, gated, read)

    def writing(self, product: Product) -> WriteProduct:
        """The product, added to a stream."""

        def write(stream: Stream, y: Tensor) -> Stream:
            return Stream(stream.total(), product(y))

        return write if self.few_rows is None else self.few_rows.writing(product, write)


def _added(rms_norm: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, rms_norm(total, weight, eps)

    return add_norm


def torch_kernels(form: str, multiply: LinearForm | None = None, *, version: str = "") -> Kernels:
    """Torch's functions, with the products of this form (`LINEAR_FORMS`), or those that are given.

    version: in words; left out, it is a CPU's, with the reason if the kernels in C are not here.
    """
    multiply = multiply or LINEAR_FORMS[form]
    if not version:
        version = f"torch {torch.__version__}" + (f" (not compiled: {why_not()})" if why_not() else "")

    def linear(w: Weight, b: Tensor | None) -> Product:
        if isinstance(w, Float8Weight):
            return float8.reference(w, b) if form == "reference" else float8.emulated(w, b)
        assert isinstance(w, Tensor), "only native kernels read packed weights"
        return multiply(w, b)

    def embedding(w: Weight) -> Callable[[Tensor], Tensor]:
        assert isinstance(w, Tensor), "only native kernels read packed weights"
        return lambda ids: functional.embedding(ids, w)

    return Kernels(
        name=form,
        version=version,
        row_tile=row_tile(form),
        linear=linear,
        embedding=embedding,
        rms_norm=norm.rms_norm,
        rms_norm_once=norm.rms_norm_once,
        add_norm=_added(norm.rms_norm),
        silu_mul=activation.silu_mul,
        gelu_tanh_mul=activation.gelu_tanh_mul,
        rotate=rope.rotate,
    )


def native_kernels(library: Library, *, packs_all: bool = True) -> Kernels:
    """The kernels in C. packs_all: those weights, too, that come as tensors; else oneDNN's product takes them."""
    rows, of_tensors = RowKernels(library), torch_kernels("packed")

    def joined(w: Tensor | JoinedWeight) -> JoinedWeight:
        return packed_floats(library, w) if isinstance(w, Tensor) else w

    def linear(w: Weight, b: Tensor | None) -> Product:
        if isinstance(w, Float8Weight) or (isinstance(w, Tensor) and not packs_all):
            return of_tensors.linear(w, b)
        return partial(joined(w).multiply, bias=b)

    def embedding(w: Weight) -> Callable[[Tensor], Tensor]:
        if isinstance(w, Tensor) and not packs_all:
            return of_tensors.embedding(w)
        assert not isinstance(w, Float8Weight), "a look-up reads no weight of 8 bits"
        return joined(w).rows

    return Kernels(
        name="native",
        version=library.version,
        row_tile=1,
        linear=linear,
        embedding=embedding,
        rms_norm=rows.rms_norm,
        rms_norm_once=rows.rms_norm,
        add_norm=_added(rows.rms_norm),
        silu_mul=rows.silu_mul,
        gelu_tanh_mul=rows.gelu_tanh_mul,
        rotate=rows.rotate,
    )


def _gated_on_hopper(product: Product, otherwise: Product) -> Product:
    """`Kernels.gated` (`ops.triton.gated`)."""
    from perdure.ops.triton.few_rows import FewRowsProduct

    if not isinstance(product, FewRowsProduct) or product.b is not None or gluon.why_not(product.w.device):
        return otherwise
    from perdure.ops.triton import gated

    w = product.w
    return lambda x: gated.gated_product(x, w) if gated.serves(x, w) else otherwise(x)


def triton_kernels(*, batch_invariant: bool) -> Kernels:
    """All in Triton but, where a row's bits may depend on its company, the products, which are the libraries' then."""
    import triton

    from perdure.ops.triton import few_rows, rows
    from perdure.ops.triton import float8 as float8_on_gpu
    from perdure.ops.triton import linear as products

    version = f"torch {torch.__version__}, triton {triton.__version__}"
    if batch_invariant:
        plain = torch_kernels("triton", products.invariant, version=version)
    else:
        plain = torch_kernels("plain", few_rows.FewRowsProduct, version=version)
        plain = replace(plain, few_rows=few_rows.FewRowsKernels(), gated=_gated_on_hopper)

    def linear(w: Weight, b: Tensor | None) -> Product:
        return float8_on_gpu.product(w, b) if isinstance(w, Float8Weight) else plain.linear(w, b)

    return replace(
        plain,
        linear=linear,
        rms_norm=rows.rms_norm,
        rms_norm_once=rows.rms_norm_once,
        add_norm=rows.add_norm,
        silu_mul=rows.silu_mul,
        gelu_tanh_mul=rows.gelu_tanh_mul,
        rotate=rows.rotate,
        rotations=rows.rotations,
    )


def choose_kernels(name: str, device: torch.device, dtype: torch.dtype, *, batch_invariant: bool = False) -> Kernels:
    """The kernels whose products are called `name`: "native", "triton", one of `LINEAR_FORMS`, or "auto", the fastest:
    on a CPU of those that give a row the same bits in any company, on CUDA only if that was asked. ValueError: an
    unknown name, or one whose form is not for this device or does not keep what was asked."""
    names = ("native", "triton", *LINEAR_FORMS)
    if name not in ("auto", *names):
        raise ValueError(f"linear_backend={name!r} is none of auto, {', '.join(names)}")
    if device.type == "cuda":
        if name == "auto":
            name = "triton" if batch_invariant else "plain"
        if name in ("triton", "plain"):
            if batch_invariant and name == "plain":
                raise ValueError("linear_backend='plain' is not batch invariant; use 'auto' or batch_invariant=False")
            return triton_kernels(batch_invariant=name == "triton")
        if name != "reference":
            raise ValueError(f"linear_backend={name!r} is not for CUDA; there are auto, triton, plain, reference")
        return torch_kernels(name, version=f"torch {torch.__version__}")
    if name == "triton":
        raise ValueError(
            f"linear_backend='triton' is not for {device}; there are auto, native, {', '.join(LINEAR_FORMS)}"
        )
    fits = device.type == "cpu" and dtype == torch.float32
    found = library() if fits and name in ("auto", "native") else None
    if found is not None:
        return native_kernels(found, packs_all=name == "native")
    if name == "native":
        reason = why_not() if fits else f"they compute in float32 on a CPU, not in {dtype} on {device}"
        raise ValueError(f"linear_backend='native' needs compiled kernels: {reason}")
    if name == "auto":
        name = "packed" if can_pack(device, dtype) else "invariant"
    return torch_kernels(name)
