"""What demand to expect: forecasts of each series of an observation, and measured step times of warm workers."""
