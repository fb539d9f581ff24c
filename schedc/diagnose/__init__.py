"""From the trace of a run to its causes of lost time: replay, counterfactuals, ranking."""
