"""What the authors of a schedule claim: decided for all costs at one size, or checked over a range of sizes."""
