"""What every transport must do, as tests, between agents and to storage."""
