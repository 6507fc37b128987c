"""What discovery, request plane and event plane must do, as tests."""
