"""Who runs the workers."""
