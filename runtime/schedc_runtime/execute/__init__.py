"""Executes a rank's instruction stream: bound code, registers, one handler per instruction, micro-steps of cells."""
