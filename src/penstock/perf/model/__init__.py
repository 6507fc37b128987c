"""What decides a model's speed on hardware: shapes, devices, how one engine is spread over them."""
