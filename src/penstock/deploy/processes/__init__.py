"""Child processes of a deployment: frontend and worker."""
