"""Floor 6: capacity follows demand. Observes a deployment, and changes the number and roles of its workers."""
