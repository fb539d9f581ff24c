"""Says how long the cells of a step take: the sums of cost keys, and what reads them."""
