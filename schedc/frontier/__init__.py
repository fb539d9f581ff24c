"""Where schedules stand between bubble and memory: the library at given sizes, floors, and orders that were found."""
