"""Makes the instruction streams of a step, and other programs from them."""
