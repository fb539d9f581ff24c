"""The rows, bytes and FLOPs that follow from the values of a plan (`schedc.ir.plan`)."""
