"""Image sets: how they are found, decoded, held or streamed, and cut into batches."""
