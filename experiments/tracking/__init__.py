"""A run on disk: its directory, journals, checkpoints and TensorBoard files."""
