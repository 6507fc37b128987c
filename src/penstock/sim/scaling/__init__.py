"""Scales a simulated deployment while it serves: its workers behind the seam that planners act by, and the planner itself."""
