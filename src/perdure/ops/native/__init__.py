"""Kernels in C for a CPU, compiled on the machine they run on: products, attention, norms, activations.

- `library` compiles them at first use and keeps the result; without a C compiler there is none, and torch serves.
- Each is held to the slow form of the same operation in `ops`, and gives a row the same bits in any company, in any
  chunk, on any number of threads and whatever the page size: sums have one order, written down in the C.
- Threads are the kernels' own (`c/pool.c`), as many as torch was told to use.

Shapes: as in the modules of `ops` they stand in for. Tensors are fp32 on a CPU, heads and elements dense in a row.
"""

from perdure.ops.native.build import Library, library, why_not

__all__ = ["Library", "library", "why_not"]
