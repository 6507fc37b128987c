"""Floor 9: the planner: finds the best deployment of N devices by the latency model and confirms it on the simulator."""
