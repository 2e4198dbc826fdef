"""Measures mixed-precision training side by side with what else there is."""
