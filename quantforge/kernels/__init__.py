"""Fused kernels over packed weights. Importing this package, or any module of it but `sources`, needs no triton."""
