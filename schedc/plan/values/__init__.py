"""What follows from the values of a plan alone: contradictions, and the stages that a line speaks of."""
