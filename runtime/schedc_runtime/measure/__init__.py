"""Instruments: traces of steps, times of stages, emulated device time, bytes held."""
