"""What people ask of a plan beside its step: days, device-hours and cost of a training run, failures included."""
