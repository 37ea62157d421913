"""Compiles the files of cuda/ for the GPU at hand, and keeps the machine code."""
