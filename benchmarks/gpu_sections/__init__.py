"""What `benchmarks/gpu.py` runs, a section a function."""
