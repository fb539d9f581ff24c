"""Moves experts between ranks: their states, messages, forecasts of loads, and the choice of places."""
