"""Many routers over simulated workers (`routers`, the experiment `scale`), and one alone in its process (`alone`, `scale-router`)."""
