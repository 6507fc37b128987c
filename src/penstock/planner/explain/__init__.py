"""Why the planner did what it did: a record of each round."""
