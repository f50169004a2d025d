"""Executing plans on a GPU: rows and pages that stay there, steps that are launched and not waited for, graphs.

All of it also runs on CPU tensors, with Triton's interpreter, which is how it is tested where there is no GPU.
"""
