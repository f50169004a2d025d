"""Kernels in Triton, for CUDA: each a function on tensors that launches one or a few programs and returns at once.

- What they compute is what torch's forms of the same names compute; an order of sums is theirs.
- None of them waits for the device, looks at values on the host or allocates by them: all can be captured in graphs.
- Triton's interpreter (TRITON_INTERPRET=1 before the first import) runs them on CPU tensors, slowly, for tests in
  float32 and float16: its bfloat16 is wrong.
"""
