"""What planners see of a deployment: windows of its processes, kept for some minutes and added up."""
