"""The seam to the device that computes: streams, events, host memory, capabilities.

`cuda` alone has the words of CUDA. `cpu` has no streams, and a work there ends with its call. `choice.device_for`
gives the device of a tensor.
"""
