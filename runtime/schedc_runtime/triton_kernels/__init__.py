"""Kernels in Triton, and their launches. Only a launch loads these files, because Triton is not everywhere.

Arguments of kernels have no annotations but `tl.constexpr`: Triton's compiler evaluates them as code of the kernel.
Every load by an index has a mask. A row's number times its stride is int64.
"""
