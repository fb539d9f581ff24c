"""Statements about all costs at one size, decided exactly: cones of costs, times as maxima of linear forms."""
