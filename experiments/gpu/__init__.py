"""The program that XLA makes for a GPU, compiled and read on a machine without one."""
