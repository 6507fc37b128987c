"""What went wrong for a request, and whether, when and where it is tried again."""
