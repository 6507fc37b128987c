"""Routes of files and batches."""
