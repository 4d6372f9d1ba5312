"""Helpers of tests: the first line of each module says what it is for."""
