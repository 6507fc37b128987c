"""`penstock planner`: what the planner decided, why, and what it would decide otherwise."""
