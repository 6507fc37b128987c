"""Experiments in virtual time: layouts, placements, several frontends, the simulator's own speed."""
