"""What a client may use up: keys, places, time, body sizes."""
