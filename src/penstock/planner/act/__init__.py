"""Carries out plans: starts, ends and flips workers by a `ScalingConnector`."""
