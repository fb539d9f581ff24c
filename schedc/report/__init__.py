"""What the commands report: facts as JSON, and text made of that JSON."""
