"""Times, taken in turns, and where one way of computing becomes faster than another."""
