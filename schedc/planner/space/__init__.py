"""Which plans there are for a model on a cluster: their axes, the sizes that schedules take, and conditions on them."""
