"""One planner for many hosts: supervisors connect to the one that plans, tell it what they see, and take its orders."""
