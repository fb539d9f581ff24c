"""The machines of a cluster: accelerators, and the levels of the network between them."""
