"""The price of cells from inside: forms of cells, on one rank or on all ranks of an expert group."""
