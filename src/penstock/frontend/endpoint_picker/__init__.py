"""The router as an endpoint picker of the Gateway API inference extension, asked by Envoy over its external processing protocol."""
