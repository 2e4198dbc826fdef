"""The comparison of runs in several precisions: running them, reading them, reporting on them."""
