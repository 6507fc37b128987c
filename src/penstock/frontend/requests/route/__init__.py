"""What the router alone is asked, over HTTP or by Envoy: a body and its model's tokens."""
