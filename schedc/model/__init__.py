"""A model: its sizes, the parts of its layers, and the parameters, FLOPs and bytes that are sums over parts."""
