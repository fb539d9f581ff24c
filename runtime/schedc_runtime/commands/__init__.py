"""The commands that `schedc run` and `schedc calibrate` start on every rank."""
