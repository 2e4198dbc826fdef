"""Training runs on real images that use mpopt, and what belongs to them."""
