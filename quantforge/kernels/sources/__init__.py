"""Triton source. Each file needs triton alone and is imported only when something is to run or be compiled."""
