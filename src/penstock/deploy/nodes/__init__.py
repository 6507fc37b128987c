"""The connection between the nodes of one worker: followers join the leader, and each side learns when the other ends."""
