"""Kernels of our own: operations of torch, each with a twin of torch's operations and a Triton kernel.

`library` defines an operation. A file beside it has the operation and its twin. `schedc_runtime.triton_kernels`
has the kernel.
`registry` has a row for each kernel, with its twin and the variants that are compiled.
"""
